"""Linear layers whose weights and inputs are 8-bit integers, for inference.

    y = (q(x) · q(W)ᵀ) · s(x) s(W) + b,    q(v) = round(v / s(v)),    s(v) = max |v| / 127

with an s(W) for each output and an s(x) for each token, so that a text has the same encoding alone and in a
batch. CPUs with VNNI or AMX multiply such integers fast. Texts/s of the paper's size, AMD EPYC with
AVX512_VNNI and AVX512_BF16, beside other work, these layers with all else in bf16:

    cores    float32    these layers    bf16
    1        234        751 to 856      865
    2        363        687 to 705      1,409

So they help a CPU that lacks bf16.

N tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.torch_operators import int8_product

LEVELS = 127
_LEAST = 1e-12  # of a scale, for rows of zeros


def to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(levels int8, scale of each row [..., 1] float32)"""
    rows = rows.float()
    scale = rows.abs().amax(dim=-1, keepdim=True).clamp(min=_LEAST) / LEVELS
    return (rows / scale).round_().to(torch.int8), scale


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

    @classmethod
    def of(cls, layer: nn.Linear) -> Int8Linear:
        bias = None if layer.bias is None else layer.bias.detach().float()
        return cls(*to_int8(layer.weight.detach()), bias)

    def forward(self, inputs_NI: Tensor) -> Tensor:
        scale_O = self.scale_O1[:, 0].to(inputs_NI.device)
        if inputs_NI.device.type == "cpu":
            levels_NI, scale_N1 = to_int8(inputs_NI)
            # In place: new memory for each step would take longer than the product itself.
            outputs_NO = int8_product(levels_NI, self.levels_OI).mul_(scale_N1).mul_(scale_O)
        else:  # GPUs are fast enough with the weights alone in 8 bits
            outputs_NO = F.linear(inputs_NI.float(), self.levels_OI.float()).mul_(scale_O)
        if self.bias is not None:
            outputs_NO.add_(self.bias.float())
        return outputs_NO.to(inputs_NI.dtype)


def linear_layers(blocks: nn.Module) -> dict[str, nn.Linear | Int8Linear]:
    """The linear layers of ConveRT's blocks by name."""
    kinds = (nn.Linear, Int8Linear)
    return {name: part for name, part in blocks.named_modules() if isinstance(part, kinds)}


def replace_layer(blocks: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(blocks.get_submodule(parent), attribute, layer)


def quantise_blocks(blocks: nn.Module) -> None:
    """Gives the blocks 8-bit layers in place of those with float weights."""
    for name, layer in linear_layers(blocks).items():
        if isinstance(layer, nn.Linear):
            replace_layer(blocks, name, Int8Linear.of(layer))
