"""An encoder from scratch: masked language model and next utterance (or sentence)."""

from __future__ import annotations

from dataclasses import dataclass, field

from jobs import cluster, program
from pipeline import tracking
from pipeline.artifact import Artifact, draft, open_artifact
from pipeline.config import NOT_IDENTITY
from pipeline.models.transformer import Shape
from pipeline.training import launch
from pipeline.training.loop import validation_steps
from pipeline.training.pretraining import PretrainConfig, Pretraining
from pipeline.training.settings import LoopConfig, Workers


@dataclass(frozen=True, kw_only=True)
class Config:
    """Pre-trains an encoder on pairs of a corpus: MLM + NUP (Reddit), MLM + NSP (Wikipedia pairs)."""

    corpus: str
    """A corpus (of jobs.prepare_corpus)."""
    tokenizer: str
    """A tokenizer (of jobs.train_tokenizer)."""
    output: str = field(metadata=NOT_IDENTITY)
    """Folder of the encoder: a plain `transformers` directory and manifest.json."""
    encoder: Shape = field(default_factory=Shape)
    """The model."""
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    """The task."""
    loop: LoopConfig = field(
        default_factory=lambda: LoopConfig(
            learning_rate=2e-4, schedule="inverse_sqrt", weight_decay=0.0, betas=(0.9, 0.98)
        )
    )
    """The optimisation; the paper's by default."""
    resources: Workers = field(default_factory=Workers, metadata=NOT_IDENTITY)
    """What it runs on."""


def run(config: Config) -> program.Summary:
    corpus = open_artifact(config.corpus, "corpus")
    tokenizer = open_artifact(config.tokenizer, "tokenizer")
    recipe = Pretraining(corpus, tokenizer, config.encoder, config.pretrain, config.loop)
    task = recipe.build(0, config.resources.workers)  # refuses what does not fit, before the draft
    validation_steps(task, config.loop)
    out = draft(config.output, "encoder", config, {"corpus": corpus, "tokenizer": tokenizer})
    if isinstance(out, Artifact):
        return program.published(out, already_there=True)
    with cluster.session(), tracking.start("pretrain", out) as tracked:
        trained = launch.fit(
            recipe, config.loop, task.steps, config.resources, out, tracked, "pretrain"
        )
        metrics = trained.metrics
        parameters = sum(value.numel() for value in task.module.parameters())
        counts = {"steps": task.steps, "parameters": parameters}
        files = launch.collect_model(out)
        encoder = out.publish(files, counts, run_id=tracked.run_id, metrics=metrics)
        tracking.finish(tracked, encoder)
    return program.published(encoder, already_there=False, metrics=metrics)


if __name__ == "__main__":
    program.main(Config, run, "pretrain")
