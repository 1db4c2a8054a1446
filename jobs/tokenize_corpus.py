"""Turns a corpus into token ids once; pre-training reads them in every epoch."""

from __future__ import annotations

from dataclasses import dataclass, field

from jobs import program
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import NOT_IDENTITY
from pipeline.engine.draft import draft
from pipeline.models.sources import open_tokenizer
from pipeline.training.settings import TOKENS, TokenizeConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """Tokenizes the train and valid splits of a corpus."""

    corpus: str
    """A corpus (of jobs.prepare_corpus)."""
    tokenizer: str
    """A tokenizer (of jobs.train_tokenizer), any `transformers` directory with a tokenizer.json, or
    a hub id."""
    output: str = field(metadata=program.OUTPUT)
    """Folder of the tokens: train/, valid/, tokenizer/ and manifest.json."""
    tokenize: TokenizeConfig = field(default_factory=TokenizeConfig)
    """Which tokens of each example are kept."""
    dry_run: bool = field(default=False, metadata=NOT_IDENTITY)
    """Print sizes, tasks, requests and hours, measured on this machine, and write nothing."""


def run(config: Config) -> program.Summary:
    corpus = open_artifact(config.corpus, "corpus")
    source, reference = open_tokenizer(config.tokenizer)

    from jobs import cluster
    from pipeline import cost, tracking
    from pipeline.models.tokens import Tokenizer
    from pipeline.training import tokenized_corpus

    tokenized_corpus.require_train(corpus)
    if config.dry_run:
        estimate = tokenized_corpus.estimate(corpus, source, config.tokenize)
        return cost.show("tokenize_corpus", estimate)
    vocabulary = tokenized_corpus.Vocabulary.of(Tokenizer.load(source.local()), config.tokenizer)
    out = draft(config.output, TOKENS, config, {"corpus": corpus, "tokenizer": reference})
    if isinstance(out, Artifact):
        return program.artifact_summary(out, already_there=True)
    with tracking.start("tokenize_corpus", out) as tracked, cluster.session(for_tasks=True):
        tokens = tokenized_corpus.tokenize(out, corpus, source, vocabulary, config.tokenize)
        tokenized = out.publish(run_id=tracked.run_id, **tokens)
        tracking.finish(tracked, tokenized)
    return program.artifact_summary(tokenized, already_there=False)


if __name__ == "__main__":
    program.main(Config, run, "tokenize_corpus")
