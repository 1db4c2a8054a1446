"""Reads many small files at once, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

_AT_ONCE = 16


def map_prefetched(
    function: Callable[[ItemT], ResultT], items: Iterable[ItemT]
) -> Iterator[ResultT]:
    """`function(item)` of each item, in order, while threads do the next ones: an object store takes 20 ms or
    more for a file, and a large pool has thousands."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        futures: deque[Future[ResultT]] = deque()
        for item in items:
            futures.append(pool.submit(function, item))
            if len(futures) > 2 * _AT_ONCE:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
