"""Embedding tables of 8 bits, which a model learns to live with while it trains.

In training a table is float32, and what is looked up is rounded to one of 256 levels; gradients pass the
rounding unchanged (reference 5.5). The levels lie evenly over a range that is set again from time to time:
all values of the table, and on either side a tenth of that or 0.01, whichever is more. Saved are the levels'
numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_STEPS = 255  # between the lowest and the highest level of a table
_MARGIN_SHARE, _MARGIN = 0.1, 0.01


def value_range(weights: Tensor) -> tuple[float, float]:
    """(lowest, highest) level for a table: its values, and room for them to move."""
    low, high = weights.min().item(), weights.max().item()
    margin = max(_MARGIN_SHARE * (high - low), _MARGIN)
    return low - margin, high + margin


def quantise(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The numbers of the nearest levels, uint8; values beyond the range take its ends."""
    step = (high - low) / _STEPS
    return ((values - low) / step).round().clamp(0, _STEPS).to(torch.uint8)


def dequantise(levels: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The values of levels, float32."""
    return low + levels.float() * ((high - low) / _STEPS)


class Table(nn.Module):
    """An embedding table: float32 rows to train, or 8-bit ones to look up in.

    Its range is in the state of a checkpoint, since training goes on in it.
    """

    low: Tensor
    high: Tensor
    levels: Tensor | None

    def __init__(self, rows: int, width: int, largest: float) -> None:
        """Starts uniform between -`largest` and `largest`, and not quantised."""
        super().__init__()
        self.rows, self.width = rows, width
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(rows, width).uniform_(-largest, largest)
        )
        self.register_buffer("low", torch.tensor(math.nan))
        self.register_buffer("high", torch.tensor(math.nan))
        self.register_buffer("levels", None)

    def set_range(self) -> None:
        """Sets the levels' range by the weights of now; from then on rows are rounded to levels."""
        assert self.weight is not None
        low, high = value_range(self.weight.detach())
        self.low.fill_(low)
        self.high.fill_(high)

    def freeze(self, levels: Tensor, low: float, high: float) -> None:
        """Takes 8-bit rows in place of the float32 ones: a quarter of the memory, nothing to train."""
        self.weight = None
        self.levels = levels
        self.low.fill_(low)
        self.high.fill_(high)

    def to_levels(self) -> tuple[Tensor, float, float]:
        """(levels uint8, lowest, highest), which `freeze` takes."""
        if self.levels is None:
            assert self.weight is not None
            if self.low.isnan():
                self.set_range()
            levels = quantise(self.weight.detach(), self.low, self.high)
        else:
            levels = self.levels
        return levels, self.low.item(), self.high.item()

    def forward(self, ids: Tensor) -> Tensor:
        """[…] → […, width], float32."""
        if self.levels is not None:
            return dequantise(self.levels[ids], self.low, self.high)
        assert self.weight is not None
        exact = F.embedding(ids, self.weight)
        # Before a range is set the levels are no numbers, and the exact values count.
        levels = quantise(exact.detach().nan_to_num(), *self._range())
        rounded = dequantise(levels, *self._range())
        return exact + torch.where(self.low.isnan(), 0.0, rounded - exact.detach())

    def _range(self) -> tuple[Tensor, Tensor]:
        unset = self.low.isnan()
        return self.low.masked_fill(unset, 0.0), self.high.masked_fill(unset, 1.0)
