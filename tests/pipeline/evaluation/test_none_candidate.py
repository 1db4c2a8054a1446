"""NONE: its place, and the best threshold by trying all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import BadInput
from pipeline.evaluation import none_candidate
from pipeline.evaluation.questions import Question, Questions
from pipeline.evaluation.ranking import rank

ASKED = Questions.of([
    Question("right", [], ["a", "NONE", "b"], 0),
    Question("absent", [], ["NONE", "c", "d"], 0),
    Question("wrong", [], ["e", "f", "NONE"], 1),
])  # fmt: skip


def test_questions_without_the_candidate_are_refused():
    none_candidate.require_none(ASKED, "--none threshold")
    for questions in ([Question("x", [], ["a", "b"], 0)],
                      [Question("x", [], ["a", "NONE"], 0), Question("y", [], ["a", "b"], 0)]):  # fmt: skip
        with pytest.raises(BadInput, match="--none threshold: there are examples without"):
            none_candidate.require_none(Questions.of(questions), "--none threshold")


def test_the_threshold_stands_in_for_nones_own_score(fixed):
    ready = fixed({"right": [0.9, 99, 0.1], "absent": [-99, 0.3, 0.2], "wrong": [0.8, 0.7, 99]})
    assert rank(ready, ASKED).ranks_N.tolist() == [2, 3, 3]
    assert rank(ready, ASKED, none_score=0.5).ranks_N.tolist() == [1, 1, 2]
    # A tie with NONE is lost, on either side.
    assert rank(ready, ASKED, none_score=np.float32(0.9)).ranks_N.tolist() == [2, 1, 3]
    assert rank(ready, ASKED, none_score=np.float32(0.3)).ranks_N.tolist() == [1, 2, 2]


def test_the_least_score_hides_few_right_answers_and_what_lies_below_it(fixed):
    """[right, other, third] of 40 questions; 36 are right, of which a twentieth, one, may be hidden."""
    asked = Questions.of([Question(f"q{n}", [], ["a", "b", "c"], 0) for n in range(40)])
    scores = {f"q{n}": [10.0 + n, 9.0 + n / 2, 0.0] for n in range(36)}
    scores |= {f"q{n}": [0.0, 8.0 + n % 2 * 10, 1.0] for n in range(36, 40)}
    least = none_candidate.least_score(rank(fixed(scores), asked))
    assert least == (11.0, 1 / 36, 0.5, 6 / 40)
    absent = sum((9.0 + n / 2 if n < 36 else 8.0 + n % 2 * 10) < 11.0 for n in range(40))
    assert absent == 6
    assert "below a score of 11 hides 3% of the right first answers, 50% of the wrong" in str(least)


def test_without_a_right_answer_there_is_no_least_score(fixed):
    asked = Questions.of([Question("q", [], ["a", "b"], 0)])
    assert none_candidate.least_score(rank(fixed({"q": [0.0, 1.0]}), asked)) is None


score = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0])


@given(st.lists(st.tuples(score, score, st.booleans()), min_size=1, max_size=12))
def test_no_other_threshold_has_a_higher_recall(rows):
    def scores(asked):
        return np.array([[*rows[int(name)][:2], 0.0] for name in asked.ids], np.float32)

    asked = Questions.of(
        Question(str(n), [], ["right", "wrong", "NONE"], 2 if absent else 0)
        for n, (_, _, absent) in enumerate(rows)
    )

    def recall(value: float) -> int:
        return int((rank(scores, asked, none_score=value).ranks_N == 1).sum())

    last = rank(scores, asked, none_score=-np.inf)
    chosen = none_candidate.threshold(last, asked)
    tried = [-3.0, -1.0, -0.25, 0.1, 0.6, 2.0, 4.0]
    assert recall(chosen) == max(map(recall, tried))
    assert np.isfinite(chosen)
