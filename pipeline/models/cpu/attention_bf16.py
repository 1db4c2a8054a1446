"""Attention of a bf16 model in inference on a CPU.

softmax(s) V = (2^t V) / (2^t 1), t = s · log₂ e, is unchanged by what is subtracted from a row of s:

- The keys' mean is subtracted from all keys (Zhang et al., SageAttention, 2024, section 4.2). The logits get
  smaller, so that their rounding to bf16 costs less.
- The row's maximum is not, as torch's fused attention does: 2^t overflows from 2^128 on only, and the lengths
  of queries and keys bound t. Longer ones are left to the fused attention, which keeps logits in float32 (of
  all-MiniLM's six layers the first one).

So between two products there is one pass over the logits. (8 texts of 256 tokens, 12 heads of 32, one core
with AVX512_BF16: 4.6 ms, not 11.6; 128 texts of 16 tokens: 1.4 ms, not 3.5.)
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
    visible_BT = _visible_keys(attention_mask, query)
    is_plain = query.dtype == torch.bfloat16 and query.shape == key.shape and not dropout
    is_causal = options.get("is_causal") or getattr(module, "is_causal", False)
    if (
        is_plain
        and not is_causal
        and visible_BT is not None
        and options.get("position_bias") is None
    ):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = _attend(query * (scale * math.log2(math.e)), key, value, visible_BT)
        if output is not None:
            return output, None
    fused: Tensor = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options
    )[0]
    return fused, None


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
    return mask[:, 0, 0] if mask.shape[1:3] == (1, 1) else None


def _attend(query: Tensor, key: Tensor, value: Tensor, visible_BT: Tensor) -> Tensor | None:
    """[B, heads, T, d] each, queries times the scale and log₂ e → [B, T, heads, d]; None: a power might
    overflow."""
    texts, heads, length, _ = query.shape
    query = query.contiguous()
    key = (key - key.mean(dim=2, keepdim=True)).contiguous()
    longest = [torch.linalg.vector_norm(rows, dim=-1).amax() for rows in (query, key)]
    if not longest[0] * longest[1] < _LARGEST_EXPONENT:  # nor where it is NaN
        return None
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
