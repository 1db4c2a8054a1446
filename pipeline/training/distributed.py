"""Negatives from all ranks: candidate vectors gathered with gradient."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.models.precision import Precision, Resolved, resolve_precision

ItemT = TypeVar("ItemT")


def gather(rows: Tensor) -> Tensor:
    """Like `gather_with_gradient`, for tensors without a gradient."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rows
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


class _GatherWithGradient(torch.autograd.Function):
    """Forward: every rank's rows, in the order of ranks. Backward: each rank's own rows of the sum of
    all ranks' gradients.

    DistributedDataParallel then divides by the number of ranks, so that with the mean loss over the
    local contexts the gradient is that of the mean loss over the whole global batch.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.rows = len(rows)
        return gather(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous()
        dist.all_reduce(total)
        start = dist.get_rank() * ctx.rows
        return total[start : start + ctx.rows]


def gather_with_gradient(rows: Tensor) -> Tensor:
    """[N, …] on each of W ranks → [W·N, …] on all of them; the same tensor without a process group.

    Every rank must bring the same number of rows.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rows
    gathered: Tensor = _GatherWithGradient.apply(rows)  # type: ignore[no-untyped-call]
    return gathered


def gather_items(items: list[ItemT]) -> list[ItemT]:
    """The items of all ranks, in the order of ranks, on each rank. Ranks may have different numbers of
    them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return items
    parts: list[list[ItemT]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def agree_on_precision(name: Precision, device: torch.device) -> Resolved:
    """What `name` stands for on the hardware of all ranks: bf16 where each of them computes in it. A
    collective call."""
    is_bf16 = torch.tensor(int(resolve_precision(name, device) == "bf16"), device=device)
    if dist.is_initialized():
        dist.all_reduce(is_bf16, dist.ReduceOp.MIN)
    return "bf16" if is_bf16 else "fp32"


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
