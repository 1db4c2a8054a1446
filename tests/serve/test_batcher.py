"""The batcher: who is computed when, with whom, and who is not. The masks of filters."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from serve.batcher import SENDER, Batch, Batcher, Stage, Step, all_of
from serve.pools import ENTRY_BYTES, Masks, RowFilter
from serve.refusals import Refusal

from .conftest import Clock, run


class Gate:
    """A kind whose first batch waits until it is opened; it keeps what it computed."""

    def __init__(self, cost: float = 100.0) -> None:
        self.stage = Stage("gated", self._run, cost)
        self.entered, self.opened = threading.Event(), threading.Event()
        self.batches: list[list[Any]] = []

    def _run(self, rows: list[Any]) -> list[Any]:
        self.entered.set()
        assert self.opened.wait(60)
        self.batches.append(rows)
        return [f"done {row}" for row in rows]


@pytest.fixture
def batcher() -> Iterator[Batcher]:
    made = Batcher(max_wait_s=60.0)
    yield made
    made.close()


@pytest.fixture
def unit() -> Stage:
    """Work that is admitted and never computed."""
    return Stage("unit", list, 1.0)


@pytest.fixture
def still_clock(monkeypatch) -> None:
    """No batch takes any time, so rows count by their cost."""
    now = time.monotonic()
    monkeypatch.setattr("serve.batcher.time", SimpleNamespace(monotonic=lambda: now))


def soon() -> float:
    return time.monotonic() + 60


async def behind(gate: Gate, batcher: Batcher, submit: Callable[[], list[Any]]) -> list[Any]:
    """What comes of coroutines that are handed in while a first row is computed."""
    first = asyncio.ensure_future(batcher.run(gate.stage, ["first"], [1], soon() - 59))
    await asyncio.to_thread(gate.entered.wait, 60)
    waiting = [asyncio.ensure_future(work) for work in submit()]
    await asyncio.sleep(0)  # so that each has handed in its rows
    gate.opened.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    await first
    return results


def test_results_come_in_the_order_of_the_rows(batcher):
    square = Stage("square", lambda rows: [row * row for row in rows], 10)
    found = run(batcher.run(square, range(100), [3] * 100, soon()))
    assert found == [number * number for number in range(100)]
    assert run(batcher.run(square, [], [], soon())) == []


def test_rows_that_gathered_are_computed_together_up_to_the_cost_of_a_batch(batcher):
    gate = Gate(cost=10)
    rows = [batcher.run(gate.stage, [name], [4], soon()) for name in "abcde"]
    results = run(behind(gate, batcher, lambda: rows))
    assert results == [[f"done {name}"] for name in "abcde"]
    assert gate.batches == [["first"], ["a", "b"], ["c", "d"], ["e"]]


def test_a_row_above_the_cost_of_a_batch_is_computed_alone(batcher):
    gate = Gate(cost=10)
    run(behind(gate, batcher, lambda: [batcher.run(gate.stage, ["a", "b"], [50, 1], soon())]))
    assert gate.batches == [["first"], ["a"], ["b"]]


async def admitted(batcher: Batcher, gate: Gate, sender: str, rows: list[Any], cost: float) -> None:
    SENDER.set(sender)
    with batcher.admit({gate.stage: cost * gate.stage.batch_cost}, soon()):
        await batcher.run(gate.stage, rows, [1] * len(rows), soon())


def order_of(batcher: Batcher, *requests: tuple[str, list[Any], float]) -> list[Any]:
    """The order in which the rows of requests (sender, rows, cost) are computed, one by one."""
    gate = Gate(cost=1)
    run(behind(gate, batcher, lambda: [admitted(batcher, gate, *request) for request in requests]))
    return [row for batch in gate.batches[1:] for row in batch]


def test_senders_are_computed_in_turns(still_clock, batcher):
    order = order_of(
        batcher, ("a", ["a1", "a2", "a3"], 1.0), ("a", ["a4"], 1.0), ("b", ["b1", "b2"], 1.0)
    )
    assert order == ["a1", "b1", "a2", "b2", "a3", "a4"]


def test_a_request_that_was_begun_is_finished_before_later_ones_of_its_sender(batcher):
    order: list[str] = []
    is_handed_in = threading.Event()

    def compute(rows: list[str]) -> list[str]:
        order.extend(rows)
        assert rows != ["b1"] or is_handed_in.wait(60)
        return rows

    stage = Stage("ordered", compute, 1)

    async def two_stages(name: str) -> None:
        with batcher.admit({stage: 1}, soon()):
            await batcher.run(stage, [f"{name}1"], [1], soon())
            second = asyncio.ensure_future(batcher.run(stage, [f"{name}2"], [1], soon()))
            await asyncio.sleep(0)  # so that it has handed in its row
            is_handed_in.set()
            await second

    async def three() -> None:
        await asyncio.gather(two_stages("a"), two_stages("b"), two_stages("c"))

    run(three())
    assert order.index("a2") < order.index("c1")


def test_a_new_sender_does_not_wait_for_the_later_stages_of_anothers_requests(batcher):
    """Where an event loop was busy while the first stage of many was computed, their second stages had places
    before those of whoever came now."""
    order: list[str] = []
    names = [f"a{number}" for number in range(10)]
    all_encoded, searching, may_search = (threading.Event() for _ in range(3))

    def encode(rows: list[str]) -> list[str]:
        if rows == names[-1:]:
            all_encoded.set()
        return rows

    def search(rows: list[str]) -> list[str]:
        searching.set()
        assert may_search.wait(60)
        order.extend(rows)
        return rows

    first, second = Stage("encode", encode, 1), Stage("search", search, 1)

    async def ask(sender: str, name: str) -> None:
        SENDER.set(sender)
        with batcher.admit({first: 1}, soon()):
            await batcher.run(first, [name], [1], soon())
            await batcher.run(second, [name], [1], soon())

    async def all_ask() -> None:
        asking = [asyncio.create_task(ask("a", name)) for name in names]
        await asyncio.sleep(0)  # so that each has handed in its row
        assert all_encoded.wait(60)  # the event loop is busy
        asking.append(asyncio.create_task(ask("b", "b")))
        assert await asyncio.to_thread(searching.wait, 60)
        may_search.set()
        await asyncio.gather(*asking)

    run(all_ask())
    assert order.index("b") <= 2
    assert [name for name in order if name != "b"] == names


def test_what_is_too_late_is_not_computed(batcher):
    gate = Gate()
    late = batcher.run(gate.stage, ["late"], [1], time.monotonic() - 1)
    in_time = batcher.run(gate.stage, ["in time"], [1], soon())
    results = run(behind(gate, batcher, lambda: [late, in_time]))
    assert isinstance(results[0], Refusal) and results[0].code == "too_late"
    assert results[1] == ["done in time"]
    assert gate.batches == [["first"], ["in time"]]


def test_a_request_is_too_late_at_its_deadline_not_after_the_batch(batcher):
    """With a deadline of 0.2 s and a batch of 3 s the refusal came after 3 s."""
    gate = Gate()

    async def late() -> str:
        with pytest.raises(Refusal) as refused:
            await batcher.run(gate.stage, ["late"], [1], time.monotonic() + 0.05)
        is_computing = gate.entered.is_set() and not gate.opened.is_set()
        gate.opened.set()
        assert is_computing
        return refused.value.code

    assert run(late()) == "too_late"


def test_a_row_whose_client_is_gone_is_not_computed(batcher):
    gate = Gate()

    async def leave():
        gone = asyncio.ensure_future(batcher.run(gate.stage, ["gone"], [1], soon()))
        await asyncio.sleep(0)
        gone.cancel()

    run(behind(gate, batcher, lambda: [leave(), batcher.run(gate.stage, ["there"], [1], soon())]))
    assert gate.batches == [["first"], ["there"]]


def test_of_a_request_whose_one_part_fails_the_others_are_not_computed(batcher):
    """Nobody waited for them, but they took the time of other requests."""
    gate = Gate()

    async def fail() -> None:
        raise Refusal("too_late")

    async def scenario() -> None:
        first = asyncio.ensure_future(batcher.run(gate.stage, ["first"], [1], soon()))
        await asyncio.to_thread(gate.entered.wait, 60)
        with pytest.raises(Refusal, match="time was over"):
            await all_of(batcher.run(gate.stage, ["in vain"], [1], soon()), fail())
        gate.opened.set()
        await first
        await batcher.run(gate.stage, ["next"], [1], soon())

    run(scenario())
    assert gate.batches == [["first"], ["next"]]


def test_one_requests_failure_is_not_that_of_its_batch(batcher):
    def inverse(rows: list[float]) -> list[float]:
        return [1 / row for row in rows]

    async def three() -> list[Any]:
        stage = Stage("inverse", inverse, 100)
        calls = (batcher.run(stage, [row], [1], soon()) for row in (1, 0, 2))
        return await asyncio.gather(*calls, return_exceptions=True)

    one, zero, two = run(three())
    assert (one, two) == ([1.0], [0.5])
    assert isinstance(zero, ZeroDivisionError)


def test_a_request_counts_before_its_rows_are_there(batcher, unit):
    """They come one stage after the other: 200 clients who came at once were all let in."""
    unit.unit_s.value = 29.0
    with batcher.admit({unit: 1}, soon()), batcher.admit({unit: 1}, soon()):
        assert batcher._waiting_s(False) == pytest.approx(58.0)
        with pytest.raises(Refusal), batcher.admit({unit: 1}, soon()):
            pass
    assert batcher._waiting_s(False) == 0.0


def test_a_request_counts_as_is_measured_while_it_waits(batcher, unit):
    """All that came to a new replica before its first answers counted as no work."""
    with batcher.admit({unit: 1}, soon()), batcher.admit({unit: 1}, soon()):
        assert batcher._waiting_s(False) == 0.0
        unit.unit_s.value = 29.0
        assert batcher._waiting_s(False) == pytest.approx(58.0)
        with pytest.raises(Refusal), batcher.admit({unit: 1}, soon()):
            pass


def test_a_request_whose_time_is_over_is_too_late_however_much_is_waiting(batcher, unit):
    """A refusal as overloaded would invite it to come again."""
    for waiting_s in (0.0, 100.0):
        unit.unit_s.value = waiting_s
        with batcher.admit({unit: 1}, soon()):
            assert batcher._waiting_s(False) == waiting_s
            over = batcher.admit({unit: 1}, time.monotonic())
            with pytest.raises(Refusal) as refused, over:
                pass
        assert (refused.value.code, refused.value.retry_after_s) == ("too_late", 0.0)


def test_a_request_that_would_wait_for_half_of_its_time_is_refused_at_once(batcher, unit):
    """Where it could wait for all of it, it was answered after its deadline."""
    unit.unit_s.value = 10.0
    now = time.monotonic()
    with batcher.admit({unit: 1}, now + 25), batcher.admit({unit: 1}, now + 25):
        with batcher.admit({unit: 1}, now + 45):  # 20 s of work come before it
            pass
        late = batcher.admit({unit: 1}, now + 36)
        with pytest.raises(Refusal, match="are waiting") as refused, late:
            pass
    assert refused.value.code == "overloaded"


def test_what_rows_took_is_what_the_next_are_expected_to_take(batcher, monkeypatch):
    """A unit of their stage; the first batch does not count. What is computed does not wait any more."""
    monkeypatch.setattr("serve.batcher.time", clock := Clock())
    took = iter([5.0, 0.2, 0.4])

    def work(rows: list[int]) -> list[int]:
        clock.now += next(took)
        return rows

    stage = Stage("work", work, 10)

    async def ask() -> float:
        with batcher.admit({stage: 6}, deadline := clock.now + 60):
            await batcher.run(stage, [1, 2], [1, 1], deadline)
            return batcher._waiting_s(False)

    left_s = [run(ask()) for _ in range(3)]
    assert left_s == pytest.approx([0.0, 4 * 0.1, 4 * 0.15])
    assert stage.row_cost.value == 1.0
    with batcher.admit({stage: 100}, clock.now + 60):
        assert batcher._waiting_s(True) == pytest.approx(15.0)
    assert batcher._waiting_s(True) == 0.0


def test_a_list_costs_what_its_parts_cost_in_all_stages(batcher, unit):
    """Its first part decided: others were computed, and were too late with the whole list."""
    other = Stage("other", list, 1.0)
    unit.unit_s.value, other.unit_s.value = 0.1, 1.0
    now = time.monotonic()
    with batcher.admit({unit: 1}, now + 60):
        with batcher.admit({unit: 5, other: 4}, now + 9):
            pass
        with pytest.raises(Refusal) as refused, batcher.admit({unit: 5, other: 5}, now + 5):
            pass
        assert (refused.value.code, refused.value.retry_after_s) == ("overloaded", 1.0)
        with batcher.admit({unit: 5, other: 5}, now + 5, is_checked=True):
            pass


def test_a_refused_list_does_not_let_more_of_others_be_expected(batcher, unit):
    """All lists that came together with a small request of another sender were refused after the first."""
    unit.unit_s.value = 1.0
    now = time.monotonic()
    SENDER.set("few")
    with batcher.admit({unit: 0.1}, now + 60):
        SENDER.set("many")
        assert batcher.refusal(now + 10, {unit: 20}) is not None
        assert batcher.refusal(now + 10, {unit: 4}) is None
        SENDER.set("few")
        assert batcher.refusal(now + 0.15) is not None  # of which more is expected
        SENDER.set("many")
        assert batcher.refusal(now + 10, {unit: 4}) is not None


def test_a_sender_of_most_rows_gets_short_batches_while_another_one_is_there(batcher, monkeypatch):
    """3.3 milliseconds a row, so three rows are 10 ms; two senders of as many rows share long batches."""
    monkeypatch.setattr("serve.batcher.time", clock := Clock())
    gate = Gate()
    sizes = list[int]()

    def work(rows: list[str]) -> list[str]:
        assert gate.opened.wait(60)
        clock.now += 0.0033 * len(rows)
        sizes.append(len(rows))
        return rows

    stage = Stage("work", work, 100)

    async def ask(sender: str, rows: int) -> None:
        SENDER.set(sender)
        with batcher.admit({stage: rows}, clock.now + 60):
            await batcher.run(stage, ["row"] * rows, [1] * rows, clock.now + 60)

    gate.opened.set()
    for sender, rows in (("many", 10), ("many", 10), ("few", 1), ("many", 10)):
        run(ask(sender, rows))
    assert sizes == [10, 10, 1, 3, 3, 3, 1]
    clock.now += 60
    gate.opened.clear()
    sizes.clear()
    run(behind(gate, batcher, lambda: [ask("few", 5), ask("many", 5)]))
    assert sizes == [10]
    gate.opened.clear()
    sizes.clear()
    run(behind(gate, batcher, lambda: [ask("few", 1), ask("many", 10)]))
    assert sizes == [1, 3, 3, 3, 1], "the one row is not computed together with the many"


def test_a_further_step_needs_no_event_loop(batcher):
    """Under load the loop was busy, and the thread computed rows of others meanwhile."""
    is_done = threading.Event()

    def join(rows: list[str]) -> list[str]:
        is_done.set()
        return [f"<{row}>" for row in rows]

    upper = Stage("upper", lambda rows: [row.upper() for row in rows], 1)
    steps = Step(Stage("join", join, 10), lambda results: ["-".join(results), "end"])

    async def ask() -> list[str]:
        asking = asyncio.ensure_future(batcher.run(upper, ["a", "b"], [1, 1], soon(), steps))
        await asyncio.sleep(0)  # so that it has handed in its rows
        assert is_done.wait(60)  # the event loop is busy
        return await asking

    assert run(ask()) == ["<A-B>", "<end>"]


def test_an_error_before_a_further_step_is_that_of_its_request(batcher):
    def fail(results: list[int]) -> list[int]:
        raise ValueError("no rows")

    same = Stage("same", lambda rows: rows, 1)
    with pytest.raises(ValueError, match="no rows"):
        run(batcher.run(same, [1], [1], soon(), Step(same, fail)))
    assert run(batcher.run(same, [1], [1], soon())) == [1]


def test_the_next_step_of_another_sender_comes_before_more_rows_of_the_one_with_most(batcher):
    gate = Gate(cost=3)
    second = Step(Stage("second", gate.stage.run, 3, lambda row: 1), lambda results: ["few"])

    async def ask(sender: str, *then: Step) -> None:
        SENDER.set(sender)
        with batcher.admit({gate.stage: 0.3}, soon()):
            await batcher.run(gate.stage, [sender], [1], soon(), *then)

    few, many = ask("few", second), [ask("many") for _ in range(9)]
    assert run(behind(gate, batcher, lambda: [*many, few])) == [None] * 10
    three = ["many"] * 3
    assert gate.batches == [["first"], ["many", "few", "many"], ["few"], three, three, ["many"]]


def test_rows_count_by_the_seconds_that_they_take_not_by_their_share_of_a_batch(
    batcher, monkeypatch
):
    """A context of a tenth of a second is half of a batch, and a search of 0.3 s a hundredth."""
    monkeypatch.setattr("serve.batcher.time", clock := Clock())
    order: list[str] = []

    def compute(seconds: float, rows: list[str]) -> list[str]:
        clock.now += seconds * len(rows)
        order.extend(rows)
        return rows

    contexts = Stage("contexts", partial(compute, 0.1), 2)
    searches = Stage("searches", partial(compute, 0.3), 100, lambda row: 1)
    gate = Gate()

    async def ask(sender: str, stage: Stage, *then: Stage) -> None:
        SENDER.set(sender)
        steps = [
            Step(each, partial(lambda row, _: [row], f"{sender} {each.name}")) for each in then
        ]
        with batcher.admit({searches: 10}, clock.now + 60):
            await batcher.run(stage, [f"{sender} {stage.name}"], [1], clock.now + 60, *steps)

    for _ in range(3):  # so that the seconds are known
        run(ask("many", contexts, searches))
    order.clear()
    many = [ask("many", searches) for _ in range(3)]
    run(behind(gate, batcher, lambda: [*many, ask("few", contexts, searches)]))
    assert order == ["many searches", "few contexts", "few searches", *["many searches"] * 2]


def test_the_watch_hears_of_every_batch():
    heard: list[Batch] = []
    batcher = Batcher(60.0, heard.append)
    run(batcher.run(Stage("k", lambda rows: rows, 3), [1, 2, 3, 4], [1] * 4, soon()))
    batcher.close()
    assert [(batch.stage, batch.rows, batch.cost) for batch in heard] == [("k", 3, 3), ("k", 1, 1)]


# Whether it computes


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
def test_the_thread_that_computes_gives_way_to_the_event_loop(batcher):
    niceness = Stage("niceness", lambda rows: [os.getpriority(os.PRIO_PROCESS, 0) for _ in rows], 1)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert run(batcher.run(niceness, [None], [1], soon())) == [min(19, before + 10)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
def test_a_worker_of_ray_that_has_a_low_priority_computes(monkeypatch):
    """Niceness 15 was set to 10, which ended the thread, as only root may do so."""
    given = []

    def set_priority(which, who, niceness):
        if niceness < 15:
            raise PermissionError
        given.append(niceness)

    monkeypatch.setattr(os, "getpriority", lambda which, who: 15)
    monkeypatch.setattr(os, "setpriority", set_priority)
    batcher = Batcher(60.0)
    assert run(batcher.run(Stage("k", lambda rows: rows, 3), [1], [1], soon())) == [1]
    batcher.close()
    assert given == [19]


def test_an_error_of_the_metrics_ends_nothing(caplog):
    """It ended the thread, and all requests hung."""

    def fail(batch: Batch) -> None:
        raise ValueError("no such label")

    batcher = Batcher(60.0, fail)
    double = Stage("double", lambda rows: [2 * row for row in rows], 10)
    assert [run(batcher.run(double, [row], [1], soon())) for row in (1, 2)] == [[2], [4]]
    assert "no such label" in caplog.text
    batcher.close()


def test_too_few_results_are_a_failure_of_their_batch(batcher):
    """They ended the thread, and all requests hung."""
    lossy = Stage("lossy", lambda rows: rows[:-1], 10)
    with pytest.raises(RuntimeError, match="lossy: 1 results of 2 rows"):
        run(batcher.run(lossy, [1, 2], [1, 1], soon()))
    assert batcher.problem() == ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_ended_is_a_problem(batcher):
    def leave(rows: list[Any]) -> list[Any]:
        raise SystemExit

    assert batcher.problem() == ""
    with pytest.raises(Refusal, match="time was over"):
        run(batcher.run(Stage("leave", leave, 1), [1], [1], time.monotonic() + 0.1))
    batcher._thread.join(60)
    assert batcher.problem() == "the thread that computes has ended"


def test_a_batch_that_does_not_end_is_a_problem(batcher, monkeypatch):
    monkeypatch.setattr("serve.batcher.time", clock := Clock())
    gate = Gate()

    async def wait() -> list[str]:
        waiting = asyncio.ensure_future(batcher.run(gate.stage, ["a"], [1], clock.now + 60))
        await asyncio.to_thread(gate.entered.wait, 60)
        problems = []
        for _ in range(2):
            clock.now += 20
            problems.append(batcher.problem())
        gate.opened.set()
        await waiting
        return problems

    assert run(wait()) == ["", "a batch has not ended after 30 s"]


def test_a_failed_batch_that_is_computed_again_request_by_request_is_no_problem(
    batcher, monkeypatch
):
    """The replica was replaced, because all of these together took longer than a batch may take."""
    monkeypatch.setattr("serve.batcher.time", clock := Clock())
    gate, problems = Gate(), list[str]()

    def work(rows: list[str]) -> list[str]:
        if len(rows) > 1:
            raise RuntimeError("out of memory")
        clock.now += 20
        problems.append(batcher.problem())
        return rows

    stage = Stage("work", work, 10)
    rows = [batcher.run(stage, [name], [1], clock.now + 100) for name in "abc"]
    run(behind(gate, batcher, lambda: rows))
    assert problems == ["", "", ""]


def test_batches_that_all_fail_are_noticed_and_one_that_does_not_ends_it(batcher):
    def compute(rows: list[int]) -> list[float]:
        return [1 / row for row in rows]

    stage = Stage("inverse", compute, 1)
    is_failing = []
    for row in (0, 0, 1, 0, 0, 0, 0, 0, 1):
        with suppress(ZeroDivisionError):
            run(batcher.run(stage, [row], [1], soon()))
        is_failing.append(batcher.is_failing)
    assert is_failing == [False] * 7 + [True, False]


# Masks of filters


class Filtered:
    """A pool of ten rows, all of which pass each filter. It counts the filters by their first denied id."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.artifact = SimpleNamespace(uri="pools/replies/v-1")
        self.selected, self.threads = Counter[str](), set[int]()
        monkeypatch.setattr("serve.pools.filters.select", self._select)

    def _select(self, pool: Any, allow: Any, deny: Sequence[str], where: Any) -> np.ndarray:
        self.selected[deny[0]] += 1
        self.threads.add(threading.get_ident())
        return np.ones(10, bool)


def test_masks_are_kept_up_to_a_number_of_bytes_and_made_beside_the_event_loop(monkeypatch):
    masks, pool = Masks(most_bytes=2 * ENTRY_BYTES + 25), Filtered(monkeypatch)
    for name in ("a", "b", "a", "c", "a", "b"):  # c takes the place of b
        run(masks.allowed_rows(pool, RowFilter(deny=(name,))))
    assert pool.selected == {"a": 1, "b": 2, "c": 1}
    assert masks._masks.currsize == 2 * ENTRY_BYTES + 20
    assert threading.get_ident() not in pool.threads


def test_masks_take_no_memory_for_the_ids_of_their_filters(monkeypatch):
    masks, pool = Masks(), Filtered(monkeypatch)

    async def fill() -> None:
        for number in range(200):
            ids = tuple(f"row {number} {place}" for place in range(200))
            await masks.allowed_rows(pool, RowFilter(deny=ids))
        pool.selected.clear()

    tracemalloc.start()
    try:
        run(fill())
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert masks._masks.currsize == 200 * (ENTRY_BYTES + 10)
    assert taken_bytes < 2 * masks._masks.currsize
