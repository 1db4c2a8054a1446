"""Searches a pool for the exact top k of a context's vectors.

With L[c,i] = candidate[c] · vector[i] the score is Σ softmax_i(L)·L, a weighted mean of the L, so
score ≤ max_i L[c,i]. A row whose bound (`bounds`) lies below the k-th best score so far needs no score.

    exact         every row of the vectors: all scores in float32 (`scores`), or bounds by some centres of
                  the context's vectors
    pruned        bounds from every row of the sketch, a sixth of the bytes of float32; the same answer
    auto          the fastest of these for this pool, on this processor (`choice`)
    approximate   what an index of neighbours finds (`approximate`); likely, not proved

A pool on a device is searched there by `auto` and `exact` (`device`).

Rows that bounds leave open are scored in float32 with a proved error. The rows whose scores are within that
error of the k-th, some dozens of a million, are scored in float64. Scores are compared as float32; rows with
equal scores are tied, and are in the order of their ids.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any, NamedTuple, get_args

import numpy as np
import torch

from pipeline.arrays import Bools, Floats, Ints
from pipeline.config import BadInput, require
from pipeline.models.settings import Attention
from pipeline.pools.pool import Method, Pool
from pipeline.pools.vector_format import Layer
from pipeline.search import approximate, device
from pipeline.search.bounds import Columns, upper_bounds
from pipeline.search.choice import Form, columns_of, fastest_form, learn
from pipeline.search.scores import Scorer, exact_scores, scorer
from pipeline.search.threads import in_parallel

# Where less of a pool is allowed, its rows are picked out instead of going through all.
_FEW_ALLOWED = 1 / 64
_CONTEXTS = 16  # at once
_SECTION_ROWS = 1 << 20  # bounds in memory, for each context
_BLOCK_ROWS = 1 << 14
# Rows that are scored at once, by so many vectors at most: their products stay in a core's cache.
_SCORED_ROWS, _LEAST_SCORED, _MOST_SCORED, _SCORED_PRODUCTS = 1024, 128, 8192, 1 << 16
_EXACT_ROWS = 256  # in float64
_OPEN_ROWS = 1 << 12
_SEEDS = 256
_NO_REACH = np.float32(-np.inf)
_METHODS, _ATTENTIONS = get_args(Method), get_args(Attention)
FORMS: dict[Method, tuple[Form, ...]] = {"exact": ("scores", "vectors"), "pruned": ("sketch",)}
_ALL: tuple[Form, ...] = get_args(Form)

PREFILTERS: dict[str, Callable[[Pool, Floats, int], Ints]] = {"approximate": approximate.neighbours}
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
    candidate over the vectors, as in `poly_scores`. `method`: `auto` is the fastest one
    whose answer is exact. `among`: the rows that count, of `filters.select`.
    `certify`: after an approximate answer go on with the pruned search, which proves or betters it.

    Raises BadInput for shapes that do not fit the pool, for vectors that are not finite, for
    top_k < 1, and where an index is asked for that the pool has not.
    """
    queries = _floats(vectors)
    is_single = queries.ndim == 2
    top = top_rows(
        pool,
        queries[None] if is_single else queries,
        top_k,
        np.asarray(vector_mask)[None] if is_single and vector_mask is not None else vector_mask,
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
    is_number = isinstance(top_k, Integral) and top_k >= 1
    require(is_number, "top_k", top_k, "a whole number >= 1")
    top_k = int(top_k)  # numpy's -k of an unsigned k is none
    if method not in _METHODS and method not in PREFILTERS:
        require(False, "method", method, ", ".join(dict.fromkeys([*_METHODS, *PREFILTERS])))
    require(attention in _ATTENTIONS, "attention", attention, "dot, scaled_dot")
    if among is not None and (among.shape != (len(pool),) or among.dtype.kind != "b"):
        raise BadInput(f"among: shape {among.shape} of {among.dtype} is not allowed; allowed: {(len(pool),)} "
                       "of bool, as filters.select makes it")  # fmt: skip
    allowed_count = len(pool) if among is None else int(among.sum())
    task = _Task(top_k, _scale(pool, attention), among)
    count = min(top_k, allowed_count)
    best: dict[int, _Rows] = {}
    """By the number of the context."""
    certified_Q = np.ones(len(contexts), bool)
    reaches = [_NO_REACH] * len(contexts)
    if pool.on_device is not None and method in ("auto", "exact"):
        most = np.asarray(vectors_QMD).shape[1]
        reaching = device.reaching_rows(pool.on_device, contexts, most, top_k, task.scale, among)
        for number, places in reaching:  # float64 decides while the device scores for the next ones
            best[number] = _TopK(pool, contexts[number], task).best_of_few(places)
    elif among is not None and method == "auto" and allowed_count <= _FEW_ALLOWED * len(pool):
        for number, context in enumerate(contexts):
            top = _TopK(pool, context, task)
            top.take(np.flatnonzero(among))
            best[number] = top.best()
    elif method in PREFILTERS:
        for number, context in enumerate(contexts):
            top, places = _TopK(pool, context, task), PREFILTERS[method](pool, context, top_k)
            top.take(places if among is None else places[among[places]])
            if not certify and len(top) >= count:  # fewer than were asked for are no answer
                best[number], certified_Q[number] = top.best(), False
            reaches[number] = top.reach
    todo = [number for number in range(len(contexts)) if number not in best]
    for start in range(0, len(todo), _CONTEXTS):
        numbers = todo[start : start + _CONTEXTS]
        part = [contexts[number] for number in numbers]
        found = _scan_pool(pool, part, task, method, [reaches[number] for number in numbers])
        best.update(zip(numbers, found, strict=True))
    rows = [best[number] for number in range(len(contexts))]
    return TopRows(
        np.array([places for places, _ in rows], np.int64).reshape(len(rows), count),
        np.array([scores for _, scores in rows], np.float32).reshape(len(rows), count),
        certified_Q,
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
    queries = _floats(vectors_QMD)
    if queries.ndim != 3 or queries.shape[2] != pool.dimensions:
        raise BadInput(f"vectors: shape {queries.shape} is not allowed; allowed: (m, d) or "
                       f"(queries, m, d) with d = {pool.dimensions}, the pool's dimensions")  # fmt: skip
    mask = None if mask_QM is None else np.asarray(mask_QM, bool)
    is_valid = mask is None or (mask.shape == queries.shape[:2] and mask.any(axis=1).all())
    if queries.shape[1] == 0 or not is_valid:
        allowed = "one true value at least for each context, in the vectors' shape"
        raise BadInput(f"vector_mask: {allowed}")
    if not np.isfinite(queries).all():
        raise BadInput("vectors: not finite; allowed: numbers")
    contexts = queries.astype(np.float64)
    if mask is None:
        return list(contexts)
    return [vectors[m] for vectors, m in zip(contexts, mask, strict=True)]


def _floats(vectors: Floats) -> Floats:
    try:
        return np.ascontiguousarray(vectors, dtype=np.float32)
    except (TypeError, ValueError):  # contexts with differing m, say
        raise BadInput("vectors: no array of numbers; allowed: one shape for all contexts, and vector_mask "
                       "for those with fewer vectors") from None  # fmt: skip


_Rows = tuple[Ints, Floats]
"""The best rows of a context: places and scores."""


class _Task(NamedTuple):
    """What is asked for each context."""

    top_k: int
    scale: float
    """β: the factor of the products in the softmax."""
    among: Bools | None


class _TopK:
    """The best rows found so far for one context."""

    def __init__(
        self, pool: Pool, vectors_MD: Floats, task: _Task, reach: np.float32 = _NO_REACH
    ) -> None:
        self.vectors_MD, self.task = vectors_MD, task
        self._pool = pool
        self._places: Ints = np.empty(0, np.int64)
        self._scores: Floats = np.empty(0, np.float32)
        self.reach = reach
        """No row with a lower score, or bound, belongs to the top k."""

    @functools.cached_property
    def scorer(self) -> Scorer:
        return scorer([self.vectors_MD], self.task.scale, self._pool.longest)

    def __len__(self) -> int:
        return len(self._places)

    def best_of_few(self, places: Ints) -> _Rows:
        """The best of rows that may all be among the best, where none was considered before."""
        if len(places) <= _SCORED_ROWS:
            return _best(self._pool, np.sort(places), self.vectors_MD, self.task)
        self.take(places)
        return self.best()

    def take(self, places: Ints) -> None:
        """Considers rows that were not considered before."""
        places = np.sort(places)
        scores = in_parallel(self._scores_at, _split(places, _SCORED_ROWS))
        self._add(places, _joined(scores))

    def take_section(self, start: int, bounds_N: Floats) -> None:
        """Considers the rows from place `start` on, whose bounds are known and may be changed here."""
        if (among := self.task.among) is not None:
            bounds_N[~among[start : start + len(bounds_N)]] = -np.inf
        if not self.reach > -np.inf:
            seeds = _seed_rows(bounds_N, max(_SEEDS, 4 * self.task.top_k))
            seeds = seeds[~np.isneginf(bounds_N[seeds])]
            self.take(seeds + start)
            bounds_N[seeds] = -np.inf
        offsets = _open_rows(self.reach, bounds_N)
        # The most promising rows first: they show that others are not needed.
        order = np.argsort(-bounds_N[offsets], kind="stable")
        for part in _split(offsets[order], _OPEN_ROWS):
            part = part[~(bounds_N[part] < self.reach)]
            self.take(part + start)

    def best(self) -> _Rows:
        """The top k, best first; ties by id."""
        return _best(self._pool, np.sort(self._places), self.vectors_MD, self.task)

    def _scores_at(self, places: Ints) -> Floats:
        return self.scorer.scores(self._pool.layer_at(places, "vectors"))[0]

    def _add(self, places: Ints, scores: Floats) -> None:
        if len(self._places):
            places = np.concatenate([self._places, places])
            scores = np.concatenate([self._scores, scores])
        if len(scores) >= self.task.top_k:
            kth_score, error = _kth(scores, self.task.top_k, self.scorer.errors[0])
            reach = np.nextafter(np.float32(kth_score - error), np.float32(-np.inf))
            self.reach = max(self.reach, reach)
            is_near = ~(scores < kth_score - 2 * error)
            places, scores = places[is_near], scores[is_near]
        self._places, self._scores = places, scores


def _kth(scores: Floats, top_k: int, error: float) -> tuple[float, float]:
    """(the k-th best score, what it may be off). What rounds to the same float32 is tied with it."""
    kth_score = float(np.partition(scores, -top_k)[-top_k])
    return kth_score, error + (abs(kth_score) * 2.0**-22 if math.isfinite(kth_score) else 0.0)


def _best(pool: Pool, places: Ints, vectors_MD: Floats, task: _Task) -> _Rows:
    """The top k of rows at ascending places, in float64, best first; ties by id."""

    def exact_scores_at(part: Ints) -> Floats:
        return exact_scores(pool.layer_at(part, "vectors"), vectors_MD, task.scale)

    # One vector's products take no thread of torch.
    share: Callable[..., Any] = map if len(vectors_MD) == 1 else in_parallel
    scores = _joined(list(share(exact_scores_at, _split(places, _EXACT_ROWS))))
    order = np.argsort(-scores)
    if len(set(scores.tolist())) < len(scores):
        ids = [row["id"] for row in pool.rows_at(places, ("id",))]
        order = np.array(sorted(range(len(ids)), key=lambda n: (-scores[n], ids[n])))
    best = order[: task.top_k]
    return places[best], scores[best]


def _scan_pool(
    pool: Pool,
    contexts: Sequence[Floats],
    task: _Task,
    method: Method,
    reaches: Sequence[np.float32],
) -> list[_Rows]:
    """The top k of the whole pool for some contexts. `reaches`: what is known to be too low for each."""
    forms = FORMS.get(method, _ALL)
    form = forms[0] if len(forms) == 1 else fastest_form(pool, contexts, forms)
    began = time.perf_counter()
    if form == "scores":
        best = _score_pool(pool, contexts, task)
    else:
        tops = [
            _TopK(pool, context, task, reach)
            for context, reach in zip(contexts, reaches, strict=True)
        ]
        columns = columns_of(pool, contexts, form)
        for section_start, rows, blocks in _sections(pool, form):
            bounds_QN = np.empty((len(tops), rows), np.float32)
            work = functools.partial(_fill_bounds, columns=columns, bounds_QN=bounds_QN)
            in_parallel(work, blocks)
            for top, bounds_N in zip(tops, bounds_QN, strict=True):
                top.take_section(section_start, bounds_N)
        best = [top.best() for top in tops]
    if len(forms) > 1 and task.among is None and task.top_k <= len(pool):
        learn(pool, contexts, form, time.perf_counter() - began)
    return best


def _score_pool(pool: Pool, contexts: Sequence[Floats], task: _Task) -> list[_Rows]:
    """As `_scan_pool`, by the scores of all rows in float32. Those near the k-th are scored in float64.

    So a small pool takes one product, as in plain torch, and some 20 calls of numpy, which after a rest of
    10 ms take several times their usual 1 µs each, because the caches are cold.
    """
    scored = scorer(contexts, task.scale, pool.longest)
    most = min(max(_SCORED_PRODUCTS // len(scored.vectors), _LEAST_SCORED), _MOST_SCORED)
    blocks = list(_blocks(pool.multiplied_layers, most))
    # A single block is not handed over: all cores multiply it together, or one core by one vector.
    parts = [scored.scores(blocks[0])] if len(blocks) == 1 else in_parallel(scored.scores, blocks)
    allowed = None if task.among is None else np.flatnonzero(task.among)
    best = []
    for number, context in enumerate(contexts):
        scores = _joined([part[number] for part in parts])
        scores = scores if allowed is None else scores[allowed]
        kth_score, error = -math.inf, 0.0
        if len(scores) > task.top_k:
            kth_score, error = _kth(scores, task.top_k, scored.errors[number])
        near = np.flatnonzero(~(scores < kth_score - 2 * error))
        best.append(_best(pool, near if allowed is None else allowed[near], context, task))
    return best


def _fill_bounds(block: tuple[int, Layer], columns: Columns, bounds_QN: Floats) -> None:
    start, layer = block
    bounds_QN[:, start : start + len(layer.matrix)] = upper_bounds(layer, columns).numpy()


def _sections(pool: Pool, name: str) -> Iterator[tuple[int, int, list[tuple[int, Layer]]]]:
    """(the place of its first row, rows, blocks of rows and where each begins) of each section."""
    section_start = rows = 0
    blocks: list[tuple[int, Layer]] = []
    for layer in _blocks([getattr(shard, name) for shard in pool.shards], _BLOCK_ROWS):
        blocks.append((rows, layer))
        rows += len(layer.matrix)
        if rows >= _SECTION_ROWS:
            yield section_start, rows, blocks
            section_start, rows, blocks = section_start + rows, 0, []
    if blocks:
        yield section_start, rows, blocks


def _blocks(layers: Sequence[Layer], most: int) -> Iterator[Layer]:
    """All rows: one block of at most so many, else about equally many for each thread."""
    total = sum(len(layer.matrix) for layer in layers)
    blocks = 1 if total <= most else _round_up(-(-total // most), torch.get_num_threads())
    rows = max(1, -(-total // blocks))
    for layer in layers:
        for start in range(0, len(layer.matrix), rows):
            yield layer.take(slice(start, start + rows))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


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


def _joined(parts: Sequence[Floats]) -> Floats:
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.float32), *parts])


def _split(places: Ints, rows: int) -> list[Ints]:
    return [places[n : n + rows] for n in range(0, len(places), rows)]
