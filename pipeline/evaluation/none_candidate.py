"""DSTC7's sub-task 4: the right answer may be absent, and then the candidate NONE is right.

NONE is ranked like any other candidate, as in the challenge's own scorer. Its score is one of two: the
model's own score of the text "NONE", for models that were trained on such examples, or a threshold, for
scorers that never saw one. Candidates below the threshold then rank behind NONE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.arrays import Bools
from pipeline.config import BadInput
from pipeline.corpora.formats.dstc7 import NONE
from pipeline.evaluation.questions import Questions

if TYPE_CHECKING:
    from pipeline.evaluation.ranking import QuestionRanks


def require_none(questions: Questions, option: str) -> None:
    """Raises BadInput unless every question has the candidate."""
    if not (questions.places_NK == questions.place_of(NONE)).any(axis=1).all():
        raise BadInput(f"{option}: there are examples without the candidate {NONE!r}; allowed: a "
                       "corpus of DSTC7's sub-task 4")  # fmt: skip


def is_right(questions: Questions) -> Bools:
    """Whether NONE is the right candidate of each question, [N]."""
    is_right_N: Bools = questions.right_places() == questions.place_of(NONE)
    return is_right_N


def threshold(best: QuestionRanks, is_none_right_N: Bools) -> float:
    """The score for NONE with the highest R@1 on questions that were ranked with NONE at -inf.

    A threshold is right about a question where NONE is right and all scores are below it, and about one where
    the right answer has the highest score and that is above it. The number of right answers is constant
    between two scores. Of equally good thresholds the lowest is taken.
    """
    best_N = best.top_scores_NT[:, 0].astype(np.float64)
    absent = np.sort(best_N[is_none_right_N])
    present = np.sort(best_N[~is_none_right_N & (best.ranks_N == 1)])
    edges = np.unique(np.concatenate([absent, present]))
    if not len(edges):
        return 0.0
    thresholds = np.concatenate([[edges[0] - 1], (edges[1:] + edges[:-1]) / 2, [edges[-1] + 1]])
    lost = np.searchsorted(present, thresholds, "right")
    return float(thresholds[np.argmax(np.searchsorted(absent, thresholds, "left") - lost)])
