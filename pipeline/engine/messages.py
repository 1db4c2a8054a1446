"""Messages from tasks and workers of the cluster to the process that started them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@contextmanager
def listening(handle: Callable[..., None]) -> Iterator[Queue]:
    """A queue; each tuple that is put into it becomes the arguments of `handle`, in a thread.

    All messages that were put in before the end are handled before it.
    """
    # On any other node, the death of that node would end the job: whoever sends waits for the queue.
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": this_node})

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
