"""The Transformer underneath: any encoder that `transformers.AutoModel` loads, or a new BERT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, BertConfig, BertModel

from pipeline.config import BadInput
from pipeline.models.tokens import Tokens


class Encoder(nn.Module):
    """tokens → hidden_BTD. `hf` is the plain `transformers` model, saved by `save_pretrained`."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf = hf
        if getattr(hf, "pooler", None) is not None:
            hf.pooler = None  # never used here; DDP would wait for its gradients
        self.segments = getattr(hf.config, "type_vocab_size", 0) > 1

    @classmethod
    def new(
        cls, vocabulary: int, layers: int, width: int, heads: int, positions: int, dropout: float
    ) -> Encoder:
        """A BERT with random weights; the feed-forward layer is 4 × the width."""
        config = BertConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=positions,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        return cls(BertModel(config, add_pooling_layer=False))

    @classmethod
    def load(cls, folder: Path) -> Encoder:
        """Loads a local `transformers` directory (safetensors only).

        Raises BadInput where there is no such model.
        """
        if not (folder / "config.json").exists():
            raise BadInput(f"{folder}: not a model directory (config.json is missing)")
        if not list(folder.glob("*.safetensors")):
            raise BadInput(f"{folder}: the model has no weights (*.safetensors is missing)")
        hf = AutoModel.from_pretrained(
            str(folder),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
        )
        return cls(hf)

    def save(self, folder: Path) -> None:
        self.hf.save_pretrained(str(folder), safe_serialization=True)

    @property
    def width(self) -> int:
        return int(self.hf.config.hidden_size)

    @property
    def positions(self) -> int:
        return int(self.hf.config.max_position_embeddings)

    def forward(self, tokens: Tokens) -> Tensor:
        """[B, T, D]; what stands at pads is undefined, so every use of it is masked."""
        inputs = {"input_ids": tokens.ids_BT, "attention_mask": tokens.mask_BT.long()}
        if tokens.segments_BT is not None and self.segments:
            inputs["token_type_ids"] = tokens.segments_BT
        hidden: Tensor = self.hf(**inputs).last_hidden_state
        return hidden


def use_bf16(device: torch.device) -> bool:
    """Whether the hardware has matrix units for bf16.

    A CPU without AMX emulates bf16 products at a quarter of float32's speed.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and bool(torch.cpu.get_capabilities().get("amx_bf16", False))
