"""LoRA (Hu et al., ICLR 2022) by the package peft: an encoder is trained by few weights beside its own.

The weights W [out, in] of each linear layer stay as they are. A product that is added to them is trained:
W + alpha / rank · B A, with A [rank, in] and B [out, rank].
"""

from __future__ import annotations

from importlib.util import find_spec

from torch import nn

from pipeline.config import BadInput
from pipeline.models.encoder import Encoder


def add_adapters(encoder: Encoder, rank: int, alpha: float) -> list[nn.Parameter]:
    """Freezes the encoder's weights, and gives each of its linear layers an adapter, which changes nothing at
    first: A is random, B is 0. Returns the adapters' weights.

    Raises BadInput where the package peft is not installed.
    """
    if not find_spec("peft"):
        message = f"finetune.lora_rank: {rank} needs the package peft; pip install -e '.[lora]'"
        raise BadInput(message)
    from peft import LoraConfig, inject_adapter_in_model

    # peft's own choice, queries and values, is made for some architectures only, not for ModernBERT.
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear")
    inject_adapter_in_model(config, encoder.hf)
    return [value for value in encoder.hf.parameters() if value.requires_grad]


def merge_adapters(encoder: Encoder) -> None:
    """Adds the adapters to the encoder's weights, and leaves the plain `transformers` model."""
    from peft.tuners.lora import LoraLayer

    for name, part in list(encoder.hf.named_modules()):
        if isinstance(part, LoraLayer):
            part.merge()
            encoder.hf.set_submodule(name, part.get_base_layer())
    encoder.hf.requires_grad_(True)
