"""A candidate pool: `<pools>/<name>/<version>/`, and `<pools>/<name>/CURRENT` names a version.

A version never changes. Its matrix and its rows are memory-mapped, so that processes of one node
share them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipeline import storage
from pipeline.arrays import Floats, Ints
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import BadInput

CURRENT = "CURRENT"
KIND = "pool"


class Row(NamedTuple):
    """A candidate."""

    id: str
    text: str


@dataclass(frozen=True)
class Pool:
    """An open version of a pool."""

    artifact: Artifact
    name: str
    version: str
    vectors: tuple[Floats, ...]
    """Shards of the matrix, [n, D] each, float32."""
    rows: tuple[pa.Table, ...]
    """The same shards' id, text and content_hash."""
    ends: tuple[int, ...]
    """Where each shard ends in the pool."""

    @classmethod
    def open(cls, uri: str) -> Pool:
        """Opens `<pools>/<name>`, as CURRENT says, or one version of it.

        Raises BadInput where there is none, or where a file is not what the manifest says.
        """
        uri = storage.absolute(uri.rstrip("/"))
        if storage.exists(storage.join(uri, CURRENT)):
            version = storage.read_bytes(storage.join(uri, CURRENT)).decode().strip()
            uri = storage.join(uri, version)
        artifact = open_artifact(uri, KIND)
        folder = artifact.local()
        vectors, rows = [], []
        for entry in artifact.manifest["files"]:
            path = folder / entry["path"]
            if not path.exists() or path.stat().st_size != entry["bytes"]:
                raise BadInput(f"{path}: not the {entry['bytes']:,} bytes that the manifest names")
            try:
                if entry["path"].startswith("vectors/"):
                    vectors.append(np.load(path, mmap_mode="r", allow_pickle=False))
                else:
                    rows.append(pa.ipc.open_file(pa.memory_map(str(path))).read_all())
            except (ValueError, OSError) as error:  # pyarrow's are among them
                raise BadInput(f"{path}: damaged ({str(error).splitlines()[0]})") from None
        for matrix, table in zip(vectors, rows, strict=True):
            if matrix.shape != (table.num_rows, artifact.manifest["dimensions"]):
                raise BadInput(f"{uri}: {matrix.shape} vectors for {table.num_rows} rows of "
                               f"{artifact.manifest['dimensions']} dimensions")  # fmt: skip
        ends = tuple(np.cumsum([table.num_rows for table in rows]).tolist())
        name = storage.name_of(uri[: -len(storage.name_of(uri)) - 1])
        return cls(artifact, name, storage.name_of(uri), tuple(vectors), tuple(rows), ends)

    def __len__(self) -> int:
        return self.ends[-1]

    @property
    def dimensions(self) -> int:
        return int(self.artifact.manifest["dimensions"])

    @property
    def model_fingerprint(self) -> str:
        """The model that embedded the pool."""
        return str(self.artifact.manifest["inputs"]["model"]["fingerprint"])

    def require_model(self, model: Artifact) -> None:
        """Raises BadInput unless `model` embedded the pool: vectors of two models do not compare."""
        if self.model_fingerprint != model.fingerprint:
            raise BadInput(f"{self.artifact.uri}: embedded by the model {self.model_fingerprint}, not by "
                           f"{model.uri} ({model.fingerprint}); embed the pool again")  # fmt: skip

    def row(self, place: int) -> Row:
        """The candidate at a place from 0 to len - 1."""
        shard = bisect_right(self.ends, place)
        at = place - (self.ends[shard - 1] if shard else 0)
        table = self.rows[shard]
        return Row(table["id"][at].as_py(), table["text"][at].as_py())

    def vectors_at(self, places: Ints) -> Floats:
        """The vectors [N, D] at N ascending places."""
        parts = np.split(places, np.searchsorted(places, self.ends[:-1]))
        starts = (0, *self.ends[:-1])
        found = [m[p - s] for m, p, s in zip(self.vectors, parts, starts, strict=True)]
        return np.concatenate(found)


def current_uri(pools: str, name: str) -> str:
    """Where a pool's CURRENT lies."""
    return storage.join(pools, name, CURRENT)


def make_current(pools: str, name: str, version: str) -> None:
    """Lets readers that open the pool from now on have `version`; one atomic step."""
    storage.write_bytes(current_uri(pools, name), f"{version}\n".encode())


def describe(pool: Pool) -> dict[str, Any]:
    """What a service says about a pool."""
    return {
        "name": pool.name,
        "version": pool.version,
        "candidates": len(pool),
        "dimensions": pool.dimensions,
        "created_at": pool.artifact.manifest["created_at"],
    }
