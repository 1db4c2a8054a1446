"""The settings of fine-tuning; importing them loads no torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from pipeline.config import require
from pipeline.models.shape import TrainLayers
from pipeline.options.unread import read_when

NegativesFrom = Literal["batch", "given", "both", "mined"]
Taught = Literal["candidates", "batch"]
"""What a teacher scores for each context: its own candidates, or the responses of the global batch."""

TeachingLoss = Literal["none", "kl", "margin_mse", "cosine"]

_DISTILS = read_when({"finetune.distill.loss": get_args(TeachingLoss)[1:]})
_DRAWS_NEGATIVES = read_when(
    {"finetune.negatives_from": ("given", "both", "mined"), "ranker.architecture": ("cross",)}
)


@dataclass(frozen=True, kw_only=True)
class Mining:
    """How hard negatives are found, for `negatives_from: mined`."""

    every_epochs: float = 1.0
    """Found again so often; before the first time wrong candidates are any."""
    responses: int = 20_000
    """Train rows whose responses are searched, others each time; equal responses are searched once."""
    top_k: int = 30
    """Nearest that an example keeps; `finetune.negatives` of them are drawn for a batch."""
    margin: float = 0.0
    """Wrong ones score at least so much lower than the right one."""
    max_share: float = 0.95
    """And at most this share of the right one's score, where that is above 0."""

    def __post_init__(self) -> None:
        name = "finetune.mine"
        require(self.every_epochs > 0, f"{name}.every_epochs", self.every_epochs, "above 0")
        require(self.responses >= 2, f"{name}.responses", self.responses, ">= 2")
        require(self.top_k >= 1, f"{name}.top_k", self.top_k, ">= 1")
        require(self.margin >= 0, f"{name}.margin", self.margin, ">= 0")
        require(0 < self.max_share <= 1, f"{name}.max_share", self.max_share, "above 0, up to 1")


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """What is learnt from a teacher's scores (of jobs.score_candidates), beside the right answers."""

    loss: TeachingLoss = "none"
    """kl: the teacher's distribution over what `over` says. margin_mse: its margins between the right
    one and each other. cosine, over batch: that each text's vector points where the teacher's does; both
    have as many numbers (with matryoshka: all of them), and a context has one vector."""
    over: Taught = field(default="candidates", metadata=_DISTILS)
    """candidates: those that the corpus gives a context. batch, for bi, poly and convert: the responses
    of the batch over all workers, by the teacher's vectors (--teaching.over batch)."""
    weight: float = field(default=1.0, metadata=_DISTILS)
    """Factor on that loss; that of the right answers has 1."""
    temperature: float = field(default=1.0, metadata=read_when({"finetune.distill.loss": ("kl",)}))
    """kl: both scores are divided by it."""
    teacher_scale: float = field(
        default=1.0, metadata=read_when({"finetune.distill.loss": ("kl", "margin_mse")})
    )
    """kl, margin_mse: factor on the teacher's scores. 20 for one of sentence-transformers, whose scores are
    cosines: its own losses take 20 times as much."""

    def __post_init__(self) -> None:
        for name in ("weight", "temperature", "teacher_scale"):
            value = getattr(self, name)
            require(value > 0, f"finetune.distill.{name}", value, "above 0")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Which examples, against which negatives, for how long."""

    batch_examples: int = 64
    """Examples in a batch over all workers."""
    chunk_examples: int = 0
    """Examples of a worker's batch in memory at once (gradient caching): the same gradients, a third
    more time; 0: all of them."""
    negatives_from: NegativesFrom = "batch"
    """bi and poly: a context's wrong candidates are all other responses of the batch, or `negatives`
    of those that the corpus gives it, or both; mined: the batch's, and `negatives` of those in all of
    train that the model scores highest."""
    negatives: int = field(default=15, metadata=_DRAWS_NEGATIVES)
    """cross, given, both and mined: wrong candidates per example, of those given or mined; where they
    are too few, other examples' responses."""
    label_smoothing: float = 0.0
    """bi, poly and convert: share of the target that is spread evenly over all candidates."""
    share_negatives: bool = False
    """given, both and mined: wrong candidates count for every context of the global batch, not only for
    their own."""
    mine: Mining = field(
        default_factory=Mining, metadata=read_when({"finetune.negatives_from": ("mined",)})
    )
    """mined: how they are found."""
    distill: Distillation = field(default_factory=Distillation)
    """Learning from another ranker's scores; needs candidates that are given."""
    folds: int = 1
    """The files of train go to so many folds in turn; above 1: one of them is not read, and the ranker
    can score it as a teacher that has not seen it (jobs.score_candidates --teaching.held-out)."""
    held_out: int = 0
    """Which fold, from 0."""
    epochs: float = 3.0
    """Passes over the training examples; 0: none, for a ranker as its encoder makes it."""
    max_steps: int = 0
    """Stop after so many steps, whatever the epochs; 0: no limit."""
    train_layers: TrainLayers = "all"
    """Of the encoders; the head always trains. top, top4: the last one or four layers. The paper
    freezes the embeddings of Google's BERT (R@1/20 83.3 against 83.0) and nothing of its own."""
    keep_layers: int = 0
    """Of the encoder's layers, the first so many; 0: all. A smaller, faster model, that a whole one may
    teach."""
    dropout: float | None = None
    """Of the encoder while it is fine-tuned; null: as it comes. On CPUs dropout costs a third."""
    valid_examples: int = 1000
    """Examples of the valid split that a validation ranks, at most; drawn at random."""
    valid_candidates: int = 20
    """Where an example of the valid split has no candidates: responses of the split that its context is
    ranked against, its own among them."""

    def __post_init__(self) -> None:
        require(self.batch_examples >= 2, "finetune.batch_examples", self.batch_examples, ">= 2")
        require(self.negatives >= 1, "finetune.negatives", self.negatives, ">= 1")
        require(not self.share_negatives or self.negatives_from != "batch",
                "finetune.share_negatives", True, "false with finetune.negatives_from 'batch', which "
                "shares all that there are")  # fmt: skip
        require(0 <= self.label_smoothing < 1, "finetune.label_smoothing", self.label_smoothing,
                "0 to below 1")  # fmt: skip
        require(self.folds >= 1, "finetune.folds", self.folds, ">= 1")
        require(0 <= self.held_out < self.folds, "finetune.held_out", self.held_out,
                f"0 to {self.folds - 1}, with finetune.folds {self.folds}")  # fmt: skip
        require(self.epochs >= 0, "finetune.epochs", self.epochs, ">= 0")
        for name in ("max_steps", "keep_layers"):
            require(getattr(self, name) >= 0, f"finetune.{name}", getattr(self, name), ">= 0")
        require(self.dropout is None or 0 <= self.dropout < 1, "finetune.dropout", self.dropout,
                "0 to below 1, or null")  # fmt: skip
        require(self.chunk_examples >= 0, "finetune.chunk_examples", self.chunk_examples, ">= 0")
        for name in ("valid_examples", "valid_candidates"):
            require(getattr(self, name) >= 2, f"finetune.{name}", getattr(self, name), ">= 2")
