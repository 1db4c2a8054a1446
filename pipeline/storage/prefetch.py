"""Does the next items ahead, such as reading small files or ranges of a large one, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

_THREADS = 16


def map_prefetched(
    function: Callable[[ItemT], ResultT],
    items: Iterable[ItemT],
    threads: int = _THREADS,
    most_waiting: int = 2 * _THREADS,
) -> Generator[ResultT, None, None]:
    """`function(item)` of each item, in order, while threads do the next ones: an object store takes 20 ms or
    more for a file, and a large pool has thousands.

    `most_waiting`: results, and items to do, that are held at a time.
    """
    with ThreadPoolExecutor(threads) as pool:
        futures: deque[Future[ResultT]] = deque()
        try:
            for item in items:
                futures.append(pool.submit(function, item))
                if len(futures) >= most_waiting:
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
        finally:  # of a caller that stops, or a failure
            for future in futures:
                future.cancel()
