"""The results of one scorer: its ranking, and the metrics computed from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline import progress
from pipeline.engine.actors import HERE, Actors
from pipeline.engine.resources import cpus_each
from pipeline.engine.waiting import await_room
from pipeline.evaluation import significance
from pipeline.evaluation.metrics import summarise
from pipeline.evaluation.protocols import Protocol
from pipeline.evaluation.questions import Questions
from pipeline.evaluation.significance import Comparison, Interval

if TYPE_CHECKING:
    from pipeline.evaluation.ranking import Latency, QuestionRanks, Scorer


@dataclass(frozen=True)
class ScorerResult:
    """One row of the table."""

    name: str
    ranking: QuestionRanks
    metrics: dict[str, float]
    """The first is the main metric: R@1, unless other metrics were asked for."""
    intervals: dict[str, Interval]
    """The interval of each metric."""
    latency: Latency | None
    """None: the latency was not measured."""

    def numbers(self) -> dict[str, float]:
        """All numbers by name; MLflow allows no "@" in a name."""
        values = dict(self.metrics)
        for name, (low, high) in self.intervals.items():
            values |= {f"{name}.low": low, f"{name}.high": high}
        if self.latency:
            values |= {"ms.median": self.latency.median, "ms.p95": self.latency.p95}
        return {name.replace("@", "_at_"): number for name, number in values.items()}


@dataclass(frozen=True)
class Measurement:
    """The settings of a measurement, the same for every scorer."""

    questions: Questions
    protocol: Protocol
    queries: int
    """Questions that are timed; 0: none."""
    seed: int

    def of(
        self, name: str, make: Callable[[], Scorer], timed: bool = True, actors: Actors = HERE
    ) -> ScorerResult:
        """Asks a scorer all questions, in this process or on a cluster (see `rank_questions`)."""
        queries = self.queries if timed else 0
        ranking, latency = rank_questions(name, make, self.questions, queries, actors)
        numbers = (ranking.ranks_N, self.protocol.candidates, self.protocol.recall_at)
        intervals = significance.intervals(*numbers, self.seed)
        return ScorerResult(name, ranking, summarise(*numbers), intervals, latency)


def rank_questions(
    name: str,
    make: Callable[[], Scorer],
    questions: Questions,
    queries: int,
    actors: Actors,
) -> tuple[QuestionRanks, Latency | None]:
    """The ranking of the questions, and the latency measured on `queries` of them (None for 0).

    With `actors` other than `HERE`, tasks of a Ray cluster share the questions. Each task has its share of
    the questions, the texts that these need, and a scorer of its own.
    """
    if actors == HERE:
        return _rank_and_time(name, make, questions, queries)

    import ray

    from pipeline.evaluation import ranking

    task_count = max(actors.count(len(questions)), min(actors.max_actors, len(questions)))
    cpus = cpus_each(task_count, actors.gpu, actors.cpus_per_actor)
    await_room(cpus, int(actors.gpu))
    task = ray.remote(_rank_and_time).options(num_cpus=cpus, num_gpus=int(actors.gpu))
    shares = np.array_split(np.arange(len(questions)), task_count)
    tasks = [
        task.remote("", make, questions.part(numbers), 0 if share else queries)
        for share, numbers in enumerate(shares)
    ]
    answers = []
    with progress.bar(name, len(tasks), unit="share") as bar:
        for share in tasks:
            answers.append(ray.get(share))
            bar.update()
    return ranking.join_rankings([part for part, _ in answers]), answers[0][1]


def _rank_and_time(
    name: str,
    make: Callable[[], Scorer],
    questions: Questions,
    queries: int,
) -> tuple[QuestionRanks, Latency | None]:
    from pipeline.evaluation import ranking

    prepared = make().prepare(questions)
    result = ranking.rank(prepared, questions, name)
    return result, ranking.latency(prepared, questions, queries) if queries else None


def compare_all(results: Sequence[ScorerResult], seed: int) -> list[Comparison]:
    """Comparisons of all pairs of results."""
    return [
        significance.compare(
            first.name, second.name, first.ranking.ranks_N == 1, second.ranking.ranks_N == 1, seed
        )
        for first, second in itertools.combinations(results, 2)
    ]
