"""Attention of a model that trains on a CPU.

The fused attention knows no dropout on CPUs, and in bf16 its way back takes half of a step; plain products
of matrices run on the matrix units (64 texts of 160 tokens, 12 heads of 32: 52 ms, not 175; in float32
the fused one stays: 44 ms, not 68).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pipeline.models.cpu.dropout import drop
from pipeline.models.cpu.packing import Packing

NAME = "polyrank"
"""The name of the implementation in `transformers`' register."""
# Weights of attention made again at once, in bf16: what two cores' caches hold.
_WEIGHTS_AT_ONCE = 1 << 21


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: Packing | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """[B, heads, T, d] and a mask [B, 1, 1 or T, T], false where nothing is seen → [B, T, heads, d]."""
    if packing is None:
        return _attend_padded(
            module, query, key, value, attention_mask, scaling, dropout, **options
        ), None

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return _attend_padded(module, q, k, v, mask, scaling, dropout, **options)

    return packing.attend(attend, query, key, value), None


def _attend_padded(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    **options: Any,
) -> Tensor:
    # Without dropout, and not in bf16, the fused attention is as fast as it gets.
    # torch's compiler takes none of our functions with a way back of their own.
    uses_own_kernel = module.training and (dropout or query.dtype == torch.bfloat16)
    uses_own_kernel = uses_own_kernel and not torch.compiler.is_compiling()
    if not uses_own_kernel:
        fused = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options
        )
        fused_output: Tensor = fused[0]
        return fused_output
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mask = attention_mask
    if mask is not None and mask.dtype == torch.bool:
        # In windowed attention padding far from every token sees nothing. Without keys the log-sum of its
        # logits is -inf, and the gradients of its whole text are NaN; what it sees instead has no effect.
        mask = mask | ~mask.any(dim=-1, keepdim=True)
        lowest = torch.finfo(query.dtype).min
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, lowest)
    if not dropout and query.requires_grad:
        attended = _Attention.apply(query, key, value, mask, scale)  # type: ignore[no-untyped-call]
    else:
        with torch.autocast("cpu", enabled=False):
            scores = (query * scale) @ key.transpose(2, 3)
            weights = torch.softmax(scores if mask is None else scores.add_(mask), dim=-1)
            attended = (drop(weights, dropout) if dropout else weights) @ value
    output: Tensor = attended.transpose(1, 2).contiguous()
    return output


class _Attention(torch.autograd.Function):
    """The fused kernel forward; back by products, from weights that are made again some texts at a time.

    q, k, v [B, H, T, D], mask [B, 1 or H, 1 or T, T] or None, added to the logits → [B, H, T, D]. With the
    kernel's log-sums lse (Dao et al., FlashAttention, 2022, appendix B.4):

        P = exp(s Q Kᵀ + mask - lse)    dV = Pᵀ dO    dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O))
        dQ = s dS K                     dK = s dSᵀ Q

    Made are Pᵀ and dSᵀ, as two of the three products need those. What is subtracted goes through the
    products, as two more dimensions of Q and dO against ones (bf16's rounding, and what it leaves), so
    that only differences are rounded to bf16: logits up to 70 cost 0.8 % of a gradient, not 7 %.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
    ) -> Any:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse, mask)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, mask = ctx.saved_tensors
        (d_out,) = gradients
        row_sums = (d_out.float() * out).sum(dim=3)
        ones = k.new_ones(*k.shape[:3], 2)
        keys, queries = torch.cat([k, ones], dim=3), _append_subtracted(q, lse / ctx.scale)
        values, errors = torch.cat([v, ones], dim=3), _append_subtracted(d_out, row_sums)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        step = max(1, _WEIGHTS_AT_ONCE // (q.shape[1] * q.shape[2] * k.shape[2]))
        for start in range(0, len(q), step):
            texts = slice(start, start + step)
            weights = _product(keys[texts], queries[texts].mT, ctx.scale)
            if mask is not None:
                weights += mask[texts].mT
            weights.exp_()
            dv[texts] = weights @ d_out[texts]
            d_logits = weights.mul_(values[texts] @ errors[texts].mT)
            dk[texts] = d_logits @ q[texts]
            dq[texts] = d_logits.mT @ k[texts]
        return dq.mul_(ctx.scale), dk.mul_(ctx.scale), dv, None, None


def _append_subtracted(rows: Tensor, subtracted: Tensor) -> Tensor:
    """[…, D], float32 […] → […, D + 2]: products with (x, 1, 1) are those with x, less the number."""
    rounded = subtracted.to(rows.dtype)
    remainder = (subtracted - rounded).to(rows.dtype)
    return torch.cat([rows, -rounded[..., None], -remainder[..., None]], dim=-1)


def _product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale · left @ right of [B, H, …], scaled before it is rounded."""
    empty = left.new_empty(1, 1, 1)
    scaled = torch.baddbmm(empty, left.flatten(0, 1), right.flatten(0, 1), beta=0, alpha=scale)
    return scaled.view(*left.shape[:2], *scaled.shape[1:])


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
