"""The costs of tasks: measured where they run, summed up by the process that started them.

Each task's record says its seconds, rows, bytes, peak memory and host. At the end of a stage its
stragglers, restarts and failures are printed; MLflow gets them as `tasks.json`, and Ray's Prometheus
endpoint gets running totals.
"""

from __future__ import annotations

import dataclasses
import functools
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import progress
from pipeline.engine.records import RecordT, TaskCost

_STRAGGLER_FACTOR = 3.0  # times the median
_STRAGGLER_SECONDS = 10.0  # and at least so long: short tasks wait for each other
_SHOWN = 5
_MAX_TASKS_IN_JSON = 200  # of a stage's tasks, in tasks.json: the slowest


def measured(action: Callable[[], RecordT]) -> RecordT:
    """A task's record, with what the task cost."""
    forget_peak_memory()
    began = time.monotonic()
    record = action()
    cost = TaskCost(
        seconds=round(time.monotonic() - began, 3),
        rows=sum(entry["rows"] for entry in record.files) or record.counts.get("records", 0),
        bytes=sum(entry["bytes"] for entry in record.files),
        peak_memory_bytes=peak_memory(),
        host=socket.gethostname(),
    )
    return dataclasses.replace(record, cost=cost)


def forget_peak_memory() -> None:
    """The peak of this process, which does one task after another, counts from here; see proc(5)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """The most bytes that this process held, libraries included."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of macOS, in bytes


@dataclass(frozen=True)
class Stage:
    """The tasks of a stage of a job, those of earlier attempts too."""

    name: str
    costs: Mapping[str, TaskCost]
    """The costs of the finished tasks."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """The reasons, by task."""
    crashed_hosts_by_task: Mapping[str, list[str]] = field(default_factory=dict)
    """Hosts on which the process of a task died, by task."""

    def stragglers(self) -> dict[str, TaskCost]:
        """Finished tasks that took much longer than the median, slowest first."""
        if len(self.costs) < 4:
            return {}
        limit = max(_STRAGGLER_FACTOR * self.median_seconds(), _STRAGGLER_SECONDS)
        slow = {task: cost for task, cost in self.costs.items() if cost.seconds > limit}
        return dict(sorted(slow.items(), key=lambda item: -item[1].seconds))

    def median_seconds(self) -> float:
        return statistics.median([cost.seconds for cost in self.costs.values()] or [0.0])

    def as_json(self) -> dict[str, Any]:
        costs = self.costs.values()
        slowest = sorted(self.costs.items(), key=lambda item: -item[1].seconds)[:_MAX_TASKS_IN_JSON]
        return {
            "stage": self.name,
            "tasks": len(self.costs),
            "task_seconds": round(sum(cost.seconds for cost in costs), 3),
            "median_seconds": self.median_seconds(),
            "rows": sum(cost.rows for cost in costs),
            "bytes": sum(cost.bytes for cost in costs),
            "peak_memory_bytes": max((cost.peak_memory_bytes for cost in costs), default=0),
            "stragglers": list(self.stragglers()),
            "failed": dict(self.failed),
            "died_on": {task: list(hosts) for task, hosts in self.crashed_hosts_by_task.items()},
            "slowest_tasks": {task: dataclasses.asdict(cost) for task, cost in slowest},
        }


_stages: ContextVar[list[Stage] | None] = ContextVar("stages", default=None)


@contextmanager
def collect_stages() -> Iterator[list[Stage]]:
    """The stages that end meanwhile, in this thread."""
    stages: list[Stage] = []
    token = _stages.set(stages)
    try:
        yield stages
    finally:
        _stages.reset(token)


def end_stage(stage: Stage) -> None:
    """Says what a person should know of a stage that has ended, and keeps it for MLflow."""
    for task, hosts in stage.crashed_hosts_by_task.items():
        death = f"its process died on {', '.join(hosts)}"
        print(f"{stage.name}: {task} was started again: {death}", file=sys.stderr)
    stragglers = stage.stragglers()
    for task, cost in list(stragglers.items())[:_SHOWN]:
        print(f"{stage.name}: straggler {task}: {cost.seconds:.0f} s on {cost.host}, "
              f"median {stage.median_seconds():.0f} s", file=sys.stderr)  # fmt: skip
    if len(stragglers) > _SHOWN:
        print(f"{stage.name}: and {len(stragglers) - _SHOWN} more stragglers", file=sys.stderr)
    progress.event("stage", **stage.as_json())
    stages = _stages.get()
    if stages is not None:
        stages.append(stage)


def count_done(stage: str, cost: TaskCost) -> None:
    if not (totals := _totals()):
        return
    tags = {"stage": stage}
    for counter, value in ((totals.rows, cost.rows), (totals.bytes, cost.bytes)):
        if value:  # Ray refuses to add nothing
            counter.inc(value, tags)
    totals.seconds.observe(cost.seconds, tags)
    totals.tasks.inc(1, {**tags, "outcome": "done"})


def count_failed(stage: str) -> None:
    if totals := _totals():
        totals.tasks.inc(1, {"stage": stage, "outcome": "failed"})


class _Totals(NamedTuple):
    """Running totals for Prometheus, counted by the job's driver: workers may end before they report."""

    rows: Any
    bytes: Any
    seconds: Any
    tasks: Any


def _totals() -> _Totals | None:
    """The totals of this process; None without Ray, which exports them."""
    ray = sys.modules.get("ray")
    return _totals_of_process() if ray and ray.is_initialized() else None


@functools.cache
def _totals_of_process() -> _Totals:
    from ray.util.metrics import Counter, Histogram

    by_stage = ("stage",)
    bounds_s = [1, 3, 10, 30, 100, 300, 1000, 3000]
    outcomes = "Tasks that ended; outcome: done or failed."
    return _Totals(
        Counter("polyrank_task_rows_total", "Rows that finished tasks wrote.", by_stage),
        Counter("polyrank_task_bytes_total", "Bytes that finished tasks wrote.", by_stage),
        Histogram("polyrank_task_seconds", "Seconds of finished tasks.", bounds_s, by_stage),
        Counter("polyrank_tasks_total", outcomes, ("stage", "outcome")),
    )
