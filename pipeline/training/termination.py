"""SIGTERM while a training runs: the notice that a spot node gives, or an operator who stops the job."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_sigterm(notice: Callable[[], None]) -> Iterator[None]:
    """Meanwhile SIGTERM does not end this process: the first one calls `notice`, in a thread.

    It works in any thread. `signal.signal` works in the main thread alone, which in a worker of Ray Train is
    Ray's, and Ray's own handler ends the process. The handler of faulthandler can be set anywhere: it writes
    a stack into a pipe, whose other end waits here. A process of a Ray that a job has started blocks the
    signal in all of its other threads (`jobs.cluster`).
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # a handler does not wait for room in the pipe

    def wait() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if os.read(reader, 1):  # b"": the other end is closed
            notice()

    thread = threading.Thread(target=wait, daemon=True, name="sigterm")
    faulthandler.register(signal.SIGTERM, writer, all_threads=False)
    thread.start()
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGTERM)
        os.close(writer)
        thread.join()
        os.close(reader)
