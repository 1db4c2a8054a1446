"""SIGTERM is noticed in any thread, and ends the process again afterwards."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.training.termination import on_sigterm


@pytest.fixture
def other_handler():
    """What the process did at SIGTERM before."""
    called = threading.Event()
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: called.set())
    yield called
    signal.signal(signal.SIGTERM, earlier)


@pytest.mark.parametrize("signals", [1, 500])  # 500 stacks are more than a pipe holds
def test_sigterm_is_noticed_outside_of_the_main_thread(other_handler, signals):
    noticed = threading.Event()

    def work() -> bool:
        with on_sigterm(noticed.set):
            for _ in range(signals):  # of a process, the last would be on its way for a moment
                signal.raise_signal(signal.SIGTERM)
            return noticed.wait(60)

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(work).result()
    assert not other_handler.is_set()


def test_without_sigterm_nothing_is_noticed_and_the_earlier_handler_is_back(other_handler):
    noticed = threading.Event()
    with on_sigterm(noticed.set):
        pass
    assert not noticed.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    assert other_handler.wait(60)
    assert not noticed.is_set()
