"""Vectors of builds that were killed and never finished, which a later build copies. The vectors of a version
that is not CURRENT are copied the same way.

A killed build resumes with the same input. With another input it becomes another version, with a draft of
its own, which would embed again what took hours. So it copies finished shards of other drafts. They are as
good as those of a published version, if the same model made them by the same settings and numerics.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline import storage
from pipeline.arrays import Floats, Ints
from pipeline.artifact import Artifact
from pipeline.config import digest
from pipeline.drafts import read_request, task_marks
from pipeline.files import node_cache
from pipeline.retrieval.pools.plan import SHARD_PREFIX
from pipeline.retrieval.pools.vector_format import Layer, decode

PLAN = "plan"
"""The task whose record says in what a build computes."""


@dataclass(frozen=True)
class UnfinishedShard:
    """A finished shard of a draft, or of a version that is not CURRENT."""

    folder: str
    """The URI of the draft or the version."""
    name: str
    rows: int

    @property
    def rows_file(self) -> str:
        return storage.join(self.folder, "rows", f"{self.name}.arrow")


def find_shards(
    folders: Sequence[str],
    model_fingerprint: str,
    vector_settings: Mapping[str, Any],
    numerics: Mapping[str, Any],
    min_cosine: float,
) -> list[UnfinishedShard]:
    """The finished shards of those drafts in which the same model makes the same vectors.

    `vector_settings`: the job's settings that decide a vector, by their dotted names. `numerics`: what the
    record of the draft's plan has to say of its computation. `min_cosine`: of every row that the gate has
    embedded once more. It looks at a few rows of a shard, so a draft with one lower cosine is left out whole.
    """
    shards = []
    for folder in folders:
        request = read_request(folder)
        if request.get("inputs", {}).get("model") != model_fingerprint:
            continue
        config = request.get("config", {})
        if any(config.get(name, value) != value for name, value in vector_settings.items()):
            continue
        try:
            records = {name: json.loads(data) for name, data in task_marks(folder).items()}
        except FileNotFoundError:  # a dry run holds no lock
            print(
                f"{folder}: nothing is copied from this unfinished build: another job has published or "
                "removed it meanwhile"
            )
            continue
        planned = records.get(PLAN, {})
        if any(planned.get(name) != value for name, value in numerics.items()):
            continue
        checks = [record["check"] for record in records.values() if record.get("check")]
        cosines = [check["cosine"] for check in checks if check["cosine"] is not None]
        if not all(cosine >= min_cosine for cosine in cosines):
            print(
                f"{folder}: nothing is copied from this unfinished build: the gate refused its vectors"
            )
            continue
        for name, record in sorted(records.items()):
            rows = record.get("counts", {}).get("candidates", 0)
            if name.startswith(SHARD_PREFIX) and rows:
                shards.append(UnfinishedShard(folder, name, rows))
    return shards


def shards_of_version(version: Artifact) -> list[UnfinishedShard]:
    return [
        UnfinishedShard(version.uri, Path(entry["path"]).stem, entry["rows"])
        for entry in version.manifest["files"]
        if entry["path"].startswith("rows/")
    ]


class UnfinishedVectors:
    """The rows of unfinished shards, by place among all of them; an actor holds none in memory."""

    def __init__(self, shards: Sequence[UnfinishedShard]) -> None:
        self._shards = shards
        self._ends = np.cumsum([shard.rows for shard in shards], dtype=np.int64).tolist()
        self._folders: dict[str, Path] = {}

    def at(self, places: Ints) -> tuple[pa.ChunkedArray, Floats]:
        """(texts, vectors [N, D]) at N ascending places, one at least.

        Raises OSError or ValueError where a file is gone or damaged.
        """
        chunks: list[pa.Array] = []
        parts: list[Floats] = []
        start = 0
        while start < len(places):
            number = bisect_right(self._ends, int(places[start]))
            end = int(np.searchsorted(places, self._ends[number]))
            shard_start = self._ends[number - 1] if number else 0
            texts, vectors = self._read_rows(self._shards[number], places[start:end] - shard_start)
            chunks += texts.chunks
            parts.append(vectors)
            start = end
        return pa.chunked_array(chunks, pa.string()), np.concatenate(parts)

    def _read_rows(self, shard: UnfinishedShard, places: Ints) -> tuple[pa.ChunkedArray, Floats]:
        matrix, norms = (
            np.load(
                self._local_folder(shard.folder, subfolder) / f"{shard.name}.npy",
                "r",
                allow_pickle=False,
            )
            for subfolder in ("vectors", "norms")
        )
        path = self._local_folder(shard.folder, "rows") / f"{shard.name}.arrow"
        with pa.memory_map(str(path)) as stream:
            rows = pa.ipc.open_file(stream).read_all()
            texts = rows["text"].take(pa.array(places))
        if not len(matrix) == norms.shape[1] == len(rows) == shard.rows:
            raise ValueError(f"{path}: not as many rows as the draft says")
        return texts, decode(Layer(matrix[places], norms[:, places]))

    def _local_folder(self, folder: str, subfolder: str) -> Path:
        """A local copy of a draft's folder, once per node."""
        uri = storage.join(folder, subfolder)
        if uri not in self._folders:
            names = [shard.name for shard in self._shards if shard.folder == folder]
            self._folders[uri] = node_cache.local_folder(uri, digest(names))
        return self._folders[uri]
