"""Attention of a bf16 model in inference on a CPU.

softmax(s) V = (2^t V) / (2^t 1), t = s · log₂ e, is unchanged by what is subtracted from a row of s:

- The keys' mean is subtracted from all keys (Zhang et al., SageAttention, 2024, section 4.2). The logits get
  smaller, so that their rounding to bf16 costs less.
- The row's maximum is not, as torch's fused attention does: 2^t overflows from 2^128 on only, and the lengths
  of queries and keys bound t. Heads with longer ones are left to the fused attention, which keeps logits in
  float32 (one of all-MiniLM's 72 heads).

So between two products there is one pass over the logits. (8 texts of 256 tokens, 12 heads of 32, one core
with AVX512_BF16: 5.4 ms, not 11.2; 128 texts of 16 tokens: 2.1 ms, not 3.3. AMX was not at hand.)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "polyrank_bf16"
"""The name of the implementation in `transformers`' register."""
# A row's sum of a million powers stays below 2^127, the largest that bf16 holds; and a logit of 64 to 128 is
# rounded by up to 0.25, which is a fifth of its power.
_LARGEST_EXPONENT = 100.0
# Logits computed at once by a thread: 1 MB, which stays in its cache.
_LOGITS_AT_ONCE = 1 << 19


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """[B, heads, T, d] and a mask [B, 1, 1 or T, T], false where nothing is seen → [B, T, heads, d]."""

    def attend_fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output: Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options
        )[0]
        return output

    visible_BT = _visible_keys(attention_mask, query)
    is_plain = query.dtype == torch.bfloat16 and query.shape == key.shape and not dropout
    is_biased = options.get("position_bias") is not None
    is_causal = options.get("is_causal") or getattr(module, "is_causal", False)
    if visible_BT is None or not is_plain or is_biased or is_causal:
        return attend_fused(query, key, value), None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scaled = (query * (scale * math.log2(math.e))).contiguous()
    centred = (key - key.mean(dim=2, keepdim=True)).contiguous()
    longest_q, longest_k = (
        torch.linalg.vector_norm(rows, dim=-1).amax(dim=(0, 2)) for rows in (scaled, centred)
    )
    is_small_H = longest_q * longest_k < _LARGEST_EXPONENT  # false where it is NaN
    if is_small_H.all():
        return _attend(scaled, centred, value, visible_BT), None
    output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    large, small = (mask.nonzero().flatten() for mask in (~is_small_H, is_small_H))
    output[:, :, large] = attend_fused(query[:, large], key[:, large], value[:, large])
    if len(small):
        output[:, :, small] = _attend(
            scaled[:, small], centred[:, small], value[:, small], visible_BT
        )
    return output, None


def _padding_mask(*sizes: Any, **options: Any) -> Tensor | None:
    """As `sdpa_mask`; bool [B, 1, 1, T] where all queries of a text see the same keys."""
    mask: Tensor | None = sdpa_mask(*sizes, **options)
    if mask is not None and torch.equal(mask, mask[:, :, :1].expand_as(mask)):
        return mask[:, :, :1]
    return mask


def _visible_keys(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """bool [B, T]: the keys that all queries of a text see; None: queries see different ones."""
    texts, _, length, _ = query.shape
    if mask is None:
        return query.new_ones(texts, length, dtype=torch.bool)
    is_padding = mask.dtype == torch.bool and mask.shape[1:3] == (1, 1)
    return mask[:, 0, 0] if is_padding else None


def _attend(query: Tensor, key: Tensor, value: Tensor, visible_BT: Tensor) -> Tensor:
    """[B, heads, T, d] each, queries times the scale and log₂ e → [B, T, heads, d]."""
    texts, heads, length, _ = query.shape
    value = value.masked_fill(~visible_BT[:, None, :, None], 0.0)
    visible_BT1 = visible_BT[..., None].to(value.dtype)
    output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    step = max(1, _LOGITS_AT_ONCE * torch.get_num_threads() // (heads * length * length))
    for start in range(0, texts, step):
        part = slice(start, start + step)
        powers = (query[part] @ key[part].mT).exp2_()
        sums = (powers.flatten(1, 2) @ visible_BT1[part]).view(-1, heads, length, 1)
        torch.div(powers @ value[part], sums, out=output[part].transpose(1, 2))
    return output


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _padding_mask)
