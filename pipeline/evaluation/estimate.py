"""What an evaluation will take: a few questions are asked here, and their time says that of all."""

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
class AskedModel:
    """A model, and what its time grows with."""

    load: Callable[[], Scorer]
    has_vectors: bool
    """Then it reads each text once, else each pair of a context and a candidate."""

    def reads(self, asked: Questions) -> int:
        """Texts or pairs."""
        if self.has_vectors:
            return len(asked.texts) + len(asked)
        return int((asked.own_NK != NO_TEXT).sum()) + len(asked) * asked.shared


def estimate(asked: Questions, models: Mapping[str, AskedModel]) -> cost.Estimate:
    """Asks each model some of the questions, in this process. Baselines count as free."""
    rates = {name: _rate(model, asked) for name, model in models.items()}
    hours = sum(model.reads(asked) / rates[name] for name, model in models.items()) / 3600
    measured = ", ".join(
        f"{name} {rate:,.0f} {'texts' if models[name].has_vectors else 'pairs'} a second"
        for name, rate in rates.items()
    )
    return cost.measured_here(hours, measured, rows=len(asked))


def _rate(model: AskedModel, asked: Questions) -> float:
    """Texts or pairs that the model reads in a second."""
    scorer, count = model.load(), 2
    while True:
        some = _some(asked, count)
        began = time.perf_counter()
        rank(scorer.prepare(some), some)
        seconds = time.perf_counter() - began
        if count > 2 and (seconds >= _MEASURED_S or len(some) == len(asked)):  # the first warms up
            return model.reads(some) / seconds
        count *= 4


def _some(asked: Questions, count: int) -> Questions:
    """The first ones, each with a few of its candidates."""
    return Questions.of(
        Question(
            asked.ids[number],
            asked.contexts[number],
            [asked.texts[place] for place in asked.places(number)[:_MOST_CANDIDATES]],
            0,
        )
        for number in range(min(count, len(asked)))
    )
