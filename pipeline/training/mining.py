"""Hard negatives: wrong responses that the model in training takes for right ones, found again and again.

A pool of train responses is embedded with the weights of now, and every train context looks for its
nearest ones in it. Those that score nearly as high as the right response, or higher, are left out:
among them are right ones that nobody marked (limits relative to the right one's score: Moreira et al.,
NV-Retriever, 2024). Ranks share the work, and all know all that was found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config import require
from pipeline.models import inference
from pipeline.models.ranker import Ranker
from pipeline.training.batches import Rows
from pipeline.training.distributed import gather

COLUMNS = ("example_id", "context", "response")
_CONTEXTS_AT_ONCE = 64
_LOGITS_AT_ONCE = 1 << 23  # of float32; scoring holds some four arrays of them: 128 MB


@dataclass(frozen=True, kw_only=True)
class Mining:
    """How hard negatives are found, for `negatives_from: mined`."""

    every_epochs: float = 1.0
    """Found again so often; before the first time wrong candidates are any."""
    responses: int = 20_000
    """Train responses that are searched, others each time."""
    top_k: int = 30
    """Nearest that an example keeps; `finetune.negatives` of them are drawn for a batch."""
    margin: float = 0.0
    """Wrong ones score at least so much lower than the right one."""
    max_share: float = 0.95
    """And at most this share of the right one's score, where that is above 0."""

    def __post_init__(self) -> None:
        name = "finetune.mine"
        require(self.every_epochs > 0, f"{name}.every_epochs", self.every_epochs, "above 0")
        require(self.responses >= 2, f"{name}.responses", self.responses, ">= 2")
        require(self.top_k >= 1, f"{name}.top_k", self.top_k, ">= 1")
        require(self.margin >= 0, f"{name}.margin", self.margin, ">= 0")
        require(0 < self.max_share <= 1, f"{name}.max_share", self.max_share, "above 0, up to 1")

    def limit(self, right_B: Tensor) -> Tensor:
        """The highest score of a wrong one, given the right one's."""
        by_share_B = torch.where(right_B > 0, right_B * self.max_share, math.inf)
        return torch.minimum(right_B - self.margin, by_share_B)


class Miner:
    """Finds them, and knows those of each example."""

    def __init__(
        self, ranker: Ranker, rows: Rows, config: Mining, every_steps: int, rank: int, world: int
    ) -> None:
        """`rows`: the whole train split, `COLUMNS`."""
        self.every_steps = every_steps
        self._ranker, self._config, self._seed = ranker, config, rows.seed
        self._rank, self._world = rank, world
        self._table = rows.epoch(0).read(0, len(rows))
        ids = self._table["example_id"].to_pylist()
        self._place = {example_id: place for place, example_id in enumerate(ids)}
        self._round = 0
        self._pool: list[str] = []
        self._found_NK = torch.empty(len(ids), 0, dtype=torch.int32)

    def of(self, example_id: str) -> list[str]:
        """An example's hard negatives, nearest first; none before the first time."""
        places = self._found_NK[self._place[example_id]].tolist()
        return [self._pool[place] for place in places if place >= 0]

    def state(self) -> dict[str, Any]:
        return {"round": self._round, "found": self._found_NK}

    def load(self, state: dict[str, Any]) -> None:
        self._round, self._found_NK = state["round"], state["found"].cpu()
        self._pool = self._draw() if self._round else []

    @torch.inference_mode()
    def __call__(self) -> None:
        """Finds them with the weights of now. A collective call; leaves the ranker in evaluation mode."""
        self._ranker.eval()
        self._round += 1
        pool = self._draw()
        own = self._share(len(pool))
        vectors_PD = self._gathered(self._embedded(pool[own]), len(pool))
        own = self._share(len(self._table))
        place = {text: number for number, text in enumerate(pool)}
        found = [
            self._nearest(slice(start, min(start + _CONTEXTS_AT_ONCE, own.stop)), place, vectors_PD)
            for start in range(own.start, own.stop, _CONTEXTS_AT_ONCE)
        ]
        nothing = torch.empty(0, min(self._config.top_k, len(pool)), dtype=torch.int32)
        found_NK = self._gathered(torch.cat([nothing, *found]), len(self._table))
        self._pool, self._found_NK = pool, found_NK.clone()

    def _draw(self) -> list[str]:
        """The pool of this round: different texts, in random order."""
        texts = self._table["response"].unique().to_pylist()
        order = np.random.default_rng([self._seed, self._round]).permutation(len(texts))
        return [texts[place] for place in order[: self._config.responses].tolist()]

    def _share(self, count: int) -> slice:
        """This rank's part of so many."""
        size = -(-count // self._world)
        return slice(min(count, self._rank * size), min(count, (self._rank + 1) * size))

    def _gathered(self, rows: Tensor, count: int) -> Tensor:
        """All ranks' shares of `count` rows, put together, on the CPU."""
        size = -(-count // self._world)
        padded = torch.zeros(size, *rows.shape[1:], dtype=rows.dtype)
        padded[: len(rows)] = rows
        device = self._ranker.device if dist.is_initialized() else "cpu"
        return gather(padded.to(device)).cpu()[:count]

    def _embedded(self, texts: list[str]) -> Tensor:
        if not texts:
            return torch.empty(0, self._ranker.dual.dimensions)
        return inference.candidate_vectors(self._ranker, texts)

    def _nearest(self, rows: slice, place: dict[str, int], vectors_PD: Tensor) -> Tensor:
        """Places in the pool, [B, K] int32, nearest first, -1 where there are no more."""
        dual, table = self._ranker.dual, self._table.slice(rows.start, rows.stop - rows.start)
        responses = table["response"].to_pylist()
        device = self._ranker.device
        vectors_BMD, mask_BM = inference.context_vectors(self._ranker, table["context"].to_pylist())
        vectors_BMD, mask_BM = vectors_BMD.to(device), mask_BM.to(device)
        right_BD = inference.candidate_vectors(self._ranker, responses).to(device)
        right_B = dual.scores(vectors_BMD, mask_BM, right_BD[:, None])[:, 0]
        columns = max(1, _LOGITS_AT_ONCE // (vectors_BMD.shape[0] * vectors_BMD.shape[1]))
        scores_BP = torch.cat(
            [
                dual.scores(vectors_BMD, mask_BM, part.to(device))
                for part in torch.split(vectors_PD, columns)
            ],
            dim=1,
        ).cpu()
        scores_BP[scores_BP > self._config.limit(right_B.cpu())[:, None]] = -torch.inf
        for number, text in enumerate(responses):
            if text in place:
                scores_BP[number, place[text]] = -torch.inf
        best = scores_BP.topk(min(self._config.top_k, len(place)), dim=1)
        return best.indices.masked_fill(best.values == -torch.inf, -1).int()
