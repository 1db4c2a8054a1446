"""Private operators of torch, each behind a function that does without where a release lacks it.

Public operators compute the same within rounding, but slower. No other module names a private operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.processor import processor_has

Activation = Literal["none", "gelu", "swish"]
"""swish: x · σ(x)."""
_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "none": lambda values: values,
    "gelu": F.gelu,
    "swish": F.silu,
}
_lay_out: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_attention: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_int8_product: Any = getattr(torch, "_int_mm", None)
_lay_out_int8: Any = getattr(torch.ops.onednn, "qlinear_prepack", None)
_int8_linear: Any = getattr(torch.ops.onednn, "qlinear_pointwise", None)
MOST_LEVEL = 63
"""The highest level of weights that `int8_linear` multiplies fast on any processor."""


def lay_out(weight: Tensor) -> Tensor:
    """A weight in bf16 as `linear` takes it: laid out for the matrix units once, not for each product."""
    laid_out: Tensor = _lay_out(weight) if _lay_out and _linear else weight
    return laid_out


def plain(laid_out: Tensor) -> Tensor:
    """The weight that `lay_out` was given."""
    return laid_out.to_dense() if laid_out.is_mkldnn else laid_out


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """activation(x Wᵀ + b) in one pass, as torch's compiler has it where weights are constants."""
    if _lay_out and _linear:
        product: Tensor = _linear(inputs, weight, bias, activation, [], "none")
        return product
    return _ACTIVATIONS[activation](F.linear(inputs, weight, bias))


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(attended [B, H, T, D], log-sums of the logits' powers [B, H, T] float32) of q, k, v [B, H, T, D]. The
    mask, [B, 1 or H, 1 or T, T], is added to the logits."""
    if _attention:
        attended, log_sums = _attention(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
        return attended, log_sums
    logits = scale * (q.float() @ k.float().mT) + (0.0 if mask is None else mask.float())
    return logits.softmax(dim=-1).to(v.dtype) @ v, logits.logsumexp(dim=-1)


def lay_out_int8(levels_OI: Tensor) -> Tensor | None:
    """Weights as `int8_linear` takes them, laid out once. None: it takes them as they are.

    Without VNNI oneDNN adds two products of a byte of inputs, 0 to 255, and one of weights in 16 bits. So it
    is used for weights of levels up to 63 only.
    """
    has_operators = _lay_out_int8 and _int8_linear
    is_fast = has_operators and processor_has("avx2") and not processor_has("avx512_vnni")
    if not is_fast or levels_OI.device.type != "cpu" or levels_OI.abs().amax() > MOST_LEVEL:
        return None
    laid_out: Tensor = _lay_out_int8(levels_OI, [1, levels_OI.shape[1]])
    return laid_out


def int8_linear(
    levels_NI: Tensor, levels_OI: Tensor, scale_O: Tensor, laid_out: Tensor | None
) -> Tensor:
    """[N, O] float32: the product of int8 with a scale for each output. torch multiplies int8 without VNNI 20
    times slower than float32."""
    if laid_out is not None:
        # From -128 to 127 on to 0 to 255: for signed bytes oneDNN sums up all weights, once a product.
        bytes_NI = levels_NI.bitwise_xor(-128).view(torch.uint8)
        zeros_O = torch.zeros_like(scale_O, dtype=torch.int32)
        weights = (laid_out, scale_O, zeros_O, None)
        product: Tensor = _int8_linear(
            bytes_NI, 1.0, 128, *weights, 1.0, 0, torch.float32, "none", [], ""
        )
        return product
    if _int8_product and processor_has("avx512_vnni"):
        return int8_mm(levels_NI, levels_OI.t()).float().mul_(scale_O)
    return F.linear(levels_NI.float(), levels_OI.float()).mul_(scale_O)


def int8_mm(left_NI: Tensor, right_IO: Tensor, out: Tensor | None = None) -> Tensor:
    """[N, O] int32 of int8; `out` takes it, as in torch.mm."""
    if _int8_product:
        product: Tensor = _int8_product(left_NI, right_IO, out=out)
        return product
    return torch.mm(left_NI.int(), right_IO.int(), out=out)
