"""A pool's rows on disk: shards with mapped matrices and rows, and parts of a pool for several services."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from pipeline.artifact import Artifact
from pipeline.config import BadInput
from pipeline.pools.vector_format import FILE_DTYPES, Layer
from pipeline.storage import npy

ROWS = pa.schema(
    [pa.field(name, pa.string(), nullable=False) for name in ("id", "text", "content_hash")]
)
"""The columns of all pools; those kept to filter by stand behind them."""

KNOWN_CONTEXTS = "known_contexts"
"""The last column of a pool whose candidates have known contexts: in each row a JSON list of
contexts, which are lists of turns."""

_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_C.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class Shard:
    """Some of a pool's rows, in one order."""

    rows: pa.Table
    """id, text, content_hash and more columns"""
    vectors: Layer
    sketch: Layer

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def part(self, rows: slice) -> Shard:
        """A stretch of the rows."""
        if rows == slice(0, len(self)):
            return self
        table = self.rows.slice(rows.start, rows.stop - rows.start)
        return Shard(table, self.vectors.take(rows), self.sketch.take(rows))


@dataclass(frozen=True)
class PoolPart:
    """One of `count` parts of a pool's rows, which are equal up to one row and follow each other."""

    number: int
    """The part's number, from 0."""
    count: int

    def rows(self, total: int) -> slice:
        """The rows of this part, of so many in total."""
        return slice(total * self.number // self.count, total * (self.number + 1) // self.count)

    def rows_of_files(self, artifact: Artifact) -> dict[str, slice]:
        """The names of a pool's files that hold rows of this part, and which of the file's rows."""
        part_rows, rows_by_file = self.rows(artifact.rows("rows/")), dict[str, slice]()
        file_start = 0
        for entry in artifact.manifest["files"]:
            if not entry["path"].startswith("rows/"):
                continue
            start = max(part_rows.start - file_start, 0)
            stop = min(part_rows.stop - file_start, entry["rows"])
            if start < stop or self.count == 1:
                rows_by_file[Path(entry["path"]).stem] = slice(start, stop)
            file_start += entry["rows"]
        return rows_by_file


def paths_of_shards(artifact: Artifact, names: Sequence[str]) -> list[str]:
    """The paths of the files of some shards."""
    folders = ("rows", "vectors", "norms", "sketch", "sketch_norms")
    shard_files = {(folder, name) for folder in folders for name in names}
    paths = (Path(path) for path in artifact.paths())
    return [str(path) for path in paths if (str(path.parent), path.stem) in shard_files]


def open_shard(folder: Path, name: str, manifest: dict[str, Any], columns: int) -> Shard:
    """Maps a shard's files. `columns`: of the sketch. Raises BadInput where one is damaged.

    It keeps 5 maps and no descriptor: 100 million rows are 6,104 shards, and a process may have 65,530 maps
    but often only 1,024 descriptors.
    """
    path = folder / f"rows/{name}.arrow"
    with _damage_named(path), path.open("rb", buffering=0) as file:
        rows = pa.ipc.open_file(pa.py_buffer(_map(file))).read_all()  # the rows keep the map
    layers = []
    for layer, dtype, shape in (
        ("vectors", FILE_DTYPES[manifest["dtype"]], (rows.num_rows, manifest["dimensions"])),
        ("norms", "float32", (2, rows.num_rows)),
        ("sketch", "int8", (rows.num_rows, columns)),
        ("sketch_norms", "float32", (4, rows.num_rows)),
    ):
        layers.append(load_matrix(folder / f"{layer}/{name}.npy", dtype, shape))
    return Shard(rows, Layer(*layers[:2]), Layer(*layers[2:]))


def load_matrix(path: Path, dtype: Any, shape: tuple[int, int | None]) -> np.ndarray[Any, Any]:
    """A mapped matrix; what is written to it stays in this process.

    Raises BadInput where it is none, or of another dtype or shape.
    """
    with _damage_named(path), path.open("rb", buffering=0) as file:
        file_shape, is_fortran, file_dtype, start = npy.read_header(file.read(npy.HEADER_BYTES))
        matrix: np.ndarray[Any, Any] = np.frombuffer(
            _map(file), file_dtype, math.prod(file_shape), start
        )
        matrix = matrix.reshape(file_shape, order="F" if is_fortran else "C")
    rows, width = shape
    expected_shape = (rows, matrix.shape[-1] if width is None else width)
    if matrix.shape != expected_shape or matrix.dtype != dtype:
        raise BadInput(f"{path}: {matrix.dtype} {matrix.shape}; the manifest and the rows' file say "
                       f"{np.dtype(dtype)} {expected_shape}")  # fmt: skip
    return matrix


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Raises BadInput for a damaged file. An error of the system, such as too many open files, has a number
    and stays as it is."""
    try:
        yield
    except (ValueError, OSError) as error:  # pyarrow's are among them
        if isinstance(error, OSError) and error.errno:
            raise
        raise BadInput(f"{path}: damaged ({str(error).splitlines()[0]})") from None


def _map(file: IO[bytes]) -> memoryview:
    """The file's bytes, mapped until nothing refers to them. Torch takes no array that is read-only, so they
    can be written to: that stays in this process.

    Python's own maps keep a descriptor each (`trackfd=False` needs Python 3.13).
    """
    size = os.fstat(file.fileno()).st_size
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _C.mmap(None, size, access, mmap.MAP_PRIVATE, file.fileno(), 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), file.name)
    mapped = (ctypes.c_ubyte * size).from_address(address)
    # At the end of the process other threads may still read it.
    weakref.finalize(mapped, _C.munmap, address, size).atexit = False
    return memoryview(mapped)
