"""A pool's vectors in the memory of a device, such as a GPU: `Pool.open(uri, device="cuda")`."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline import progress
from pipeline.arrays import Floats
from pipeline.config import require
from pipeline.pools.shard import Shard
from pipeline.pools.vector_format import LENGTH, SCALE, DeviceDtype, Dtype

# A search's own: the scores of two passes (384 MiB each), places among them, and the encoder's activations.
_WORKING_MEMORY = 4 << 30
_STAGED_BYTES = 64 << 20  # of a pinned buffer, of which there are two

_log = logging.getLogger("polyrank.pools")


@dataclass(frozen=True)
class DeviceRows:
    """The rows of a pool as a device multiplies them. N rows, D dimensions."""

    matrix_ND: Tensor
    """bfloat16, float32, or the codes of an int8 pool."""
    scales_N: Tensor | None
    """float32, of an int8 pool: what the codes are multiplied with."""
    lengths_N: Floats
    """float32, not on the device: Euclidean lengths of the pool's vectors, rounded up."""
    longest: float
    is_rounded: bool
    """Whether the pool has more digits: float32 or float16 in bfloat16."""

    def __len__(self) -> int:
        return len(self.matrix_ND)

    @property
    def device(self) -> torch.device:
        return self.matrix_ND.device


def device_named(name: str) -> torch.device:
    """Raises BadInput for a device that this machine does not have."""
    kinds = ["cpu"]
    if torch.cuda.is_available():
        kinds += ["cuda", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        kinds.append("mps")
    require(name in kinds, "device", name, ", ".join(kinds))
    return torch.device(name)


def load(
    uri: str,
    shards: Sequence[Shard],
    pool_dtype: Dtype,
    dimensions: int,
    device: torch.device,
    dtype: DeviceDtype,
) -> DeviceRows | None:
    """Copies the vectors of mapped shards to a device.

    `dtype`: bfloat16, or float32, which rounds nothing but takes twice the memory. int8 stays int8, and
    bfloat16 stays bfloat16. None if they do not fit; a line of the log says how much is needed.
    """
    rows = sum(map(len, shards))
    held_dtype = _held_dtype(pool_dtype, dtype)
    is_coded = pool_dtype == "int8"
    needed = rows * (dimensions * held_dtype.itemsize + (4 if is_coded else 0))
    free = _free_bytes(device)
    if needed + _WORKING_MEMORY > free:
        _log.warning(
            "%s: its %s vectors need %.1f GB of memory on %s, beside %.1f GB for the search, and %.1f GB are "
            "free; they stay where they are, and CPUs search them",
            uri, f"{rows:,}", needed / 1e9, device, _WORKING_MEMORY / 1e9, free / 1e9,
        )  # fmt: skip
        return None
    matrix_ND = torch.empty(rows, dimensions, dtype=held_dtype, device=device)
    _fill(matrix_ND, shards, uri)
    norms = np.concatenate(
        [np.empty((2, 0), np.float32), *(s.vectors.norms[:2] for s in shards)], 1
    )
    return DeviceRows(
        matrix_ND,
        torch.from_numpy(norms[SCALE].copy()).to(device) if is_coded else None,
        norms[LENGTH].copy(),
        float(norms[LENGTH].max(initial=0)),
        is_rounded=held_dtype == torch.bfloat16 and pool_dtype != "bfloat16",
    )


def as_tensor(matrix: np.ndarray[Any, Any]) -> Tensor:
    """A pool's matrix, without a copy."""
    if matrix.dtype == np.uint16:
        return torch.from_numpy(matrix.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(matrix)


def _held_dtype(pool_dtype: Dtype, dtype: DeviceDtype) -> torch.dtype:
    if pool_dtype == "int8":
        return torch.int8
    return torch.bfloat16 if "bfloat16" in (pool_dtype, dtype) else torch.float32


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached)
    if device.type == "mps":
        return float(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    return math.inf


def _fill(matrix_ND: Tensor, shards: Sequence[Shard], uri: str) -> None:
    """While a GPU takes one pinned buffer, the next one is read from the files."""
    device = matrix_ND.device
    step = max(1, _STAGED_BYTES // (4 * max(1, matrix_ND.shape[1])))
    pieces = _pieces(shards, step)
    with progress.bar(f"{uri} to {device}", total=len(matrix_ND), unit="row") as bar:
        if device.type != "cuda":
            for start, piece in pieces:
                matrix_ND[start : start + len(piece)].copy_(as_tensor(piece))
                bar.update(len(piece))
            return
        buffer = functools.cache(  # of the files' dtype, which the first piece tells
            lambda number, dtype: torch.empty(
                step, matrix_ND.shape[1], dtype=dtype, pin_memory=True
            )
        )
        is_free = [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]
        for number, (start, piece) in enumerate(pieces):
            rows = as_tensor(piece)
            staged = buffer(number % 2, rows.dtype)[: len(rows)]
            is_free[number % 2].synchronize()
            staged.copy_(rows)
            on_device = staged.to(device, non_blocking=True)
            is_free[number % 2].record(torch.cuda.current_stream(device))
            matrix_ND[start : start + len(rows)].copy_(on_device)
            bar.update(len(rows))
        torch.cuda.synchronize(device)


def _pieces(shards: Sequence[Shard], step: int) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """(the place of its first row, rows of one shard), `step` rows at most."""
    first = 0
    for shard in shards:
        for start in range(0, len(shard), step):
            yield first + start, shard.vectors.matrix[start : start + step]
        first += len(shard)
