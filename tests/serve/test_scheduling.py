"""The work queue: who is computed when, with whom, and who is not. The masks of filters."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from serve.errors import Refusal
from serve.masks import ENTRY_BYTES, Masks
from serve.scheduling import Batch, Kind, WorkQueue

from .conftest import Clock, run


class Gate:
    """A kind whose first batch waits until it is opened; it keeps what it computed."""

    def __init__(self, units: float = 100.0) -> None:
        self.kind = Kind("gated", self._run, units)
        self.entered, self.opened = threading.Event(), threading.Event()
        self.batches: list[list[Any]] = []

    def _run(self, rows: list[Any]) -> list[Any]:
        self.entered.set()
        assert self.opened.wait(60)
        self.batches.append(rows)
        return [f"done {row}" for row in rows]


@pytest.fixture
def queue() -> Iterator[WorkQueue]:
    made = WorkQueue(most_waiting_s=60.0)
    yield made
    made.close()


def soon() -> float:
    return time.monotonic() + 60


async def behind(gate: Gate, queue: WorkQueue, submit: Callable[[], list[Any]]) -> list[Any]:
    """What comes of coroutines that are handed in while a first row is computed."""
    first = asyncio.ensure_future(queue.run(gate.kind, ["first"], [1], soon() - 59))
    await asyncio.to_thread(gate.entered.wait, 60)
    waiting = [asyncio.ensure_future(work) for work in submit()]
    await asyncio.sleep(0)  # so that each has handed in its rows
    gate.opened.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    await first
    return results


def test_results_come_in_the_order_of_the_rows(queue):
    square = Kind("square", lambda rows: [row * row for row in rows], 10)
    found = run(queue.run(square, range(100), [3] * 100, soon()))
    assert found == [number * number for number in range(100)]
    assert run(queue.run(square, [], [], soon())) == []


def test_rows_that_gathered_are_computed_together_up_to_the_units_of_a_batch(queue):
    gate = Gate(units=10)
    rows = [queue.run(gate.kind, [name], [4], soon()) for name in "abcde"]
    results = run(behind(gate, queue, lambda: rows))
    assert results == [[f"done {name}"] for name in "abcde"]
    assert gate.batches == [["first"], ["a", "b"], ["c", "d"], ["e"]]


def test_a_row_above_the_units_of_a_batch_is_computed_alone(queue):
    gate = Gate(units=10)
    run(behind(gate, queue, lambda: [queue.run(gate.kind, ["a", "b"], [50, 1], soon())]))
    assert gate.batches == [["first"], ["a"], ["b"]]


def test_the_shortest_deadline_comes_first(queue):
    gate = Gate(units=1)
    now = time.monotonic()
    later = [queue.run(gate.kind, [s], [1], now + s) for s in (50, 40, 45)]
    run(behind(gate, queue, lambda: later))
    assert gate.batches[1:] == [[40], [45], [50]]


def test_a_small_request_passes_between_the_rows_of_a_large_one(queue):
    gate = Gate(units=1)
    queue._unit_s["gated"].value = 0.1  # what such rows took before
    now = time.monotonic()
    large = queue.run(gate.kind, list(range(100)), [1] * 100, now + 30)
    small = queue.run(gate.kind, ["small"], [1], now + 31)
    run(behind(gate, queue, lambda: [large, small]))
    order = [row for batch in gate.batches for row in batch]
    assert 5 < order.index("small") < 20  # a second of the large one's rows comes before it


def test_what_is_too_late_is_not_computed(queue):
    gate = Gate()
    late = queue.run(gate.kind, ["late"], [1], time.monotonic() - 1)
    in_time = queue.run(gate.kind, ["in time"], [1], soon())
    results = run(behind(gate, queue, lambda: [late, in_time]))
    assert isinstance(results[0], Refusal) and results[0].code == "too_late"
    assert results[1] == ["done in time"]
    assert gate.batches == [["first"], ["in time"]]


def test_a_row_whose_client_is_gone_is_not_computed(queue):
    gate = Gate()

    async def leave():
        gone = asyncio.ensure_future(queue.run(gate.kind, ["gone"], [1], soon()))
        await asyncio.sleep(0)
        gone.cancel()

    run(behind(gate, queue, lambda: [leave(), queue.run(gate.kind, ["there"], [1], soon())]))
    assert gate.batches == [["first"], ["there"]]


def test_one_requests_failure_is_not_that_of_its_batch(queue):
    def inverse(rows: list[float]) -> list[float]:
        return [1 / row for row in rows]

    async def three() -> list[Any]:
        kind = Kind("inverse", inverse, 100)
        calls = (queue.run(kind, [row], [1], soon()) for row in (1, 0, 2))
        return await asyncio.gather(*calls, return_exceptions=True)

    one, zero, two = run(three())
    assert (one, two) == ([1.0], [0.5])
    assert isinstance(zero, ZeroDivisionError)


async def let_in(gate: Gate, queue: WorkQueue, count: int) -> list[asyncio.Task[Any]]:
    """So many requests of a unit each, of which the first is being computed."""

    async def request(row: int) -> Any:
        with queue.admit("request", 1, soon() + 1000):
            return await queue.run(gate.kind, [row], [1], soon())

    waiting = [asyncio.create_task(request(row)) for row in range(count)]
    await asyncio.to_thread(gate.entered.wait, 60)
    return waiting


def test_so_much_work_is_accepted_and_no_more(queue):
    gate = Gate(units=1)
    queue._request_s["request"].value = 1.0

    async def fill() -> None:
        waiting = await let_in(gate, queue, 70)
        assert queue.seconds_before(soon() + 1001) == pytest.approx(61)
        with pytest.raises(Refusal) as refused, queue.admit("request", 1, soon() + 1000):
            pass
        assert refused.value.code == "overloaded"
        assert refused.value.retry_after_s == pytest.approx(61)
        gate.opened.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [isinstance(one, Refusal) for one in results] == [False] * 61 + [True] * 9
        assert queue.seconds_before(math.inf) == 0.0
        with queue.admit("request", 1, soon()):  # all is done: nothing of it counts any more
            pass

    run(fill())


def test_a_request_counts_before_its_rows_are_there(queue):
    """They come one stage after the other: 200 clients who came at once were all let in."""
    queue._request_s["request"].value = 30.0
    with queue.admit("request", 1, soon()), queue.admit("request", 1.5, soon()):
        assert queue.seconds_before(math.inf) == pytest.approx(75.0)
        with pytest.raises(Refusal), queue.admit("request", 1, soon()):
            pass
    assert queue.seconds_before(math.inf) == 0.0


def test_a_request_counts_as_is_measured_while_it_waits(queue):
    """All that came to a new replica before its first answers counted as no work."""
    with queue.admit("request", 1, soon()), queue.admit("request", 1.5, soon()):
        assert queue.seconds_before(math.inf) == 0.0
        queue._request_s["request"].value = 30.0
        assert queue.seconds_before(math.inf) == pytest.approx(75.0)
        with pytest.raises(Refusal), queue.admit("request", 1, soon()):
            pass


def test_a_request_whose_time_is_over_is_too_late_however_much_is_waiting(queue):
    """A refusal as overloaded would invite it to come again."""
    for waiting_s in (0.0, 100.0):
        queue._request_s["request"].value = waiting_s
        with queue.admit("request", 1, soon()):
            assert queue.seconds_before(math.inf) == waiting_s
            over = queue.admit("request", 1, time.monotonic())
            with pytest.raises(Refusal) as refused, over:
                pass
        assert (refused.value.code, refused.value.retry_after_s) == ("too_late", 0.0)


def test_a_request_that_would_be_late_is_refused_at_once(queue):
    queue._request_s["request"].value = 10.0
    now = time.monotonic()
    with queue.admit("request", 1, now + 15), queue.admit("request", 1, now + 15):
        with queue.admit("request", 1, now + 30):  # 20 s of work come before it
            pass
        late = queue.admit("request", 1, now + 18)
        with pytest.raises(Refusal, match="are waiting") as refused, late:
            pass
        with queue.admit("request", 1, now + 4):  # it comes before both
            pass
    assert (refused.value.code, refused.value.is_full) == ("overloaded", False)


def test_what_requests_took_is_what_the_next_are_expected_to_take(queue, monkeypatch):
    """A unit; the first one does not count."""
    monkeypatch.setattr("serve.scheduling.time", clock := Clock())
    took = iter([5.0, 0.2, 0.4])

    def work(rows: list[int]) -> list[int]:
        clock.now += next(took)
        return rows

    async def ask() -> None:
        deadline = clock.now + 60
        with queue.admit("request", 2, deadline):
            await queue.run(Kind("work", work, 10), [1, 2], [1, 1], deadline)

    for _ in range(3):
        run(ask())
    assert queue._request_s["request"].value == pytest.approx((0.2 + 0.4) / 4)
    with queue.admit("request", 100, clock.now + 60):
        assert queue.seconds_before(math.inf) == pytest.approx(15.0)


def test_the_watch_hears_of_every_batch():
    heard: list[Batch] = []
    queue = WorkQueue(60.0, heard.append)
    run(queue.run(Kind("k", lambda rows: rows, 3), [1, 2, 3, 4], [1] * 4, soon()))
    queue.close()
    assert [(batch.kind, batch.rows, batch.units) for batch in heard] == [("k", 3, 3), ("k", 1, 1)]


# Masks of filters


def test_masks_are_kept_up_to_a_number_of_bytes():
    masks, made = Masks(most_bytes=2 * ENTRY_BYTES + 25), Counter[str]()

    def make(name: str) -> np.ndarray:
        made[name] += 1
        return np.ones(10, bool)

    for name in ("a", "b", "a", "c", "a", "b"):  # c takes the place of b
        run(masks.get(name, lambda name=name: make(name)))
    assert made == {"a": 1, "b": 2, "c": 1}
    assert masks.bytes == 2 * ENTRY_BYTES + 20


def test_masks_take_no_memory_for_the_ids_of_their_filters():
    masks = Masks()

    async def fill() -> None:
        for number in range(500):
            ids = tuple(f"row {number} {place}" for place in range(200))
            await masks.get(("pool", (), ids), lambda: np.ones(10, bool))

    tracemalloc.start()
    try:
        run(fill())
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert masks.bytes == 500 * (ENTRY_BYTES + 10)
    assert taken_bytes < 2 * masks.bytes


def test_a_filter_reads_the_rows_beside_the_event_loop():
    threads: list[int] = []

    def make() -> np.ndarray:
        threads.append(threading.get_ident())
        return np.ones(1, bool)

    run(Masks().get("a", make))
    assert threads != [threading.get_ident()]
