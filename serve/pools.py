"""Versions of pools that are open in this process: filters of their rows, and searches in batches.

M vectors a context, D dimensions, K results. No HTTP, no Ray.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from cachetools import LRUCache, cached

from pipeline.arrays import Bools, Floats, Ints
from pipeline.engine.resources import best_device
from pipeline.models.settings import Attention
from pipeline.pools.lock import lease
from pipeline.pools.pool import Canary, Pool, describe
from pipeline.pools.shard import PoolPart
from pipeline.ranking.results import Result, results_at
from pipeline.search import device, filters, top_rows
from serve.batcher import Batcher, Stage

_SEARCHES = 16  # searches in one pass over a pool
_ROWS_OF_A_SEARCH = 200  # whose texts are read in the time of a search of a small pool
_CANARIES = 8
_MASK_BYTES = 64 << 20  # 64 masks of a pool of a million rows
# Of an entry beside its mask: the digest, the array object and the place in the dictionary. Python's objects
# were 260 bytes; the allocator rounds up.
ENTRY_BYTES = 512


class RowFilter(NamedTuple):
    """Which rows of a pool a search may answer with; by default all."""

    where: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Columns, and the values that a row may have there."""
    allow: tuple[str, ...] | None = None
    """The only ids that count; None: any."""
    deny: tuple[str, ...] = ()
    """Ids that do not count."""


ALL_ROWS = RowFilter()


class PoolQuery(NamedTuple):
    """A search of a pool."""

    vectors_MD: Floats
    """Of the context, float32."""
    mask_M: Bools
    """False for a vector that does not count."""
    attention: Attention
    top_k: int
    rows: RowFilter = ALL_ROWS
    with_vectors: bool = False
    """Whether the answer has the vectors of its results."""
    is_checked: bool = False
    """Whether a shard admitted another search of its request, so that this one is not refused."""


class PoolAnswer(NamedTuple):
    """The best rows of a pool, best first; ties by id."""

    results: list[Result]
    certified: bool
    """Whether this is provably the exact top k."""
    vectors: Mapping[int, Floats] = {}
    """[D] by the place of a result; only if the query asks for them."""
    missing_shards: Sequence[int] = ()
    """Shards that did not answer, whose rows are not among the results."""


class Masks:
    """Masks by the digests of their filters; the longest unused ones go first. One mask may stay, however
    large. A filter itself may be larger than its mask: it names up to a thousand ids."""

    def __init__(self, most_bytes: int = _MASK_BYTES) -> None:
        def size(mask: Bools) -> int:
            return min(most_bytes, mask.nbytes + ENTRY_BYTES)

        self._masks: LRUCache[bytes, Bools] = LRUCache(most_bytes, size)
        # One array for equal filters, because they are searched together.
        self._select = cached(self._masks, _digest, threading.Lock())(_select)

    async def allowed_rows(self, pool: Pool, rows: RowFilter) -> Bools | None:
        """The mask of a pool's rows that pass a filter; None: all rows. It is made beside the event loop,
        because it reads all rows of a pool.

        Raises BadInput for a column that the pool does not keep.
        """
        return None if rows == ALL_ROWS else await asyncio.to_thread(self._select, pool, rows)


def _digest(pool: Pool, rows: RowFilter) -> bytes:
    return hashlib.sha256(repr((pool.artifact.uri, rows)).encode()).digest()


def _select(pool: Pool, rows: RowFilter) -> Bools:
    return filters.select(pool, rows.allow, rows.deny, dict(rows.where))


class OpenPool:
    """A version of a pool, or a part of its rows. It is not removed from the storage while it is open."""

    def __init__(self, uri: str, masks: Masks, part: PoolPart | None = None) -> None:
        """Opens a version, or a pool's CURRENT one. `masks`: a cache for the pools of this process.

        Raises BadInput or OSError."""
        self.pool = pool = Pool.open(uri, part=part, device=search_device())
        self.uri, self.name, self.version = pool.artifact.uri, pool.name, pool.version
        self.rows, self.on_device = len(pool), pool.on_device
        self.description = {**describe(pool), "columns": pool.filter_columns}
        self.stage = Stage("search", self._search, _SEARCHES, _cost)
        """Its rows are queries with their masks; one pass over the pool answers several."""
        self._masks = masks
        self._first = part.rows(pool.artifact.rows("rows/")).start if part else 0
        self._lease = lease(self.uri)

    @functools.cached_property
    def canaries(self) -> list[Canary]:
        """Some rows, to check that the model embedded them."""
        return self.pool.canaries(_CANARIES) if self.rows else []

    def close(self) -> None:
        self.pool.close()
        if self._lease is not None:
            self._lease.stop()

    def warm_up(self, vectors_per_context: int) -> None:
        """Compiles what searches on a GPU need."""
        if self.on_device is not None:
            device.warm_up(self.on_device, vectors_per_context)

    async def search(self, query: PoolQuery, deadline: float, batcher: Batcher) -> PoolAnswer:
        """The best rows, with their places in the whole pool. Raises BadInput for a column that the pool does
        not keep, and Refusal (too_late)."""
        row = (query, await self.mask(query.rows))
        (answer,) = await batcher.run(self.stage, [row], [_cost(row)], deadline)
        return answer  # type: ignore[no-any-return]

    async def mask(self, rows: RowFilter) -> Bools | None:
        """As `Masks.allowed_rows`."""
        return await self._masks.allowed_rows(self.pool, rows) if self.rows else None

    def _search(self, queries: Sequence[tuple[PoolQuery, Bools | None]]) -> list[PoolAnswer]:
        """Queries with the same filter share their passes over the pool."""
        if not self.rows:
            return [PoolAnswer([], True)] * len(queries)
        answers: dict[int, PoolAnswer] = {}
        by_filter: dict[tuple[Attention, int], list[int]] = defaultdict(list)
        for place, (query, row_mask) in enumerate(queries):
            by_filter[query.attention, id(row_mask)].append(place)
        for (attention, _), places in by_filter.items():
            group = [queries[place][0] for place in places]
            found = top_rows(
                self.pool,
                np.stack([query.vectors_MD for query in group]),
                max(query.top_k for query in group),
                np.stack([query.mask_M for query in group]),
                attention,
                among=queries[places[0]][1],
            )
            best = [found.places[row, : query.top_k] for row, query in enumerate(group)]
            scores = [found.scores[row, : query.top_k] for row, query in enumerate(group)]
            # Read together: ten texts take 0.10 ms, and 160 texts 0.26.
            results = iter(
                results_at(self.pool, np.concatenate(best), np.concatenate(scores), self._first)
            )
            for row, (place, query) in enumerate(zip(places, group, strict=True)):
                own_results = list(itertools.islice(results, len(best[row])))
                vectors = self._vectors_at(best[row]) if query.with_vectors else {}
                answers[place] = PoolAnswer(own_results, bool(found.certified[row]), vectors)
        return [answers[place] for place in range(len(queries))]

    def _vectors_at(self, places_K: Ints) -> dict[int, Floats]:
        """[D] by the place in the whole pool."""
        ascending_K = np.sort(places_K)  # as the pool reads them
        places = (self._first + ascending_K).tolist()
        return dict(zip(places, self.pool.vectors_at(ascending_K), strict=True))


def search_cost(top_k: int) -> float:
    """The cost in searches: the texts of the results are read, too."""
    return 1 + top_k / _ROWS_OF_A_SEARCH


def _cost(row: tuple[PoolQuery, Bools | None]) -> float:
    return search_cost(row[0].top_k)


def search_device() -> str:
    """The GPU that this replica asked for (`num_gpus`), which then searches the pools; "": its cores do."""
    place = best_device()
    return "" if place.type == "cpu" else str(place)
