"""What is slow on CPUs: attention and dropout in training, memory that it does not use, weights in inference.

The fused attention knows no dropout on CPUs, and in bf16 its way back takes half of a step; plain products
of matrices run on the matrix units (64 texts of 160 tokens, 12 heads of 32: 52 ms, not 175; in float32
the fused one stays: 44 ms, not 68). A Bernoulli draw costs 10 ns; here one of the generator's 64-bit
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
# Weights of attention made again at once, in bf16: what two cores' caches hold.
_WEIGHTS_AT_ONCE = 1 << 21
# Of mallopt: M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD (without which threads unmap heaps, of 64 MiB each).
_KEEP = {-4: 0, -1: 2**31 - 1, -2: 1 << 26}


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


def keep_memory() -> None:
    """Lets a process that trains keep what it frees, for its next step; glibc only.

    Otherwise each tensor above 32 MiB is mapped, zeroed page by page and unmapped again: GELU of 8,000
    tokens in float32 takes 37 ms, not 4.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for setting, value in _KEEP.items():
            mallopt(setting, value)


def return_memory() -> None:
    """Gives free memory back to the system; glibc only.

    As batches are of many lengths, some blocks fit no later tensor: a worker of all-MiniLM's kept 2.9 GB
    after 10 steps and 4.0 after 68. To be called now and then, not after each step: touching returned
    pages again is dear (1.5 s where memory is a virtual machine's).
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def pack(hf: Any) -> None:
    """Lays out the linear layers of a bf16 model on a CPU for inference; it can do nothing else then."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # it takes AVX-512
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
    # Without dropout, and not in bf16, the fused attention is as fast as it gets.
    own = module.training and (dropout or query.dtype == torch.bfloat16)
    if query.device.type != "cpu" or not own:
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
        seen = (d_out.float() * out).sum(dim=3)
        ones = k.new_ones(*k.shape[:3], 2)
        keys, queries = torch.cat([k, ones], dim=3), _less(q, lse / ctx.scale)
        values, errors = torch.cat([v, ones], dim=3), _less(d_out, seen)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        step = max(1, _WEIGHTS_AT_ONCE // (q.shape[1] * q.shape[2] * k.shape[2]))
        for start in range(0, len(q), step):
            some = slice(start, start + step)
            weights = _product(keys[some], queries[some].mT, ctx.scale)
            if mask is not None:
                weights += mask[some].mT
            weights.exp_()
            dv[some] = weights @ d_out[some]
            d_logits = weights.mul_(values[some] @ errors[some].mT)
            dk[some] = d_logits @ q[some]
            dq[some] = d_logits.mT @ k[some]
        return dq.mul_(ctx.scale), dk.mul_(ctx.scale), dv, None, None


def _less(rows: Tensor, subtracted: Tensor) -> Tensor:
    """[…, D], float32 […] → […, D + 2]: products with (x, 1, 1) are those with x, less the number."""
    rounded = subtracted.to(rows.dtype)
    rest = (subtracted - rounded).to(rows.dtype)
    return torch.cat([rows, -rounded[..., None], -rest[..., None]], dim=-1)


def _product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale · left @ right of [B, H, …], scaled before it is rounded."""
    nothing = left.new_empty(1, 1, 1)
    scaled = torch.baddbmm(nothing, left.flatten(0, 1), right.flatten(0, 1), beta=0, alpha=scale)
    return scaled.view(*left.shape[:2], *scaled.shape[1:])


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
