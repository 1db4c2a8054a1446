"""What training is slow at on CPUs: attention, dropout, and memory that is taken anew at each step.

The fused attention knows no dropout on CPUs, and its backward pass is slow in bf16; plain products of
matrices run on the matrix units. A Bernoulli draw costs 10 ns; here one of the generator's 64-bit
numbers makes four of them. And glibc returns large blocks to the system, which clears them again.
Of all-MiniLM's step (64 contexts of 188 tokens, a core with AMX) 9.0 s became 4.7 s.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "polyrank"
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt(3)


def speed_up(hf: Any) -> None:
    """Changes how a `transformers` model trains on CPUs, not what it computes."""
    if hf.config._attn_implementation == "sdpa":
        hf.set_attn_implementation(_NAME)
    for part in list(hf.modules()):
        for name, child in part.named_children():
            if type(child) is nn.Dropout:
                setattr(part, name, _Dropout(child.p))


def keep_memory() -> None:
    """What this process frees it keeps for itself, until it ends; with glibc only."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """[B, heads, T, d] and a mask [B, 1, T, T], false where nothing is seen → [B, T, heads, d]."""
    if query.device.type != "cpu" or not module.training:
        fused = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **more
        )
        return fused[0], None
    with torch.autocast("cpu", enabled=False):
        scores = (query * (scaling or query.shape[-1] ** -0.5)) @ key.transpose(2, 3)
        if attention_mask is not None:
            hidden = torch.zeros_like(attention_mask, dtype=scores.dtype)
            scores = scores.add_(
                hidden.masked_fill_(~attention_mask, torch.finfo(scores.dtype).min)
            )
        weights = torch.softmax(scores, dim=-1)
        found = (_drop(weights, dropout) if dropout else weights) @ value
    return found.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)


class _Dropout(nn.Dropout):
    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.device.type == "cpu" and self.training and self.p:
            return _drop(hidden, self.p)
        whole: Tensor = super().forward(hidden)
        return whole


def _drop(values: Tensor, share: float) -> Tensor:
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
        kept = (drawn.view(torch.int16)[: values.numel()] >= parts - 32768).view(values.shape)
        ctx.kept, ctx.factor = kept, 65536 / (65536 - parts)
        return (values * kept).mul_(ctx.factor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        dropped: Tensor = (gradients[0] * ctx.kept).mul_(ctx.factor)
        return dropped, None
