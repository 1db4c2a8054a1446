"""Scores in float32 with a proved error, and in float64.

A score s = Σ p_i L_i, p = softmax(β L), changes by at most (1 + 2 ln M) ε where no product L_i changes by
more than ε: its derivative by L_j is p_j (1 + β (L_j - s)), and

    β Σ p_j |L_j - s| ≤ 2 β (max L - s) = 2 (H(p) - ln Σ exp(β (L_i - max L))) ≤ 2 ln M,

because the entropy H(p) is at most ln M and the sum at least 1. In float32, with u = 2⁻²⁴ and K numbers in a
row, ε holds the rounding of a product, 2 K u |c| |y|, and that of β L, 2 u |L|. Exponentials, their sum and
the weighted sum add (2⁻¹⁵ + (2 M + 8) u) |L| at most.

Axes: B rows of a block, D numbers of a row, M vectors of a context, Q contexts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.arrays import Floats
from pipeline.pools.device_rows import as_tensor
from pipeline.pools.vector_format import Layer, decode
from pipeline.search.bounds import FLOAT32, LARGE, TINY

_EXPONENTIALS = 2.0**-15


class Scorer(NamedTuple):
    """Contexts as float32 multiplies them with rows; as float64 where float32 cannot be trusted."""

    vectors: Floats
    """[M of all contexts, D]"""
    counts: tuple[int, ...]
    """The number of each context's vectors."""
    scale: float
    """β: the factor of the products in the softmax."""
    errors: tuple[float, ...]
    """What a score may be off, for each context; 0: float64, which is taken for exact."""

    def scores(self, layer: Layer) -> list[Floats]:
        """[B] float32 for each context, from one product with all vectors."""
        rows_BD = _rows(layer, self.vectors.dtype)
        if len(self.vectors) == 1:
            return [_dots(rows_BD, self.vectors[0])]
        products = torch.from_numpy(rows_BD) @ torch.from_numpy(self.vectors).T
        parts = products.split(self.counts, 1)  # type: ignore[no-untyped-call]
        return [_mean(part, self.scale).float().numpy() for part in parts]


def scorer(contexts: Sequence[Floats], scale: float, longest: float) -> Scorer:
    """`contexts`: [M, D] float64 each; `longest`: the longest row."""
    counts = tuple(map(len, contexts))
    joined = contexts[0] if len(contexts) == 1 else np.concatenate(contexts)
    sizes = [math.sqrt(np.vecdot(context, context).max()) for context in contexts]
    in_range = max(1.0, *sizes) * max(1.0, longest) < LARGE
    if not in_range or torch.get_float32_matmul_precision() != "highest":
        return Scorer(joined, counts, scale, (0.0,) * len(counts))
    width = joined.shape[1]
    errors = [_error(count, width, s, longest) for count, s in zip(counts, sizes, strict=True)]
    return Scorer(joined.astype(np.float32), counts, scale, tuple(errors))


def exact_scores(layer: Layer, vectors_MD: Floats, scale: float) -> Floats:
    """[B] float32, computed in float64."""
    rows_BD = decode(layer, np.float64)
    if len(vectors_MD) == 1:
        return _dots(rows_BD, vectors_MD[0])
    logits_BM = torch.from_numpy(rows_BD) @ torch.from_numpy(vectors_MD).T
    return _mean(logits_BM, scale).float().numpy()


def _dots(rows_BD: Floats, vector_D: Floats) -> Floats:
    """[B] float32, in this thread alone.

    5,000 rows of 384 numbers take 0.67 ms so, as by FAISS, and 1.05 by `torch.mv` (MKL, AVX2 of a Zen 3).
    """
    with np.errstate(over="ignore"):
        dots_B: Floats = np.vecdot(rows_BD, vector_D).astype(np.float32, copy=False)
    return dots_B


def _rows(layer: Layer, dtype: np.dtype[np.floating[Any]]) -> Floats:
    if dtype == np.float64:
        return decode(layer, np.float64)
    if layer.matrix.dtype == np.uint16:
        return as_tensor(layer.matrix).float().numpy()
    return layer.matrix if layer.matrix.dtype == np.float32 else decode(layer)


def _mean(logits_BM: Tensor, scale: float) -> Tensor:
    if logits_BM.shape[1] == 1:
        return logits_BM[:, 0]
    weights_BM = (logits_BM if scale == 1 else logits_BM * scale).softmax(1)
    return weights_BM.mul_(logits_BM).sum(1)


def _error(vectors: int, width: int, size: float, longest: float) -> float:
    product = size * longest
    tiny = TINY * (width**0.5 * (size + longest) + 2 * width)
    error: float = (2 * width + 2) * FLOAT32 * product + tiny
    if vectors > 1:
        error *= 1 + 2 * math.log(vectors)
        error += (_EXPONENTIALS + (2 * vectors + 8) * FLOAT32) * product + vectors * tiny
    return error * (1 + 1e-6)
