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
# A score is a float32 sum of M products: the bound may be exceeded by its rounding.
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

    Raises BadInput for shapes that do not fit the pool, and for top_k < 1.
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
    scale = float(width) ** -0.5 if attention == "scaled_dot" else 1.0
    flat = queries.reshape(count * m, width).T
    best = [_Best(top_k) for _ in range(count)]
    at = 0
    for matrix in pool.vectors:
        for start in range(0, len(matrix), _BLOCK_ROWS):
            block = matrix[start : start + _BLOCK_ROWS]
            logits_NQM = (block @ flat).reshape(len(block), count, m)
            for number, keep in enumerate(best):
                logits_NM = logits_NQM[:, number, mask[number]]
                keep.offer(logits_NM, scale, at)
            at += len(block)
    return Found(
        np.stack([keep.places for keep in best]), np.stack([keep.scores for keep in best]), True
    )


class _Best:
    """The best rows of one context so far, best first."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self.scores: Floats = np.empty(0, np.float32)
        self.places: Ints = np.empty(0, np.int64)

    def offer(self, logits_NM: Floats, scale: float, first: int) -> None:
        """Takes in the rows of a block whose place in the pool begins at `first`."""
        rows = np.arange(len(logits_NM))
        if logits_NM.shape[1] == 1:
            scores = logits_NM[:, 0]
        else:
            bound_N = logits_NM.max(axis=1)
            if len(self.scores) == self._top_k:
                rows = np.flatnonzero(bound_N + _SLACK * np.abs(bound_N) >= self.scores[-1])
            chosen_RM = logits_NM[rows]
            weights_RM = np.exp((chosen_RM - bound_N[rows, None]) * scale)
            scores = (weights_RM * chosen_RM).sum(axis=1) / weights_RM.sum(axis=1)
        scores = np.concatenate([self.scores, scores])
        places = np.concatenate([self.places, rows + first])
        if len(scores) > 4 * self._top_k:  # a sort of the few that matter
            cut = np.partition(scores, -self._top_k)[-self._top_k]
            scores, places = scores[scores >= cut], places[scores >= cut]
        order = np.argsort(-scores, kind="stable")[: self._top_k]  # places ascend, so ties keep them
        self.scores, self.places = scores[order].astype(np.float32), places[order]
