"""Turns raw public dumps into a corpus: Parquet examples, in a folder per split."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from jobs import cluster, program
from pipeline import cost, progress, storage
from pipeline.artifact import Artifact
from pipeline.config import NOT_IDENTITY, BadInput, identity_with
from pipeline.corpora import published_counts, raw, reddit
from pipeline.corpora.author_key import author_key, require_author_key
from pipeline.corpora.formats import (
    amazonqa,
    convai2,
    dstc7,
    intents,
    opensubtitles,
    pairs,
    starspace,
    ubuntu,
    wikipedia,
)
from pipeline.corpora.privacy import NOT_REDACTED, Authors, Privacy
from pipeline.corpora.raw import Reading
from pipeline.engine.draft import Draft, draft
from pipeline.engine.records import TaskRecord, sum_counts
from pipeline.options.unread import read_when
from pipeline.storage import fingerprints
from pipeline.storage.prefetch import map_prefetched


def _for(format_name: str) -> Mapping[str, Any]:
    """The metadata of options that no other format reads."""
    return {**read_when({"format": (format_name,)}), **identity_with("format", format_name)}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Turns raw files, public dumps or your own CSV of pairs, into a corpus of examples.

    An example is a context and its response. Formats: reddit (RC_* dump files), convai2 (ParlAI's text,
    Xpersona's JSON), dstc7 (track 1, Ubuntu), ubuntu (V2), wikipedia (XML dumps or WikiExtractor's
    output), starspace (its articles of Wikipedia), amazonqa (McAuley's questions and answers),
    opensubtitles (raw text), banking77, clinc150, hwu64, snips (intents), pairs (your own JSON lines,
    CSV, TSV or Parquet).
    """

    ALIASES = MappingProxyType({"corpus": "format"})
    format: Literal[
        "reddit", "convai2", "dstc7", "ubuntu", "wikipedia", "starspace", "amazonqa",
        "opensubtitles", "pairs", "banking77", "clinc150", "hwu64", "snips",
    ]  # fmt: skip
    """The format of the input; `--corpus`, its earlier name, means the same."""
    input: tuple[str, ...]
    """Files or folders: local, s3://, gs://, …; .zst, .bz2, .gz, .xz or plain."""
    output: str = field(metadata=program.OUTPUT)
    """Folder of the corpus: train/, valid/, test/ and manifest.json."""
    redact: bool | None = None
    """Replace e-mail addresses, u/names, IPs and phone numbers by tags. null: in public dumps yes, in pairs
    of your own no."""
    authors: Authors = "hash"
    """How author names are stored (reddit): as keyed hashes, or as they are. The key is
    POLYRANK_AUTHOR_SALT. Without it, an output on this machine gets a random key that is kept in
    ~/.config/polyrank, and any other output is refused."""
    expect: published_counts.Expect = field(default="report", metadata=NOT_IDENTITY)
    """What to do if the number of examples is not the published one: report it, or refuse the input
    (`published`)."""
    dry_run: bool = field(default=False, metadata=NOT_IDENTITY)
    """Print sizes, tasks and requests, and write nothing."""
    reading: Reading = field(default_factory=Reading, metadata=NOT_IDENTITY)
    """How much damage in the input is tolerated."""
    reddit: reddit.Options = field(default_factory=reddit.Options, metadata=_for("reddit"))
    """Rules for reddit."""
    convai2: convai2.Options = field(default_factory=convai2.Options, metadata=_for("convai2"))
    """Options for convai2."""
    dstc7: dstc7.Options = field(default_factory=dstc7.Options, metadata=_for("dstc7"))
    """Options for dstc7."""
    ubuntu: ubuntu.Options = field(default_factory=ubuntu.Options, metadata=_for("ubuntu"))
    """Options for ubuntu."""
    wikipedia: wikipedia.Options = field(
        default_factory=wikipedia.Options, metadata=_for("wikipedia")
    )
    """Options for wikipedia."""
    starspace: starspace.Options = field(
        default_factory=starspace.Options, metadata=_for("starspace")
    )
    """Options for starspace."""
    amazonqa: amazonqa.Options = field(default_factory=amazonqa.Options, metadata=_for("amazonqa"))
    """Rules for amazonqa."""
    opensubtitles: opensubtitles.Options = field(
        default_factory=opensubtitles.Options, metadata=_for("opensubtitles")
    )
    """Rules for opensubtitles."""
    banking77: intents.Options = field(default_factory=intents.Options, metadata=_for("banking77"))
    """Rules for banking77."""
    pairs: pairs.Options = field(default_factory=pairs.Options, metadata=_for("pairs"))
    """Columns and splits of pairs."""

    def __post_init__(self) -> None:
        if self.redact is None:
            object.__setattr__(self, "redact", self.format != "pairs")

    @property
    def needs_author_key(self) -> bool:
        """Whether author names become keyed hashes."""
        return self.format == "reddit" and self.authors == "hash"

    def check_environment(self) -> None:
        """Raises BadInput where this job needs a variable that the environment lacks."""
        if self.needs_author_key:
            require_author_key(self.output)


FORMATS: dict[str, Callable[[Draft, list[str], Any, Reading, Privacy], Sequence[TaskRecord]]] = {
    "reddit": reddit.prepare,
    "convai2": convai2.prepare,
    "dstc7": dstc7.prepare,
    "ubuntu": ubuntu.prepare,
    "wikipedia": wikipedia.prepare,
    "starspace": starspace.prepare,
    "amazonqa": amazonqa.prepare,
    "opensubtitles": opensubtitles.prepare,
    "pairs": pairs.prepare,
    **{name: functools.partial(intents.prepare, corpus=name) for name in intents.CORPORA},
}


def run(config: Config) -> program.Summary:
    config.check_environment()
    files = storage.expand(config.input)
    if config.format == "pairs":
        guessed, guess = pairs.with_guessed_columns(files, config.pairs, config.reading)
        if guess:
            print(guess, file=sys.stderr, flush=True)
        config = replace(config, pairs=guessed)
        pairs.require_columns(files, config.pairs, config.reading)
    if config.dry_run:
        return cost.show("prepare_corpus", _estimate(config, files))
    stamps = fingerprints.Stamps.of(files)
    fingerprint = fingerprints.raw_fingerprint(files, input_name=_input_names(config, files))
    raw_input = {"uri": " ".join(config.input), "kind": "raw", "fingerprint": fingerprint}
    inputs: dict[str, Any] = {"input": raw_input}
    key = ""
    if config.needs_author_key:
        key = author_key(config.output)
        # Enough of the key's hash to notice another key, too little to find the key by.
        key_fingerprint = hashlib.sha256(f"polyrank {key}".encode()).hexdigest()[:6]
        inputs["author_key"] = {"uri": "", "kind": "secret", "fingerprint": key_fingerprint}
    privacy = Privacy(redact=bool(config.redact), authors=config.authors, salt=key)
    if config.format == "reddit":  # from here on nothing knows the names, so nothing can log them
        config = replace(config, reddit=config.reddit.with_name_keys(privacy))
    out = draft(config.output, "corpus", config, inputs)
    if isinstance(out, Artifact):
        published_counts.check(out.manifest.get("published", []), config.expect)
        return program.artifact_summary(out, already_there=True)

    from pipeline import tracking

    with tracking.start("prepare_corpus", out) as tracked, cluster.session(for_tasks=True):
        if not config.redact:
            print(NOT_REDACTED, file=sys.stderr, flush=True)
        options = getattr(config, config.format, None)
        records = FORMATS[config.format](out, files, options, config.reading, privacy)
        stamps.check("input", out.staging)
        counts = sum_counts(record.counts for record in records)
        if not counts.get("examples"):
            raise _no_example_refusal(out, counts["records"], records)
        sizes = published_counts.compare(config.format, files, records)
        published_counts.check(sizes, config.expect)
        notes = [note for record in records for note in record.notes]
        files_made = [file for record in records for file in record.files]
        dropped = sum_counts(record.dropped for record in records)
        corpus = out.publish(
            files_made, counts, dropped, tracked.run_id, notes=notes, published=sizes
        )
        tracking.finish(tracked, corpus)
    for line in [*notes, *published_counts.differences(sizes)]:
        print(line, file=sys.stderr)
    return program.artifact_summary(corpus, already_there=False, notes=notes, published=sizes)


def _input_names(config: Config, files: Sequence[str]) -> Callable[[str], str]:
    """What the format reads of a file's URI: its name, and of some formats also folders."""
    if config.format == "pairs":
        return pairs.input_names(files, config.pairs)
    if config.format in intents.CORPORA:
        return functools.partial(intents.input_name, corpus=config.format)
    return storage.name_of


def _no_example_refusal(out: Draft, count: int, records: Sequence[TaskRecord]) -> BadInput:
    """The refusal of input without examples; keeps of the draft only the samples of rejected records."""
    dropped = sum_counts(record.dropped for record in records)
    rejected = out.path("rejected")
    hint = f"; see {rejected}" if storage.exists(rejected) else ""
    if not hint:
        storage.delete(out.staging)
    return BadInput(f"--input: {count:,} records gave no example ({dropped}){hint}")


def _estimate(config: Config, files: Sequence[str]) -> cost.Estimate:
    asked: Iterator[int] = map(storage.size_of, files)
    if not storage.is_local(files[0]):  # each takes a request
        asked = map_prefetched(storage.size_of, files)
    sizes = list[int]()
    with progress.bar("sizes of the input", len(files), unit="file") as bar:
        for size in asked:
            sizes.append(size)
            bar.update()
    if config.format == "reddit":
        ratio, comment_bytes = raw.expansion(files[0])
        return reddit.estimate(sizes, comment_bytes, ratio, config.reddit)
    return cost.Estimate(
        input_files=len(sizes),
        input_bytes=sum(sizes),
        tasks=len(sizes),
        requests=cost.reads(sizes) + 3 * len(sizes),
    )


if __name__ == "__main__":
    program.main(Config, run, "prepare_corpus")
