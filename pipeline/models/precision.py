"""The precision in which a model computes: bf16, float32, or for inference on a CPU 8 bits.

POLYRANK_PROCESSOR bounds what a CPU is taken for (`pipeline.processor`): with `avx2` the precision `auto` is
float32 on every CPU.

Nothing here loads torch before a device is asked about, so that settings can name a precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pipeline.config import require
from pipeline.processor import processor_has

if TYPE_CHECKING:
    import torch

Precision = Literal["auto", "bf16", "fp32", "int8"]
"""auto: bf16 on hardware that multiplies it, else float32. int8: linear layers of 8 bits, for inference on a
CPU; the fastest on one that has AVX2 or more and no bf16 (`pipeline.models.int8`)."""
Resolved = Literal["bf16", "fp32", "int8"]
Trained = Literal["bf16", "fp32"]
"""The precision of a training."""
NUMERICS = 2
"""See `numerics_of`."""


def resolve_precision(name: Precision, device: torch.device) -> Resolved:
    """The precision that `name` stands for on a device. "bf16" is obeyed on any hardware.

    Raises BadInput for int8 on a GPU.
    """
    require(name != "int8" or device.type == "cpu", "precision", name, "auto, bf16, fp32 on a GPU")
    if name == "auto":
        return "bf16" if use_bf16(device) else "fp32"
    return name


def numerics_of(precision: Precision) -> int:
    """Counts up when the code computes other vectors from the same weights, texts and precision, if only in
    their rounding: pools are then embedded anew, so that none holds vectors of both kinds."""
    return NUMERICS + (precision == "int8")  # whose weights have levels up to 63 now


def use_bf16(device: torch.device) -> bool:
    """Whether the hardware multiplies in bf16. Of a CPU `pipeline.processor` says so."""
    import torch

    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and processor_has("avx512_bf16")
