"""Writes the files of a pool: each shard by itself, then the index over all shards.

The rotation of the sketches comes from a sample of the finished shards' vectors. Every shard's sketch is a
task of its own, which a resumed job does not repeat.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa

from pipeline import storage
from pipeline.arrays import Floats
from pipeline.artifact import FileEntry
from pipeline.config import BadInput
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord
from pipeline.engine.run import run_tasks
from pipeline.pools.candidates import arrow_file
from pipeline.pools.pool import ROTATION
from pipeline.pools.sketch import MISSED, fit_rotation, sketch
from pipeline.pools.vector_format import LENGTH, Layer, decode
from pipeline.storage import npy
from pipeline.storage.prefetch import map_prefetched

# The rotation of 65,536 rows misses as much of a pool as that of all its rows does.
_SAMPLE_SHARDS, _SAMPLE_ROWS = 64, 1024

# An index over so many shards, whose product quantizer has learnt from so many rows.
_PART_SHARDS, _LEAST_LEARNT, _LEARNT = 16, 1024, 8192
_BITS, _ROUNDS = 4, 10


class ShardStatistics(TypedDict):
    """The entry of a shard in a pool's manifest."""

    shard: str
    rows: int
    lengths: list[float]
    """The least, the mean and the greatest length of its vectors."""
    missed_by_sketch: float
    """The mean share of a vector's length that the sketch does not have."""


@dataclass(frozen=True, kw_only=True)
class SketchRecord(TaskRecord):
    """The sketch of one shard."""

    statistics: ShardStatistics


def require_faiss() -> None:
    """Raises BadInput if FAISS is not installed."""
    if importlib.util.find_spec("faiss") is None:
        raise BadInput("embed.neighbours: needs the package faiss-cpu; pip install -e '.[faiss]'")


def write_shard(draft: Draft, name: str, rows: pa.Table, vectors: Layer) -> list[FileEntry]:
    """Writes a shard's rows and vectors; returns the files' entries for the manifest."""
    files = {
        f"rows/{name}.arrow": arrow_file(rows),
        f"vectors/{name}.npy": npy.to_bytes(vectors.matrix),
        f"norms/{name}.npy": npy.to_bytes(vectors.norms),
    }
    return _write_together(draft, files, len(rows))


def _write_together(
    draft: Draft, files: Mapping[str, bytes | pa.Buffer], rows: int
) -> list[FileEntry]:
    """Writes the files at the same time, because an object store answers each after 20 to 100 ms."""
    return list(map_prefetched(lambda name: draft.write_file(name, files[name], rows), files))


def read_shard(draft: Draft, name: str) -> tuple[pa.Table, Layer]:
    """(rows, vectors) of a finished shard."""
    data = storage.read_bytes(draft.path("rows", f"{name}.arrow"))
    rows = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    return rows, _read_vectors(draft, name)[0]


def index(
    draft: Draft, names: Sequence[str], dimensions: int, neighbours: bool = False
) -> tuple[list[FileEntry], list[ShardStatistics]]:
    """Sketches the finished shards; returns (entries of the files, statistics of the shards).

    `neighbours`: for approximate searches, too.
    """
    finished = draft.finished_tasks()
    if "rotation" in finished:
        rotation = finished.record("rotation", TaskRecord)
    else:
        entry = draft.write_file(ROTATION, npy.to_bytes(_make_rotation(draft, names, dimensions)))
        rotation = TaskRecord(files=[entry])
        draft.mark("rotation", rotation)
    tasks = {f"sketch-{name}": name for name in names}
    sketches = run_tasks(draft, tasks, _make_sketch, "sketch", SketchRecord) if tasks else []
    records: list[TaskRecord] = [rotation, *sketches]
    if neighbours:
        starts = range(0, len(names), _PART_SHARDS)
        parts = {f"neighbours-{n:05d}": names[s : s + _PART_SHARDS] for n, s in enumerate(starts)}
        records += run_tasks(draft, parts, _index_neighbours, "neighbours", TaskRecord)
    entries = [entry for record in records for entry in record.files]
    return entries, [record.statistics for record in sketches]


def _make_rotation(draft: Draft, names: Sequence[str], dimensions: int) -> Floats:
    def read_sample(name: str) -> Floats:
        layer, _ = _read_vectors(draft, name)
        return decode(layer.take(slice(None, None, -(-len(layer.matrix) // _SAMPLE_ROWS))))

    samples = map_prefetched(read_sample, names[:: -(-len(names) // _SAMPLE_SHARDS) or 1])
    return fit_rotation(np.concatenate([np.empty((0, dimensions), np.float32), *samples]))


def _make_sketch(draft: Draft, task: str, name: str) -> SketchRecord:
    layer, rotation = _read_vectors(draft, name, ROTATION)
    shard_sketch = sketch(decode(layer, np.float64), rotation)
    rows = len(shard_sketch.matrix)
    lengths = layer.norms[LENGTH].astype(np.float64)
    missed_shares = shard_sketch.norms[MISSED].astype(np.float64) / np.maximum(lengths, 1e-300)
    files = {
        f"sketch/{name}.npy": npy.to_bytes(shard_sketch.matrix),
        f"sketch_norms/{name}.npy": npy.to_bytes(shard_sketch.norms),
    }
    return SketchRecord(
        files=_write_together(draft, files, rows),
        statistics={
            "shard": name,
            "rows": rows,
            "lengths": [float(lengths.min()), float(lengths.mean()), float(lengths.max())],
            "missed_by_sketch": float(missed_shares.mean()),
        },
    )


def _index_neighbours(draft: Draft, task: str, names: Sequence[str]) -> TaskRecord:
    import faiss

    faiss.omp_set_num_threads(1)  # the other cores have tasks of their own
    vectors_ND = np.concatenate([decode(_read_vectors(draft, name)[0]) for name in names])
    width = vectors_ND.shape[1]
    group = next(size for size in (3, 2, 1) if width % size == 0)
    index = faiss.IndexPQFastScan(width, width // group, _BITS, faiss.METRIC_INNER_PRODUCT)
    index.pq.cp.niter = _ROUNDS
    sample = vectors_ND[:: -(-len(vectors_ND) // _LEARNT)]
    index.train(np.resize(sample, (max(len(sample), _LEAST_LEARNT), width)))
    index.add(vectors_ND)
    name = task.replace("neighbours-", "neighbours/part-") + ".faiss"
    data = faiss.serialize_index(index).tobytes()
    return TaskRecord(files=[draft.write_file(name, data, len(vectors_ND))])


def _read_vectors(draft: Draft, name: str, array_file: str = "") -> tuple[Layer, Floats]:
    """(a shard's vectors, the array in `array_file`), read at the same time."""

    def load(file: str) -> Any:
        return npy.from_bytes(storage.read_bytes(draft.path(file)))

    files = [f"vectors/{name}.npy", f"norms/{name}.npy", *([array_file] if array_file else [])]
    matrix, norms, *arrays = map_prefetched(load, files)
    return Layer(matrix, norms), arrays[0] if arrays else np.empty(0, np.float32)
