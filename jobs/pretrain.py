"""Trains an encoder to predict masked tokens, and to tell the next utterance (or sentence) from others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from jobs import program, tokenize_corpus
from pipeline import cost
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import NOT_IDENTITY, BadInput, require
from pipeline.engine.draft import draft
from pipeline.models.settings import Shape
from pipeline.models.sources import Source, open_encoder, open_tokenizer
from pipeline.options.unread import read_when
from pipeline.training.settings import TOKENS, LoopConfig, PretrainConfig, TokenizeConfig, Workers

# The settings of the task that a run which goes on may change.
_MAY_CHANGE = ("pretrain.steps", "pretrain.gradient_checkpointing")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Pre-trains an encoder on pairs: MLM + NUP (dialogues), MLM + NSP (sentences), or contrastive."""

    ALIASES = MappingProxyType({"encoder": "shape"})
    corpus: tuple[str, ...]
    """Corpora of jobs.tokenize_corpus; or corpora of jobs.prepare_corpus, which are tokenized first, into
    `<output>.tokens`."""
    weights: tuple[float, ...] = ()
    """How often each corpus is read, relative to the others: one number for each; none: in proportion to
    its tokens."""
    tokenizer: str = ""
    """For corpora that are not tokenized: a tokenizer (of jobs.train_tokenizer), or --start's own."""
    start: str = ""
    """A published encoder that training starts from: a `transformers` directory or a hub id, with its MLM
    head if it has one. Empty: a new encoder of --shape."""
    continue_from: str = ""
    """An encoder of this job, to train with more --pretrain.steps. Its corpora, task, optimizer and shape
    stay."""
    output: str = field(metadata=program.OUTPUT)
    """Folder of the encoder: a plain `transformers` directory, curves.png and manifest.json."""
    shape: Shape = field(default_factory=Shape, metadata=read_when({"start": ("",)}))
    """The shape of a new encoder; `--encoder.*`, its earlier name, means the same."""
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    """The task."""
    loop: LoopConfig = field(
        default_factory=lambda: LoopConfig(
            learning_rate=2e-4,
            schedule="inverse_sqrt",
            warmup_steps=4000,
            weight_decay=0.0,
            betas=(0.9, 0.98),
            validate_every_steps=2000,
            stop_after_validations=0,
        )
    )
    """The optimisation; the paper's by default."""
    keep_training_state: bool = field(default=True, metadata=NOT_IDENTITY)
    """Keep the optimizer's moments and the place in the corpora with the encoder, for --continue-from."""
    dry_run: bool = field(default=False, metadata=NOT_IDENTITY)
    """Print sizes, steps, memory and hours, measured on this machine, and train nothing."""
    resources: Workers = field(default_factory=Workers, metadata=NOT_IDENTITY)
    """The hardware that the job runs on."""


def run(config: Config) -> program.Summary:
    _check(config)
    input_corpora = [open_artifact(uri, TOKENS, "corpus") for uri in config.corpus]
    inputs: dict[str, Artifact | dict[str, object]] = {}
    start: Shape | Source = config.shape
    earlier: Artifact | None = None
    if config.start:
        start, inputs["start"] = open_encoder(config.start, "--start")
    if config.continue_from:
        inputs["continue_from"] = start = earlier = _open_earlier(config)

    from jobs import cluster
    from pipeline import tracking
    from pipeline.training import launch
    from pipeline.training.loop import validation_steps
    from pipeline.training.pretraining import Pretraining
    from pipeline.training.tokenized_corpus import TokenizedCorpus

    corpora = tuple(
        TokenizedCorpus(_open_tokens(config, number, input_corpus))
        for number, input_corpus in enumerate(input_corpora)
    )
    inputs |= {f"corpus.{number}": corpus.artifact for number, corpus in enumerate(corpora)}
    if earlier:
        _require_same_run(earlier, config, [corpus.artifact for corpus in corpora])
    weights = config.weights or tuple(float(corpus.train_tokens) for corpus in corpora)
    recipe = Pretraining(corpora, weights, start, config.pretrain, config.loop)
    task = recipe.build(0, config.resources.workers)  # refuses what does not fit, before the draft
    validation_steps(task, config.loop)
    if config.dry_run:
        from pipeline.training.estimate import estimate_pretraining

        steps_done = earlier.counts["steps"] if earlier else 0
        return cost.show("pretrain", *estimate_pretraining(recipe, config.resources, steps_done))
    out = draft(config.output, "encoder", config, inputs)
    if isinstance(out, Artifact):
        return program.artifact_summary(_require_same_steps(out, config), already_there=True)
    with (
        tracking.start("pretrain", out) as tracked,
        cluster.session(for_tasks=True, outlives_sigterm=True),
    ):
        trained = launch.fit(
            recipe, task.steps, config.resources, out, tracked, "pretrain", earlier=earlier
        )
        parameters = sum(value.numel() for value in task.module.parameters())
        counts = {"steps": int(trained.metrics["step"]), "parameters": parameters}
        state = trained.checkpoint if config.keep_training_state else ""
        files = launch.collect_model(out, state)
        # MLflow has the whole run, also the time before it was resumed.
        picture = launch.draw_curves(tracked.histories(launch.CURVES), out.uri)
        tracked.attach({"curves.png": picture})
        files.append(out.write_file("curves.png", picture))
        metrics, precision = trained.metrics, trained.precision
        encoder = out.publish(
            files, counts, run_id=tracked.run_id, metrics=metrics, precision=precision
        )
        tracking.finish(tracked, encoder, delivered=trained.delivered)
    return program.artifact_summary(encoder, already_there=False, metrics=trained.metrics)


def _check(config: Config) -> None:
    """Raises BadInput for options that do not go together."""
    require(bool(config.corpus), "corpus", "none", "one or more")
    require(len(config.weights) in (0, len(config.corpus)) and min(config.weights, default=1) > 0, "weights",
            config.weights, f"none, or {len(config.corpus)}: one for each corpus, above 0")  # fmt: skip
    require(not (config.start and config.continue_from), "start", config.start,
            "empty with --continue-from, which has an encoder")  # fmt: skip
    loop, default = config.loop, LoopConfig.validate_every_epochs
    require(not loop.validate_every_steps or loop.validate_every_epochs == default,
            "loop.validate_every_epochs", loop.validate_every_epochs, f"{default}, the default, as "
            f"loop.validate_every_steps {loop.validate_every_steps} decides, if not 0")  # fmt: skip
    if config.tokenizer:
        open_tokenizer(config.tokenizer)
    workers, lanes = config.resources, config.pretrain.lanes
    if workers.shard_weights:  # all ranks compute as many micro-batches, or one waits for ever
        # FSDP2 over gloo: 2 of 79 trainings ended in a segmentation fault.
        require(workers.gpu, "resources.shard_weights", True, "false without resources.gpu true: on CPUs "
                "it is not reliable")  # fmt: skip
        require(lanes % workers.workers == 0, "resources.workers", workers.workers,
                f"a divisor of {lanes}, the micro-batches of a step, with "
                "resources.shard_weights")  # fmt: skip
        elastic = range(workers.min_workers or workers.workers, workers.workers)
        require(not any(lanes % number for number in elastic), "resources.min_workers",
                workers.min_workers, "0 with resources.shard_weights, unless each number up to "
                f"{workers.workers} divides {lanes}, the micro-batches of a step")  # fmt: skip


def _open_tokens(config: Config, number: int, corpus: Artifact) -> Artifact:
    """The tokens of a corpus; tokenizes a plain corpus first."""
    if corpus.kind == TOKENS:
        return corpus
    tokenizer = config.tokenizer or config.start
    if not tokenizer:
        raise BadInput(f"--corpus {corpus.uri}: not tokenized; allowed: a corpus of "
                       "jobs.tokenize_corpus, or --tokenizer")  # fmt: skip
    if config.dry_run:
        raise BadInput(f"--corpus {corpus.uri}: --dry-run writes nothing, so it knows no cost of a corpus "
                       "that is not tokenized; allowed: a corpus of jobs.tokenize_corpus")  # fmt: skip
    open_tokenizer(tokenizer, "--tokenizer" if config.tokenizer else "--start")
    output = f"{config.output.rstrip('/')}.tokens/{number}"
    limits = TokenizeConfig(
        max_context_tokens=config.pretrain.max_context_tokens - 2,
        max_response_tokens=config.pretrain.max_response_tokens - 2,
    )
    job = tokenize_corpus.Config(
        corpus=corpus.uri, tokenizer=tokenizer, output=output, tokenize=limits
    )
    tokenize_corpus.run(job)
    return open_artifact(output, TOKENS)


def _open_earlier(config: Config) -> Artifact:
    """The encoder whose run goes on. Raises BadInput where it has no training state, or as many steps."""
    from pipeline.training.checkpoint import open_with_state

    artifact = open_with_state(config.continue_from, "encoder", "jobs.pretrain")
    steps_done = artifact.counts["steps"]
    require(config.pretrain.steps > steps_done, "pretrain.steps", config.pretrain.steps,
            f"above {steps_done}, the steps of --continue-from")  # fmt: skip
    return artifact


def _require_same_run(earlier: Artifact, config: Config, corpora: Sequence[Artifact]) -> None:
    from pipeline.training.checkpoint import require_same_run

    shape = () if earlier.manifest["config"]["start"] else ("shape.",)
    require_same_run(
        earlier, config, {"corpus": [corpus.fingerprint for corpus in corpora]},
        fixed=("corpus", "weights", "pretrain.", *shape), may_change=_MAY_CHANGE,
        otherwise=f"--start {earlier.uri} for a new run",
    )  # fmt: skip


def _require_same_steps(encoder: Artifact, config: Config) -> Artifact:
    """Raises BadInput where more steps are asked for than it was trained."""
    steps = int(encoder.manifest["config"]["pretrain"]["steps"])
    if steps != config.pretrain.steps:
        raise BadInput(f"{encoder.uri}: was trained for {steps} steps, not {config.pretrain.steps}; to "
                       f"train it on: --continue-from {encoder.uri} and another --output")  # fmt: skip
    return encoder


if __name__ == "__main__":
    program.main(Config, run, "pretrain")
