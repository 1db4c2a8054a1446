"""Learns a tokenizer from the train splits of corpora."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from jobs import program
from pipeline import cost, storage
from pipeline.artifact import Artifact, folder_entries, open_artifact
from pipeline.config import NOT_IDENTITY
from pipeline.engine.draft import draft
from pipeline.training.settings import TokenizerConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """Learns a tokenizer from corpora, for an encoder that is pre-trained from scratch."""

    corpus: tuple[str, ...]
    """Corpora (of jobs.prepare_corpus)."""
    output: str = field(metadata=program.OUTPUT)
    """Folder of the tokenizer: tokenizer.json (subwords: vocabulary.json and what is known of them) and
    manifest.json."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """What is learnt."""
    dry_run: bool = field(default=False, metadata=NOT_IDENTITY)
    """Print sizes, and write nothing."""


def run(config: Config) -> program.Summary:
    corpora = {uri: open_artifact(uri, "corpus") for uri in config.corpus}
    if config.dry_run:
        from pipeline.training import tokenizer

        estimate = tokenizer.estimate(list(corpora.values()), config.tokenizer)
        return cost.show("train_tokenizer", estimate)
    inputs = {f"corpus.{number}": corpus for number, corpus in enumerate(corpora.values())}
    out = draft(config.output, "tokenizer", config, inputs)
    if isinstance(out, Artifact):
        return program.artifact_summary(out, already_there=True)

    from pipeline import tracking
    from pipeline.training import tokenizer

    with tracking.start("train_tokenizer", out) as tracked, tempfile.TemporaryDirectory() as folder:
        learnt_tokenizer = tokenizer.learn(list(corpora.values()), config.tokenizer)
        tokenizer.save(learnt_tokenizer, Path(folder))
        storage.upload(Path(folder), out.staging)
        counts = {"vocabulary": len(learnt_tokenizer)}
        artifact = out.publish(folder_entries(Path(folder)), counts, run_id=tracked.run_id)
        tracking.finish(tracked, artifact)
    return program.artifact_summary(artifact, already_there=False)


if __name__ == "__main__":
    program.main(Config, run, "train_tokenizer")
