"""What can be measured of any service by its URL: many clients, and load on a Poisson clock.

The clients run where the command runs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jobs.benchmark import Config
from jobs.benchmarks import pictures
from jobs.benchmarks.inputs import read_contexts
from jobs.benchmarks.measure import BenchmarkRow
from jobs.benchmarks.serving import services
from jobs.benchmarks.serving.load import LoadResult, Step, clients, poisson
from pipeline.artifact import open_artifact
from pipeline.config import BadInput

PARTS = ("clients", "load")
TOP_K = 10
CLIENTS = 32
COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of clients."""
_SHARES = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9)  # of saturation, where the load is measured


@dataclass(frozen=True)
class Size:
    """The amount and the duration of a load."""

    candidates: int
    questions: int
    """Different ones."""
    seconds: float
    """Duration of each side in each round."""
    rounds: int
    steady_s: float
    """At 70 % of saturation."""
    overload_s: float


SIZES = {
    "small": Size(100_000, 500, 8.0, 3, 30.0, 60.0),
    "full": Size(100_000, 2_000, 10.0, 5, 300.0, 60.0),
}


def measure(config: Config, work: Path) -> list[BenchmarkRow]:
    """Measures a service that is already there. Raises BadInput if it does not answer."""
    size, url = SIZES[config.size], config.url.rstrip("/")
    contexts = read_contexts(open_artifact(config.corpus[0], "corpus"), size.questions)
    bodies = request_bodies(contexts, config.pool)
    service = AnyService(bodies, size, work, lambda: nullcontext(url))
    require_answers(clients(f"{url}/rank", service.bodies, 1, 0.1))
    report_rows = list[BenchmarkRow]()
    for part in config.only or PARTS:
        print(f"{part} …", flush=True)
        report_rows += getattr(service, part)()
    return report_rows


def request_bodies(contexts: Sequence[Sequence[str]], pool: str) -> list[bytes]:
    return [
        json.dumps({"context": context, "pool": pool, "top_k": TOP_K}).encode()
        for context in contexts
    ]


@dataclass(frozen=True)
class AnyService:
    """The parts of the report that need no more than a service's URL."""

    bodies: list[bytes]
    size: Size
    work: Path
    running: Callable[[], AbstractContextManager[str]]
    """The URL of the service, as long as it is needed."""

    @functools.cached_property
    def saturation(self) -> float:
        """Answers a second to clients who always ask."""
        with self.running() as url:
            return self.saturate(url)

    def saturate(self, url: str) -> float:
        """Answers a second to clients who always ask."""
        result = clients(f"{url}/rank", self.bodies, CLIENTS, self.size.seconds)
        require_answers(result, (200, 429))
        return result.per_s(self.size.seconds / 4, self.size.seconds)

    def clients(self) -> list[BenchmarkRow]:
        """Clients who always ask: p50 and answers a second for each number of `COUNTS`.

        Beyond saturation twice as many clients wait twice as long, at the same rate of answers. The first
        quarter of the time does not count. Refusals (429) are counted and have no part in the latency.
        """
        detail, end_s = dict[str, list[Any]](), self.size.seconds
        with self.running() as url:
            for count in COUNTS:
                result = clients(f"{url}/rank", self.bodies, count, end_s)
                settled = result.between(end_s / 4, end_s).successes()
                for name, value in (
                    ("answers/s", round(result.per_s(end_s / 4, end_s), 1)),
                    ("p50, ms", round(settled.ms(50), 1)),
                    ("p99, ms", round(settled.ms(99), 1)),
                    ("statuses", result.statuses()),
                ):
                    detail.setdefault(name, []).append(value)
        rates, counts = (", ".join(map(str, numbers)) for numbers in (detail["answers/s"], COUNTS))
        note = f"Answers a second with {counts} clients: {rates}."
        unit = f"ms (p50) with {COUNTS[-1]} clients"
        p50 = detail["p50, ms"][-1]
        return [BenchmarkRow("serve.by_clients", p50, unit, detail={**detail, "note": note})]

    def load(self) -> list[BenchmarkRow]:
        """Latency at shares of saturation, on a Poisson clock; minutes at 70 %; three times too much."""
        saturation = self.saturation
        curve = list[dict[str, float]]()
        with self.running() as url:
            for share in _SHARES:
                result = self.send_poisson(url, [Step(self.size.seconds, share * saturation)])
                curve.append(_point(result, share * saturation))
            steady = self.send_poisson(url, [Step(self.size.steady_s, 0.7 * saturation)])
            overload, health = services.run_together(
                lambda: self.send_poisson(url, [Step(self.size.overload_s, 3 * saturation)]),
                lambda: poisson(f"{url}/health", [], [Step(self.size.overload_s, 5.0)]),
            )
        pictures.load(curve, self.work / "load.png")
        refused = overload.select(overload.status == 429)
        successes = overload.successes()
        goodput = overload.per_s(self.size.overload_s / 5, self.size.overload_s)
        return [
            BenchmarkRow("serve.load.70_percent.p99_over_p50", steady.ms(99) / steady.ms(50), "times",
                         detail={
                "p50, p95, p99, ms": [round(steady.ms(q), 1) for q in (50, 95, 99)],
                "requests/s: p50, p99, ms; requests at once": [
                    [round(value, 1) for value in point.values()] for point in curve],
                "statuses": steady.statuses(),
                "note": f"{self.size.steady_s:.0f} s at {0.7 * saturation:.1f} requests/s."}),
            BenchmarkRow("serve.load.300_percent.goodput", goodput, "rankings/s", peer=saturation,
                ratio=goodput / saturation, detail={
                    "statuses": overload.statuses(),
                    "refused within, ms (p50, p99)": [round(refused.ms(q), 1) for q in (50, 99)],
                    "answered within, ms (p50, p99)": [round(successes.ms(q), 1) for q in (50, 99)],
                    "health, ms (p50, p99)": [round(health.ms(q), 1) for q in (50, 99)],
                    "health's statuses": health.statuses(),
                    "note": f"{self.size.overload_s:.0f} s."}),
        ]  # fmt: skip

    def send_poisson(self, url: str, steps: Sequence[Step]) -> LoadResult:
        result = poisson(f"{url}/rank", self.bodies, steps)
        require_answers(result, (200, 429))
        return result


def require_answers(result: LoadResult, allowed_statuses: Sequence[int] = (200,)) -> None:
    """Raises BadInput: figures of a service that fails mean nothing."""
    if not len(result.status) or not np.isin(result.status, allowed_statuses).all():
        raise BadInput(f"the service answered {result.statuses()}; allowed: {allowed_statuses}")


def _point(result: LoadResult, per_s: float) -> dict[str, float]:
    successes = result.successes()
    # Little's law: requests that are there at once = their rate × the time that each stays.
    at_once = per_s * float(successes.seconds.mean())
    return {"per_s": per_s, "p50": successes.ms(50), "p99": successes.ms(99), "at_once": at_once}
