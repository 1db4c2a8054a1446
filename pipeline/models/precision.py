"""The precision in which a model computes: bf16 under autocast with float32 weights, or float32.

Nothing here loads torch before a device is asked about, so that settings can name a precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Precision = Literal["auto", "bf16", "fp32"]
"""auto: bf16 on hardware that multiplies it, else float32."""
Resolved = Literal["bf16", "fp32"]
NUMERICS = 2
"""Counts up when the code computes other vectors from the same weights, texts and precision, if only in
their rounding: pools are then embedded anew, so that none holds vectors of both kinds."""


def resolve_precision(name: Precision, device: torch.device) -> Resolved:
    """The precision that `name` stands for on a device. "bf16" is obeyed on any hardware."""
    if name == "auto":
        return "bf16" if use_bf16(device) else "fp32"
    return name


def use_bf16(device: torch.device) -> bool:
    """Whether the hardware multiplies in bf16.

    CPUs with AMX or AVX512_BF16 do (Intel's since Sapphire Rapids, AMD's since Zen 4): a Zen 5 makes 740
    GFLOPS, 170 in float32. Others emulate it at a quarter of float32's speed.
    """
    import torch

    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))
