"""News from tasks and workers of the cluster, heard by the process that started them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray.util.queue import Queue


@contextmanager
def listening(hear: Callable[..., None]) -> Iterator[Queue]:
    """A queue; each tuple that is put into it becomes the arguments of `hear`, in a thread.

    What was put in before the end is heard before it.
    """
    queue = Queue(actor_options={"num_cpus": 0})

    def listen() -> None:
        while (news := queue.get()) is not None:
            hear(*news)

    thread = threading.Thread(target=listen, daemon=True, name="news")
    thread.start()
    try:
        yield queue
    finally:
        queue.put(None)
        thread.join()
        queue.shutdown()
