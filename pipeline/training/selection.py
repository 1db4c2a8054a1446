"""Decides by validations: the rate after a plateau, when to stop, and which weights to keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Measured:
    """The result of a validation."""

    metrics: Mapping[str, float]
    """By name; "loss" is among them, in nats."""
    selection: str
    """The metric that chooses the best weights. If it is equal, the lower loss wins."""
    higher_is_better: bool = True

    @property
    def merit(self) -> tuple[float, float]:
        """Greater is better."""
        value = self.metrics[self.selection]
        return (value if self.higher_is_better else -value, -self.metrics["loss"])


@dataclass
class Selection:
    """The decisions so far. Checkpoints hold all of it, so a resumed run decides as an undisturbed one
    does."""

    decay: float
    """Factor on the rate after a validation whose loss is not below the lowest (ParlAI: 0.4)."""
    patience: int
    """Stop after this many validations without a better one; 0: never."""
    keep_last: bool = False
    """Each validation counts as the best so far, and the last weights are the result."""
    plateau_factor: float = 1.0
    """The current factor on the rate."""
    lowest_loss: float = math.inf
    best_merit: tuple[float, float] = (-math.inf, -math.inf)
    best_metrics: dict[str, float] = field(default_factory=dict)
    """The metrics of the best validation."""
    best_step: int = 0
    without_better: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)
    """The weights of the best validation, on the CPU; empty before the first, and with `keep_last`."""

    @property
    def best(self) -> dict[str, float]:
        """The metrics of the best validation, to show; empty before the first one."""
        if not self.best_metrics:
            return {}
        best = {f"best_valid_{name}": value for name, value in self.best_metrics.items()}
        return {**best, "best_step": float(self.best_step)}

    @property
    def stop(self) -> bool:
        return not self.keep_last and 0 < self.patience <= self.without_better

    def update(
        self, measured: Measured, step: int, weights: Callable[[], dict[str, Tensor]]
    ) -> dict[str, float]:
        """Adds a validation; returns the metrics to show.

        `weights` copies the measured weights. It is called if they are the best so far; all ranks decide that
        alike.
        """
        if measured.metrics["loss"] < self.lowest_loss:
            self.lowest_loss = measured.metrics["loss"]
        else:
            self.plateau_factor *= self.decay
        self.without_better += 1
        if self.keep_last or measured.merit > self.best_merit:
            self.best_merit, self.best_metrics = measured.merit, dict(measured.metrics)
            self.best_step, self.without_better = step, 0
            self.weights = {} if self.keep_last else weights()
        metrics = {f"valid_{name}": value for name, value in measured.metrics.items()}
        return {**metrics, **self.best}

    def state(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("decay", "patience", "keep_last")
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Selection:
        """The selection in a `state`."""
        selection = cls(decay=1.0, patience=0)
        selection.load(state)
        return selection

    def load(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        if self.decay == 1.0:  # a run that goes on by a schedule without plateaus
            self.plateau_factor = 1.0
        self.best_merit = (self.best_merit[0], self.best_merit[1])  # a list in checkpoints
        weights = {} if self.keep_last else self.weights
        self.weights = {name: value.cpu() for name, value in weights.items()}
