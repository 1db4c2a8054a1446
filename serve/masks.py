"""Filters of a pool's rows, and a cache of their masks."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from typing import NamedTuple

from cachetools import LRUCache, cached

from pipeline.arrays import Bools
from pipeline.pools.pool import Pool
from pipeline.search import filters

_BYTES = 64 << 20  # 64 masks of a pool of a million rows
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


class Masks:
    """Masks by the digests of their filters; the longest unused ones go first. One mask may stay, however
    large. A filter itself may be larger than its mask: it names up to a thousand ids."""

    def __init__(self, most_bytes: int = _BYTES) -> None:
        def size(mask: Bools) -> int:
            return min(most_bytes, mask.nbytes + ENTRY_BYTES)

        self._masks: LRUCache[bytes, Bools] = LRUCache(most_bytes, size)
        # One array for equal filters, because they are searched together.
        self._select = cached(self._masks, _digest, threading.Lock())(_select)

    @property
    def bytes(self) -> int:
        """Size of all entries."""
        return int(self._masks.currsize)

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
