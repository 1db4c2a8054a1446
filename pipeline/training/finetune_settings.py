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
class NegativeLimits:
    """The highest score of a hard negative."""

    margin: float = 0.0
    """A negative scores at least this much lower than the right response."""
    max_share: float = 0.95
    """A negative scores at most this share of the right response's score, if that score is above 0."""

    def check_limits(self, prefix: str) -> None:
        """Raises BadInput for limits out of range."""
        require(self.margin >= 0, f"{prefix}.margin", self.margin, ">= 0")
        require(0 < self.max_share <= 1, f"{prefix}.max_share", self.max_share, "above 0, up to 1")


@dataclass(frozen=True, kw_only=True)
class Mining(NegativeLimits):
    """How hard negatives are mined, for `negatives_from: mined`."""

    every_epochs: float = 1.0
    """Epochs between two rounds of mining. Before the first round negatives are any other responses."""
    responses: int = 20_000
    """Train rows whose responses a round searches. Each round draws other rows; equal responses are
    searched once."""
    top_k: int = 30
    """Number of nearest responses that an example keeps; `finetune.negatives` of them are drawn for a
    batch."""

    def __post_init__(self) -> None:
        name = "finetune.mine"
        require(self.every_epochs > 0, f"{name}.every_epochs", self.every_epochs, "above 0")
        require(self.responses >= 2, f"{name}.responses", self.responses, ">= 2")
        require(self.top_k >= 1, f"{name}.top_k", self.top_k, ">= 1")
        self.check_limits(name)


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """What is learnt from a teacher's scores (of jobs.score_candidates), beside the right answers."""

    loss: TeachingLoss = "none"
    """kl: learn the teacher's distribution over the candidates that `over` chooses. margin_mse: learn its
    margins between the right candidate and each other one. cosine (over batch): learn the direction of
    the teacher's vector of each text; both models need the same width (with matryoshka: the full one) and
    one vector per context."""
    over: Taught = field(default="candidates", metadata=_DISTILS)
    """candidates: the candidates that the corpus gives a context. batch, for bi, poly and convert: the
    responses of the batch over all workers, scored by the teacher's vectors (--teaching.over batch)."""
    weight: float = field(default=1.0, metadata=_DISTILS)
    """Factor on this loss; the loss of the right answers has the factor 1."""
    temperature: float = field(default=1.0, metadata=read_when({"finetune.distill.loss": ("kl",)}))
    """kl: the scores of teacher and student are divided by this number."""
    teacher_scale: float = field(
        default=1.0, metadata=read_when({"finetune.distill.loss": ("kl", "margin_mse")})
    )
    """kl, margin_mse: factor on the teacher's scores. Use 20 for a model of sentence-transformers: its
    scores are cosines, and its own losses multiply them by 20."""

    def __post_init__(self) -> None:
        for name in ("weight", "temperature", "teacher_scale"):
            value = getattr(self, name)
            require(value > 0, f"finetune.distill.{name}", value, "above 0")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Which examples, against which negatives, for how long."""

    batch_examples: int = 64
    """Examples in a batch, over all workers."""
    chunk_examples: int = 0
    """Examples of a worker's batch that are in memory at once (gradient caching). The gradients are the
    same, and a step takes a third longer. 0: all examples."""
    negatives_from: NegativesFrom = "batch"
    """bi, poly and convert: where a context's wrong candidates come from. batch: all other responses of
    the batch. given: `negatives` of the candidates that the corpus gives the context. both: these two
    together. mined: the batch, and `negatives` of the train responses that the model scores highest."""
    negatives: int = field(default=15, metadata=_DRAWS_NEGATIVES)
    """cross, given, both and mined: wrong candidates per example. If an example has too few given or
    mined ones, responses of other examples fill up."""
    same_group_negatives: bool = True
    """false: other responses of the example's group (dialogue, thread, product) are no negatives. Other
    responses to the same context never are."""
    label_smoothing: float = 0.0
    """bi, poly and convert: share of the target that is spread evenly over all candidates."""
    share_negatives: bool = False
    """given, both and mined: wrong candidates count for every context of the global batch, not only for
    their own."""
    mine: Mining = field(
        default_factory=Mining, metadata=read_when({"finetune.negatives_from": ("mined",)})
    )
    """mined: how hard negatives are mined."""
    distill: Distillation = field(default_factory=Distillation)
    """Learning from another ranker's scores; needs candidates that are given."""
    folds: int = 1
    """Divides the files of train into this many folds, in turn. Above 1, the run leaves out one fold, so
    that jobs.score_candidates --teaching.held-out can use the ranker as a teacher for that fold."""
    held_out: int = 0
    """The number of the fold that is left out, from 0."""
    epochs: float = 3.0
    """Passes over the training examples; 0: no training, a ranker straight from its encoder."""
    max_steps: int = 0
    """Stop after this many steps, whatever the epochs; 0: no limit."""
    train_layers: TrainLayers = "all"
    """Which layers of the encoders train; the head always trains. top, top4: the last one or four layers.
    The paper freezes the embeddings of Google's BERT (R@1/20 83.3 against 83.0) and nothing of its
    own."""
    keep_layers: int = 0
    """Keep only this many first layers of the encoder; 0: all. The smaller, faster model may learn from
    the full one as its teacher."""
    dropout: float | None = None
    """Dropout of the encoder during fine-tuning; null: as the encoder has it. On CPUs dropout costs a
    third."""
    valid_examples: int = 1000
    """Number of examples of the valid split that a validation ranks at most, drawn at random."""
    valid_candidates: int = 20
    """For an example of the valid split without candidates: number of responses of the split that its
    context is ranked against, its own among them."""

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
        require(0 <= self.chunk_examples < self.batch_examples, "finetune.chunk_examples",
                self.chunk_examples,
                f"0, or below finetune.batch_examples, {self.batch_examples}")  # fmt: skip
        for name in ("valid_examples", "valid_candidates"):
            require(getattr(self, name) >= 2, f"finetune.{name}", getattr(self, name), ">= 2")
