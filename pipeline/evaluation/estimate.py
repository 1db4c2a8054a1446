"""Estimates the time of an evaluation, from a few questions that are answered on this machine."""

from __future__ import annotations

import time
from collections.abc import Mapping

from pipeline import cost
from pipeline.evaluation.questions import NO_TEXT, Question, Questions
from pipeline.evaluation.ranking import RankerScorer, rank

_MEASURED_S = 2.0
_MOST_CANDIDATES = 64  # of a question that is asked here: among 10,001, one would take minutes


def estimate(questions: Questions, scorers: Mapping[str, RankerScorer]) -> cost.Estimate:
    """Asks each model some of the questions, in this process. Baselines count as free."""
    rates = {name: _rate(scorer, questions) for name, scorer in scorers.items()}
    hours = sum(_reads(scorer, questions) / rates[name] for name, scorer in scorers.items()) / 3600
    measured = ", ".join(
        f"{name} {rate:,.0f} {'texts' if _has_vectors(scorers[name]) else 'pairs'} a second"
        for name, rate in rates.items()
    )
    return cost.measured_here(hours, measured, rows=len(questions))


def _has_vectors(scorer: RankerScorer) -> bool:
    """Whether the model reads each text once; others read each pair of a context and a candidate."""
    return scorer.ranker.config.has_vectors


def _reads(scorer: RankerScorer, questions: Questions) -> int:
    """The number of texts or pairs that the model reads."""
    if _has_vectors(scorer):
        return len(questions.texts) + len(questions)
    return int((questions.places_NK != NO_TEXT).sum()) + len(questions) * questions.shared


def _rate(scorer: RankerScorer, questions: Questions) -> float:
    """Texts or pairs that the model reads in a second."""
    count = 2
    while True:
        sample = _sample_questions(questions, count)
        began = time.perf_counter()
        rank(scorer.prepare(sample), sample)
        seconds = time.perf_counter() - began
        # The first warms up.
        if count > 2 and (seconds >= _MEASURED_S or len(sample) == len(questions)):
            return _reads(scorer, sample) / seconds
        count *= 4


def _sample_questions(questions: Questions, count: int) -> Questions:
    """The first questions, each with a few of its candidates."""
    return Questions.of(
        Question(
            questions.ids[number],
            questions.contexts[number],
            [questions.texts[place] for place in questions.places(number)[:_MOST_CANDIDATES]],
            0,
        )
        for number in range(min(count, len(questions)))
    )
