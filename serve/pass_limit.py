"""How many requests a proxy passes on at once, after a replica has refused one because too much was waiting.

To pass a request to a full replica and its refusal back takes the cores that answers need. So a proxy counts
its requests under way, by path. A refusal tells it how many were too many. From then on it refuses what goes
beyond them by itself, and a request may pass as soon as another one is answered: a replica never runs out of
work, and with several replicas a full one keeps no request from the others. The limit grows, so a few
requests a second find out whether there is room for more, and after a while without a refusal it is gone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_GROWTH_PER_S = 20.0
"""Of the limit. So many requests a second reach a full replica in vain: some 2 % of a core."""


@dataclass
class _Path:
    under_way: int = 0
    limit: float = math.inf
    set_at: float = 0.0
    ends_at: float = 0.0

    def most(self, now: float) -> float:
        """The most requests under way at once."""
        return self.limit + _GROWTH_PER_S * (now - self.set_at) if now < self.ends_at else math.inf


class PassLimit:
    """The requests under way through one proxy."""

    def __init__(self) -> None:
        self._paths: dict[str, _Path] = {}

    def is_reached(self, path: str) -> bool:
        """Whether a further request would be too many."""
        known = self._paths.get(path)
        return known is not None and known.under_way + 1 > known.most(time.monotonic())

    @contextmanager
    def passing(self, path: str) -> Iterator[int]:
        """Counts a request as under way. The number is its own among those of its path."""
        known = self._paths.setdefault(path, _Path())
        known.under_way += 1
        try:
            yield known.under_way
        finally:
            known.under_way -= 1
            if not known.under_way and known.ends_at <= time.monotonic():
                del self._paths[path]

    def lower(self, path: str, number: int, seconds: float) -> None:
        """A replica was too full for the request of this number: it was one too many. One request may always
        pass. The limit ends when no replica was full for so many seconds."""
        now, known = time.monotonic(), self._paths[path]
        known.limit = max(1.0, min(number - 1, known.most(now)))
        known.set_at, known.ends_at = now, now + seconds
        for other, state in list(self._paths.items()):  # a client may invent paths
            if not state.under_way and state.ends_at <= now:
                del self._paths[other]
