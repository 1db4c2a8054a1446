"""Which form of exact search is the fastest here: the first searches of a pool try those that may be.

    scores     all products of all rows, in float32: nothing comes before them, so small pools take this form
    vectors    bounds from the rows of the vectors
    sketch     bounds from the rows of the sketch

An estimate says which forms may be. It rests on a measurement of some of the pool's rows, once for a
process: the seconds before the first row, those of each row, those that memory needs to give the rows where
they exceed the caches, and those of the rows that bounds leave open. How many these are depends on the texts
and the model.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from pipeline.arrays import Floats
from pipeline.pools.pool import Pool
from pipeline.pools.vector_format import Layer
from pipeline.search.bounds import Columns, sketch_columns, upper_bounds, vector_columns
from pipeline.search.scores import scorer
from pipeline.search.threads import in_parallel

Form = Literal["scores", "vectors", "sketch"]
_WITH_BOUNDS: tuple[Form, ...] = ("vectors", "sketch")

# Too few rows for anything else to pay: to group a context's vectors takes as long as to score these rows.
_FEW_ROWS = 2048
# Rows whose first products take some milliseconds.
_LEAST_ROWS, _MOST_ROWS, _PRODUCTS = 2048, 8192, 1 << 18
_ROUNDS = 2
# What follows bounds, for each context: seconds in any case, rows that are scored first, and how much longer
# a row takes that is picked out. Measured with a poly-64 on 5,000 to 100,000 rows.
_AFTER_S, _FIRST_ROWS, _PICKED = 0.5e-3, 512, 3
# The share of the rows that bounds leave open where a context has several vectors: of a poly-64 on 5,000 to
# 100,000 rows; of a million it is a quarter of these.
_OPEN_SHARES: dict[Form, float] = {"vectors": 0.03, "sketch": 0.06}
# By the estimate alone 2.3 times the fastest form's time was taken.
_MAY_BE, _TRIES = 3.0, 3
# Of all scores the best are selected, in one thread.
_SELECTED_S = 6e-9
_CACHE_BYTES, _READ_BYTES = 1 << 22, 1 << 27


class _Seconds(NamedTuple):
    before: float
    a_row: float
    bytes_a_row: int


_Key = tuple[object, ...]
_measured: dict[_Key, dict[Form, _Seconds]] = {}
_tried: dict[_Key, dict[Form, list[float]]] = defaultdict(dict)
"""Seconds for each vector, of the first searches of each pool, by form."""


def fastest_form(pool: Pool, contexts: Sequence[Floats], forms: Sequence[Form]) -> Form:
    """`contexts`: [M, D] float64 each; `forms`: those to choose from."""
    if len(pool) <= _FEW_ROWS and "scores" in forms:
        return "scores"
    seconds = _measure(pool, contexts)
    cores = torch.get_num_threads()

    def estimate(form: Form) -> float:
        before, a_row, bytes_a_row = seconds[form]
        total_bytes = bytes_a_row * len(pool)
        reading = total_bytes / _read_rate() if total_bytes > _CACHE_BYTES else 0.0
        total = before + max(a_row * len(pool) / cores, reading)
        if form == "scores":
            total += _SELECTED_S * len(contexts) * len(pool)
        else:
            share = _OPEN_SHARES[form] if len(contexts[0]) > 1 else 0.0
            open_rows = min(_FIRST_ROWS + share * len(pool), len(pool))
            total += len(contexts) * _AFTER_S
            total += _PICKED * open_rows * seconds["scores"].a_row / cores
        return total

    estimates = {form: estimate(form) for form in forms}
    most_s, tried = _MAY_BE * min(estimates.values()), _tried[_pool_key(pool, contexts)]
    possible = [form for form in forms if estimates[form] <= most_s]
    fewest = min(len(tried.get(form, ())) for form in possible)
    if fewest >= _TRIES:
        return min(possible, key=lambda form: min(tried[form]))
    untried = [form for form in possible if len(tried.get(form, ())) == fewest]
    return min(untried, key=estimates.__getitem__)


def learn(pool: Pool, contexts: Sequence[Floats], form: Form, seconds: float) -> None:
    """Notes what a search of the whole pool took."""
    if len(pool) <= _FEW_ROWS:  # there is no choice, and a search takes a millisecond
        return
    tried = _tried[_pool_key(pool, contexts)].setdefault(form, [])
    if len(tried) < _TRIES:
        tried.append(seconds / sum(map(len, contexts)))


def columns_of(pool: Pool, contexts: Sequence[Floats], form: Form) -> Columns:
    """What the rows are multiplied with for the bounds of a form."""
    if form == "sketch":
        return sketch_columns(contexts, pool.rotation, pool.longest)
    return vector_columns(contexts, pool.dtype, pool.longest)


def _samples(pool: Pool, contexts: Sequence[Floats]) -> list[Layer]:
    """Some rows as `scores` multiplies them, of the vectors, and of the sketch."""
    shard = max(pool.shards, key=len)
    rows = min(max(_PRODUCTS // sum(map(len, contexts)), _LEAST_ROWS), _MOST_ROWS, len(shard))
    layers = (pool.multiplied_layers[0], shard.vectors, shard.sketch)
    return [layer.take(slice(rows)) for layer in layers]


def _key(pool: Pool, contexts: Sequence[Floats]) -> _Key:
    vectors, rows = sum(map(len, contexts)), min(_MOST_ROWS, max(map(len, pool.shards)))
    dtype = pool.multiplied_layers[0].matrix.dtype.str
    return (pool.dimensions, pool.rotation.shape[1], pool.dtype, dtype, len(contexts), vectors.bit_length(),
            rows.bit_length(), torch.get_num_threads())  # fmt: skip


def _pool_key(pool: Pool, contexts: Sequence[Floats]) -> _Key:
    return pool.artifact.uri, len(pool), *_key(pool, contexts)


def _measure(pool: Pool, contexts: Sequence[Floats]) -> dict[Form, _Seconds]:
    key = _key(pool, contexts)
    if key not in _measured:
        multiplied, *layers = _samples(pool, contexts)
        rows, scored = len(multiplied.matrix), scorer(contexts, 1.0, pool.longest)
        seconds = _alone(lambda: scored.scores(multiplied))
        measured: dict[Form, _Seconds] = {}
        measured["scores"] = _Seconds(0.0, seconds / rows, _bytes(multiplied))
        for form, layer in zip(_WITH_BOUNDS, layers, strict=True):
            columns = functools.partial(columns_of, pool, contexts, form)
            bound = functools.partial(upper_bounds, layer, columns())
            measured[form] = _Seconds(_best(columns), _alone(bound) / rows, _bytes(layer))
        _measured[key] = measured
    return _measured[key]


def _bytes(layer: Layer) -> int:
    return int(layer.matrix.strides[0]) + 4 * len(layer.norms)


def _alone(work: Callable[[], object]) -> float:
    """Seconds on one of the search's threads, which have a core each."""
    return min(in_parallel(_best, [work] * torch.get_num_threads()))


def _best(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(1 + _ROUNDS):
        began = time.thread_time()  # of this core alone: others may be at work, too
        work()
        seconds.append(time.thread_time() - began)
    return min(seconds[1:])


@functools.cache
def _read_rate() -> float:
    """Bytes a second that all cores read from memory."""
    numbers = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    return torch.get_num_threads() * _READ_BYTES / _alone(numbers.sum)
