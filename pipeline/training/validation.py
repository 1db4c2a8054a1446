"""Validation: how often the model in training puts the right candidate first (R@1), and its loss.

The questions and the scores are those of evaluation. The questions are the same at every validation,
and the ranks share them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from pipeline.evaluation.questions import Questions
from pipeline.evaluation.ranking import RankerScorer, rank
from pipeline.models.ranker import Ranker


class Measured(NamedTuple):
    """What a validation finds."""

    r1: float
    """Share of the contexts whose right candidate scores above all others; a tie is none."""
    loss: float
    """Mean cross-entropy of the right candidate, in nats."""


class Validation:
    """Asks a ranker the same questions whenever it is called."""

    def __init__(self, ranker: Ranker, asked: Questions, rank: int, world: int) -> None:
        """`asked`: the questions of all ranks."""
        self.asked = asked
        self._ranker = ranker
        self._own = asked.part(np.arange(rank, len(asked), world))

    def __call__(self) -> Measured:
        """A collective call. Leaves the ranker in evaluation mode."""
        self._ranker.eval()
        sums = [0.0, 0.0, float(len(self._own))]
        if len(self._own):
            found = rank(RankerScorer(self._ranker).prepare(self._own), self._own)
            sums[:2] = [float((found.ranks_N == 1).sum()), float(found.losses_N.sum())]
        total = torch.tensor(sums, dtype=torch.float64, device=self._ranker.device)
        if dist.is_initialized():
            dist.all_reduce(total)
        hits, loss_sum, count = total.tolist()
        return Measured(hits / count, loss_sum / count)
