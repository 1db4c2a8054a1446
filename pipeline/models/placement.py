"""Chooses how the encoders of a model compute on a device in training."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import nn

from pipeline.models import cpu
from pipeline.models.precision import Precision, resolve_precision
from pipeline.models.transformer import Encoder


def prepare_for_training(
    module: nn.Module, device: torch.device, precision: Precision = "auto"
) -> None:
    """Chooses the implementation of every encoder in `module`, before it is wrapped or compiled.

    On a CPU: `cpu.accelerate`. On a GPU: FlashAttention-2 where the package `flash_attn` is installed, the
    model knows it and the computation is in bf16, because its kernels take no float32; else the library's
    default, SDPA. A model with FlashAttention-2 is validated under bf16 autocast, too.
    """
    bf16 = resolve_precision(precision, device) == "bf16"
    for part in module.modules():
        if isinstance(part, Encoder):
            if device.type == "cpu":
                cpu.accelerate(part.hf)
            elif (
                device.type == "cuda"
                and bf16
                and find_spec("flash_attn")
                and part.hf._supports_flash_attn
            ):
                part.hf.set_attn_implementation("flash_attention_2")
