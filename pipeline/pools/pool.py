"""A candidate pool: `<pools>/<name>/<version>/`, and `<pools>/<name>/CURRENT` names a version.

    manifest.json                 dtype, dimensions, statistics of the shards, checksums of all files
    rows/part-00000.arrow         id, text, content_hash, the columns kept to filter by, known contexts
    vectors/, norms/              `vector_format`
    rotation.npy, sketch/, sketch_norms/    `sketch`
    neighbours/                   with `--embed.neighbours true`: `approximate`

A version never changes. Its matrices and its rows are memory-mapped, so that processes of one node
share them.
"""

from __future__ import annotations

import functools
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from pipeline import checksums, storage
from pipeline.arrays import Floats, Ints
from pipeline.artifact import Artifact, read_artifact
from pipeline.checksums import Check
from pipeline.config import BadInput
from pipeline.pools.shard import (
    KNOWN_CONTEXTS,
    ROWS,
    PoolPart,
    Shard,
    load_matrix,
    open_shard,
    paths_of_shards,
)
from pipeline.pools.sketch import is_orthonormal
from pipeline.pools.vector_format import (
    FILE_DTYPES,
    LENGTH,
    SCALE,
    DeviceDtype,
    Dtype,
    Layer,
    decode,
)
from pipeline.storage import node_cache

_FEW_NUMBERS = 1 << 24  # 64 MiB in float32: 43,000 rows of 384 dimensions

if TYPE_CHECKING:
    import torch

    from pipeline.pools.device_rows import DeviceRows

CURRENT = "CURRENT"
KIND = "pool"
ROTATION = "rotation.npy"
Method = Literal["auto", "exact", "pruned", "approximate"]
"""How a pool is searched. It stands here, so that jobs need no torch to name it."""
RankingT = TypeVar("RankingT", covariant=True)


class Model(Protocol):
    """A ranker, loaded or not."""

    @property
    def uri(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...


class Searcher(Protocol[RankingT]):
    """A loaded ranker."""

    def search(self, pool: Pool, *arguments: Any, **options: Any) -> RankingT: ...


class PoolRow(NamedTuple):
    """A candidate."""

    id: str
    text: str


class Canary(NamedTuple):
    """A candidate with what its vector is made from."""

    id: str
    text: str
    known_contexts: list[list[str]]
    vector_D: Floats


@dataclass(frozen=True, repr=False)
class Pool:
    """An open version of a pool."""

    artifact: Artifact
    name: str
    version: str
    shards: tuple[Shard, ...]
    rotation: Floats
    """[D, K] float64, of the sketches."""
    ends: tuple[int, ...]
    """The place in the pool behind each shard's last row."""
    folder: Path | None = None
    """The folder of the pool's files on this node."""
    on_device: DeviceRows | None = None
    """The vectors in a device's memory, which are searched there."""

    @classmethod
    def open(
        cls,
        uri: str | Path,
        check: Check = "once",
        part: PoolPart | None = None,
        device: str | torch.device = "",
        device_dtype: DeviceDtype = "bfloat16",
    ) -> Pool:
        """Opens `<pools>/<name>`, as CURRENT says, or one version of it.

        `check`: when checksums are checked (`checksums`); sizes and shapes always are. `part`:
        opens only this part of the rows, which needs only the files that hold it; places then begin at its
        first row. `device`: copies the vectors to this device, such as cuda or cuda:1, which then searches
        them; vectors that do not fit stay in the files, and a line of the log says how much memory they
        need. `device_dtype`: float32 takes twice the memory of bfloat16. The answers are the same.

        Raises BadInput if there is no pool, if a file does not fit its manifest, or if this machine does not
        have the device.
        """
        if device:
            from pipeline.pools import device_rows  # torch takes seconds

            place = device_rows.device_named(str(device))
        uri = storage.absolute(str(uri).rstrip("/"))
        if storage.exists(storage.join(uri, CURRENT)):
            uri = storage.join(uri, version_in(storage.join(uri, CURRENT)))
        artifact = read_artifact(uri, KIND)
        if artifact.manifest.get("dtype") not in FILE_DTYPES:
            raise BadInput(f"{uri}: dtype is {artifact.manifest.get('dtype')!r}; allowed: "
                           f"{', '.join(FILE_DTYPES)}; embed the pool again")  # fmt: skip
        part = part or PoolPart(0, 1)
        parts = part.rows_of_files(artifact)
        only = None if part.count == 1 else [ROTATION, *paths_of_shards(artifact, list(parts))]
        folder = artifact.local(only)
        try:
            pool = cls._open(artifact, folder, parts, check, only)
            if not device:
                return pool
            held = device_rows.load(
                uri, pool.shards, pool.dtype, pool.dimensions, place, device_dtype
            )
            return replace(pool, on_device=held)
        except BaseException:
            node_cache.release(folder)
            raise

    @classmethod
    def _open(
        cls,
        artifact: Artifact,
        folder: Path,
        parts: dict[str, slice],
        check: Check,
        only: Sequence[str] | None,
    ) -> Pool:
        uri = artifact.uri
        rotation = load_matrix(
            folder / ROTATION, np.float64, (artifact.manifest["dimensions"], None)
        )
        if not is_orthonormal(rotation):
            raise BadInput(f"{folder / ROTATION}: damaged (no rotation)")
        columns = rotation.shape[1]
        with checksums.checking(uri, artifact.manifest, folder, check, only):
            full_shards = [open_shard(folder, name, artifact.manifest, columns) for name in parts]
        shards = tuple(s.part(rows) for s, rows in zip(full_shards, parts.values(), strict=True))
        ends = tuple(np.cumsum([len(shard) for shard in shards], dtype=np.int64).tolist())
        name = storage.name_of(storage.parent_of(uri))
        return cls(artifact, name, storage.name_of(uri), shards, rotation, ends, folder)

    def close(self) -> None:
        """Lets the node's cache remove the files, if they are a copy there."""
        if self.folder is not None:
            node_cache.release(self.folder)

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __repr__(self) -> str:
        numbers = f"{len(self):,} candidates, {self.dimensions} dimensions, {self.dtype}"
        return f"Pool({self.artifact.uri!r}, {numbers})"

    @property
    def dimensions(self) -> int:
        return int(self.artifact.manifest["dimensions"])

    @functools.cached_property
    def longest(self) -> float:
        """The length of the longest vector."""
        return max(
            (float(s.vectors.norms[LENGTH].max(initial=0)) for s in self.shards), default=0.0
        )

    @functools.cached_property
    def multiplied_layers(self) -> list[Layer]:
        """The vectors as `scores` multiplies them: float32 in memory where they are few, else the files."""
        layers = [shard.vectors for shard in self.shards]
        if not 0 < len(self) * self.dimensions <= _FEW_NUMBERS:
            return layers
        matrix_ND = np.concatenate([decode(layer) for layer in layers])
        norms = np.concatenate([layer.norms for layer in layers], axis=1)
        norms[SCALE] = 1
        return [Layer(matrix_ND, norms)]

    @property
    def dtype(self) -> Dtype:
        return self.artifact.manifest["dtype"]  # type: ignore[no-any-return]

    @functools.cached_property
    def neighbours(self) -> Any:
        """FAISS' index of all rows, by place; its parts, in this process' memory, are searched at once.

        Raises BadInput where the pool has none, where its files have been removed meanwhile, and for a part
        of a pool, whose rows have other places.
        """
        if len(self) != self.artifact.rows("rows/"):
            raise BadInput(f"{self.artifact.uri}: a part of a pool has no index of neighbours; search it by "
                           "another method")  # fmt: skip
        files = self.artifact.files("neighbours/")
        if not files:
            raise BadInput(f"{self.artifact.uri}: has no index of neighbours; embed the pool again with "
                           "--embed.neighbours true, or search by another method")  # fmt: skip
        import faiss

        assert self.folder is not None
        folder = self.folder / "neighbours"
        index_class: Any = faiss.IndexShards  # its types know another constructor
        index = index_class(self.dimensions, True, True)
        for file in files:
            path = folder / storage.name_of(file)
            if not path.exists():
                raise BadInput(f"{path}: has been removed since the pool was opened; open it again")
            index.add_shard(faiss.read_index(str(path)))
        return index

    @property
    def rows(self) -> tuple[pa.Table, ...]:
        """The shards' rows."""
        return tuple(shard.rows for shard in self.shards)

    @property
    def filter_columns(self) -> list[str]:
        """The columns that the pool keeps to filter by."""
        names = self.rows[0].column_names if self.shards else []
        return [name for name in names if name not in (*ROWS.names, KNOWN_CONTEXTS)]

    @property
    def model_fingerprint(self) -> str:
        """The model that embedded the pool."""
        return str(self.artifact.manifest["inputs"]["model"]["fingerprint"])

    @property
    def precision(self) -> str:
        return precision_of(self.artifact)

    def search(self, ranker: Searcher[RankingT], *arguments: Any, **options: Any) -> RankingT:
        """`ranker.search` of this pool, with the same further arguments."""
        return ranker.search(self, *arguments, **options)

    def require_model(self, model: Model) -> None:
        """Raises BadInput unless `model` embedded the pool: vectors of two models do not compare."""
        if self.model_fingerprint != model.fingerprint:
            raise BadInput(f"{self.artifact.uri}: embedded by the model {self.model_fingerprint}, not by "
                           f"{model.uri} ({model.fingerprint}); embed the pool again")  # fmt: skip

    def row(self, place: int) -> PoolRow:
        """The candidate at a place from 0 to len - 1."""
        shard = bisect_right(self.ends, place)
        rows, number = self.shards[shard].rows, place - (self.ends[shard - 1] if shard else 0)
        return PoolRow(rows["id"][number].as_py(), rows["text"][number].as_py())

    def canaries(self, count: int) -> list[Canary]:
        """So many candidates, spread over the pool; all, if it has no more."""
        places = np.unique(np.linspace(0, len(self) - 1, min(len(self), count)).astype(np.int64))
        has_contexts = self.shards and KNOWN_CONTEXTS in self.rows[0].column_names
        columns = ("id", "text", *((KNOWN_CONTEXTS,) if has_contexts else ()))
        return [
            Canary(row["id"], row["text"], json.loads(row.get(KNOWN_CONTEXTS, "[]")), vector_D)
            for row, vector_D in zip(
                self.rows_at(places, columns), self.vectors_at(places), strict=True
            )
        ]

    def rows_at(
        self, places: Ints, columns: Sequence[str] = ("id", "text")
    ) -> list[dict[str, str]]:
        """Some columns of the candidates at places in any order."""
        order = np.argsort(places)
        rows: list[dict[str, str]] = []
        for shard, shard_places in self._split_by_shard(places[order]):
            rows += shard.rows.select(columns).take(pa.array(shard_places)).to_pylist()
        return [rows[place] for place in np.argsort(order).tolist()]

    def vectors_at(self, places: Ints) -> Floats:
        """The vectors [N, D] at N ascending places, float32."""
        if not len(places):
            return np.empty((0, self.dimensions), np.float32)
        return decode(self.layer_at(places, "vectors"))

    def rows_and_vectors_at(self, places: Ints) -> tuple[pa.Table, Floats]:
        """The rows and the vectors [N, D] at N ascending places, one at least."""
        parts = [
            s.rows.take(pa.array(shard_places)) for s, shard_places in self._split_by_shard(places)
        ]
        return pa.concat_tables(parts), self.vectors_at(places)

    def layer_at(self, places: Ints, name: str) -> Layer:
        """The rows of `vectors` or of `sketch` at ascending places, one at least."""
        if len(self.shards) == 1:
            layer: Layer = getattr(self.shards[0], name)
            return layer.take(places)
        parts = [
            getattr(shard, name).take(shard_places)
            for shard, shard_places in self._split_by_shard(places)
        ]
        matrices, norms = zip(*parts, strict=True)
        return Layer(np.concatenate(matrices), np.concatenate(norms, axis=1))

    def _split_by_shard(self, places: Ints) -> list[tuple[Shard, Ints]]:
        """Shards with some of these ascending places, and the places in each."""
        parts = []
        first = 0
        while first < len(places):
            number = bisect_right(self.ends, int(places[first]))
            end = int(np.searchsorted(places, self.ends[number]))
            start = self.ends[number - 1] if number else 0
            parts.append((self.shards[number], places[first:end] - start))
            first = end
        return parts


def known_contexts(rows: pa.Table) -> list[list[list[str]]]:
    """Each row's known contexts, as turns; [] where the pool has none."""
    if KNOWN_CONTEXTS not in rows.column_names:
        return []
    return [json.loads(contexts) for contexts in rows[KNOWN_CONTEXTS].to_pylist()]


def precision_of(artifact: Artifact) -> str:
    """The precision in which a pool's vectors were computed; pools of earlier versions do not say."""
    return str(artifact.manifest.get("precision", "unknown"))


def current_uri(pools: str, name: str) -> str:
    """The URI of a pool's CURRENT."""
    return storage.join(pools, name, CURRENT)


def version_in(uri: str) -> str:
    """The name in a file such as CURRENT; "": it names none. A power cut may leave it empty or full of
    zeros."""
    return storage.name_of(storage.read_bytes(uri).decode(errors="replace").strip("\0 \r\n"))


def make_current(pools: str, name: str, version: str) -> None:
    """Makes `version` the CURRENT one for all readers that open the pool from now on, in one atomic step."""
    storage.write_bytes(current_uri(pools, name), f"{version}\n".encode())


def describe(pool: Pool) -> dict[str, Any]:
    """A pool as a service describes it."""
    return {
        "name": pool.name,
        "version": pool.version,
        "candidates": len(pool),
        "dimensions": pool.dimensions,
        "precision": pool.precision,
        "created_at": pool.artifact.manifest["created_at"],
    }
