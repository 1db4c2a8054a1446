"""Exact search: the top k of a pool for a context's vectors, in blocks of the memory-mapped matrix.

With L[c,i] = candidate[c] · vector[i] the score is Σ softmax_i(L)·L, a weighted mean of the L, so
score ≤ max_i L[c,i]. One matrix product gives a block's L for all vectors of all contexts; only rows
whose maximum can still reach the top k pay for the softmax.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pipeline.arrays import Bools, Floats, Ints
from pipeline.config import BadInput, require
from pipeline.models.polyencoder import Attention
from pipeline.retrieval.pool import Pool

_BLOCK_ROWS = 8192
# Logits, bounds and scores of a block are rounded to float32; rows so close count as tied until
# float64 decides.
_SLACK = 1e-5


class Answer(NamedTuple):
    """What `search` returns, best first; ties by place in the pool."""

    ids: list[Any]
    """[k] ids of candidates; [Q][k] for several contexts."""
    scores: Floats
    """[k] or [Q, k] float32."""
    certified: bool
    """Whether this is provably the exact top k."""


class Found(NamedTuple):
    """What `top_rows` returns."""

    places: Ints
    """[Q, k] places in the pool."""
    scores: Floats
    """[Q, k] float32"""
    certified: bool


def search(
    pool: Pool,
    vectors: Floats,
    top_k: int,
    vector_mask: Bools | None = None,
    attention: Attention = "dot",
) -> Answer:
    """The best `top_k` candidates, or all if there are fewer.

    `vectors` [M, D] of one context, or [Q, M, D]; a bi-encoder's have M = 1. `vector_mask` [M] or
    [Q, M]: false for vectors that do not count; each context has one at least. `attention`: of the
    candidate over the vectors, as in `poly_scores`.

    Raises BadInput for shapes that do not fit the pool, for vectors that are not finite, and for
    top_k < 1.
    """
    one = np.asarray(vectors).ndim == 2
    found = top_rows(
        pool,
        np.asarray(vectors)[None] if one else np.asarray(vectors),
        top_k,
        vector_mask[None] if one and vector_mask is not None else vector_mask,
        attention,
    )
    ids = [[pool.row(place).id for place in places] for places in found.places.tolist()]
    if one:
        return Answer(ids[0], found.scores[0], found.certified)
    return Answer(ids, found.scores, found.certified)


def top_rows(
    pool: Pool,
    vectors_QMD: Floats,
    top_k: int,
    mask_QM: Bools | None = None,
    attention: Attention = "dot",
) -> Found:
    """As `search`, for several contexts, and with places instead of ids."""
    require(top_k >= 1, "top_k", top_k, ">= 1")
    queries = np.ascontiguousarray(vectors_QMD, dtype=np.float32)
    if queries.ndim != 3 or queries.shape[2] != pool.dimensions:
        raise BadInput(f"vectors: shape {queries.shape} is not allowed; allowed: (m, d) or "
                       f"(queries, m, d) with d = {pool.dimensions}, the pool's dimensions")  # fmt: skip
    count, m, width = queries.shape
    mask = np.ones((count, m), bool) if mask_QM is None else np.asarray(mask_QM, bool)
    if mask.shape != (count, m) or not mask.any(axis=1).all():
        raise BadInput("vector_mask: one true value at least for each context, in the vectors' shape")
    if not np.isfinite(queries).all():
        raise BadInput("vectors: not finite; allowed: numbers")
    scale = float(width) ** -0.5 if attention == "scaled_dot" else 1.0
    flat = queries.reshape(count * m, width).T
    best = [_Best(top_k, scale) for _ in range(count)]
    at = 0
    for matrix in pool.vectors:
        for start in range(0, len(matrix), _BLOCK_ROWS):
            block = matrix[start : start + _BLOCK_ROWS]
            logits_NQM = (block @ flat).reshape(len(block), count, m)
            for number, keep in enumerate(best):
                keep.offer(logits_NQM[:, number, mask[number]], at)
            at += len(block)
    kept = min(top_k, len(pool))
    places, scores = np.empty((count, kept), np.int64), np.empty((count, kept), np.float32)
    for number, keep in enumerate(best):
        vectors_MD = queries[number, mask[number]].astype(np.float64)
        places[number], scores[number] = keep.final(pool, vectors_MD)
    return Found(places, scores, True)


class _Best:
    """The best rows of one context so far, and those that only rounding tells from them."""

    def __init__(self, top_k: int, scale: float) -> None:
        self._top_k = top_k
        self._scale = scale
        self._scores: Floats = np.empty(0, np.float32)
        self._places: Ints = np.empty(0, np.int64)  # ascending
        self._reach = -np.inf

    def offer(self, logits_NM: Floats, first: int) -> None:
        """Takes in the rows of a block whose place in the pool begins at `first`."""
        bound_N = logits_NM.max(axis=1)
        rows = np.flatnonzero(bound_N + _SLACK * np.abs(bound_N) >= self._reach)
        scores = np.concatenate([self._scores, _scores(logits_NM[rows], self._scale)])
        places = np.concatenate([self._places, rows + first])
        if len(scores) > self._top_k:
            cut = np.partition(scores, -self._top_k)[-self._top_k]
            self._reach = cut - _SLACK * abs(cut)
            near = scores >= self._reach
            scores, places = scores[near], places[near]
        self._scores, self._places = scores, places

    def final(self, pool: Pool, vectors_MD: Floats) -> tuple[Ints, Floats]:
        """(places, scores) of the top k, best first; ties by place."""
        parts: list[Floats] = [np.empty(0)]
        for start in range(0, len(self._places), _BLOCK_ROWS):
            rows_ND = pool.vectors_at(self._places[start : start + _BLOCK_ROWS])
            parts.append(_scores(rows_ND.astype(np.float64) @ vectors_MD.T, self._scale))
        scores = np.concatenate(parts).astype(np.float32)
        order = np.argsort(-scores, kind="stable")[: self._top_k]
        return self._places[order], scores[order]


def _scores(logits_NM: Floats, scale: float) -> Floats:
    """[N]"""
    if logits_NM.shape[1] == 1:
        return logits_NM[:, 0]
    weights_NM = np.exp((logits_NM - logits_NM.max(axis=1, keepdims=True)) * scale)
    return np.asarray((weights_NM * logits_NM).sum(axis=1) / weights_NM.sum(axis=1))
