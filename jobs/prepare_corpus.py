"""Raw public dumps to a corpus: Parquet examples in a folder per split."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

from jobs import cluster, program
from pipeline import storage, tracking
from pipeline.artifact import Artifact, draft, sum_counts
from pipeline.config import BadInput
from pipeline.corpora import convai2, reddit, wikipedia
from pipeline.corpora.raw import Reading


@dataclass(frozen=True, kw_only=True)
class Config:
    """Turns raw dump files into a corpus of (context, response) examples.

    Formats: reddit (RC_* dump files), convai2 (ParlAI's text), wikipedia (WikiExtractor's output).
    """

    corpus: Literal["reddit", "convai2", "wikipedia"]
    """The format of the input."""
    input: tuple[str, ...]
    """Files or folders: local, s3://, gs://, …; .zst, .bz2, .gz, .xz or plain."""
    output: str
    """Folder of the corpus: train/, valid/, test/ and manifest.json."""
    redact: Literal["on", "off"] = "on"
    """Replace e-mail addresses, u/names, IPs and phone numbers by tags (reddit)."""
    authors: Literal["hash", "plain"] = "hash"
    """Author names as keyed hashes, or as they are (reddit). The key is POLYRANK_AUTHOR_SALT."""
    reading: Reading = field(default_factory=Reading)
    """Damaged input."""
    reddit: reddit.Rules = field(default_factory=reddit.Rules)
    """Rules for reddit."""
    wikipedia: wikipedia.Options = field(default_factory=wikipedia.Options)
    """Options for wikipedia."""


def run(config: Config) -> program.Summary:
    files = storage.expand(config.input)
    fingerprint = storage.raw_fingerprint(files)
    source = {"uri": " ".join(config.input), "kind": "raw", "fingerprint": fingerprint}
    out = draft(config.output, "corpus", config, {"input": source})
    if isinstance(out, Artifact):
        return program.published(out, already_there=True)
    with cluster.session(), tracking.start("prepare_corpus", out) as tracked:
        records: list[dict[str, Any]]
        if config.corpus == "reddit":
            # Without a key of its own a corpus gets one that only who has the dump can know.
            salt = os.environ.get("POLYRANK_AUTHOR_SALT") or fingerprint
            privacy = reddit.Privacy(redact=config.redact, authors=config.authors, salt=salt)
            records = reddit.prepare(out, files, config.reddit, config.reading, privacy)
        elif config.corpus == "convai2":
            records = convai2.prepare(out, files, config.reading)
        else:
            records = wikipedia.prepare(out, files, config.wikipedia, config.reading)
        counts = sum_counts(records, "counts")
        if not counts.get("examples"):
            dropped = sum_counts(records, "dropped")
            raise BadInput(f"--input: {counts['records']:,} records gave no example ({dropped})")
        corpus = out.publish(
            [file for record in records for file in record.get("files", ())],
            counts,
            sum_counts(records, "dropped"),
            tracked.run_id,
        )
        tracking.finish(tracked, corpus)
    return program.published(corpus, already_there=False)


if __name__ == "__main__":
    program.main(Config, run, "prepare_corpus")
