"""Validation: how often the model in training puts the right candidate first (R@1), and its loss.

A context's candidates are those that the corpus gives; a corpus without any has each context's
response among those of a group of others, the same group at every validation. Ranks share the contexts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from pipeline.artifact import Artifact
from pipeline.models import inference
from pipeline.models.ranker import Ranker
from pipeline.training.batches import Row, Rows

_COLUMNS = ("context", "response", "candidates")
_AT_ONCE = 64  # contexts whose vectors are in memory: with 360 of 768 dimensions each, 71 MB


class Question(NamedTuple):
    """A context, texts to choose from, and the place of the right one among them."""

    context: list[str]
    candidates: list[str]
    label: int


class Measured(NamedTuple):
    """What a validation finds."""

    r1: float
    """Share of the contexts whose right candidate scores above all others; a tie is none."""
    loss: float
    """Mean cross-entropy of the right candidate, in nats."""


def questions_of(corpus: Artifact, examples: int, group: int, seed: int) -> list[Question]:
    """At most so many questions from the corpus' valid split; none where it has no such split."""
    if not corpus.files("valid/", ".parquet"):
        return []
    rows = Rows.of(corpus, "valid", _COLUMNS, 0, 1, seed)
    count = min(examples, len(rows))
    read = rows.epoch(0).read(0, count).to_pylist() if count else []
    given = [_given(row) for row in read if row["candidates"]]
    order = np.random.default_rng(seed).permutation(len(read))
    return given or _grouped([read[place] for place in order], group)


def _given(row: Row) -> Question:
    """Its candidates, once each: a second copy of the right one would be a wrong one."""
    texts = list(dict.fromkeys([row["response"], *row["candidates"]]))
    return Question(row["context"], texts, 0)


def _grouped(rows: Sequence[Row], group: int) -> list[Question]:
    """Groups of equal size; what is left over makes no question, as fewer are easier to tell."""
    group = min(group, len(rows))
    found = []
    for start in range(0, len(rows) - group + 1, max(1, group)):
        members = rows[start : start + group]
        texts = list(dict.fromkeys(row["response"] for row in members))
        if len(texts) > 1:
            found += [Question(r["context"], texts, texts.index(r["response"])) for r in members]
    return found


class Validation:
    """Asks a ranker the same questions whenever it is called."""

    def __init__(
        self, ranker: Ranker, questions: Sequence[Question], rank: int, world: int
    ) -> None:
        self._ranker = ranker
        self._own = questions[rank::world]

    @torch.inference_mode()
    def __call__(self) -> Measured:
        """A collective call. Leaves the ranker in evaluation mode."""
        self._ranker.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self._ranker.device)
        for asked, scores_C in zip(self._own, self._scores(), strict=True):
            others_C = torch.cat([scores_C[: asked.label], scores_C[asked.label + 1 :]])
            hit = bool(scores_C[asked.label] > others_C.max()) if len(others_C) else True
            loss = F.cross_entropy(scores_C, torch.tensor(asked.label))
            sums += torch.tensor([hit, loss.item(), 1.0], dtype=torch.float64, device=sums.device)
        if dist.is_initialized():
            dist.all_reduce(sums)
        hits, loss_sum, count = sums.tolist()
        return Measured(hits / count, loss_sum / count)

    def _scores(self) -> Iterator[Tensor]:
        """Each question's scores, [C], float32 on the CPU."""
        blocks = [self._own[at : at + _AT_ONCE] for at in range(0, len(self._own), _AT_ONCE)]
        if not self._ranker.config.has_vectors:
            for block in blocks:
                contexts, candidates = [q.context for q in block], [q.candidates for q in block]
                yield from inference.pair_scores(self._ranker, contexts, candidates)
            return
        texts = list(dict.fromkeys(text for asked in self._own for text in asked.candidates))
        place = {text: number for number, text in enumerate(texts)}
        vectors_ND = inference.candidate_vectors(self._ranker, texts) if texts else torch.empty(0)
        for block in blocks:
            contexts = [asked.context for asked in block]
            vectors_BMD, mask_BM = inference.context_vectors(self._ranker, contexts)
            for number, asked in enumerate(block):
                own_CD = vectors_ND[[place[text] for text in asked.candidates]]
                one = slice(number, number + 1)
                yield self._ranker.dual.scores(vectors_BMD[one], mask_BM[one], own_CD)[0]
