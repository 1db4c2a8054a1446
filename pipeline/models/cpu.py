"""What is slow on CPUs: attention and dropout in training, memory that it does not use, weights in inference.

The fused attention knows no dropout on CPUs, and its way back takes half of a step; plain products of
matrices run on the matrix units. A Bernoulli draw costs 10 ns; here one of the generator's 64-bit
numbers makes four of them. Of all-MiniLM's step with dropout (64 contexts of 188 tokens, a core with AMX)
9.0 s became 5.5 s, of one without (140 tokens) 3.2 s became 2.0 s. A product lays its weights out for the
matrix units each time; laid out once, with GELU in the product, all-MiniLM in bf16 takes a fifth less time.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.activations import GELUActivation
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pipeline.models import packing

_NAME = "polyrank"
# Weights of attention made again at once, in float32: what a core's cache holds.
_WEIGHTS_AT_ONCE = 1 << 20


def speed_up(hf: Any) -> None:
    """Changes how a `transformers` model trains on CPUs, not what it computes."""
    if hf.config._attn_implementation == "sdpa":
        hf.set_attn_implementation(_NAME)
    for part in list(hf.modules()):
        for name, child in part.named_children():
            if type(child) is nn.Dropout:
                setattr(part, name, _Dropout(child.p))


def has_sped_up(hf: Any) -> bool:
    """Whether a model's attention is the one of this module, which knows packed rows."""
    return bool(hf.config._attn_implementation == _NAME)


def return_memory() -> None:
    """Gives free memory back to the system; glibc only.

    glibc keeps it, and as batches are of many lengths, no block fits the next one: a worker grew from
    3.1 to 7.9 GB in 100 steps. To be called now and then, not after each step: touching returned pages
    again is dear. With blocks that glibc never keeps (M_MMAP_THRESHOLD of 8 MB), 4.5 s a step, not 3.0.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def pack(hf: Any) -> None:
    """Lays out the linear layers of a bf16 model on a CPU for inference; it can do nothing else then."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for part in list(hf.modules()):
        activation = getattr(part, "intermediate_act_fn", None)  # behind a layer of BERT's
        fused = isinstance(activation, GELUActivation)
        for name, child in part.named_children():
            if type(child) is nn.Linear:
                setattr(part, name, _Packed(child, "gelu" if fused else "none"))
        if fused:
            part.intermediate_act_fn = nn.Identity()


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
    """[B, heads, T, d] and a mask [B, 1, 1 or T, T], false where nothing is seen → [B, T, heads, d]."""
    packed = packing.current()
    if packed is None:
        return _padded(module, query, key, value, attention_mask, scaling, dropout, **more), None

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return _padded(module, q, k, v, mask, scaling, dropout, **more)

    return packed.attend(attend, query, key, value), None


def _padded(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    **more: Any,
) -> Tensor:
    if query.device.type != "cpu" or not module.training:
        fused = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **more
        )
        whole: Tensor = fused[0]
        return whole
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mask = attention_mask
    if mask is not None and mask.dtype == torch.bool:
        hidden = torch.finfo(query.dtype).min
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, hidden)
    if not dropout and query.requires_grad:
        found = _Attention.apply(query, key, value, mask, scale)  # type: ignore[no-untyped-call]
    else:
        with torch.autocast("cpu", enabled=False):
            scores = (query * scale) @ key.transpose(2, 3)
            weights = torch.softmax(scores if mask is None else scores.add_(mask), dim=-1)
            found = (_drop(weights, dropout) if dropout else weights) @ value
    turned: Tensor = found.transpose(1, 2).contiguous()
    return turned


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    if packing.current():
        return None
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


class _Attention(torch.autograd.Function):
    """The fused kernel forward; back by products, from weights that are made again some texts at a time.

    q, k, v [B, H, T, D], mask [B, 1 or H, 1 or T, T] or None, added to the logits → [B, H, T, D]. With the
    kernel's log-sums lse (Dao et al., FlashAttention, 2022, appendix B.4):

        P = exp(s Q Kᵀ + mask - lse)    dV = Pᵀ dO    dS = s P ∘ (dO Vᵀ - rowsum(dO ∘ O))
        dQ = dS K                       dK = dSᵀ Q
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
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        step = max(1, _WEIGHTS_AT_ONCE // (q.shape[1] * q.shape[2] * k.shape[2]))
        for start in range(0, len(q), step):
            some = slice(start, start + step)
            logits = (q[some] @ k[some].mT).float().mul_(ctx.scale).sub_(lse[some, :, :, None])
            if mask is not None:
                logits += mask[some]
            weights = logits.exp_().to(q.dtype)
            seen = (d_out[some] * out[some]).sum(dim=3, keepdim=True)
            dv[some] = weights.mT @ d_out[some]
            d_logits = (d_out[some] @ v[some].mT).sub_(seen).mul_(weights).mul_(ctx.scale)
            dq[some] = d_logits @ k[some]
            dk[some] = d_logits.mT @ q[some]
        return dq, dk, dv, None, None


class _Packed(nn.Module):
    """activation(x Wᵀ + b), by the operators that torch's compiler uses where weights are constants."""

    def __init__(self, layer: nn.Linear, activation: Literal["none", "gelu"]) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
        self._bias = None if layer.bias is None else layer.bias.detach()
        self._activation = activation

    def forward(self, hidden: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            hidden, self._weight, self._bias, self._activation, [], "none"
        )
        return product


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, _mask)


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
