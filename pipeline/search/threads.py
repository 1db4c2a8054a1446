"""The threads of a search: blocks of rows, each on one core from its beginning to its end.

Threads that share every single product wait for each other after each, which on a core that others use too
costs several times the product. And they go on waiting, at full load, for some milliseconds after the last
product (7 ms with torch's OpenMP, 50 ms with numpy's OpenBLAS), in which the next blocks have to do with
fewer cores: 5,000 rows took 3.2 ms in place of 1.5. So only `scores` of a whole pool, which does nothing
else, shares its products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def in_parallel(work: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> list[ResultT]:
    """Work on blocks of rows, each on one core.

    A single core works where it is: with the clients of a service beside it, 50 hand-overs a search took
    three quarters of its time.
    """
    items = list(items)
    threads = torch.get_num_threads()
    if len(items) < 2 or threads == 1:
        with one_thread():
            return list(map(work, items))
    results = list(_threads().map(work, items))
    torch.set_num_threads(
        threads
    )  # for new threads, too, which take what was set last, by any thread
    return results


@contextmanager
def one_thread() -> Iterator[None]:
    """Products in this thread stay on its core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # 0.1 µs
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), initializer=_stay_on_one_core)


def _stay_on_one_core() -> None:
    torch.get_num_threads()  # the first call in a thread takes what was set last, by any thread
    torch.set_num_threads(1)
