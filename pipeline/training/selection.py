"""What validations decide: the learning rate after a plateau, when to stop, which weights to keep."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from pipeline.training.validation import Measured


@dataclass
class Selection:
    """Goes into checkpoints whole, so that a resumed run decides as one that was not killed."""

    decay: float
    """Factor on the rate after a validation whose loss is not below the lowest (ParlAI: 0.4)."""
    patience: int
    """Stop after so many validations without a better one; 0: never."""
    share: float = 1.0
    """The rate's factor now."""
    lowest_loss: float = math.inf
    best_r1: float = -1.0
    best_loss: float = math.inf
    """Of the best validation: R@1 decides, then the loss."""
    best_step: int = 0
    without_better: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Of the best validation, on the CPU; empty before the first."""

    @property
    def stop(self) -> bool:
        return 0 < self.patience <= self.without_better

    def judge(self, measured: Measured, step: int, module: nn.Module) -> dict[str, float]:
        """Takes a validation in and returns what is to be shown of it."""
        if measured.loss < self.lowest_loss:
            self.lowest_loss = measured.loss
        else:
            self.share *= self.decay
        self.without_better += 1
        if (measured.r1, -measured.loss) > (self.best_r1, -self.best_loss):
            self.best_r1, self.best_loss = measured
            self.best_step, self.without_better = step, 0
            self.weights = {
                name: value.detach().to("cpu", copy=True)
                for name, value in module.state_dict().items()
            }
        return {
            "valid_r1": measured.r1,
            "valid_loss": measured.loss,
            "best_valid_r1": self.best_r1,
            "best_step": float(self.best_step),
        }

    def state(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("decay", "patience")}

    def load(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.weights = {name: value.cpu() for name, value in self.weights.items()}
