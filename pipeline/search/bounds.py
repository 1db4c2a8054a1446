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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.cluster.hierarchy import linkage
from torch import Tensor

from pipeline.arrays import Floats, Ints
from pipeline.models.precision import use_bf16
from pipeline.pools.device_rows import as_tensor
from pipeline.pools.sketch import ORTHONORMAL
from pipeline.pools.vector_format import LENGTH, SCALE, Dtype, Layer, to_int8
from pipeline.search.products import free_columns, product_with
from pipeline.search.threads import in_parallel

BF16, FLOAT32 = 2.0**-8, 2.0**-24
_SAFETY = 16 * FLOAT32
TINY = 2.0**-126
# Where products could come near the end of float32's range, a bound is infinite.
LARGE = 2.0**100
# A context gets the fewest of these centres whose widest group is narrower than this share of its longest
# vector. Twice as many centres cost 40 ns a row and more; a row that a wide group leaves open costs 900.
_CENTRES, _NARROW = (4, 8, 16, 32), 0.27
_CENTRE_STEPS = 8
# Contexts from which on it pays to compare whole columns.
_LANES = 8
# Rows multiplied at once, and products: what a core's own cache is best used by.
_BLOCK_ROWS, _BLOCK_PRODUCTS = {torch.int8: 4096, torch.bfloat16: 3072}, 1 << 17


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
    contexts: Sequence[Floats], pool_dtype: Dtype, longest: float, centres: int | None = None
) -> Columns:
    """Columns for the vectors of a pool.

    `contexts`: [M, D] float64 each; `longest`: its longest row; `centres`: of each context at most; None: as
    many as its vectors need.
    """
    dtype, rounding_error = "float64", 0.0
    if pool_dtype == "int8":
        dtype = "int8"
    elif pool_dtype == "bfloat16" or use_bf16(torch.device("cpu")):
        dtype, rounding_error = "bfloat16", 0.0 if pool_dtype == "bfloat16" else BF16
    elif torch.get_float32_matmul_precision() == "highest":
        dtype = "float32"
    return _columns(contexts, longest, centres, dtype, rounding_error)


def sketch_columns(
    contexts: Sequence[Floats], rotation_DK: Floats, longest: float, centres: int | None = None
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
    weights = weights * (1 + _SAFETY) + 4 * ORTHONORMAL * total[:, None] + TINY
    return Columns(columns.matrix_KC, len(contexts), columns.scales_Q, weights, columns.floors_Q)


def upper_bounds(layer: Layer, columns: Columns) -> Tensor:
    """[Q, N] float32: what no product of a row with any vector of a context exceeds.

    NaN, too, where numbers leave the range of float32: it bounds nothing.
    """
    norms_EN = torch.from_numpy(layer.norms)
    bounds_QN = _highest_products(as_tensor(layer.matrix), columns)
    if columns.matrix_KC.dtype == torch.int8:
        bounds_QN *= columns.scales_Q[:, None]
        bounds_QN *= norms_EN[SCALE]
    bounds_QN += columns.floors_Q[:, None]
    for number, weights_Q in enumerate(columns.weights_QE.T, start=LENGTH):
        bounds_QN.addcmul_(norms_EN[number], weights_Q[:, None])
    return bounds_QN


def _columns(
    contexts: Sequence[Floats],
    longest: float,
    centres: int | None,
    dtype: str,
    rounding_error: float,
) -> Columns:
    """`rounding_error`: what a row may be off, relative to its length, when it is multiplied."""
    free = 1
    if centres is None:
        free = -(-free_columns(getattr(torch, dtype), contexts[0].shape[1]) // len(contexts))

    def group(vectors_MK: Floats) -> tuple[Tensor, float, float, float]:
        """(centres [G, K] as they are multiplied, their scale, weight, floor)"""
        centres_GK, centre_of_M = (
            near_centres(vectors_MK, free) if centres is None else centres_of(vectors_MK, centres)
        )
        matrix_GK, scale = _low_precision(centres_GK, dtype)
        rounded_GK = matrix_GK.double().numpy() * scale
        return (
            matrix_GK,
            scale,
            *_weight_and_floor(vectors_MK, rounded_GK, centre_of_M, longest, dtype, rounding_error),
        )

    matrices, scales, weights, floors = zip(*in_parallel(group, contexts), strict=True)
    centre_count = max(free, *map(len, matrices))
    parts = [matrix_GK[torch.arange(centre_count) % len(matrix_GK)] for matrix_GK in matrices]
    # Not `contiguous`, which leaves the strides of a K of 1 as they are, and int8 products take as said.
    matrix_KC = (
        torch.stack(parts, dim=1).flatten(0, 1).T.clone(memory_format=torch.contiguous_format)
    )
    weights_Q1 = torch.tensor(weights)[:, None]
    return Columns(matrix_KC, len(contexts), torch.tensor(scales), weights_Q1, torch.tensor(floors))


def _weight_and_floor(
    vectors_MK: Floats,
    centres_GK: Floats,
    centre_of_M: Ints,
    longest: float,
    dtype: str,
    rounding_error: float,
) -> tuple[float, float]:
    """What is added to a row's highest product with the centres of a context: (times its length, in any case)

    The terms are those of the table at the top of this module.
    """
    width = vectors_MK.shape[1]
    radius = float(np.linalg.norm(vectors_MK - centres_GK[centre_of_M], axis=1).max())
    size = float(np.linalg.norm(centres_GK, axis=1).max())
    if not max(1.0, size + radius) * max(1.0, longest) < LARGE:
        radius = float("inf")
    addition_error = 0.0 if dtype == "int8" else 2 * width * FLOAT32
    error = rounding_error + addition_error + _SAFETY
    weight = (radius + size * error + TINY * width**0.5) * (1 + _SAFETY)
    return weight, TINY * (width**0.5 * size + 2 * width) * (1 + _SAFETY)


def _low_precision(centres_GK: Floats, dtype: str) -> tuple[Tensor, float]:
    """(what is multiplied, what the products have to be multiplied with)"""
    if dtype != "int8":
        return torch.from_numpy(centres_GK).to(getattr(torch, dtype)), 1.0
    # One scale for all centres of a context, so that the largest product is that of the largest code.
    codes_1, scales_1 = to_int8(centres_GK.reshape(1, -1))
    return torch.from_numpy(codes_1.reshape(centres_GK.shape)), float(scales_1[0])


def near_centres(vectors_MK: Floats, least: int) -> tuple[Floats, Ints]:
    """As `centres_of`, with as many centres as keep every group narrow, and `least` at least."""
    longest = float(np.linalg.norm(vectors_MK, axis=1).max())
    merges = _merges(vectors_MK)
    for count in _CENTRES:
        if count < least:
            continue
        # Merges are in the order of the widths of what they make.
        if count >= len(vectors_MK) or merges[len(vectors_MK) - count - 1, 2] <= _NARROW * longest:
            break
    return centres_of(vectors_MK, count, merges)


def centres_of(vectors_MK: Floats, count: int, merges: Floats | None = None) -> tuple[Floats, Ints]:
    """(centres [G, K], the centre of each vector [M]): at most `count`, with small largest distances.

    Complete linkage keeps the widest group narrow; each centre then goes some steps towards the
    vector of its group that is farthest, which comes near the smallest ball around the group
    (Bădoiu and Clarkson, 2003). `merges`: those of the linkage, where they are known.
    """
    total = len(vectors_MK)
    if total <= count:
        return vectors_MK, np.arange(total)
    labels_M = np.arange(total)
    pairs = (_merges(vectors_MK) if merges is None else merges)[: total - count, :2]
    for label, (left, right) in enumerate(pairs, start=total):
        labels_M[(labels_M == left) | (labels_M == right)] = label
    groups_M = np.unique(labels_M, return_inverse=True)[1]
    is_of_GM = np.arange(count)[:, None] == groups_M
    # A centre is the sum of so much of each vector; distances follow from products of vectors.
    shares_GM = is_of_GM / is_of_GM.sum(axis=1, keepdims=True)
    products_MM = _products(vectors_MK)
    for step in range(2, _CENTRE_STEPS + 2):
        distances_GM = products_MM.diagonal() - 2 * (shares_GM @ products_MM)
        farthest_G = np.where(is_of_GM, distances_GM, -np.inf).argmax(axis=1)
        shares_GM *= 1 - 1 / step
        shares_GM[np.arange(count), farthest_G] += 1 / step
    return shares_GM @ vectors_MK, groups_M


def _merges(vectors_MK: Floats) -> Floats:
    """[M - 1, 4]: the linkage; its distances may be rounded, as nothing is proved by them."""
    if len(vectors_MK) < 2:
        return np.empty((0, 4))
    unit_MK = vectors_MK / max(float(np.abs(vectors_MK).max()), 1e-300)
    products_MM = _products(unit_MK)
    left, right = np.triu_indices(len(vectors_MK), 1)
    squares = products_MM.diagonal()[left] + products_MM.diagonal()[right]
    squares -= 2 * products_MM[left, right]
    merges = linkage(np.sqrt(squares.clip(min=0)), "complete")
    merges[:, 2] *= float(np.abs(vectors_MK).max())
    return np.asarray(merges)


def _products(vectors_MK: Floats) -> Floats:
    """[M, M], by torch: numpy's products take threads of their own."""
    rows = torch.from_numpy(vectors_MK)
    return (rows @ rows.T).numpy()


def _highest_products(matrix_NK: Tensor, columns: Columns) -> Tensor:
    """[Q, N] float32: the highest product of each row with the centres of each context."""
    columns_KC = columns.matrix_KC
    dtype, contexts = columns_KC.dtype, columns.contexts
    step = min(_BLOCK_ROWS.get(dtype, 1024), max(1, _BLOCK_PRODUCTS // columns_KC.shape[1]))
    product = product_with(columns_KC, min(step, len(matrix_NK)))
    highest_QN = torch.empty(contexts, len(matrix_NK))
    for start in range(0, len(matrix_NK), step):
        products_NC = product(matrix_NK[start : start + step].to(dtype))
        best_NQ = _maxima(products_NC, contexts)
        if products_NC.dtype == torch.bfloat16:
            best_NQ = best_NQ.float() * (1 + BF16)  # It was rounded once more than others.
        highest_QN[:, start : start + step] = best_NQ.T
    return highest_QN


def _maxima(products_NC: Tensor, contexts: int) -> Tensor:
    """[N, Q]: the highest product with each context, whose centres are columns q, q + Q, …"""
    bf16 = products_NC.dtype == torch.bfloat16
    if bf16:
        # As int16, positive numbers stay in order, and are compared at six times the rate.
        products_NC = products_NC.view(torch.int16)
    if contexts < _LANES:
        best_NQ = products_NC.reshape(len(products_NC), -1, contexts).amax(1)
    else:
        best_NQ = products_NC
        while (width := best_NQ.shape[1]) > contexts:
            half = -(-width // contexts // 2) * contexts
            best_NQ = torch.maximum(best_NQ[:, :half], best_NQ[:, width - half :])
    # Where there are no positive numbers: 0.
    maxima_NQ: Tensor = best_NQ.clamp_(min=0).view(torch.bfloat16) if bf16 else best_NQ
    return maxima_NQ
