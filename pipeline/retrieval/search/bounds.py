"""Upper bounds of the products of rows and context vectors, from cheap matrix products, proved.

For a row c and a context vector y that lies near a centre v

    c · y = c · v + c · (y - v) ≤ c · v + |c| |y - v|                        (Cauchy-Schwarz)

so that a context's many vectors cost a few centres, and no more than those has to be multiplied exactly:
v is whatever low-precision vector is multiplied, and |y - v|, taken in float64, holds its rounding too.
What the product itself may be off is bounded by the lengths as well, with u the unit roundoff:

    rounding a row to bfloat16       u |c| |v|             u = 2⁻⁸; a row of bfloat16 or int8 is exact
    adding K products in float32     2 K u |c| |v|         u = 2⁻²⁴, any order (Higham, Accuracy and
                                                           Stability, 3.1), twice for other roundings
    rounding the sum to bfloat16     u |sum|               u = 2⁻⁸
    numbers below 2⁻¹²⁶ taken for 0  2⁻¹²⁶ (√K (|c| + |v|) + 2 K)

A product of int8 codes is exact, but what it is multiplied with may be as tiny. A bound is evaluated in
float32 itself; `_SAFETY` of all that is in it covers that.

Axes: N rows, K numbers of a row, Q contexts, M vectors of a context, G centres, E lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist
from torch import Tensor

from pipeline.arrays import Floats, Ints
from pipeline.models.precision import use_bf16
from pipeline.retrieval.pools.sketch import ORTHONORMAL
from pipeline.retrieval.pools.vector_format import LENGTH, SCALE, Dtype, Layer, to_int8

_BF16, _FLOAT32 = 2.0**-8, 2.0**-24
_SAFETY = 16 * _FLOAT32
_TINY = 2.0**-126
# Where products could come near the end of float32's range, a bound is infinite.
_LARGE = 2.0**100
# A product with fewer columns takes no less time (bfloat16, AMX: 1 column twice that of 16).
_LEAST_COLUMNS = 16
_CENTRE_STEPS = 8
# Contexts from which on it pays to compare whole columns.
_LANES = 8
# Rows multiplied at once, and products: what is a core's own cache is best used by.
_BLOCK_ROWS, _BLOCK_PRODUCTS = {torch.int8: 4096, torch.bfloat16: 8192}, 1 << 19

# bfloat16 rows a core copies into its cache where it has no AMX (`has_amx`).
_COPIED_ROWS = 3072

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Columns:
    """The factors of a layer's rows that give their bounds for some contexts."""

    matrix_KC: Tensor
    """C = G · Q columns, bfloat16, float32, float64 or int8: the first centre of each context, the
    second of each, …"""
    contexts: int
    scales_Q: Tensor
    """int8: the factor of the products, besides the row's own scale."""
    weights_QE: Tensor
    """The factors of the rows' lengths."""
    floors_Q: Tensor


def vector_columns(
    contexts: Sequence[Floats], pool_dtype: Dtype, longest: float, centres: int
) -> Columns:
    """Columns for the vectors of a pool. `contexts`: [M, D] float64 each; `longest`: its longest row."""
    dtype, rounding_error = "float64", 0.0
    if pool_dtype == "int8":
        dtype = "int8"
    elif use_bf16(torch.device("cpu")):
        dtype, rounding_error = "bfloat16", 0.0 if pool_dtype == "bfloat16" else _BF16
    elif torch.get_float32_matmul_precision() == "highest":
        dtype = "float32"
    return _columns(contexts, longest, centres, dtype, rounding_error)


def sketch_columns(
    contexts: Sequence[Floats], rotation_DK: Floats, longest: float, centres: int
) -> Columns:
    """Columns for the sketch of a pool: codes s q, what they miss of R^T c, and the rest of c.

    With z = R^T y:  c · y = s q · z + (R^T c - s q) · z + (c - R R^T c) · (y - R z)
                           ≤ s q · v + |s q| |z - v| + |R^T c - s q| |z| + |c - R R^T c| |y - R z|
    and what R is off from orthonormal adds `ORTHONORMAL` |c| |y| twice at most.
    """
    rotation = torch.from_numpy(rotation_DK)

    def rotate(context_MD: Floats) -> tuple[Floats, Floats]:
        vectors_MD = torch.from_numpy(context_MD)
        rotated_MK = vectors_MD @ rotation
        return rotated_MK.numpy(), (vectors_MD - rotated_MK @ rotation.T).numpy()

    rotated, missed = zip(*in_parallel(rotate, contexts), strict=True)
    columns = _columns(rotated, longest, centres, "int8", 0.0)
    inside, outside, total = (
        torch.tensor([float(np.linalg.norm(v, axis=1).max()) for v in vectors])
        for vectors in (rotated, missed, contexts)
    )
    weights = torch.stack([columns.weights_QE[:, 0], inside, outside], dim=1)
    weights = weights * (1 + _SAFETY) + 4 * ORTHONORMAL * total[:, None] + _TINY
    return Columns(columns.matrix_KC, len(contexts), columns.scales_Q, weights, columns.floors_Q)


def upper_bounds(layer: Layer, columns: Columns) -> Tensor:
    """[Q, N] float32: what no product of a row with any vector of a context exceeds.

    NaN, too, where numbers leave the range of float32: it bounds nothing.
    """
    norms_EN = torch.from_numpy(layer.norms)
    bounds_QN = _highest_products(_tensor(layer.matrix), columns)
    if columns.matrix_KC.dtype == torch.int8:
        bounds_QN *= columns.scales_Q[:, None]
        bounds_QN *= norms_EN[SCALE]
    bounds_QN += columns.floors_Q[:, None]
    for number, weights_Q in enumerate(columns.weights_QE.T, start=LENGTH):
        bounds_QN.addcmul_(norms_EN[number], weights_Q[:, None])
    return bounds_QN


def in_parallel(work: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> list[ResultT]:
    """Work on blocks of rows, each on one core from its beginning to its end.

    Threads that share every single product wait for each other after each, which on a core that
    others use too costs several times the product. For the same reason a single core works where it is: with
    the clients of a service beside it, 50 hand-overs a search took three quarters of its time.
    """
    if torch.get_num_threads() == 1:
        return list(map(work, items))
    return list(_threads().map(work, items))


@functools.cache
def has_amx() -> bool:
    """Whether products cost less than reading the rows: AMX makes ten times those of AVX512."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,)
    )


def _columns(
    contexts: Sequence[Floats], longest: float, centres: int, dtype: str, rounding_error: float
) -> Columns:
    """`rounding_error`: what a row may be off, relative to its length, when it is multiplied."""
    clusterings = in_parallel(functools.partial(centres_of, count=centres), contexts)
    centre_count = max(
        -(-_LEAST_COLUMNS // len(contexts)), *(len(centres_GK) for centres_GK, _ in clusterings)
    )
    parts, scales, weights, floors = [], [], [], []
    for vectors_MK, (centres_GK, centre_of_M) in zip(contexts, clusterings, strict=True):
        matrix_GK, scale = _low_precision(centres_GK, dtype)
        rounded_GK = matrix_GK.double().numpy() * scale
        radius = float(np.linalg.norm(vectors_MK - rounded_GK[centre_of_M], axis=1).max())
        size = float(np.linalg.norm(rounded_GK, axis=1).max())
        if not max(1.0, size + radius) * max(1.0, longest) < _LARGE:
            radius = float("inf")
        width = vectors_MK.shape[1]
        addition_error = 0.0 if dtype == "int8" else 2 * width * _FLOAT32
        error = rounding_error + addition_error + _SAFETY
        parts.append(matrix_GK[torch.arange(centre_count) % len(matrix_GK)])
        scales.append(scale)
        weights.append([(radius + size * error + _TINY * width**0.5) * (1 + _SAFETY)])
        floors.append(_TINY * (width**0.5 * size + 2 * width) * (1 + _SAFETY))
    # Not `contiguous`, which leaves the strides of a K of 1 as they are, and int8 products take as said.
    matrix_KC = (
        torch.stack(parts, dim=1).flatten(0, 1).T.clone(memory_format=torch.contiguous_format)
    )
    return Columns(
        matrix_KC, len(contexts), torch.tensor(scales), torch.tensor(weights), torch.tensor(floors)
    )


def _low_precision(centres_GK: Floats, dtype: str) -> tuple[Tensor, float]:
    """(what is multiplied, what the products have to be multiplied with)"""
    if dtype != "int8":
        return torch.from_numpy(centres_GK).to(getattr(torch, dtype)), 1.0
    # One scale for all centres of a context, so that the largest product is that of the largest code.
    codes_1, scales_1 = to_int8(centres_GK.reshape(1, -1))
    return torch.from_numpy(codes_1.reshape(centres_GK.shape)), float(scales_1[0])


def centres_of(vectors_MK: Floats, count: int) -> tuple[Floats, Ints]:
    """(centres [G, K], the centre of each vector [M]): at most `count`, with small largest distances.

    Complete linkage keeps the widest group narrow; each centre then goes some steps towards the
    vector of its group that is farthest, which comes near the smallest ball around the group
    (Bădoiu and Clarkson, 2003).
    """
    if len(vectors_MK) <= count:
        return vectors_MK, np.arange(len(vectors_MK))
    groups_M = (
        fcluster(linkage(pdist(vectors_MK), "complete"), count, "maxclust").astype(np.int64) - 1
    )
    sizes_G = np.bincount(groups_M)
    centres_GK = np.zeros((len(sizes_G), vectors_MK.shape[1]))
    np.add.at(centres_GK, groups_M, vectors_MK)
    centres_GK /= sizes_G[:, None]
    for step in range(2, _CENTRE_STEPS + 2):
        offsets_MK = vectors_MK - centres_GK[groups_M]
        order = np.argsort(np.einsum("mk,mk->m", offsets_MK, offsets_MK))
        farthest_G = np.empty(len(sizes_G), np.int64)
        farthest_G[groups_M[order]] = order  # the last one of each group stays
        centres_GK += offsets_MK[farthest_G] / step
    return centres_GK, groups_M


def _highest_products(matrix_NK: Tensor, columns: Columns) -> Tensor:
    """[Q, N] float32: the highest product of each row with the centres of each context."""
    columns_KC = columns.matrix_KC
    dtype, width, contexts = columns_KC.dtype, columns_KC.shape[1], columns.contexts
    step = min(_BLOCK_ROWS.get(dtype, 2048), max(1, _BLOCK_PRODUCTS // width))
    # A product reads rows in strips, which memory does not foresee. Copied first, a million rows take 107 ms
    # instead of 154 (bfloat16, 16 columns, one core of a Zen 5), and 37 instead of 44 (int8).
    copies = not has_amx()
    if copies and dtype == torch.bfloat16:
        step = min(step, _COPIED_ROWS)
    highest_QN = torch.empty(contexts, len(matrix_NK))
    # Fresh memory for every block would cost half of a product.
    products_BC = torch.empty(step, width, dtype=torch.int32 if dtype == torch.int8 else dtype)
    rows_BK = torch.empty(step if copies else 0, matrix_NK.shape[1], dtype=dtype)
    for start in range(0, len(matrix_NK), step):
        rows_NK = matrix_NK[start : start + step]
        products_NC = products_BC[: len(rows_NK)]
        rows_NK = rows_BK[: len(rows_NK)].copy_(rows_NK) if copies else rows_NK.to(dtype)
        if dtype == torch.int8:
            torch._int_mm(rows_NK, columns_KC, out=products_NC)
        else:
            torch.mm(rows_NK, columns_KC, out=products_NC)
        best_NQ = _maxima(products_NC, contexts)
        highest_QN[:, start : start + step] = best_NQ.T
    if dtype == torch.bfloat16:
        highest_QN *= 1 + _BF16  # The product was rounded once more than others.
    return highest_QN


def _maxima(products_NC: Tensor, contexts: int) -> Tensor:
    """[N, Q]: the highest product with each context, whose centres are columns q, q + Q, …"""
    bf16 = products_NC.dtype == torch.bfloat16
    if bf16:
        # As int16, positive numbers stay in order, and are compared at six times the rate.
        products_NC = products_NC.view(torch.int16)
    if contexts < _LANES:
        best_NQ = products_NC.view(len(products_NC), -1, contexts).amax(1)
    else:
        best_NQ = products_NC
        while (width := best_NQ.shape[1]) > contexts:
            half = -(-width // contexts // 2) * contexts
            best_NQ = torch.maximum(best_NQ[:, :half], best_NQ[:, width - half :])
    # Where there are no positive numbers: 0.
    return best_NQ.clamp_(min=0).view(torch.bfloat16) if bf16 else best_NQ


def _tensor(matrix: np.ndarray[Any, Any]) -> Tensor:
    if matrix.dtype == np.uint16:
        return torch.from_numpy(matrix.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(matrix)
