"""Numbers of a training, added up over steps and ranks between two reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Weighted(NamedTuple):
    """A sum and its divisor; a report shows the mean over all steps and ranks."""

    total: Tensor
    weight: float


StepMetrics = Mapping[str, Tensor | Weighted]
"""Numbers to show by name; a plain tensor is a mean that counts once a step."""

UNSAVED = "minutes_unsaved"
"""Among what a meter reads: minutes since the last checkpoint."""


@dataclass
class Meter:
    """Means of numbers over steps and ranks, without waiting for the device at each step."""

    device: torch.device
    skipped: int = 0
    """Steps of the whole run that changed nothing."""
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _weights: dict[str, float] = field(default_factory=dict)
    _work: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.restart()
        self.mark_saved()

    def mark_saved(self) -> None:
        """Notes the time of a checkpoint."""
        self._saved = time.perf_counter()

    def restart(self) -> None:
        self._sums, self._weights, self._work = {}, {}, {}
        self._steps = 0
        self._waited_s = 0.0
        self._began = time.perf_counter()

    def time_wait(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """Calls `function` and counts its time as waiting for data."""
        began = time.perf_counter()
        result = function(argument)
        self._waited_s += time.perf_counter() - began
        return result

    def add(self, metrics: StepMetrics, work: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            total, weight = value if isinstance(value, Weighted) else (value, 1.0)
            total = total.detach()
            self._sums[name] = self._sums.get(name, torch.zeros_like(total)) + total
            self._weights[name] = self._weights.get(name, 0.0) + weight
        for name, amount in work.items():
            self._work[name] = self._work.get(name, 0.0) + amount
        self._steps += 1

    def skip(self) -> None:
        """A step that changed nothing."""
        self._steps += 1
        self.skipped += 1

    def read(self) -> dict[str, float]:
        """The means and the rates per second since the last call, all skipped steps, and the minutes since
        `mark_saved`.

        A collective call; ranks may have shown different names.
        """
        names, work = sorted(self._sums), sorted(self._work)
        if dist.is_initialized():
            names, work = _union(names), _union(work)
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        minutes = (time.perf_counter() - self._saved) / 60
        numbers = torch.stack([
            *(self._sums.get(name, zero).double() for name in names),
            *(zero + self._weights.get(name, 0.0) for name in names),
            *(zero + self._work.get(name, 0.0) for name in work),
            zero + minutes,
        ])  # fmt: skip
        ranks = 1
        if dist.is_initialized():
            dist.all_reduce(numbers)
            ranks = dist.get_world_size()
        values = numbers.tolist()
        seconds = time.perf_counter() - self._began
        n = len(names)
        means = {name: values[i] / values[n + i] for i, name in enumerate(names) if values[n + i]}
        rates = {f"{name}_per_s": values[2 * n + i] / seconds for i, name in enumerate(work)}
        waited = zero + self._waited_s / seconds
        if dist.is_initialized():  # all ranks wait for the one whose data comes last
            dist.all_reduce(waited, dist.ReduceOp.MAX)
        speed = {"steps_per_s": self._steps / seconds, "data_wait_share": waited.item()}
        skipped = {"skipped_steps": float(self.skipped)}
        self.restart()
        return {**means, **rates, **speed, **skipped, UNSAVED: values[-1] / ranks}


def _union(names: list[str]) -> list[str]:
    names_of_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(names_of_ranks, names)
    return sorted({name for rank_names in names_of_ranks for name in rank_names})
