"""Removes duplicates, and examples that share text with evaluation sets, from a corpus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jobs import cluster, program
from pipeline import cost, storage
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import NOT_IDENTITY, BadInput
from pipeline.corpora import dedup
from pipeline.corpora.dedup import decontaminate, evaluation_sets, options
from pipeline.corpora.schema import example_files
from pipeline.engine.draft import draft
from pipeline.engine.records import sum_counts


@dataclass(frozen=True, kw_only=True)
class Config:
    """Drops duplicates, near duplicates, and examples of train that share words with evaluation sets.

    The output has the columns and splits of the input; `rejected/` shows some of what was dropped.
    """

    corpus: str
    """A corpus (of jobs.prepare_corpus)."""
    output: str = field(metadata=program.OUTPUT)
    """Folder of the cleaned corpus."""
    evaluation: tuple[str, ...] = ()
    """Evaluation sets that train must not share words with: corpora (their valid and test splits), files
    or folders of Parquet (context and response, or text), or plain text with one text a line."""
    dry_run: bool = field(default=False, metadata=NOT_IDENTITY)
    """Print sizes, tasks and requests, and write nothing."""
    dedup: options.Options = field(default_factory=options.Options)
    """Duplicates."""
    decontaminate: decontaminate.Options = field(default_factory=decontaminate.Options)
    """Words shared with evaluation sets."""


def run(config: Config) -> program.Summary:
    corpus = open_artifact(config.corpus, "corpus")
    inputs: dict[str, Any] = {"corpus": corpus}
    sets = evaluation_sets.own_sets(corpus) if config.decontaminate.own_splits else []
    for number, uri in enumerate(config.evaluation):
        evaluation_set, inputs[f"evaluation.{number}"] = evaluation_sets.open_set(uri)
        sets.append(evaluation_set)
    if config.dry_run:
        shards = example_files(corpus)
        sizes, rows = [entry["bytes"] for entry in shards], sum(entry["rows"] for entry in shards)
        evaluation_sizes = [storage.size_of(file) for one in sets for file in one.files]
        estimate = dedup.estimate(sizes, rows, config.dedup, evaluation_sizes)
        return cost.show("clean_corpus", estimate)
    out = draft(config.output, "corpus", config, inputs)
    if isinstance(out, Artifact):
        return program.artifact_summary(out, already_there=True)

    from pipeline import tracking

    with tracking.start("clean_corpus", out) as tracked, cluster.session(for_tasks=True):
        records = dedup.clean(out, corpus, sets, config.dedup, config.decontaminate)
        counts = sum_counts(record.counts for record in records)
        dropped = sum_counts(record.dropped for record in records)
        if counts.get("records.train") and not counts["examples.train"]:
            raise BadInput(f"--corpus {config.corpus}: no example of train is left ({dropped})")
        files = [file for record in records for file in record.files]
        cleaned = out.publish(files, counts, dropped, tracked.run_id)
        tracking.finish(tracked, cleaned)
    return program.artifact_summary(cleaned, already_there=False)


if __name__ == "__main__":
    program.main(Config, run, "clean_corpus")
