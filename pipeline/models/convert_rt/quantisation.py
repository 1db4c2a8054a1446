"""8 bits: embedding tables that a model learns to live with while it trains, and linear layers for inference.

In training a table is float32, and what is looked up is rounded to one of 256 levels; gradients pass the
rounding unchanged (reference 5.5). The levels lie evenly over a range that is set again from time to time:
all values of the table, and on either side a tenth of that or 0.01, whichever is more. Saved are the levels'
numbers.

Linear layers have weights and inputs of 8-bit integers:

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

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.torch_operators import int8_product

_STEPS = 255  # between the lowest and the highest level of a table
_MARGIN_SHARE, _MARGIN = 0.1, 0.01
_INT8 = 127  # the highest level of a linear layer
_LEAST = 1e-12  # of a scale, for rows of zeros


def value_range(weights: Tensor) -> tuple[float, float]:
    """(lowest, highest) level for a table: its values, and room for them to move."""
    low, high = weights.min().item(), weights.max().item()
    margin = max(_MARGIN_SHARE * (high - low), _MARGIN)
    return low - margin, high + margin


def quantise(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The numbers of the nearest levels, uint8; values beyond the range take its ends."""
    step = (high - low) / _STEPS
    return ((values - low) / step).round().clamp(0, _STEPS).to(torch.uint8)


def dequantise(levels: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The values of levels, float32."""
    return low + levels.float() * ((high - low) / _STEPS)


class Table(nn.Module):
    """An embedding table: float32 rows to train, or 8-bit ones to look up in.

    Its range is in the state of a checkpoint, since training goes on in it.
    """

    low: Tensor
    high: Tensor
    levels: Tensor | None

    def __init__(self, rows: int, width: int, largest: float) -> None:
        """Starts uniform between -`largest` and `largest`, and not quantised."""
        super().__init__()
        self.rows, self.width = rows, width
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(rows, width).uniform_(-largest, largest)
        )
        self.register_buffer("low", torch.tensor(math.nan))
        self.register_buffer("high", torch.tensor(math.nan))
        self.register_buffer("levels", None)

    def set_range(self) -> None:
        """Sets the levels' range by the weights of now; from then on rows are rounded to levels."""
        assert self.weight is not None
        low, high = value_range(self.weight.detach())
        self.low.fill_(low)
        self.high.fill_(high)

    def freeze(self, levels: Tensor, low: float, high: float) -> None:
        """Takes 8-bit rows in place of the float32 ones: a quarter of the memory, nothing to train."""
        self.weight = None
        self.levels = levels
        self.low.fill_(low)
        self.high.fill_(high)

    def to_levels(self) -> tuple[Tensor, float, float]:
        """(levels uint8, lowest, highest), which `freeze` takes."""
        if self.levels is None:
            assert self.weight is not None
            if self.low.isnan():
                self.set_range()
            levels = quantise(self.weight.detach(), self.low, self.high)
        else:
            levels = self.levels
        return levels, self.low.item(), self.high.item()

    def forward(self, ids: Tensor) -> Tensor:
        """[…] → […, width], float32."""
        if self.levels is not None:
            return dequantise(self.levels[ids], self.low, self.high)
        assert self.weight is not None
        exact = F.embedding(ids, self.weight)
        # Before a range is set the levels are no numbers, and the exact values count.
        levels = quantise(exact.detach().nan_to_num(), *self._range())
        rounded = dequantise(levels, *self._range())
        return exact + torch.where(self.low.isnan(), 0.0, rounded - exact.detach())

    def _range(self) -> tuple[Tensor, Tensor]:
        unset = self.low.isnan()
        return self.low.masked_fill(unset, 0.0), self.high.masked_fill(unset, 1.0)


def to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(levels int8, scale of each row [..., 1] float32)"""
    rows = rows.float()
    scale = rows.abs().amax(dim=-1, keepdim=True).clamp(min=_LEAST) / _INT8
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
