"""Settings of what is trained and taught; importing them loads no torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipeline.config import NOT_IDENTITY, require
from pipeline.options.unread import default_of, read_when
from pipeline.training.finetune_settings import NegativeLimits, Taught

TRAINING_STATE = "training_state"
"""Folder of a published model that holds what a longer run starts from."""


@dataclass(frozen=True, kw_only=True)
class OptimizationConfig:
    """How weights are updated."""

    learning_rate: float = 5e-5
    """Peak learning rate."""
    head_lr_factor: float = field(
        default=10.0, metadata=read_when({"ranker.architecture": ("bi", "poly", "cross")})
    )
    """The learning rate of weights that were not pre-trained (codes, heads), as a multiple of
    `learning_rate`."""
    warmup_steps: float = 0.1
    """Steps in which the rate rises linearly; below 1: this share of the run's steps."""
    initial_rate_share: float = 0.0
    """The rate at which the warm-up begins, as a share of the peak."""
    schedule: Literal["linear", "cosine", "inverse_sqrt", "wsd", "constant", "plateau"] = "linear"
    """How the rate falls after the warm-up. linear, cosine: to `final_rate_share` at the last step.
    inverse_sqrt: with 1/sqrt(step). wsd: it stays at the peak, then falls linearly in the last
    `decay_share` of the steps. constant: it stays. plateau: it is multiplied by `plateau_decay` whenever
    the validation loss is not a new lowest one (the paper's schedule)."""
    final_rate_share: float = field(
        default=0.0, metadata=read_when({"loop.schedule": ("linear", "cosine", "wsd")})
    )
    """linear, cosine, wsd: the rate at the last step, as a share of the peak."""
    decay_share: float = field(default=0.1, metadata=read_when({"loop.schedule": ("wsd",)}))
    """wsd: share of the steps in which the rate falls."""
    plateau_decay: float = field(default=0.4, metadata=read_when({"loop.schedule": ("plateau",)}))
    """plateau: the factor on the rate."""
    optimizer: Literal["adamw", "adamax", "adadelta"] = "adamw"
    """AdamW for BERT-like weights; the Poly-encoder paper used Adamax for its own, ConveRT AdaDelta."""
    weight_decay: float = 0.01
    """Weight decay. It does not apply to biases and layer norms."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the optimizer's moments; the paper pre-trained with 0.9, 0.98. AdaDelta takes the
    first as rho."""
    epsilon: float = 1e-8
    """Added to the optimizer's denominators."""
    max_gradient_norm: float = 1.0
    """Gradients are scaled down to this L2 norm."""
    token_tables: Literal["as_all", "apart"] = "as_all"
    """apart: only the gradients of the token embeddings are scaled down. Only the embeddings that the
    batch looks up decay, by an L2 penalty in the gradient (ConveRT)."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "head_lr_factor", "max_gradient_norm", "epsilon"):
            require(getattr(self, name) > 0, f"loop.{name}", getattr(self, name), "above 0")
        require(
            0 <= self.warmup_steps < 1 or self.warmup_steps == int(self.warmup_steps) >= 1,
            "loop.warmup_steps", self.warmup_steps, "a whole number of steps, or a share below 1",
        )  # fmt: skip
        for name in ("plateau_decay", "decay_share"):
            value = getattr(self, name)
            require(0 < value < 1, f"loop.{name}", value, "between 0 and 1")
        for name in ("initial_rate_share", "final_rate_share"):
            value = getattr(self, name)
            require(0 <= value < 1, f"loop.{name}", value, "0 to below 1")
        require(self.weight_decay >= 0, "loop.weight_decay", self.weight_decay, ">= 0")
        for beta in self.betas:
            require(0 <= beta < 1, "loop.betas", beta, "0 to below 1")


@dataclass(frozen=True, kw_only=True)
class LoopConfig(OptimizationConfig):
    """How weights are updated, and how often the loop validates, reports and saves."""

    validate_every_epochs: float = 0.5
    """Epochs between two validations; the last step is validated, too. 0: no validation by epochs; without
    `validate_every_steps` the last weights are the result. Without a valid split nothing is validated."""
    validate_every_steps: int = 0
    """Steps between two validations, whatever the epochs; 0: `validate_every_epochs` decides."""
    keep_weights: Literal["best", "last"] = "best"
    """The weights that are the result: of the best validation, or of the last step. last suits few epochs:
    R@1 of 100 questions has a standard error of up to 0.05, so an early validation often wins by chance."""
    stop_after_validations: int = field(
        default=10, metadata=read_when({"loop.keep_weights": ("best",)})
    )
    """Stop after this many validations in a row without a better one; 0: never."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16: bf16 autocast with float32 weights. auto: bf16 where the hardware multiplies it."""
    compile: bool = False
    """torch.compile the model. It takes a minute at the start; steps on a GPU are faster then."""
    max_skipped_steps: int = field(default=5, metadata=NOT_IDENTITY)
    """A step whose loss or gradient is not finite changes no weights. After this many such steps in a row
    the run ends, and the last batch is saved for inspection."""
    checkpoint_every_steps: int = field(default=500, metadata=NOT_IDENTITY)
    """A killed run loses at most this many steps."""
    checkpoint_every_minutes: float = field(default=10.0, metadata=NOT_IDENTITY)
    """A killed run loses at most this many minutes, too. The clock is read every `log_every_steps`,
    because on CPUs 500 steps take most of an hour. 0: the clock does not count."""
    keep_checkpoints: int = field(default=2, metadata=NOT_IDENTITY)
    """Number of the last checkpoints that are kept."""
    log_every_steps: int = field(default=20, metadata=NOT_IDENTITY)
    """Steps between two points of the curves."""
    seed: int = 0
    """Seed of the order of examples, of masks, dropout and new weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("validate_every_epochs", "validate_every_steps", "stop_after_validations",
                     "checkpoint_every_minutes", "seed"):  # fmt: skip
            require(getattr(self, name) >= 0, f"loop.{name}", getattr(self, name), ">= 0")
        if not self.validate_every_epochs and not self.validate_every_steps:
            self.check_unvalidated("where loop.validate_every_epochs is 0")
        for name in ("checkpoint_every_steps", "log_every_steps", "max_skipped_steps",
                     "keep_checkpoints"):  # fmt: skip
            require(getattr(self, name) >= 1, f"loop.{name}", getattr(self, name), ">= 1")

    def check_unvalidated(self, reason: str) -> None:
        """Raises BadInput for settings that need validations; `reason`: why there are none."""
        require(self.schedule != "plateau", "loop.schedule", self.schedule, f"another one {reason}")
        patience = default_of(LoopConfig, "stop_after_validations")
        require(self.stop_after_validations in (0, patience), "loop.stop_after_validations",
                self.stop_after_validations, f"0 or {patience} {reason}")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The hardware of a training. It is not part of the settings that identify a model."""

    workers: int = 1
    """Training processes: one per GPU, or on CPUs one per core. all-MiniLM with 64 contexts of 160 tokens
    takes 1.7 s a step with two workers of one thread, and 1.9 s with one worker of two."""
    min_workers: int = 0
    """Train with this many workers while the cluster has no room for all of them; 0: wait for all.
    jobs.pretrain: the global batch stays the same. jobs.finetune: if the number of workers does not
    divide the batch, the batch is rounded down: 63 of 64 examples on 7 workers."""
    cpus_per_worker: int = 0
    """Cores, and threads, of a worker; 0: the workers share out the cluster's cores, beside services."""
    gpu: bool = False
    """One GPU per worker, NCCL between them; else CPU and gloo."""
    shard_weights: bool = False
    """jobs.pretrain on GPUs: weights, gradients and optimizer state are sharded over the workers (FSDP2),
    for encoders that do not fit on one GPU; else every worker holds all of them."""
    max_restarts: int = 3
    """How often dead workers are replaced in the whole run; each time the run continues from the last
    checkpoint. The same command, started again, counts from 0."""

    def __post_init__(self) -> None:
        require(self.workers >= 1, "resources.workers", self.workers, ">= 1")
        require(0 <= self.min_workers <= self.workers, "resources.min_workers", self.min_workers,
                f"0 to resources.workers {self.workers}")  # fmt: skip
        for name in ("cpus_per_worker", "max_restarts"):
            require(getattr(self, name) >= 0, f"resources.{name}", getattr(self, name), ">= 0")


@dataclass(frozen=True, kw_only=True)
class TeachingConfig(NegativeLimits):
    """What the teachers score."""

    over: Taught = "candidates"
    """candidates: scores of each example's candidates. batch: the teacher's vectors of each context and
    response, whose products are its scores over any batch. batch needs one bi-encoder or ConveRT
    model."""
    random_candidates: int = 0
    """A train example without candidates gets its response and this many other responses of its shard; 0:
    it gets no candidates and no scores."""
    hardest_of: int = 0
    """Draws this many random candidates and keeps the ones that the first bi- or poly-encoder teacher
    scores highest, up to the limits `margin` and `max_share`. Most random candidates are too easy to teach
    much. 0: keeps any."""
    same_group_negatives: bool = True
    """false: no random candidate is a response of the example's group (dialogue, thread, product). None is
    another response to the same context."""
    batch_tokens: int = 0
    """Tokens in a batch at most, padding included; 0: as many as suit the device."""
    held_out: bool = False
    """Score a shard of train only with the teachers that were not trained on it (finetune.folds)."""
    seed: int = 0
    """Seed of the draw of candidates."""

    def __post_init__(self) -> None:
        for name in ("random_candidates", "batch_tokens", "seed"):
            require(getattr(self, name) >= 0, f"teaching.{name}", getattr(self, name), ">= 0")
        require(self.over == "candidates" or self.random_candidates == 0, "teaching.random_candidates",
                self.random_candidates, "0 with teaching.over 'batch', which needs none")  # fmt: skip
        require(self.hardest_of == 0 or self.hardest_of > self.random_candidates > 0,
                "teaching.hardest_of", self.hardest_of,
                f"0, or more than teaching.random_candidates, {self.random_candidates}, above 0")  # fmt: skip
        self.check_limits("teaching")
        for name, reader in (("margin", "hardest_of"), ("max_share", "hardest_of"),
                             ("same_group_negatives", "random_candidates")):  # fmt: skip
            value, default = getattr(self, name), default_of(TeachingConfig, name)
            require(value == default or getattr(self, reader) > 0, f"teaching.{name}", value,
                    f"{default} with teaching.{reader} 0")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """What is learnt."""

    kind: Literal["wordpiece", "bpe", "subwords"] = "wordpiece"
    """wordpiece: BERT's pieces and normalisation. bpe: byte-level, so no text is unknown. subwords:
    ConveRT's, which hashes pieces that the vocabulary lacks; the paper has 31,476."""
    vocabulary: int = 30_000
    """Number of pieces, the special ones included."""
    min_frequency: int = 2
    """Rarer pieces are left out."""
    max_examples: int = 1_000_000
    """Examples to learn from; more than a million change little."""
    vectors: bool = False
    """subwords: also fit a vector to each, from a teacher's vectors of the texts (`jobs.score_candidates
    --teaching.over batch`), for ranker.start taught_words."""

    def __post_init__(self) -> None:
        require(self.vocabulary >= 100, "tokenizer.vocabulary", self.vocabulary, ">= 100")
        require(self.min_frequency >= 1, "tokenizer.min_frequency", self.min_frequency, ">= 1")
        require(not self.vectors or self.kind == "subwords", "tokenizer.vectors", True,
                f"false with tokenizer.kind {self.kind!r}")  # fmt: skip
        require(self.max_examples >= 1, "tokenizer.max_examples", self.max_examples, ">= 1")
