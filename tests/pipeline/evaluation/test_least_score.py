"""The score below which no answer is shown."""

from __future__ import annotations

from pipeline.evaluation import least_score
from pipeline.evaluation.questions import Question, Questions
from pipeline.evaluation.ranking import rank


def test_the_least_score_hides_few_right_answers_and_what_lies_below_it(fixed):
    """[right, other, third] of 40 questions; 36 are right, of which a twentieth, one, may be hidden."""
    asked = Questions.of([Question(f"q{n}", [], ["a", "b", "c"], 0) for n in range(40)])
    scores = {f"q{n}": [10.0 + n, 9.0 + n / 2, 0.0] for n in range(36)}
    scores |= {f"q{n}": [0.0, 8.0 + n % 2 * 10, 1.0] for n in range(36, 40)}
    least = least_score.least_score(rank(fixed(scores), asked))
    assert least == (11.0, 1 / 36, 0.5, 6 / 40)
    absent = sum((9.0 + n / 2 if n < 36 else 8.0 + n % 2 * 10) < 11.0 for n in range(40))
    assert absent == 6
    assert "below a score of 11 hides 3% of the right first answers, 50% of the wrong" in str(least)


def test_without_a_right_answer_there_is_no_least_score(fixed):
    asked = Questions.of([Question("q", [], ["a", "b"], 0)])
    assert least_score.least_score(rank(fixed({"q": [0.0, 1.0]}), asked)) is None
