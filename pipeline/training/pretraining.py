"""What pre-training is: text pairs with hidden tokens (MLM) and a true or random second text (NUP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeline.artifact import Artifact
from pipeline.config import require
from pipeline.models.pretraining_heads import IGNORED, PretrainingModel, hide_tokens
from pipeline.models.sources import Source
from pipeline.models.tokens import Tokenizer, Tokens
from pipeline.models.transformer import Shape
from pipeline.training.batches import Batches, Row, Rows
from pipeline.training.caching import backward
from pipeline.training.loop import Task
from pipeline.training.optimization import optimization
from pipeline.training.settings import LoopConfig


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Which pairs, for how long."""

    batch_tokens: int = 32_000
    """Tokens in a batch over all workers, padding included."""
    steps: int = 100_000
    """Batches."""
    max_context_tokens: int = 180
    """First text of a pair: its newest tokens."""
    max_response_tokens: int = 72
    """Second text of a pair: its first tokens."""
    hidden_share: float = 0.15
    """Share of the tokens that are predicted."""
    random_share: float = 0.5
    """Share of the pairs with another example's response."""

    def __post_init__(self) -> None:
        require(self.steps >= 1, "pretrain.steps", self.steps, ">= 1")
        longest = self.max_context_tokens + self.max_response_tokens
        require(self.batch_tokens >= longest, "pretrain.batch_tokens", self.batch_tokens,
                f">= {longest}, the longest pair")  # fmt: skip
        for name in ("max_context_tokens", "max_response_tokens"):
            require(getattr(self, name) >= 3, f"pretrain.{name}", getattr(self, name), ">= 3")
        for name in ("hidden_share", "random_share"):
            value = getattr(self, name)
            require(0 < value < 1, f"pretrain.{name}", value, "between 0 and 1")


@dataclass(frozen=True)
class PretrainBatch:
    """Pairs, what is hidden in them, and whether the second text is the true one."""

    pairs: Tokens
    predicted_N: Tensor
    labels_N: Tensor
    is_next_B: Tensor

    def to(self, device: torch.device) -> PretrainBatch:
        return PretrainBatch(
            self.pairs.to(device),
            self.predicted_N.to(device),
            self.labels_N.to(device),
            self.is_next_B.to(device),
        )


class _Pair(NamedTuple):
    context: list[int]
    response: list[int]
    is_next: bool


class PairMaker:
    """Rows to pairs; a random response comes from the same window of rows."""

    columns: Sequence[str] = ("context", "response")

    def __init__(self, tokenizer: Tokenizer, config: PretrainConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._special = torch.tensor(tokenizer.hf.all_special_ids)

    def prepare(self, rows: list[Row], generator: torch.Generator) -> list[_Pair]:
        config = self._config
        contexts = self._tokenizer.contexts(
            [row["context"] for row in rows], config.max_context_tokens
        )
        responses = self._tokenizer.candidates(
            [row["response"] for row in rows], config.max_response_tokens
        )
        # Scattered over the window: items of one length keep their order, and a batch in which all
        # pairs are true teaches nothing.
        draw = torch.rand(len(rows), generator=generator)
        swapped = (draw < config.random_share).nonzero()[:, 0].tolist()
        second = list(responses)
        for place, other in zip(swapped, [*swapped[1:], *swapped[:1]], strict=True):
            second[place] = responses[other]
        return [
            _Pair(context, response, response == true)
            for context, response, true in zip(contexts, second, responses, strict=True)
        ]

    def length(self, item: _Pair) -> int:
        return len(item.context) + len(item.response) - 1

    def collate(self, items: list[_Pair], generator: torch.Generator) -> PretrainBatch:
        pairs = self._tokenizer.pairs(
            [item.context for item in items], [item.response for item in items]
        )
        hidden, labels_BT = hide_tokens(
            pairs,
            self._special,
            int(self._tokenizer.hf.mask_token_id),
            len(self._tokenizer),
            self._config.hidden_share,
            generator,
        )
        is_next_B = torch.tensor([item.is_next for item in items])
        predicted_N = (labels_BT.flatten() != IGNORED).nonzero()[:, 0]
        return PretrainBatch(hidden, predicted_N, labels_BT.flatten()[predicted_N], is_next_B)


class PretrainModule(nn.Module):
    """The sum of both losses."""

    def __init__(self, model: PretrainingModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: PretrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
        sums = self.model.losses(batch.pairs, batch.predicted_N, batch.labels_N, batch.is_next_B)
        mlm, nup = sums.mlm_sum / sums.mlm_count, sums.next_sum / sums.pairs
        return mlm + nup, {"mlm_loss": mlm.detach(), "nup_loss": nup.detach()}


@dataclass(frozen=True)
class Pretraining:
    """All that a worker needs to build its task."""

    corpus: Artifact
    tokenizer: Source
    encoder: Shape
    pretrain: PretrainConfig
    loop: LoopConfig

    def build(self, rank: int, world: int) -> Task:
        """Raises BadInput for settings that do not fit each other or the corpus."""
        config = self.pretrain
        longest = config.max_context_tokens + config.max_response_tokens - 1
        require(longest <= self.encoder.positions, "pretrain.max_context_tokens",
                config.max_context_tokens,
                f"with max_response_tokens at most encoder.positions {self.encoder.positions}")  # fmt: skip
        tokenizer = Tokenizer.load(self.tokenizer.local())
        torch.manual_seed(self.loop.seed)
        special = {"pad": tokenizer.pad, "cls": tokenizer.cls, "sep": tokenizer.sep}
        model = PretrainingModel.new(self.encoder, len(tokenizer), special)
        pairs = PairMaker(tokenizer, config)
        rows = Rows.of(self.corpus, "train", pairs.columns, rank, world, self.loop.seed)
        batches: Batches[PretrainBatch] = Batches(
            rows, pairs, tokens=config.batch_tokens // world, length=pairs.length
        )
        module = PretrainModule(model)

        def save(folder: Path) -> None:
            model.save(folder)
            tokenizer.save(folder)

        return Task(
            module=module,
            batches=batches,
            steps=config.steps,
            optimize=lambda: optimization(self.loop, module, config.steps),
            backward=backward,
            save=save,
        )
