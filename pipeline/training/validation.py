"""Validation: how often the model in training puts the right candidate first (R@1), and its loss.

The questions and the scores are those of evaluation; the loss scales the scores as the loss of training
does. The questions are the same at every validation, and the ranks share them.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from pipeline.evaluation.questions import Questions
from pipeline.evaluation.ranking import RankerScorer, rank
from pipeline.models.ranker import Ranker
from pipeline.training.selection import Measured


class Validation:
    """Ranks the same questions with a ranker at every call."""

    def __init__(self, ranker: Ranker, questions: Questions, rank: int, world: int) -> None:
        """`questions`: those of all ranks."""
        self.questions = questions
        self._ranker = ranker
        self._rank_questions = questions.part(np.arange(rank, len(questions), world))

    def __call__(self) -> Measured:
        """R@1 and the loss; a collective call. Leaves the ranker in evaluation mode.

        r1: share of the contexts whose right candidate scores above all others; a tie is none. loss: mean
        cross-entropy of the right candidate, in nats.
        """
        self._ranker.eval()
        sums = [0.0, 0.0, float(len(self._rank_questions))]
        if len(self._rank_questions):
            scorer = RankerScorer(self._ranker, as_in_loss=True)
            ranking = rank(scorer.prepare(self._rank_questions), self._rank_questions)
            sums[:2] = [float((ranking.ranks_N == 1).sum()), float(ranking.losses_N.sum())]
        total = torch.tensor(sums, dtype=torch.float64, device=self._ranker.device)
        if dist.is_initialized():
            dist.all_reduce(total)
        hits, loss_sum, count = total.tolist()
        return Measured({"r1": hits / count, "loss": loss_sum / count}, "r1")
