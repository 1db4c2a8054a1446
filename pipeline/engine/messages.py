"""Messages from tasks and workers of the cluster to the process that started them, and one back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@contextmanager
def listening(handle: Callable[..., None]) -> Iterator[Queue]:
    """A queue; each tuple that is put into it becomes the arguments of `handle`, in a thread.

    All messages that were put in before the end are handled before it.
    """
    queue = Queue(actor_options=_on_this_node())

    def listen() -> None:
        while (message := queue.get()) is not None:
            handle(*message)

    thread = threading.Thread(target=listen, daemon=True, name="news")
    thread.start()
    try:
        yield queue
    finally:
        queue.put(None)
        thread.join()
        queue.shutdown()


class _Event:
    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def set(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()


def event() -> Any:
    """An actor whose `wait` returns, in any process of the cluster, after this process has called `set`. It
    ends with the last handle."""
    return ray.remote(_Event).options(**_on_this_node()).remote()


def _on_this_node() -> dict[str, Any]:
    """On any other node, the death of that node would end the job: whoever sends waits for the queue."""
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return {"num_cpus": 0, "scheduling_strategy": this_node}
