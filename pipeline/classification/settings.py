"""Settings of the encoder's vectors and of the head above them. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.config import require
from pipeline.models.precision import Precision

KIND = "classifier"
"""The kind of the artifact."""
REPORT, PLOT = "report.json", "confusion.png"
"""The files of the artifact that show its quality."""

Side = Literal["context", "candidate"]


@dataclass(frozen=True, kw_only=True)
class EncodeConfig:
    """How a text becomes one vector."""

    side: Side = "context"
    """The ranker's tower that reads the text. A context with several vectors counts as their mean."""
    reduction: Literal["mean", "first"] = "mean"
    """How token outputs become one vector, for a plain transformers directory. Other models have their
    own reduction."""
    max_tokens: int = 0
    """For models that are not rankers: texts keep this many tokens; 0: as many as the model takes."""
    precision: Precision = "auto"
    """The precision that the encoder computes in; auto: bf16 where the hardware multiplies it."""

    def __post_init__(self) -> None:
        require(self.max_tokens == 0 or self.max_tokens >= 3, "encode.max_tokens", self.max_tokens,
                "0, or >= 3")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The classifier of Casanueva et al. 2020 (arXiv 2003.04807) and how it is trained.

    vector / its length → dropout → dense, ReLU → dense, softmax
    """

    hidden: int = 512
    """Width of the hidden layer."""
    dropout: float = 0.75
    """Share of the vector's numbers that a training step leaves out."""
    learning_rate: float = 0.7
    """Learning rate of plain SGD in the first epoch. It falls linearly to 0, by the same amount after
    every epoch."""
    batch: int = 32
    """Texts in a step, drawn with replacement."""
    epochs: int = 500
    """Number of epochs. An epoch has as many steps as batches would hold all texts once."""
    balanced: bool = False
    """Draw every intent equally often; false: as often as it occurs in the training texts."""

    def __post_init__(self) -> None:
        for name in ("hidden", "batch", "epochs"):
            require(getattr(self, name) >= 1, f"head.{name}", getattr(self, name), ">= 1")
        require(0 <= self.dropout < 1, "head.dropout", self.dropout, "0 to below 1")
        require(self.learning_rate > 0, "head.learning_rate", self.learning_rate, "above 0")
