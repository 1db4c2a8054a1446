"""Settings of what is trained and taught; importing them loads no torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pipeline.config import NOT_IDENTITY, identity_with, require
from pipeline.models.settings import TrainLayers, architectures
from pipeline.options.unread import default_of, read_when

TRAINING_STATE = "training_state"
"""Folder of a published model that holds what a longer run starts from."""
TOKENS = "tokens"
"""The kind of artifact that a tokenized corpus is."""
NegativesFrom = Literal["batch", "given", "both", "mined"]
Taught = Literal["candidates", "batch"]
"""What a teacher scores for each context: its own candidates, or the responses of the global batch."""
TeachingLoss = Literal["none", "kl", "margin_mse", "cosine"]
PretrainingObjective = Literal["joint", "alternate", "mlm", "contrastive", "contrastive_mlm"]

_DISTILS = read_when({"finetune.distill.loss": get_args(TeachingLoss)[1:]})
_DRAWS_NEGATIVES = read_when(
    {
        "finetune.negatives_from": ("given", "both", "mined"),
        "ranker.architecture": architectures(lambda ranker: not ranker.has_vectors),
    }
)
_STARTS_FROM_ENCODER = read_when(
    {"ranker.architecture": architectures(lambda ranker: not ranker.starts_from_tokenizer)}
)
_WITH_ADAPTERS = identity_with("finetune.lora_rank")

# About 10 GB of activations in a BERT-base encoder in bfloat16, without gradient checkpointing.
_MICRO_BATCH_TOKENS = 16_384
# (with fewer examples than this, epochs): pipeline/OWN_DATA.md has what was measured.
_EPOCHS = ((5_000, 10.0), (100_000, 3.0))
_RANDOM_PAIRS: tuple[PretrainingObjective, ...] = ("joint", "alternate")
_PREDICT_TOKENS: tuple[PretrainingObjective, ...] = ("joint", "alternate", "mlm", "contrastive_mlm")
_READ_WITH_MASKS = read_when({"pretrain.objective": _PREDICT_TOKENS})


def _require_at_least(lowest: int, config: Any, section: str, *names: str) -> None:
    """Raises BadInput for the first of these settings that is below `lowest`."""
    for name in names:
        value = getattr(config, name)
        require(value >= lowest, f"{section}.{name}", value, f">= {lowest}")


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How weights are updated, and how often the loop validates, reports and saves."""

    learning_rate: float = 5e-5
    """Peak learning rate."""
    head_lr_factor: float = field(default=10.0, metadata=_STARTS_FROM_ENCODER)
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
        for beta in self.betas:
            require(0 <= beta < 1, "loop.betas", beta, "0 to below 1")
        _require_at_least(0, self, "loop", "weight_decay", "validate_every_epochs", "validate_every_steps",
                          "stop_after_validations", "checkpoint_every_minutes", "seed")  # fmt: skip
        if not self.validate_every_epochs and not self.validate_every_steps:
            self.check_unvalidated("where loop.validate_every_epochs is 0")
        _require_at_least(1, self, "loop", "checkpoint_every_steps", "log_every_steps", "max_skipped_steps",
                          "keep_checkpoints")  # fmt: skip

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
        _require_at_least(1, self, "resources", "workers")
        require(0 <= self.min_workers <= self.workers, "resources.min_workers", self.min_workers,
                f"0 to resources.workers {self.workers}")  # fmt: skip
        _require_at_least(0, self, "resources", "cpus_per_worker", "max_restarts")


@dataclass(frozen=True, kw_only=True)
class NegativeLimits:
    """The highest score of a hard negative."""

    margin: float = 0.0
    """A negative scores at least this much lower than the right response."""
    max_share: float = 0.95
    """A negative scores at most this share of the right response's score, if that score is above 0."""

    def check_limits(self, prefix: str) -> None:
        """Raises BadInput for limits out of range."""
        _require_at_least(0, self, prefix, "margin")
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
        _require_at_least(2, self, name, "responses")
        _require_at_least(1, self, name, "top_k")
        self.check_limits(name)


@dataclass(frozen=True, kw_only=True)
class GuideLimits(NegativeLimits):
    """Which negatives the guide leaves out, by its own scores; the defaults are GISTEmbed's."""

    max_share: float = 1.0
    """A negative scores at most this share of the right response's score, if that score is above 0."""

    def __post_init__(self) -> None:
        self.check_limits("finetune.guide")


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
    guide: GuideLimits = field(default_factory=GuideLimits, metadata=identity_with("guide"))
    """--guide: which negatives it leaves out of the loss."""
    distill: Distillation = field(default_factory=Distillation)
    """Learning from another ranker's scores; needs candidates that are given."""
    folds: int = 1
    """Divides the files of train into this many folds, in turn. Above 1, the run leaves out one fold, so
    that jobs.score_candidates --teaching.held-out can use the ranker as a teacher for that fold."""
    held_out: int = 0
    """The number of the fold that is left out, from 0."""
    epochs: float | None = 3.0
    """Passes over the training examples; 0: no training, a ranker straight from its encoder. null: 10 with
    fewer than 5,000 examples, 3 with fewer than 100,000, and 1 with more (pipeline/OWN_DATA.md)."""
    max_steps: int = 0
    """Stop after this many steps, whatever the epochs; 0: no limit."""
    train_layers: TrainLayers = "all"
    """Which layers of the encoders train; the head always trains. top, top4: the last one or four layers.
    The paper freezes the embeddings of Google's BERT (R@1/20 83.3 against 83.0) and nothing of its
    own."""
    lora_rank: int = field(default=0, metadata=_WITH_ADAPTERS)
    """Train adapters of this rank beside the linear layers of the encoders, whose own weights stay (LoRA): of
    a large encoder the gradients and the optimizer's moments then take little memory. The adapters learn
    `loop.head_lr_factor` times as fast, and are part of the saved weights. It needs the package peft. 0: no
    adapters."""
    lora_alpha: float = field(default=16.0, metadata=_WITH_ADAPTERS)
    """The adapters' outputs are multiplied by this number divided by `lora_rank`."""
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
        _require_at_least(
            2, self, "finetune", "batch_examples", "valid_examples", "valid_candidates"
        )
        _require_at_least(1, self, "finetune", "negatives", "folds")
        _require_at_least(0, self, "finetune", "max_steps", "keep_layers", "lora_rank")
        require(
            self.epochs is None or self.epochs >= 0, "finetune.epochs", self.epochs, ">= 0, or null"
        )
        require(not self.lora_rank or self.train_layers == "all", "finetune.train_layers",
                self.train_layers, "'all' with finetune.lora_rank")  # fmt: skip
        require(self.lora_alpha > 0, "finetune.lora_alpha", self.lora_alpha, "above 0")
        alpha = default_of(FinetuneConfig, "lora_alpha")
        require(self.lora_rank > 0 or self.lora_alpha == alpha, "finetune.lora_alpha", self.lora_alpha,
                f"{alpha} with finetune.lora_rank 0")  # fmt: skip
        require(not self.share_negatives or self.negatives_from != "batch",
                "finetune.share_negatives", True, "false with finetune.negatives_from 'batch', which "
                "shares all that there are")  # fmt: skip
        require(0 <= self.label_smoothing < 1, "finetune.label_smoothing", self.label_smoothing,
                "0 to below 1")  # fmt: skip
        require(0 <= self.held_out < self.folds, "finetune.held_out", self.held_out,
                f"0 to {self.folds - 1}, with finetune.folds {self.folds}")  # fmt: skip
        require(self.dropout is None or 0 <= self.dropout < 1, "finetune.dropout", self.dropout,
                "0 to below 1, or null")  # fmt: skip
        require(0 <= self.chunk_examples < self.batch_examples, "finetune.chunk_examples",
                self.chunk_examples,
                f"0, or below finetune.batch_examples, {self.batch_examples}")  # fmt: skip

    def epochs_over(self, examples: int) -> float:
        """The epochs over so many training examples."""
        if self.epochs is not None:
            return self.epochs
        return next((epochs for limit, epochs in _EPOCHS if examples < limit), 1.0)

    def steps_over(self, examples: int, steps_per_epoch: float) -> int:
        """The steps of a run over so many training examples."""
        epochs = self.epochs_over(examples)
        # Half an epoch of one batch would round to none.
        steps = max(round(epochs * steps_per_epoch), 1 if epochs else 0)
        return min(steps, self.max_steps or steps)


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
        _require_at_least(0, self, "teaching", "random_candidates", "batch_tokens", "seed")
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
class PretrainConfig:
    """Which pairs, for how long."""

    batch_tokens: int = 32_000
    """Tokens of a step at most, over all workers, padding included."""
    micro_batch_tokens: int = 0
    """Tokens that a worker computes at once at most, padding included; 0: 16,384. A step has batch_tokens
    / micro_batch_tokens micro-batches, rounded up, which the workers share out. They are the same for
    every number of workers, so a resumed run needs the same value."""
    steps: int = field(default=100_000, metadata=NOT_IDENTITY)
    """Updates of the weights. A run that was stopped may be resumed with more."""
    objective: PretrainingObjective = "joint"
    """joint: every batch trains masked tokens and the next utterance (BERT). alternate: even steps train
    masked tokens, odd steps the next utterance, without masks (the Poly-encoder paper). mlm: masked tokens
    only, and all pairs are true. contrastive: the encoder reads each text alone, and the mean vectors tell a
    context's own response from the others of its micro-batch (TOD-BERT); for bi- and poly-encoders.
    contrastive_mlm: the same with masks, and masked tokens in every batch."""
    masking: Literal["bert", "xlm"] = field(default="bert", metadata=_READ_WITH_MASKS)
    """bert: special tokens are never predicted. xlm: separators are predicted like other tokens; only
    padding and the first position never are."""
    masked_share: float = field(default=0.15, metadata=_READ_WITH_MASKS)
    """Share of the tokens that are predicted. Of these 80 % become the mask token, 10 % a random token, and
    10 % stay."""
    rare_token_alpha: float = field(default=0.0, metadata=_READ_WITH_MASKS)
    """Predict a token with a probability proportional to (its count in the corpus)^-alpha, so that rare
    tokens are predicted more often (XLM's sample_alpha); 0: all tokens alike."""
    whole_words: bool = field(default=False, metadata=_READ_WITH_MASKS)
    """Predict all pieces of a word, or none."""
    max_context_tokens: int = 180
    """First text of a pair: its newest tokens, as many as fit with [CLS] and [SEP]."""
    max_response_tokens: int = 72
    """Second text of a pair: its first tokens, as many as fit with [CLS] and [SEP] where it stands alone.
    A pair shares the [CLS], so it has at most max_context_tokens + max_response_tokens - 1 tokens;
    contrastive and contrastive_mlm read two texts."""
    random_share: float = field(
        default=0.5, metadata=read_when({"pretrain.objective": _RANDOM_PAIRS})
    )
    """Share of the pairs that have the response of another example (next utterance, next sentence)."""
    window_rows: int = 16_384
    """Examples that are shuffled together and cut into micro-batches; of similar length, if a row is a
    pair."""
    gradient_checkpointing: bool = False
    """Compute layers again in the backward pass. A step takes a third longer and a fraction of the
    memory, for micro-batches that do not fit otherwise."""
    valid_examples: int = 4096
    """Examples of the held-out split that validation uses at most."""

    def __post_init__(self) -> None:
        _require_at_least(3, self, "pretrain", "max_context_tokens", "max_response_tokens")
        _require_at_least(1, self, "pretrain", "steps", "window_rows", "valid_examples")
        _require_at_least(0, self, "pretrain", "rare_token_alpha", "micro_batch_tokens")
        for name in ("masked_share", "random_share"):
            value = getattr(self, name)
            require(0 < value < 1, f"pretrain.{name}", value, "between 0 and 1")
        require(self.batch_tokens >= self.longest_pair, "pretrain.batch_tokens", self.batch_tokens,
                f">= {self.longest_pair}, the longest pair")  # fmt: skip
        require(self.lane_tokens >= self.longest_pair, "pretrain.micro_batch_tokens",
                self.micro_batch_tokens,
                f"0, or enough for the longest pair, {self.longest_pair}, in each of "
                f"{self.lanes} micro-batches of pretrain.batch_tokens {self.batch_tokens}")  # fmt: skip
        require(not self.single_texts or self.lane_pairs >= 2, "pretrain.micro_batch_tokens",
                self.micro_batch_tokens,
                f"enough for two pairs, {2 * self.longest_pair}, whose responses pretrain.objective "
                f"{self.objective!r} tells apart")  # fmt: skip

    @property
    def longest_pair(self) -> int:
        """Tokens that the longest pair takes in a micro-batch: [CLS] context [SEP] response [SEP], or two
        rows of a single text each, which are equally wide."""
        return 2 * self.longest_row if self.single_texts else self.longest_row

    @property
    def longest_row(self) -> int:
        """Tokens that the encoder reads at once at most."""
        if self.single_texts:
            return max(self.max_context_tokens, self.max_response_tokens)
        return self.max_context_tokens + self.max_response_tokens - 1

    @property
    def kept_tokens(self) -> tuple[int, int]:
        """Tokens of a context and of a response that are kept, special tokens not counted."""
        return self.max_context_tokens - 2, self.max_response_tokens - 2

    @property
    def single_texts(self) -> bool:
        """Whether the encoder reads contexts and responses as rows of their own."""
        return self.objective in ("contrastive", "contrastive_mlm")

    @property
    def random_pairs(self) -> bool:
        """Whether a share of the contexts gets the response of another example."""
        return self.objective in _RANDOM_PAIRS

    def predicts_tokens(self, step: int) -> bool:
        """Whether a step has masks: those of an alternating run do if they are even."""
        if self.objective == "alternate":
            return step % 2 == 0
        return self.objective in _PREDICT_TOKENS

    def predicts_next(self, step: int) -> bool:
        """Whether a step tells true pairs from random ones."""
        return self.objective == "joint" or (self.objective == "alternate" and step % 2 == 1)

    @property
    def lanes(self) -> int:
        """Micro-batches of a step, whatever the number of workers."""
        return -(-self.batch_tokens // (self.micro_batch_tokens or _MICRO_BATCH_TOKENS))

    @property
    def lane_tokens(self) -> int:
        """Tokens of a micro-batch at most, padding included."""
        return self.batch_tokens // self.lanes

    @property
    def lane_pairs(self) -> int:
        """Pairs of a micro-batch at most, if all of them are as long as the longest."""
        return self.lane_tokens // self.longest_pair


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig:
    """Which tokens of each example are kept."""

    max_context_tokens: int = 510
    """The newest tokens of a context that are kept, special tokens not counted."""
    max_response_tokens: int = 510
    """The first tokens of a response that are kept, special tokens not counted."""
    valid_share: float = 0.01
    """Share of the groups (threads, dialogues, articles) of train that go to validation, if the corpus
    has no valid split."""

    def __post_init__(self) -> None:
        _require_at_least(1, self, "tokenize", "max_context_tokens", "max_response_tokens")
        require(0 <= self.valid_share < 1, "tokenize.valid_share", self.valid_share,
                "at least 0 and less than 1")  # fmt: skip


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
        _require_at_least(100, self, "tokenizer", "vocabulary")
        _require_at_least(1, self, "tokenizer", "min_frequency", "max_examples")
        require(not self.vectors or self.kind == "subwords", "tokenizer.vectors", True,
                f"false with tokenizer.kind {self.kind!r}")  # fmt: skip
