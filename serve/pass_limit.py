"""How many requests a proxy passes on at once, after a replica has refused one because too much was waiting.

To pass a request to a full replica and its refusal back takes the cores that answers need. So a proxy counts
its requests under way, by path. A refusal tells it how many were too many. From then on it refuses what goes
beyond them by itself, and a request may pass as soon as another one is answered: a replica never runs out of
work, and with several replicas a full one keeps no request from the others. The limit grows, slowly at first:
about one request a second finds out whether there is room for more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_GROWTH_PER_S2 = 0.5
_SHARE_PER_S2 = 0.0025
"""Of the limit's growth: one more after 1.4 s, 13 after 5 s, and a limit of thousands doubles in 20 s, as
replicas may."""
_FORGOTTEN_S = 60.0
"""The age at which a limit is dropped."""
_MOST_PATHS = 100  # a client may invent some


@dataclass
class _Path:
    under_way: int = 0
    limit: float = math.inf
    set_at: float = -math.inf

    def most(self, now: float) -> float:
        """The most requests under way at once."""
        age = now - self.set_at
        growth = (_GROWTH_PER_S2 + _SHARE_PER_S2 * self.limit) * age * age
        return self.limit + growth if age < _FORGOTTEN_S else math.inf


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
            if not known.under_way and known.most(time.monotonic()) == math.inf:
                self._paths.pop(path, None)

    def lower(self, path: str, number: int) -> None:
        """A replica was too full for the request of this number: it was one too many. One request may always
        pass."""
        now, known = time.monotonic(), self._paths[path]
        known.limit, known.set_at = max(1.0, min(number - 1, known.most(now))), now
        if len(self._paths) > _MOST_PATHS:
            self._paths = {path: known for path, known in self._paths.items() if known.under_way}
