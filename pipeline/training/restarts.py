"""Which failures of workers Ray Train restarts them for.

Apart from launch.py, which loads the networks' libraries: Ray Train's controller imports this module, in a
process of its own that trains nothing, and starts 4 seconds of CPU sooner without them.
"""

from __future__ import annotations

from typing import Any

from ray.train import UserCallback
from ray.util.queue import Queue

from pipeline.storage.failures import DETERMINISTIC, cause_of


class RetryMachinesOnly(UserCallback):  # type: ignore[misc]
    """Ends the run at an error that the same code would make again, instead of restarting workers. Before a
    restart it sends the driver `line`."""

    def __init__(self, messages: Queue, line: str) -> None:
        self._messages, self._line = messages, line

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        for error in worker_exceptions.values():
            if failure := cause_of(error, *DETERMINISTIC):
                raise failure  # Ray Train retries no error of a callback
        self._messages.actor.put_nowait.remote((self._line,))
