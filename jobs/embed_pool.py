"""Candidate texts to a versioned pool that searches and services open."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jobs import cluster, program
from pipeline import storage, tracking
from pipeline.artifact import MANIFEST, Artifact, draft, open_artifact, request_of
from pipeline.config import require
from pipeline.corpora.raw import Reading
from pipeline.models.ranker import load_ranker
from pipeline.retrieval import embed
from pipeline.retrieval.embed import EmbedConfig
from pipeline.retrieval.pool import KIND, current_uri, make_current
from pipeline.shards import Actors


@dataclass(frozen=True, kw_only=True)
class Config:
    """Embeds candidate texts with a ranker into a new version of a pool and makes it CURRENT.

    The same texts and model again: nothing to do. Candidates are Parquet files (such as a corpus'
    train/ folder, with `--embed.text-column response --embed.id-column example_id`) or JSON lines.
    """

    model: str
    """A ranker (of jobs.finetune): bi or poly."""
    candidates: tuple[str, ...]
    """Files or folders with an id and a text column."""
    pools: str
    """Folder of all pools; the version becomes <pools>/<name>/<version>."""
    name: str
    """The pool's name."""
    embed: EmbedConfig = field(default_factory=EmbedConfig)
    """The texts."""
    reading: Reading = field(default_factory=Reading)
    """Damaged input."""
    resources: Actors = field(default_factory=Actors)
    """What it runs on."""

    def __post_init__(self) -> None:
        require(bool(self.name) and not set(self.name) & set("/\\ .\n"), "name", self.name,
                "a folder's name without dots, slashes and spaces")  # fmt: skip


def run(config: Config) -> program.Summary:
    model = open_artifact(config.model, "ranker")
    ranker = load_ranker(model.local())
    dimensions = ranker.dual.dimensions
    _ = ranker.config.search_attention  # refuses a model whose pools nothing could search
    found = storage.expand(config.candidates, "candidates")
    files = [file for file in found if storage.name_of(file) != MANIFEST]
    fingerprint = storage.raw_fingerprint(files, whole=True)
    source = {"uri": " ".join(config.candidates), "kind": "raw", "fingerprint": fingerprint}
    inputs: dict[str, Any] = {"model": model, "candidates": source}
    version = f"v-{request_of(KIND, config, inputs)[:12]}"
    out = draft(storage.join(config.pools, config.name, version), KIND, config, inputs)
    there = isinstance(out, Artifact)
    if isinstance(out, Artifact):
        pool = out
    else:
        with cluster.session(), tracking.start("embed_pool", out) as tracked:
            records = embed.prepare(
                out, files, model.local(), config.embed, config.resources, config.reading
            )
            counts, dropped = embed.totals(records)
            entries = [entry for record in records for entry in record["files"]]
            pool = out.publish(entries, counts, dropped, tracked.run_id, dimensions=dimensions)
            tracking.finish(tracked, pool)
    make_current(config.pools, config.name, version)
    return program.published(
        pool, there, pool=storage.join(config.pools, config.name), version=version,
        current=current_uri(config.pools, config.name),
    )  # fmt: skip


if __name__ == "__main__":
    program.main(Config, run, "embed_pool")
