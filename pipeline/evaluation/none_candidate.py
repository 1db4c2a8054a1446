"""Questions whose right answer is absent: which score is too low, and DSTC7's candidate NONE.

In DSTC7's sub-task 4 the right answer may be absent, and then the candidate NONE is right.

NONE is ranked like any other candidate, as in the challenge's own scorer. Its score is one of two: the
model's own score of the text "NONE", for models that were trained on such examples, or a threshold, for
scorers that never saw one. Candidates below the threshold then rank behind NONE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.config import BadInput
from pipeline.corpora.formats.dstc7 import NONE
from pipeline.evaluation.questions import Questions

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


def require_none(questions: Questions, option: str) -> None:
    """Raises BadInput unless every question has the candidate."""
    if not (questions.places_NK == questions.place_of(NONE)).any(axis=1).all():
        raise BadInput(f"{option}: there are examples without the candidate {NONE!r}; allowed: a "
                       "corpus of DSTC7's sub-task 4")  # fmt: skip


def threshold(best: QuestionRanks, questions: Questions) -> float:
    """The score for NONE with the highest R@1 on these questions, which were ranked with NONE at -inf.

    A threshold is right about a question where NONE is right and all scores are below it, and about one where
    the right answer has the highest score and that is above it. The number of right answers is constant
    between two scores. Of equally good thresholds the lowest is taken.
    """
    is_none_right_N = questions.right_places() == questions.place_of(NONE)
    best_N = best.top_scores_NT[:, 0].astype(np.float64)
    absent = np.sort(best_N[is_none_right_N])
    present = np.sort(best_N[~is_none_right_N & (best.ranks_N == 1)])
    edges = np.unique(np.concatenate([absent, present]))
    if not len(edges):
        return 0.0
    thresholds = np.concatenate([[edges[0] - 1], (edges[1:] + edges[:-1]) / 2, [edges[-1] + 1]])
    lost = np.searchsorted(present, thresholds, "right")
    return float(thresholds[np.argmax(np.searchsorted(absent, thresholds, "left") - lost)])
