"""What makes `transformers` models faster on CPUs: a plug-in for training, and other layers for inference.

`accelerate` changes a model in place and changes nothing of what it computes: outputs and gradients are
those of the plain model within rounding; dropout draws other numbers from the same generator. Of
all-MiniLM's step with dropout (64 contexts of 188 tokens, a core with AMX) 9.0 s became 5.5 s, of one
without (140 tokens) 3.2 s became 2.0 s, before padding was left out (`packing`).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.activations import GELUActivation
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pipeline.models import packing, torch_operators
from pipeline.models.packing import Packing
from pipeline.models.torch_operators import Activation
from pipeline.processor import processor_has

# Names of the attentions in `transformers`' register.
_TRAINING, _INFERENCE = "polyrank", "polyrank_bf16"
# Of mallopt: M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD (without which threads unmap heaps, of 64 MiB each).
_KEEP = {-4: 0, -1: 2**31 - 1, -2: 1 << 26}
# Weights of attention made again at once, in bf16: what two cores' caches hold.
_WEIGHTS_AT_ONCE = 1 << 21
# A row's sum of a million powers stays below 2^127, the largest that bf16 holds; and a logit of 64 to 128 is
# rounded by up to 0.25, which is a fifth of its power.
_LARGEST_EXPONENT = 100.0
# Logits computed at once by a thread: 1 MB, which stays in its cache.
_LOGITS_AT_ONCE = 1 << 19


def accelerate(hf: Any) -> bool:
    """Changes how a `transformers` encoder trains on a CPU; its batches have padding at the right only.

    Returns whether it takes packed rows. A second call changes nothing.
    """
    for part in list(hf.modules()):
        for name, child in part.named_children():
            if type(child) is nn.Dropout:
                setattr(part, name, Dropout(child.p))
    if hf.config._attn_implementation == "sdpa":
        hf.set_attn_implementation(_TRAINING)
    return hf.config._attn_implementation == _TRAINING and packing.fits(hf)


def prepare_inference(encoder: nn.Module) -> bool:
    """Changes an encoder in place for inference on a CPU; it can do nothing else then.

    Linear layers in bf16 have their weights laid out for the matrix units, and `transformers` encoders
    another attention (`attend_in_inference`). Outputs are those of the plain model within rounding. Returns
    whether it takes packed rows.
    """
    is_bf16 = next(encoder.parameters()).dtype == torch.bfloat16
    if is_bf16 and processor_has("avx512"):  # oneDNN has no products of bf16 without
        for part in list(encoder.modules()):
            _pack_layers(part)
    models = [part for part in encoder.modules() if isinstance(part, PreTrainedModel)]
    for model in models:
        if model.config._attn_implementation == "sdpa":
            model.set_attn_implementation(_INFERENCE)
    return any(m.config._attn_implementation == _INFERENCE and packing.fits(m) for m in models)


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
    """Dropout whose share is a multiple of 1/65,536.

    A Bernoulli draw costs 10 ns; here one of the generator's 64-bit numbers makes four of them.
    """

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


def attend_in_training(
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
    """[B, heads, T, d] and a mask [B, 1, 1 or T, T], false where nothing is seen → [B, T, heads, d].

    The fused attention knows no dropout on CPUs, and in bf16 its way back takes half of a step; plain
    products of matrices run on the matrix units (64 texts of 160 tokens, 12 heads of 32: 52 ms, not 175; in
    float32 the fused one stays: 44 ms, not 68).
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        # Without dropout, and not in bf16, the fused attention is as fast as it gets.
        # torch's compiler takes none of our functions with a way back of their own.
        uses_own_kernel = module.training and (dropout or q.dtype == torch.bfloat16)
        if uses_own_kernel and not torch.compiler.is_compiling():
            return _attend_by_products(q, k, v, mask, scaling, dropout)
        attended: Tensor = sdpa_attention_forward(
            module, q, k, v, mask, scaling=scaling, dropout=dropout, **options
        )[0]
        return attended

    if packing is None:
        return attend(query, key, value, attention_mask), None
    return packing.attend(attend, query, key, value), None


def _attend_by_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
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
        out, lse = torch_operators.attention(q, k, v, mask, scale)
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


class PackedLinear(nn.Module):
    """activation(x Wᵀ + b) for inference in bf16. With weights that are laid out once, and GELU in the
    product, all-MiniLM takes a fifth less time."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation) -> None:
        super().__init__()
        self._weight = torch_operators.lay_out(weight.detach())
        self._bias = None if bias is None else bias.detach()
        self._activation = activation

    def __reduce__(self) -> tuple[Any, ...]:
        """A laid-out tensor cannot be written, so a copy lays out its own. As an array the plain weight goes
        by value; a tensor would go to a process as an open file, which ends with this call."""
        weight = torch_operators.plain(self._weight).view(torch.int16).numpy()
        return _unpickled, (weight, self._bias, self._activation)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch_operators.linear(hidden, self._weight, self._bias, self._activation)


def _unpickled(
    weight: np.ndarray[Any, Any], bias: Tensor | None, activation: Activation
) -> PackedLinear:
    return PackedLinear(torch.from_numpy(weight).view(torch.bfloat16), bias, activation)


def _pack_layers(part: Any) -> None:
    """Packs the layers right below a module."""
    # Behind a layer of BERT's stands its activation.
    fused = isinstance(getattr(part, "intermediate_act_fn", None), GELUActivation)
    for name, child in part.named_children():
        if hasattr(child, "pack"):  # it knows its fast form
            setattr(part, name, child.pack())
        elif type(child) is nn.Linear:
            activation: Activation = "gelu" if fused else "none"
            setattr(part, name, PackedLinear(child.weight, child.bias, activation))
    if fused:
        part.intermediate_act_fn = nn.Identity()


def attend_in_inference(
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
    """[B, heads, T, d] and a mask [B, 1, 1 or T, T], false where nothing is seen → [B, T, heads, d]. In bf16:

    softmax(s) V = (2^t V) / (2^t 1), t = s · log₂ e, is unchanged by what is subtracted from a row of s:

    - The keys' mean is subtracted from all keys (Zhang et al., SageAttention, 2024, section 4.2). The logits
      get smaller, so that their rounding to bf16 costs less.
    - The row's maximum is not, as torch's fused attention does: 2^t overflows from 2^128 on only, and the
      lengths of queries and keys bound t. Heads with longer ones are left to the fused attention, which keeps
      logits in float32 (one of all-MiniLM's 72 heads).

    So between two products there is one pass over the logits. (8 texts of 256 tokens, 12 heads of 32, one
    core with AVX512_BF16: 5.4 ms, not 11.2; 128 texts of 16 tokens: 2.1 ms, not 3.3. AMX was not at hand.)
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        def attend_fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            output: Tensor = sdpa_attention_forward(
                module, query, key, value, mask, scaling=scaling, dropout=dropout, **options
            )[0]
            return output

        visible_BT = _visible_keys(mask, q)
        is_plain = q.dtype == torch.bfloat16 and q.shape == k.shape and not dropout
        is_biased = options.get("position_bias") is not None
        is_causal = options.get("is_causal") or getattr(module, "is_causal", False)
        if visible_BT is None or not is_plain or is_biased or is_causal:
            return attend_fused(q, k, v)
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        return _attend_in_bf16(q, k, v, visible_BT, scale, attend_fused)

    if packing is None:
        return attend(query, key, value, attention_mask), None
    return packing.attend(attend, query, key, value), None


def _attend_in_bf16(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible_BT: Tensor,
    scale: float,
    attend_fused: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """`attend_fused` takes the heads whose powers might be too large."""
    scaled = (query * (scale * math.log2(math.e))).contiguous()
    centred = (key - key.mean(dim=2, keepdim=True)).contiguous()
    longest_q, longest_k = (
        torch.linalg.vector_norm(rows, dim=-1).amax(dim=(0, 2)) for rows in (scaled, centred)
    )
    is_small_H = longest_q * longest_k < _LARGEST_EXPONENT  # false where it is NaN
    if is_small_H.all():
        return _attend_by_powers(scaled, centred, value, visible_BT)
    output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    large, small = (mask.nonzero().flatten() for mask in (~is_small_H, is_small_H))
    output[:, :, large] = attend_fused(query[:, large], key[:, large], value[:, large])
    if len(small):
        output[:, :, small] = _attend_by_powers(
            scaled[:, small], centred[:, small], value[:, small], visible_BT
        )
    return output


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


def _attend_by_powers(query: Tensor, key: Tensor, value: Tensor, visible_BT: Tensor) -> Tensor:
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


AttentionInterface.register(_TRAINING, attend_in_training)
AttentionMaskInterface.register(_TRAINING, sdpa_mask)
AttentionInterface.register(_INFERENCE, attend_in_inference)
AttentionMaskInterface.register(_INFERENCE, _padding_mask)
