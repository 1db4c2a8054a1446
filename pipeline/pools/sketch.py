"""The sketch of a pool: a quarter of its bytes or less, which prove for nearly every row that it is not in
the top k.

    rotation.npy                  [D, K] float64: K orthonormal directions R in which most of the pool lies
    sketch/part-00000.npy         [rows, K] int8: a row c in these directions, R^T c, in codes q
    sketch_norms/part-00000.npy   [4, rows] float32: scale s, and the lengths of s q, of R^T c - s q, and of
                                  the rest of c, which no direction of R has

The directions are the first principal ones of the pool, as many as hold 95 % of its energy. Other directions
would give the same answers, only later. `bounds.sketch_columns` shows how the lengths bound a product.
"""

from __future__ import annotations

import numpy as np

from pipeline.arrays import Floats
from pipeline.pools.vector_format import Layer, lengths, to_int8

CODED, MISCODED, MISSED = range(1, 4)
# Vectors of texts have 95 % of their energy in 256 of 384 directions. With 192 the rest of a product is
# bounded so loosely that every hundredth row has to be looked at again, with 320 a pass takes longer.
_ENERGY = 0.95
# Tiles of the CPU's matrix units are 64 bytes wide.
_STEP = 64
# What R^T R may be off from the identity; 1e-13 is what float64 gives.
ORTHONORMAL = 1e-9


def fit_rotation(sample_ND: Floats) -> Floats:
    """[D, K] float64, from some rows of the pool."""
    rows_ND = np.asarray(sample_ND, np.float64)
    rows_ND = rows_ND / max(float(np.abs(rows_ND).max(initial=0)), 1e-300)
    energies, directions_DD = np.linalg.eigh(rows_ND.T @ rows_ND)
    energies, directions_DD = energies[::-1].clip(min=0), directions_DD[:, ::-1]
    count = int(np.searchsorted(np.cumsum(energies), _ENERGY * energies.sum())) + 1
    return directions_DD[:, : -(-count // _STEP) * _STEP].copy()


def is_orthonormal(rotation_DK: Floats) -> bool:
    errors_KK = rotation_DK.T @ rotation_DK - np.eye(rotation_DK.shape[1])
    return bool(np.linalg.norm(errors_KK) <= ORTHONORMAL)


def sketch(vectors_ND: Floats, rotation_DK: Floats) -> Layer:
    """The sketch of rows, from their float64 vectors as the pool keeps them."""
    rotated_NK = vectors_ND @ rotation_DK
    codes_NK, scales_N = to_int8(rotated_NK)
    coded_NK = codes_NK * scales_N[:, None].astype(np.float64)
    total_N = np.einsum("nd,nd->n", vectors_ND, vectors_ND)
    inside_N = np.einsum("nk,nk->n", rotated_NK, rotated_NK)
    # |c - R R^T c|² = |c|² - |R^T c|², but for R's error and the rounding of the two sums.
    missed_N1 = np.sqrt((total_N - inside_N).clip(min=0) + 4 * ORTHONORMAL * total_N)[:, None]
    norms = [scales_N, lengths(coded_NK), lengths(rotated_NK - coded_NK), lengths(missed_N1)]
    return Layer(codes_NK, np.stack(norms))
