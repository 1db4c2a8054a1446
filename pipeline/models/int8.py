"""Linear layers of 8 bits, for inference on CPUs that lack bf16.

Their weights and inputs are 8-bit integers:

    y = (q(x) · q(W)ᵀ) · s(x) s(W) + b,    q(v) = round(v / s(v)),    s(x) = max |x| / 127

with an s(x) for each token, so that a text has the same encoding alone and in a batch, and for each output
s(W) = max |W| / 63: with levels up to 63, the products are exact on processors with AVX2 alone, too
(`torch_operators.lay_out_int8`). The blocks that a ConveRT model keeps in 8 bits have levels up to 127; in
float32 their products are exact everywhere. Milliseconds of all-MiniLM, two cores of an AMD EPYC taken for
one without bf16 (POLYRANK_PROCESSOR=avx512_vnni), beside other work:

    texts of tokens    float32    these layers
    8 of 256           301        111
    64 of 16           125        50
    1 of 128           21         10
    1 of 16            6.7        4.7

With AVX2 alone (Zen 3) they are 1.33 times as fast as float32 in batches of 256 tokens a text, 1.39 in those
of 19, 1.06 times for one text of 153 and 0.91 for one of 19.

bf16, where the CPU has it, is as fast or faster, and rounds less.

N tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.torch_operators import int8_linear, lay_out_int8

_INT8 = 127  # the highest level
_LEAST = 1e-12  # of a scale, for rows of zeros
_AT_ONCE = 1 << 17  # numbers that are rounded together, which stay in a core's cache


def to_int8(rows_NI: Tensor, most: int = _INT8) -> tuple[Tensor, Tensor]:
    """(levels int8, scale of each row [N, 1] float32), the largest number of a row at level ±`most`"""
    levels_NI = torch.empty_like(rows_NI, dtype=torch.int8)
    scale_N1 = torch.empty(len(rows_NI), 1, dtype=torch.float32, device=rows_NI.device)
    step = max(1, _AT_ONCE // max(1, rows_NI.shape[1]))
    for start in range(0, len(rows_NI), step):
        part = slice(start, start + step)
        rows = rows_NI[part].float()
        scale_N1[part] = rows.abs().amax(dim=1, keepdim=True).clamp_(min=_LEAST) / most
        levels_NI[part] = (rows / scale_N1[part]).round_()
    return levels_NI, scale_N1


class Int8Linear(nn.Module):
    """A linear layer for inference; its inputs and outputs are of any float type."""

    levels_OI: Tensor
    bias: Tensor | None

    def __init__(self, levels_OI: Tensor, scale_O1: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("levels_OI", levels_OI)
        self.register_buffer("bias", bias)
        # No buffer, which `to` would round to bf16.
        self.scale_O1 = scale_O1.float()
        self._laid_out = lay_out_int8(levels_OI)

    def __reduce__(self) -> tuple[Any, ...]:
        """A laid-out tensor cannot be written, so a copy lays out its own."""
        return Int8Linear, (self.levels_OI, self.scale_O1, self.bias)

    @classmethod
    def of(cls, layer: nn.Linear, most: int = _INT8) -> Int8Linear:
        """`most`: the highest level of a weight."""
        bias = None if layer.bias is None else layer.bias.detach().float()
        return cls(*to_int8(layer.weight.detach(), most), bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """[…, I] → […, O]"""
        inputs_NI = inputs.reshape(-1, inputs.shape[-1])  # torch takes no other integers
        scale_O = self.scale_O1[:, 0].to(inputs_NI.device)
        if inputs_NI.device.type == "cpu":
            levels_NI, scale_N1 = to_int8(inputs_NI)
            # In place: new memory for each step would take longer than the product itself.
            outputs_NO = int8_linear(levels_NI, self.levels_OI, scale_O, self._laid_out)
            outputs_NO.mul_(scale_N1)
        else:  # GPUs are fast enough with the weights alone in 8 bits
            outputs_NO = F.linear(inputs_NI.float(), self.levels_OI.float()).mul_(scale_O)
        if self.bias is not None:
            outputs_NO.add_(self.bias.float())
        return outputs_NO.to(inputs.dtype).view(*inputs.shape[:-1], len(self.levels_OI))


def linear_layers(module: nn.Module) -> dict[str, nn.Linear | Int8Linear]:
    """The linear layers of an encoder by name."""
    kinds = (nn.Linear, Int8Linear)
    return {name: part for name, part in module.named_modules() if isinstance(part, kinds)}


def quantise_layers(module: nn.Module, most: int = _INT8) -> None:
    """Gives an encoder 8-bit layers in place of those with float weights, whose highest level is `most`."""
    for name, layer in linear_layers(module).items():
        if isinstance(layer, nn.Linear):
            module.set_submodule(name, Int8Linear.of(layer, most))
