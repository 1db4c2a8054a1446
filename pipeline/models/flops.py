"""Floating point operations of a training step, and how many a device makes in a second.

Model FLOP utilisation (MFU) is their ratio, as in PaLM (Chowdhery et al., 2022, appendix B): what the model
needs, so neither padding nor layers that gradient checkpointing computes again count. Only products of
matrices are counted, 2 operations per multiplication and addition; the way back takes twice the way there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.utils.benchmark import Timer

from pipeline.models.encoder import Encoder
from pipeline.models.precision import Trained

# bf16 with float32 sums, dense (without the 2:4 sparsity that data sheets double it by), in 10¹² a second.
# The first row whose words are all in the device's name counts. Sources: NVIDIA's data sheets of each.
_STATED = (
    (("GB200",), 2_500.0),
    (("B200",), 2_250.0),
    (("GH200",), 989.4),
    (("H200", "NVL"), 835.5),
    (("H200",), 989.4),
    (("H100", "PCIe"), 756.0),
    (("H100", "NVL"), 835.5),
    (("H100",), 989.4),
    (("H20",), 148.0),
    (("A100",), 312.0),  # SXM and PCIe
    (("A30",), 165.0),
    (("A40",), 149.7),
    (("A10G",), 70.0),
    (("A10",), 125.0),
    (("L40S",), 362.0),
    (("L40",), 181.0),
    (("L4",), 121.0),
    (("RTX", "A6000"), 154.8),
    (("RTX", "4090"), 165.2),
    (("RTX", "3090"), 71.0),
)
_MEASURED_SIZE = {"cpu": 2_048, "cuda": 8_192}
_MEASURED_SECONDS = 1.0


@dataclass(frozen=True)
class TrainingFlops:
    """The cost of a step, from the shapes of a model; shared layers (ALBERT's) are counted once."""

    per_token: int
    """Operations of the encoder's linear layers in the forward pass."""
    per_prediction: int
    """Operations of the MLM head for a predicted token in the forward pass; 0: there is no such head."""
    width: int
    """The width of queries, keys and values: all heads together."""
    windows: tuple[int | None, ...]
    """For each layer, how many tokens to either side a token attends to; None: all."""

    @classmethod
    def of(cls, encoder: Encoder, mlm_head: nn.Module | None = None) -> TrainingFlops:
        """Counts for a model on any device, "meta" too. `mlm_head`: `PretrainingModel.mlm`."""
        config = encoder.hf.config
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * int(
            config.num_hidden_layers
        )
        windows = tuple(
            None if kind == "full_attention" else int(config.sliding_window) for kind in kinds
        )
        head = _linear_operations(mlm_head) if mlm_head is not None else 0
        return cls(_linear_operations(encoder.hf), head, encoder.width, windows)

    def step(self, lengths: Iterable[int], predicted: int = 0) -> int:
        """Operations of a step, there and back, over texts of so many tokens without padding."""
        texts = tuple(lengths)
        pair_count = sum(_pairs(length, window) for length in texts for window in self.windows)
        products = self.per_token * sum(texts) + self.per_prediction * predicted
        return 3 * (products + 4 * self.width * pair_count)  # 4: q kᵀ and its product with v


def _linear_operations(module: nn.Module) -> int:
    return sum(2 * part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))


def _pairs(length: int, window: int | None) -> int:
    """Pairs of tokens of a text that are at most `window` apart, in both orders."""
    if window is None or window >= length:
        return length * length
    return length * (2 * window + 1) - window * (window + 1)


class Peak(NamedTuple):
    """Operations a second that a device makes at most, and where the number is from."""

    flops: float
    source: Literal["stated", "measured"]


def peak_flops(device: torch.device, precision: Trained) -> Peak:
    """The peak of one GPU, or of this process's threads.

    Stated for well-known GPUs in bf16. Else measured by products of large matrices, which takes one to
    two seconds; that is below the peak of the hardware.
    """
    if device.type == "cuda" and precision == "bf16":
        stated = _stated_flops(torch.cuda.get_device_name(device))
        if stated:
            return Peak(stated, "stated")
    return Peak(_measure_flops(device, precision), "measured")


def _stated_flops(name: str) -> float | None:
    """None: the device is not known, or is a part of one (MIG)."""
    words = set(re.split(r"[\s-]+", name))
    if "MIG" in words:
        return None
    return next((peak * 1e12 for model, peak in _STATED if words.issuperset(model)), None)


def _measure_flops(device: torch.device, precision: Trained) -> float:
    """The fastest of some products: another process may disturb most of them."""
    size = _MEASURED_SIZE.get(device.type, _MEASURED_SIZE["cpu"])
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    timer = Timer(
        "torch.mm(matrix, matrix, out=product)",
        globals={"matrix": matrix, "product": matrix @ matrix},
        num_threads=torch.get_num_threads(),
    )
    return 2 * size**3 / min(timer.blocked_autorange(min_run_time=_MEASURED_SECONDS).times)
