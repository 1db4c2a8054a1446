"""How the latency of a service grows with the number of clients that always ask.

Below saturation it should hardly grow. Beyond it the answers a second stay the same, so that twice as many
clients wait twice as long: slope 1. A service that loses throughput to its queues has a steeper curve.
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs.benchmarks.measure import BenchmarkRow
from jobs.benchmarks.serving.load import clients

COUNTS = (1, 2, 4, 8, 16, 32, 64)


def measure(url: str, bodies: Sequence[bytes], seconds: float) -> BenchmarkRow:
    """Milliseconds (p50) of an answer for the most clients, with the curve over all `COUNTS`.

    Each number of clients asks for so many seconds; the first quarter does not count. Refusals (429) are
    counted and have no part in the latency.
    """
    points, detail = list[list[float]](), dict[str, list[object]]()
    for count in COUNTS:
        result = clients(url, bodies, count, seconds)
        settled = result.between(seconds / 4, seconds).successes()
        points.append([count, settled.ms(50)])
        for name, value in (
            ("answers/s", round(result.per_s(seconds / 4, seconds), 1)),
            ("p99, ms", round(settled.ms(99), 1)),
            ("statuses", result.statuses()),
        ):
            detail.setdefault(name, []).append(value)
    return BenchmarkRow(
        "serve.by_clients", points[-1][1], f"ms (p50) with {COUNTS[-1]} clients",
        detail={"curve": {"x": "clients", "y": "ms (p50)", "points": points}, **detail},
    )  # fmt: skip
