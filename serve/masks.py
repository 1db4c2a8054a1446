"""Filters of a pool's rows, and a cache of their masks."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

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
    """Masks by the digests of their filters; the longest unused ones go first. At least one stays, however
    large. A filter itself may be larger than its mask: it names up to a thousand ids."""

    def __init__(self, most_bytes: int = _BYTES) -> None:
        self._most_bytes = most_bytes
        self._masks: OrderedDict[bytes, Bools] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0
        """Size of all entries."""

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
            if (mask := self._masks.get(key)) is not None:
                self._masks.move_to_end(key)
                return mask
        mask = await asyncio.get_running_loop().run_in_executor(None, make)
        with self._lock:
            # One array, because equal filters are searched together.
            if key not in self._masks:
                self._masks[key] = mask
                self.bytes += mask.nbytes + ENTRY_BYTES
            self._masks.move_to_end(key)
            while len(self._masks) > 1 and self.bytes > self._most_bytes:
                _, oldest_mask = self._masks.popitem(last=False)
                self.bytes -= oldest_mask.nbytes + ENTRY_BYTES
            return self._masks[key]
