"""A cache of filters' row masks."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from pipeline.arrays import Bools

_BYTES = 64 << 20  # 64 masks of a pool of a million rows


class Masks:
    """Masks by their filters; the longest unused ones go first. At least one stays, however large."""

    def __init__(self, most_bytes: int = _BYTES) -> None:
        self._most_bytes = most_bytes
        self._masks: OrderedDict[Hashable, Bools] = OrderedDict()
        self._lock = threading.Lock()

    async def get(self, key: Hashable, make: Callable[[], Bools]) -> Bools:
        """The mask of a filter; it is made beside the event loop, because it reads all rows of a pool."""
        with self._lock:
            if (mask := self._masks.get(key)) is not None:
                self._masks.move_to_end(key)
                return mask
        mask = await asyncio.get_running_loop().run_in_executor(None, make)
        with self._lock:
            # One array, because equal filters are searched together.
            mask = self._masks.setdefault(key, mask)
            self._masks.move_to_end(key)
            while len(self._masks) > 1 and self.bytes > self._most_bytes:
                self._masks.popitem(last=False)
        return mask

    @property
    def bytes(self) -> int:
        """Size of all masks."""
        return sum(mask.nbytes for mask in self._masks.values())
