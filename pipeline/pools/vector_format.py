"""The stored form of a pool's vectors, and the lengths that the bounds of a search need.

    vectors/part-00000.npy   [rows, D] float32, float16 or int8; bfloat16 as uint16, its upper half
    norms/part-00000.npy     [2, rows] float32: what a row's numbers are multiplied with; its length

A search is exact for the vectors in these files, whatever was rounded before they were written. Lengths are
those of the stored vectors, rounded up, so that bounds made of them hold.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from pipeline.arrays import Floats
from pipeline.config import BadInput

Dtype = Literal["float32", "bfloat16", "float16", "int8"]
DeviceDtype = Literal["bfloat16", "float32"]
"""What a device holds a pool's vectors in."""
# What NumPy calls the numbers in the files.
FILE_DTYPES = {"float32": "float32", "bfloat16": "uint16", "float16": "float16", "int8": "int8"}
SCALE, LENGTH = range(2)
_LARGEST = {"float32": np.inf, "bfloat16": 3.38e38, "float16": 65_504.0, "int8": 3.38e38}
_INT8 = 127
# Below, float32 has fewer bits.
_SMALLEST = np.float32(2.0**-118)


class Layer(NamedTuple):
    """Rows as a pool keeps them, or as a sketch of them does."""

    matrix: np.ndarray[Any, Any]
    """[N, K]"""
    norms: Floats
    """[2 or more, N] float32: the rows' scales, then lengths."""

    def take(self, rows: Any) -> Layer:
        return Layer(self.matrix[rows], self.norms[:, rows])


def encode(vectors_ND: Floats, dtype: Dtype) -> Layer:
    """float32 vectors as a pool keeps them; what was decoded comes out as it was.

    Raises BadInput where a number is too large for the type.
    """
    vectors_ND = np.ascontiguousarray(vectors_ND, np.float32)
    largest = float(np.abs(vectors_ND).max(initial=0))
    if largest > _LARGEST[dtype]:
        raise BadInput(f"embed.dtype: {dtype!r} holds numbers up to {_LARGEST[dtype]:g}; a vector has "
                       f"{largest:g}; allowed: float32, bfloat16")  # fmt: skip
    scales_N = np.ones(len(vectors_ND), np.float32)
    matrix: np.ndarray[Any, Any]
    if dtype == "int8":
        matrix, scales_N = to_int8(vectors_ND)
    elif dtype == "bfloat16":
        bits = vectors_ND.view(np.uint32)
        matrix = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to even at a tie
    else:
        matrix = vectors_ND.astype(dtype)
    lengths_N = lengths(decode(Layer(matrix, scales_N[None]), np.float64))
    return Layer(matrix, np.stack([scales_N, lengths_N]))


def decode(layer: Layer, dtype: type[np.floating[Any]] = np.float32) -> Floats:
    """[N, D]: the vectors, exactly, in float32 or float64."""
    matrix = layer.matrix
    if matrix.dtype == np.uint16:
        return (matrix.astype(np.uint32) << 16).view(np.float32).astype(dtype, copy=False)
    if matrix.dtype == np.int8:
        return matrix.astype(dtype) * layer.norms[SCALE, :, None].astype(dtype)
    return matrix.astype(dtype)


def to_int8(rows_NK: Floats) -> tuple[np.ndarray[Any, Any], Floats]:
    """(codes [N, K] from -127 to 127, scales [N] float32); codes times scales come near the rows.

    A scale has 16 significant bits, so that its product with a code is a float32: what is decoded
    and encoded again stays as it is.
    """
    scales_N = np.abs(rows_NK).max(axis=1, initial=0).astype(np.float32) / np.float32(_INT8)
    scales_N = ((scales_N.view(np.uint32) + 0xFF) & ~np.uint32(0xFF)).view(np.float32)
    scales_N = np.where(np.isfinite(scales_N), np.maximum(scales_N, _SMALLEST), np.float32(1))
    codes_NK = np.rint(rows_NK / scales_N[:, None].astype(rows_NK.dtype))
    return np.clip(codes_NK, -_INT8, _INT8).astype(np.int8), scales_N


def lengths(rows_NK: Floats) -> Floats:
    """[N] float32: Euclidean lengths of float64 rows, rounded up; inf where float32 ends."""
    exact_N = np.sqrt(np.einsum("nk,nk->n", rows_NK, rows_NK)) * (1 + 1e-12)
    with np.errstate(over="ignore"):
        rounded_N = exact_N.astype(np.float32)
    above_N = np.nextafter(rounded_N, np.float32(np.inf))
    return np.asarray(np.where(rounded_N < exact_N, above_N, rounded_N))
