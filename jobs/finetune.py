"""Trains a ranker: a bi-, poly- or cross-encoder from an encoder, or ConveRT from a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jobs import program
from pipeline import cost, registry
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import NOT_IDENTITY, BadInput, identity_with, require
from pipeline.engine.draft import draft
from pipeline.models.settings import (
    DualConfig,
    OnEncoderConfig,
    PolyConfig,
    RankerConfig,
    read_settings,
)
from pipeline.models.sources import (
    Prompts,
    Source,
    open_encoder,
    open_text_encoder,
    read_modules,
    read_prompts,
)
from pipeline.training.settings import FinetuneConfig, GuideLimits, LoopConfig, Workers

Reference = Mapping[str, Any]
"""To an input, as the manifest has it."""
Texts = tuple[list[list[str]], list[str]]
"""Contexts and their responses."""
# The settings of the task that a run which goes on may change.
_MAY_CHANGE = ("finetune.epochs", "finetune.max_steps", "finetune.chunk_examples")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Fine-tunes an encoder into a ranker on a corpus' train split."""

    corpus: str
    """A corpus (of jobs.prepare_corpus)."""
    encoder: str
    """What the ranker starts from. An encoder: of jobs.pretrain, any `transformers` directory, or a hub
    id. A ranker: its encoders. For ConveRT: subwords of jobs.train_tokenizer, or a ConveRT model to train
    further; its sizes then replace the defaults of `ranker`."""
    continue_from: str = field(default="", metadata=identity_with("continue_from"))
    """A ranker of this job, to train with more --finetune.epochs or --finetune.max-steps. Its corpus,
    encoder, task, optimizer and model stay."""
    guide: str = field(default="", metadata=identity_with("guide"))
    """A model that names false negatives: what it scores above the right response (--finetune.guide) counts
    for nothing. A bi- or poly-encoder or ConveRT model of this job, a directory of sentence-transformers,
    or a hub id."""
    output: str = field(metadata=program.OUTPUT)
    """Folder of the ranker."""
    ranker: RankerConfig = field(default_factory=PolyConfig)
    """The model."""
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    """The task."""
    loop: LoopConfig = field(default_factory=LoopConfig)
    """The optimisation."""
    keep_training_state: bool = field(default=False, metadata=NOT_IDENTITY)
    """Keep the optimizer's moments and the place in the corpus with the ranker, for --continue-from. They
    take up to four times as much room as the ranker, and every node that loads it copies them, too."""
    dry_run: bool = field(default=False, metadata=NOT_IDENTITY)
    """Print sizes, steps, memory and hours, measured on this machine, and train nothing."""
    resources: Workers = field(default_factory=Workers, metadata=NOT_IDENTITY)
    """The hardware that the job runs on."""
    register_as: str = field(default="", metadata=NOT_IDENTITY)
    """Name in MLflow's registry; the new version gets the alias `candidate`. If the registry fails at the
    end, the ranker is complete all the same, and the same command registers it."""

    def __post_init__(self) -> None:
        if self.register_as:
            registry.require_name("register_as", self.register_as)
        # Compiled code draws other dropout than the first encoding of a chunk.
        require(not (self.loop.compile and self.finetune.chunk_examples), "loop.compile", True,
                "false where finetune.chunk_examples is not 0")  # fmt: skip
        require(not self.resources.shard_weights, "resources.shard_weights", True,
                "false, as only jobs.pretrain shards weights")  # fmt: skip
        for name, default in vars(GuideLimits()).items():
            value = getattr(self.finetune.guide, name)
            require(bool(self.guide) or value == default, f"finetune.guide.{name}", value,
                    f"{default} without --guide")  # fmt: skip
        self.ranker.check_training()
        workers, examples = self.resources.workers, self.finetune.batch_examples
        require(examples % workers == 0, "finetune.batch_examples", examples,
                f"a multiple of the {workers} workers")  # fmt: skip


def run(config: Config, watch: Callable[[int, int], None] | None = None) -> program.Summary:
    """`watch(steps done, all steps)` is called as training goes on."""
    corpus = open_artifact(config.corpus, "corpus")
    source, encoder = open_encoder(config.encoder)
    _require_encoder(config, encoder)
    inputs: dict[str, Artifact | dict[str, Any]] = {"corpus": corpus, "encoder": encoder}
    guide: Source | None = None
    if config.guide:
        guide, inputs["guide"] = open_text_encoder(config.guide, "--guide")
    config = _completed(config, corpus, source, encoder)
    earlier: Artifact | None = None
    if config.continue_from:
        inputs["continue_from"] = earlier = _open_earlier(config, inputs)

    from jobs import cluster
    from pipeline import tracking
    from pipeline.training import launch
    from pipeline.training.finetuning import Finetuning

    recipe = Finetuning(corpus, source, config.ranker, config.finetune, config.loop, guide)
    task = recipe.build(0, config.resources.workers)  # refuses what does not fit, before the draft
    if earlier:
        _require_more_steps(config, task.steps, earlier.counts["steps"])
    texts = _first_texts(corpus)
    _require_trainable(config, task, corpus.rows("train/"), *texts)
    if config.dry_run:
        from pipeline.training.estimate import estimate_finetuning

        steps_done = earlier.counts["steps"] if earlier else 0
        return cost.show("finetune", *estimate_finetuning(recipe, config.resources, steps_done))
    out = draft(config.output, "ranker", config, inputs)
    if isinstance(out, Artifact):
        _register(config, out)  # the job that made it may have been killed before that
        return program.artifact_summary(out, already_there=True)
    question_count, left_out = task.validated
    _print_validation(question_count, left_out, corpus.rows("valid/"))
    _print_truncation(task.ranker, *texts)
    if config.register_as:
        tracking.prepare_registration(config.register_as)
    with (
        tracking.start("finetune", out) as tracked,
        cluster.session(for_tasks=True, outlives_sigterm=True),
    ):
        label = f"finetune {config.ranker.architecture}"
        trained = launch.fit(
            recipe, task.steps, config.resources, out, tracked, label, watch, earlier
        )
        counts = {"steps": int(trained.metrics["step"]), "parameters": task.parameters}
        state = trained.checkpoint if config.keep_training_state else ""
        files = launch.collect_model(out, state)
        ranker = out.publish(
            files, counts, run_id=tracked.run_id, metrics=trained.metrics,
            precision=trained.precision, held_out=recipe.unseen(),
        )  # fmt: skip
        tracking.finish(tracked, ranker, delivered=trained.delivered)
    _register(config, ranker)
    validation = {"asked": question_count, "left_out": left_out}
    return program.artifact_summary(
        ranker, already_there=False, metrics=trained.metrics, validation=validation
    )


def _require_encoder(config: Config, reference: Reference) -> None:
    """Raises BadInput for a tokenizer alone, unless the architecture starts from one, and for a ranker with
    two encoders where the new one has one: neither of them has read contexts and candidates."""
    if reference.get("kind") == "tokenizer" and not config.ranker.starts_from_tokenizer:
        raise BadInput(f"--encoder {config.encoder}: is a tokenizer; allowed: an encoder (of jobs.pretrain, "
                       "a transformers directory or a hub id), or --ranker.architecture convert, which "
                       "starts from subwords (jobs/configs/finetune/convert_pairs.yaml)")  # fmt: skip
    needs_one = not (config.ranker.has_two_towers or config.ranker.starts_from_tokenizer)
    of_ranker = needs_one and reference.get("kind") == "ranker"
    if of_ranker and read_settings(config.encoder).has_two_towers:
        raise BadInput(f"--encoder {config.encoder}: has an encoder for contexts and another one for "
                       "candidates, and the new ranker has one for both; allowed: a ranker trained with "
                       f"--ranker.share-towers true, or one encoder of this one, such as {config.encoder}"
                       "/context_encoder, which has read no candidates")  # fmt: skip


def _completed(config: Config, corpus: Artifact, source: Source, reference: Reference) -> Config:
    """The settings, with those that follow from the encoder and the corpus where none are set."""
    if reference.get("kind") == "ranker":  # a ConveRT model that is trained further has its sizes
        config = replace(config, ranker=config.ranker.sized_as(read_settings(config.encoder)))
    config = replace(config, ranker=_with_prompts(config, source, reference))
    config = replace(config, finetune=_with_epochs(config.finetune, corpus))
    _say_what_is_left_out(config.ranker, source, reference)
    return config


def _with_prompts(config: Config, source: Source, reference: Reference) -> RankerConfig:
    """The ranker's settings, with the prompts of the encoder where none are set."""
    ranker = config.ranker
    if not isinstance(ranker, OnEncoderConfig) or ranker.context_prompt or ranker.candidate_prompt:
        return ranker
    prompts = Prompts()
    if reference.get("kind") == "external":
        prompts = read_prompts(source.local())
    elif reference.get("kind") == "ranker":
        start = read_settings(config.encoder)
        if isinstance(start, OnEncoderConfig):
            prompts = Prompts(start.context_prompt, start.candidate_prompt)
    if prompts != Prompts():
        print(f"prompts of the encoder: {prompts.context!r} before contexts, {prompts.candidate!r} before "
              "candidates", flush=True)  # fmt: skip
    return replace(ranker, context_prompt=prompts.context, candidate_prompt=prompts.candidate)


def _with_epochs(finetune: FinetuneConfig, corpus: Artifact) -> FinetuneConfig:
    """The settings; with the epochs that suit the corpus where none are set."""
    if finetune.epochs is not None:
        return finetune
    examples = corpus.rows("train/")
    epochs = finetune.epochs_over(examples)
    print(f"{examples:,} training examples: {epochs:.0f} epochs, by their number; --finetune.epochs sets "
          "another one", flush=True)  # fmt: skip
    return replace(finetune, epochs=epochs)


def _say_what_is_left_out(ranker: RankerConfig, source: Source, reference: Reference) -> None:
    """Prints where a ranker makes vectors in another way than the published encoder that it starts from."""
    if reference.get("kind") != "external" or not isinstance(ranker, DualConfig):
        return
    reduction, modules = read_modules(source.local())
    if reduction and reduction != ranker.reduction:
        print(f"the encoder was trained with the reduction {reduction!r}, this ranker has "
              f"--ranker.reduction {ranker.reduction}", flush=True)  # fmt: skip
    if "Normalize" in modules and not ranker.vector_length:
        print("the encoder's vectors have length 1, those of this ranker any (--ranker.vector-length 0)",
              flush=True)  # fmt: skip
    if "Dense" in modules:
        print("the encoder's Dense layer is left out; jobs.convert_model keeps it, without training",
              flush=True)  # fmt: skip


def _open_earlier(config: Config, inputs: Mapping[str, Artifact | dict[str, Any]]) -> Artifact:
    """The ranker whose run goes on. Raises BadInput where it has no training state, or is of another run."""
    from pipeline.training.checkpoint import open_with_state, require_same_run

    earlier = open_with_state(config.continue_from, "ranker", "jobs.finetune")
    fingerprints = dict[str, list[str]](guide=[])
    for name, value in inputs.items():
        reference = value.reference() if isinstance(value, Artifact) else value
        fingerprints[name] = [reference["fingerprint"]]
    require_same_run(
        earlier, config, fingerprints,
        fixed=(*fingerprints, "ranker.", "finetune."), may_change=_MAY_CHANGE,
        otherwise=f"--encoder {earlier.uri} for a new run, which starts from its encoders",
    )  # fmt: skip
    return earlier


def _require_more_steps(config: Config, steps: int, steps_done: int) -> None:
    """Raises BadInput where nothing is left to train."""
    name = "max_steps" if 0 < config.finetune.max_steps == steps else "epochs"
    value = getattr(config.finetune, name)
    require(steps > steps_done, f"finetune.{name}", value,
            f"more: that is {steps} steps, and --continue-from has {steps_done}")  # fmt: skip


def _print_validation(question_count: int, left_out: Mapping[str, int], examples: int) -> None:
    """Prints the number of validation questions, and of the examples left out, by reason."""
    if question_count:
        reasons = "".join(f"; {count:,} are not: {reason}" for reason, count in left_out.items())
        print(f"validation: {question_count:,} examples of valid/ are asked{reasons}", flush=True)
    elif examples:
        print(f"validation: none of the {examples:,} examples of valid/ has a wrong candidate, so the last "
              "weights are the result", flush=True)  # fmt: skip


def _first_texts(corpus: Artifact) -> Texts:
    from pipeline.corpora.drawn_rows import read_rows
    from pipeline.models.truncation import SAMPLED

    rows = read_rows(corpus, "train", range(min(SAMPLED, corpus.rows("train/"))))
    return [row["context"] for row in rows], [row["response"] for row in rows]


def _require_trainable(
    config: Config, task: Any, examples: int, contexts: list[list[str]], responses: list[str]
) -> None:
    """Raises BadInput for tokens that the encoder has no vector for, and for a small corpus whose contexts,
    or responses, all read the same: no wrong candidate counts then, and the loss is 0.

    (The task's class is not named here: --help would load torch with it.)
    """
    from pipeline.models.encoder import Encoder
    from pipeline.training.loop import validation_steps

    validation_steps(task, config.loop)
    ranker, encoders = task.ranker, [m for m in task.ranker.modules() if isinstance(m, Encoder)]
    sides = {
        "contexts": ranker.context_rows(contexts),
        "responses": ranker.candidate_rows(responses),
    }
    for name, rows in sides.items():
        largest = max(map(max, rows))
        for encoder in encoders:
            count = encoder.hf.get_input_embeddings().num_embeddings
            require(largest < count, "encoder", config.encoder, f"one of a single model: it has {count} "
                    f"tokens, and its tokenizer finds token {largest} in {name} of train/")  # fmt: skip
        if task.steps and len(rows) == examples and len(set(map(tuple, rows))) == 1:
            raise BadInput(f"--corpus {config.corpus}: all {name} of train/ read the same to the model; "
                           "allowed: texts that differ in the tokens that it reads, in a language of its "
                           "tokenizer")  # fmt: skip


def _print_truncation(
    ranker: Any, contexts: Sequence[Sequence[str]], responses: Sequence[str]
) -> None:
    """Prints how many of the first training texts are longer than the ranker reads."""
    from pipeline.models.truncation import truncation

    if line := truncation(ranker, contexts, responses):
        print(f"train: {line}", flush=True)


def _register(config: Config, ranker: Artifact) -> None:
    if config.register_as:
        from pipeline import tracking

        tracking.register(config.register_as, ranker, "candidate")


if __name__ == "__main__":
    program.main(Config, run, "finetune")
