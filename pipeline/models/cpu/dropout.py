"""Dropout of a model that trains on a CPU.

A Bernoulli draw costs 10 ns; here one of the generator's 64-bit numbers makes four of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


class Dropout(nn.Dropout):
    def forward(self, hidden: Tensor) -> Tensor:
        if self.training and self.p and not torch.compiler.is_compiling():
            return drop(hidden, self.p)
        output: Tensor = super().forward(hidden)
        return output


def drop(values: Tensor, share: float) -> Tensor:
    dropped: Tensor = _Drop.apply(values, share)  # type: ignore[no-untyped-call]
    return dropped


class _Drop(torch.autograd.Function):
    """Dropout whose share is a multiple of 1/65,536."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, share: float) -> Tensor:
        parts = round(share * 65536)
        drawn = torch.empty(math.ceil(values.numel() / 4), dtype=torch.int64).random_(
            -(2**63), None
        )
        keep_mask = (drawn.view(torch.int16)[: values.numel()] >= parts - 32768).view(values.shape)
        ctx.keep_mask, ctx.factor = keep_mask, 65536 / (65536 - parts)
        return (values * keep_mask).mul_(ctx.factor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        dropped: Tensor = (gradients[0] * ctx.keep_mask).mul_(ctx.factor)
        return dropped, None
