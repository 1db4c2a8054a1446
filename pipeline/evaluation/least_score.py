"""Questions whose right answer may be absent: below which score a service shows no answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from pipeline.evaluation.ranking import QuestionRanks

_HIDDEN = 0.05


class LeastScore(NamedTuple):
    """A score, and what is hidden by leaving out the first answers that score lower."""

    score: float
    right: float
    """The share of the right first answers that it hides."""
    wrong: float
    """The share of the wrong ones."""
    absent: float
    """The share of questions for which it hides the first of the other candidates, as if the right one
    were absent."""

    def __str__(self) -> str:
        return (f"to show no answer below a score of {self.score:.4g} hides {self.right:.0%} of the right "
                f"first answers, {self.wrong:.0%} of the wrong ones, and {self.absent:.0%} of those to "
                "questions whose right answer is not in the pool")  # fmt: skip


def least_score(best: QuestionRanks) -> LeastScore | None:
    """The score below which at most 5 % of the right first answers lie; None without any."""
    first_N = best.top_scores_NT[:, 0]
    is_right_N = best.ranks_N == 1
    right = np.sort(first_N[is_right_N])
    if not len(right):
        return None
    score = float(right[int(_HIDDEN * len(right))])
    others_N = np.where(is_right_N, best.top_scores_NT[:, 1], first_N)
    parts = (right, first_N[~is_right_N], others_N)
    shares = (float((part < score).mean()) if len(part) else 0.0 for part in parts)
    return LeastScore(score, *shares)
