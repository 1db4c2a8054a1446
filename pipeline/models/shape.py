"""The shape of an encoder. Without torch, so that a job can read its settings at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.config import require

TrainLayers = Literal["all", "top", "top4", "all_but_embeddings"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A new encoder. The paper's is BERT-base: 12 layers, width 768, 12 heads."""

    architecture: Literal["bert", "modernbert"] = "bert"
    """bert: as in the paper. modernbert: rotary positions and gated layers; it learns from far fewer
    examples (sample corpora, 2 layers of 64, 2,000 steps: MLM loss 0.9 against 4.4)."""
    layers: int = 12
    """Transformer blocks."""
    width: int = 768
    """Size of a token's vector."""
    heads: int = 12
    """Attention heads in a block."""
    positions: int = 512
    """Tokens in a sequence at most."""
    dropout: float = 0.1
    """Dropout of embeddings, residuals and attention."""
    init_std: float = 0.02
    """New weights are normal with this standard deviation; small encoders need 0.05."""
    intermediate: int = 0
    """Width of a block's feed-forward layer; 0: 4 × the width, or 2 × for modernbert, which is gated.
    ModernBERT-base has 1,152 at a width of 768."""
    global_attention_every: int = 1
    """modernbert: every n-th block sees the whole text, the others 64 tokens to either side; 1: all see
    it, because windows save nothing on dialogues. ModernBERT has 3."""

    def __post_init__(self) -> None:
        require(self.layers >= 1, "shape.layers", self.layers, ">= 1")
        require(self.heads >= 1 and self.width % self.heads == 0, "shape.width", self.width,
                f"a multiple of shape.heads {self.heads}")  # fmt: skip
        require(0 <= self.dropout < 1, "shape.dropout", self.dropout, "0 to below 1")
        require(self.init_std > 0, "shape.init_std", self.init_std, "above 0")
        require(self.intermediate >= 0, "shape.intermediate", self.intermediate, ">= 0")
        require(self.global_attention_every >= 1, "shape.global_attention_every",
                self.global_attention_every, ">= 1")  # fmt: skip
        require(self.architecture == "modernbert" or self.global_attention_every == 1,
                "shape.global_attention_every", self.global_attention_every,
                "1, as shape.architecture is 'bert'")  # fmt: skip
