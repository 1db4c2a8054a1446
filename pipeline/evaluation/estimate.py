"""Estimates the time of an evaluation, from a few questions that are answered on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipeline import cost
from pipeline.evaluation.questions import NO_TEXT, Question, Questions
from pipeline.evaluation.ranking import Scorer, rank

_MEASURED_S = 2.0
_MOST_CANDIDATES = 64  # of a question that is asked here: among 10,001, one would take minutes


@dataclass(frozen=True)
class TimedModel:
    """A model, and whether its time grows with texts or with pairs."""

    load: Callable[[], Scorer]
    has_vectors: bool
    """True: the model reads each text once. False: it reads each pair of a context and a candidate."""

    def reads(self, questions: Questions) -> int:
        """The number of texts or pairs that the model reads."""
        if self.has_vectors:
            return len(questions.texts) + len(questions)
        return int((questions.places_NK != NO_TEXT).sum()) + len(questions) * questions.shared


def estimate(questions: Questions, models: Mapping[str, TimedModel]) -> cost.Estimate:
    """Asks each model some of the questions, in this process. Baselines count as free."""
    rates = {name: _rate(model, questions) for name, model in models.items()}
    hours = sum(model.reads(questions) / rates[name] for name, model in models.items()) / 3600
    measured = ", ".join(
        f"{name} {rate:,.0f} {'texts' if models[name].has_vectors else 'pairs'} a second"
        for name, rate in rates.items()
    )
    return cost.measured_here(hours, measured, rows=len(questions))


def _rate(model: TimedModel, questions: Questions) -> float:
    """Texts or pairs that the model reads in a second."""
    scorer, count = model.load(), 2
    while True:
        sample = _sample_questions(questions, count)
        began = time.perf_counter()
        rank(scorer.prepare(sample), sample)
        seconds = time.perf_counter() - began
        # The first warms up.
        if count > 2 and (seconds >= _MEASURED_S or len(sample) == len(questions)):
            return model.reads(sample) / seconds
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
