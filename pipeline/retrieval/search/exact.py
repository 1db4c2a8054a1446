"""Searches a pool for the exact top k of a context's vectors, in steps that each read fewer rows.

With L[c,i] = candidate[c] · vector[i] the score is Σ softmax_i(L)·L, a weighted mean of the L, so
score ≤ max_i L[c,i]. A row whose bound (`bounds`) lies below the k-th best score so far needs no score.

    exact         every row of the vectors, in blocks, by some centres of the context's vectors
    pruned        every row of the sketch instead, a sixth of the bytes of float32; the same answer
    approximate   what an index of neighbours finds (`approximate`); likely, not proved

The remaining rows are bounded by all vectors instead of the centres, and at last by their own vectors. The
rows that then remain, some dozens of a million, are scored in float64. Scores are compared as float32; rows
with equal scores are tied, and are in the order of their ids.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
import torch

from pipeline.arrays import Bools, Floats, Ints
from pipeline.config import BadInput, require
from pipeline.models.polyencoder import Attention
from pipeline.retrieval.methods import Method
from pipeline.retrieval.pools.pool import Pool
from pipeline.retrieval.pools.vector_format import Layer, decode
from pipeline.retrieval.search import approximate
from pipeline.retrieval.search.bounds import (
    Columns,
    has_amx,
    in_parallel,
    sketch_columns,
    upper_bounds,
    vector_columns,
)

# Below, a pass over the vectors takes under 2 ms, which a sketch and its further steps do not better.
_SMALL_POOL = 32_768
# Where less of a pool is allowed, its rows are picked out instead of going through all.
_FEW_ALLOWED = 1 / 64
# Centres of a context that is alone in a pass, which with AMX has its bytes to wait for.
_CENTRES = {"vectors": 64, "sketch": 32}
# Several contexts are bound by the products, and share them out.
_LEAST_CENTRES = 16
# Without AMX all passes are bound by the products: of 64, 32 and 16 centres, 16 were fastest, however far
# a context's vectors lie apart (a million candidates, a core of a Zen 5: 158 ms in place of 308 with 64), and
# 8 for each of 16 contexts.
_CENTRES_WITHOUT_AMX, _LEAST_WITHOUT_AMX = 16, 8
_CONTEXTS = 16  # at once
_SECTION_ROWS = 1 << 20  # bounds in memory, for each context
_BLOCK_ROWS = 1 << 14
_GATHERED_ROWS = 1024
_SEEDS = 256
_ALL = 1 << 30

FINDERS: dict[str, Callable[[Pool, Floats, int], Ints]] = {"approximate": approximate.neighbours}
"""Methods that find likely rows without a proof: functions of the pool, a context's vectors [M, D] and
top_k that return places in the pool, the likeliest first. `top_rows` scores what they find."""


class Answer(NamedTuple):
    """The result of `search`, best first; ties by id."""

    ids: list[Any]
    """[k] ids of candidates; [Q][k] for several contexts."""
    scores: Floats
    """[k] or [Q, k] float32."""
    certified: bool
    """Whether all of this is provably the exact top k."""


class TopRows(NamedTuple):
    """The result of `top_rows`."""

    places: Ints
    """[Q, k] places in the pool."""
    scores: Floats
    """[Q, k] float32"""
    certified: Bools
    """[Q]: whether a context's answer is provably the exact top k."""


def search(
    pool: Pool,
    vectors: Floats,
    top_k: int,
    vector_mask: Bools | None = None,
    attention: Attention = "dot",
    method: Method = "auto",
    among: Bools | None = None,
    certify: bool = False,
) -> Answer:
    """The best `top_k` candidates, or all if there are fewer.

    `vectors` [M, D] of one context, or [Q, M, D]; a bi-encoder's have M = 1. `vector_mask` [M] or
    [Q, M]: false for vectors that do not count; each context has one at least. `attention`: of the
    candidate over the vectors, as in `poly_scores`. `method`: `auto` is pruned for one context, and
    exact for several at once or in a small pool. `among`: the rows that count, of `filters.select`.
    `certify`: after an approximate answer go on with the pruned search, which proves or betters it.

    Raises BadInput for shapes that do not fit the pool, for vectors that are not finite, for
    top_k < 1, and where an index is asked for that the pool has not.
    """
    is_single = np.asarray(vectors).ndim == 2
    top = top_rows(
        pool,
        np.asarray(vectors)[None] if is_single else np.asarray(vectors),
        top_k,
        vector_mask[None] if is_single and vector_mask is not None else vector_mask,
        attention,
        method,
        among,
        certify,
    )
    ids = [[pool.row(place).id for place in places] for places in top.places.tolist()]
    certified = bool(top.certified.all())
    if is_single:
        return Answer(ids[0], top.scores[0], certified)
    return Answer(ids, top.scores, certified)


def top_rows(
    pool: Pool,
    vectors_QMD: Floats,
    top_k: int,
    mask_QM: Bools | None = None,
    attention: Attention = "dot",
    method: Method = "auto",
    among: Bools | None = None,
    certify: bool = False,
) -> TopRows:
    """As `search`, for several contexts, and with places instead of ids."""
    contexts = _contexts(pool, vectors_QMD, mask_QM)
    require(top_k >= 1, "top_k", top_k, ">= 1")
    methods = dict.fromkeys([*get_args(Method), *FINDERS])
    require(method in methods, "method", method, ", ".join(methods))
    require(attention in get_args(Attention), "attention", attention, "dot, scaled_dot")
    if among is not None and among.shape != (len(pool),):
        raise BadInput(f"among: shape {among.shape} is not allowed; allowed: {(len(pool),)}")
    allowed_count = len(pool) if among is None else int(among.sum())
    scale = _scale(pool, attention)
    tops = [_TopK(pool, context, top_k, scale, among) for context in contexts]
    count = min(top_k, allowed_count)
    todo = tops
    if among is not None and method == "auto" and allowed_count <= _FEW_ALLOWED * len(pool):
        for top in tops:
            top.take(np.flatnonzero(among))
            top.certified = True
        todo = []
    elif method in FINDERS:
        for top in tops:
            places = FINDERS[method](pool, top.vectors_MD, top_k)
            top.take(places if among is None else places[among[places]])
        # Fewer than were asked for are no answer.
        todo = [top for top in tops if certify or len(top) < count]
    for start in range(0, len(todo), _CONTEXTS):
        _scan_pool(pool, todo[start : start + _CONTEXTS], method)
    results = [top.final() for top in tops]
    return TopRows(
        np.array([places for places, _ in results], np.int64).reshape(len(tops), count),
        np.array([scores for _, scores in results], np.float32).reshape(len(tops), count),
        np.array([top.certified for top in tops], bool),
    )


def weights_of_vectors(
    pool: Pool, place: int, vectors_MD: Floats, mask_M: Bools, attention: Attention = "dot"
) -> Floats:
    """[M]: how much each of a context's vectors counts in a candidate's score; they add up to 1."""
    row_D = pool.vectors_at(np.array([place]))[0].astype(np.float64)
    logits_M = torch.from_numpy(vectors_MD.astype(np.float64) @ row_D * _scale(pool, attention))
    logits_M[~torch.from_numpy(mask_M)] = -torch.inf
    return logits_M.softmax(0).numpy()


def _scale(pool: Pool, attention: Attention) -> float:
    return float(pool.dimensions) ** -0.5 if attention == "scaled_dot" else 1.0


def _contexts(pool: Pool, vectors_QMD: Floats, mask_QM: Bools | None) -> list[Floats]:
    """The vectors that count, [M, D] float64 for each context."""
    queries = np.ascontiguousarray(vectors_QMD, dtype=np.float32)
    if queries.ndim != 3 or queries.shape[2] != pool.dimensions:
        raise BadInput(f"vectors: shape {queries.shape} is not allowed; allowed: (m, d) or "
                       f"(queries, m, d) with d = {pool.dimensions}, the pool's dimensions")  # fmt: skip
    mask = np.ones(queries.shape[:2], bool) if mask_QM is None else np.asarray(mask_QM, bool)
    if mask.shape != queries.shape[:2] or not mask.any(axis=1).all():
        raise BadInput(
            "vector_mask: one true value at least for each context, in the vectors' shape"
        )
    if not np.isfinite(queries).all():
        raise BadInput("vectors: not finite; allowed: numbers")
    return [q[m].astype(np.float64) for q, m in zip(queries, mask, strict=True)]


class _TopK:
    """The best rows found so far for one context."""

    def __init__(
        self, pool: Pool, vectors_MD: Floats, top_k: int, scale: float, among: Bools | None
    ) -> None:
        self.vectors_MD = vectors_MD
        self.certified = False
        self._pool, self._top_k, self._scale, self._among = pool, top_k, scale, among
        self._places: Ints = np.empty(0, np.int64)
        self._scores: Floats = np.empty(0, np.float32)
        self._reach = np.float32(-np.inf)
        self._taken: Ints = np.empty(0, np.int64)
        self._steps: list[tuple[str, Columns]] = []

    def __len__(self) -> int:
        return len(self._places)

    def steps(self, names: Sequence[str]) -> None:
        """The layers whose bounds by all vectors are looked at before a row is scored."""
        contexts = [self.vectors_MD]
        self._steps = [(name, _columns(self._pool, contexts, name, _ALL)) for name in names]

    def take(self, places: Ints) -> None:
        """Considers rows of which no bounds are known, the likeliest first."""
        self._taken = places
        self.steps(["vectors"])
        self._score(places[: 4 * self._top_k])
        self._examine(np.sort(places[4 * self._top_k :]))

    def take_section(self, start: int, bounds_N: Floats) -> None:
        """Considers the rows from place `start` on, whose bounds are known and may be changed here."""
        if self._among is not None:
            bounds_N[~self._among[start : start + len(bounds_N)]] = -np.inf
        taken_offsets = self._taken - start
        bounds_N[taken_offsets[(taken_offsets >= 0) & (taken_offsets < len(bounds_N))]] = -np.inf
        if not self._reach > -np.inf:
            seeds = _seed_rows(bounds_N, max(_SEEDS, 4 * self._top_k))
            seeds = seeds[~np.isneginf(bounds_N[seeds])]
            self._score(seeds + start)
            bounds_N[seeds] = -np.inf
        self._examine(_open_rows(self._reach, bounds_N) + start)

    def final(self) -> tuple[Ints, Floats]:
        """(places, scores) of the top k, best first; ties by id."""
        order = np.argsort(self._places)
        places, scores = self._places[order], self._scores[order]
        ids = self._pool.ids_at(places)
        best = sorted(range(len(ids)), key=lambda n: (-scores[n], ids[n]))[: self._top_k]
        return places[best], scores[best]

    def _examine(self, places: Ints) -> None:
        """Scores those of the rows that further bounds leave, the most promising ones first."""
        parts = in_parallel(self._tighten, _split_places(places))
        places = np.concatenate([np.empty(0, np.int64), *(rows for rows, _ in parts)])
        bounds = np.concatenate([np.empty(0, np.float32), *(bounds for _, bounds in parts)])
        for rows in _split_places(np.argsort(-bounds)):
            self._score(places[rows[~(bounds[rows] < self._reach)]])

    def _tighten(self, places: Ints) -> tuple[Ints, Floats]:
        """(the rows that may still reach the top, their bounds)"""
        bounds = np.full(len(places), np.inf, np.float32)
        for name, columns in self._steps:
            if len(places):
                bounds = upper_bounds(self._pool.layer_at(places, name), columns)[0].numpy()
                is_open = ~(bounds < self._reach)
                places, bounds = places[is_open], bounds[is_open]
        return places, bounds

    def _score(self, places: Ints) -> None:
        places = np.sort(places)
        scores = np.concatenate(
            [self._scores, *in_parallel(self._exact_scores, _split_places(places))]
        )
        places = np.concatenate([self._places, places])
        if len(scores) >= self._top_k:
            kth_score = np.partition(scores, -self._top_k)[-self._top_k]
            # What rounds to the same float32 as the last one is tied with it.
            self._reach = np.nextafter(kth_score, np.float32(-np.inf))
            scores, places = scores[scores >= kth_score], places[scores >= kth_score]
        self._scores, self._places = scores, places

    def _exact_scores(self, places: Ints) -> Floats:
        """[N] float32, computed in float64"""
        rows_ND = decode(self._pool.layer_at(places, "vectors"), np.float64)
        logits_NM = torch.from_numpy(rows_ND) @ torch.from_numpy(self.vectors_MD).T
        return ((logits_NM * self._scale).softmax(1) * logits_NM).sum(1).float().numpy()


def _scan_pool(pool: Pool, tops: Sequence[_TopK], method: Method) -> None:
    """Offers all rows of the pool to some contexts."""
    if method == "auto":
        method = "pruned" if len(tops) == 1 and len(pool) >= _SMALL_POOL else "exact"
    steps = ["vectors"] if method == "exact" else ["sketch", "vectors"]
    columns = _columns(
        pool, [top.vectors_MD for top in tops], steps[0], _centre_count(steps[0], len(tops))
    )
    for top in tops:
        top.steps(steps)
    for section_start, rows, blocks in _sections(pool, steps[0]):
        bounds_QN = np.empty((len(tops), rows), np.float32)
        in_parallel(functools.partial(_fill_bounds, columns=columns, bounds_QN=bounds_QN), blocks)
        for top, bounds_N in zip(tops, bounds_QN, strict=True):
            top.take_section(section_start, bounds_N)
    for top in tops:
        top.certified = True


def _centre_count(layer: str, contexts: int) -> int:
    """The number of centres by which each context bounds the rows of a layer."""
    if has_amx():
        return max(_CENTRES[layer] // contexts, _LEAST_CENTRES)
    return max(_CENTRES_WITHOUT_AMX // contexts, _LEAST_WITHOUT_AMX)


def _fill_bounds(block: tuple[int, Layer], columns: Columns, bounds_QN: Floats) -> None:
    start, layer = block
    bounds_QN[:, start : start + len(layer.matrix)] = upper_bounds(layer, columns).numpy()


def _columns(pool: Pool, contexts: Sequence[Floats], name: str, centres: int) -> Columns:
    if name == "sketch":
        return sketch_columns(contexts, pool.rotation, pool.longest, centres)
    return vector_columns(contexts, pool.dtype, pool.longest, centres)


def _sections(pool: Pool, name: str) -> Iterator[tuple[int, int, list[tuple[int, Layer]]]]:
    """(the place of its first row, rows, blocks of rows and where each begins) of each section."""
    section_start = rows = 0
    blocks: list[tuple[int, Layer]] = []
    for shard in pool.shards:
        layer: Layer = getattr(shard, name)
        for start in range(0, len(shard), _BLOCK_ROWS):
            blocks.append((rows, layer.take(slice(start, start + _BLOCK_ROWS))))
            rows += len(blocks[-1][1].matrix)
            if rows >= _SECTION_ROWS:
                yield section_start, rows, blocks
                section_start, rows, blocks = section_start + rows, 0, []
    if blocks:
        yield section_start, rows, blocks


def _seed_rows(bounds_N: Floats, count: int) -> Ints:
    """The row with the highest bound of each of `count` stretches, or all rows if they are few."""
    if len(bounds_N) < 2 * count:
        return np.arange(len(bounds_N))
    width = len(bounds_N) // count
    best = bounds_N[: count * width].reshape(count, width).argmax(axis=1)
    return np.asarray(np.arange(count) * width + best)


def _open_rows(reach: np.float32, bounds_N: Floats) -> Ints:
    """The rows whose bounds, which may be NaN, leave them open; -inf: never."""
    lowest = np.float32(-np.finfo(np.float32).max)
    starts = range(0, len(bounds_N), _BLOCK_ROWS)

    def open_rows(start: int) -> Ints:
        bounds = bounds_N[start : start + _BLOCK_ROWS]
        return np.flatnonzero(~(bounds < max(reach, lowest))) + start

    return np.concatenate([np.empty(0, np.int64), *in_parallel(open_rows, starts)])


def _split_places(places: Ints) -> list[Ints]:
    return [places[n : n + _GATHERED_ROWS] for n in range(0, len(places), _GATHERED_ROWS)]
