"""Filters of a pool's rows, and a cache of their masks."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import threading
from collections.abc import Callable, Hashable
from typing import NamedTuple

from cachetools import LRUCache

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
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """Size of all entries."""
        return int(self._masks.currsize)

    async def allowed_rows(self, pool: Pool, rows: RowFilter) -> Bools | None:
        """The mask of a pool's rows that pass a filter; None: all rows.

        Raises BadInput for a column that the pool does not keep.
        """
        if rows == ALL_ROWS:
            return None
        select = functools.partial(filters.select, pool, rows.allow, rows.deny, dict(rows.where))
        return await self.get((pool.artifact.uri, rows), select)

    async def get(self, filter_key: Hashable, make: Callable[[], Bools]) -> Bools:
        """The mask of a filter; it is made beside the event loop, because it reads all rows of a pool."""
        key = hashlib.sha256(repr(filter_key).encode()).digest()
        with self._lock:
            if (known := self._masks.get(key)) is not None:
                return known
        mask = await asyncio.get_running_loop().run_in_executor(None, make)
        with self._lock:  # one array, because equal filters are searched together
            return self._masks.setdefault(key, mask)
