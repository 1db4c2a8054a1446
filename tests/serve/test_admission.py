"""Who is admitted, and how long they wait. The clock is simulated: time passes as rows are computed."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from serve.errors import Refusal
from serve.scheduling import Kind, WorkQueue

from .conftest import Clock

ROW_S = 0.005
SMALL, LARGE = 10, 1000  # rows: 50 ms and 5 s of work


@dataclass(order=True)
class Arrival:
    """A request that comes at a time."""

    at: float
    number: int = field(default_factory=itertools.count().__next__)
    label: str = field(default="small", compare=False)
    rows: int = field(default=SMALL, compare=False)
    timeout_s: float = field(default=10.0, compare=False)
    units_ahead_in_list: float | None = field(default=None, compare=False)


class Simulation:
    """A queue, and requests that arrive while it computes. No time passes but that of the rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr("serve.scheduling.time", self.clock)
        self.queue = WorkQueue(most_waiting_s=2.0)
        self.kind = Kind("pairs", self._compute, 32)
        self.queue._request_s["rank"].value = self.queue._unit_s["pairs"].value = ROW_S
        self.codes: dict[str, Counter[str]] = {}
        self.seconds: dict[str, list[float]] = {}
        """From a request's arrival to its answer or refusal."""
        self.computed_rows: Counter[str] = Counter()
        self._arrivals: list[Arrival] = []
        self._passing = threading.RLock()

    def run(self, arrivals: Iterable[Arrival]) -> Simulation:
        self._arrivals = list(arrivals)
        for arrival in self._arrivals:
            arrival.at += self.clock.now
        heapq.heapify(self._arrivals)
        asyncio.run(self._serve())
        return self

    async def _serve(self) -> None:
        self._loop, self._asking = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        while self._arrivals or self._asking:
            if not self._asking:
                await asyncio.to_thread(self._pass_time, self._arrivals[0].at)
            if self._asking:
                # Not its second set: it lacks those that come while it waits.
                done, _ = await asyncio.wait(self._asking, return_when=asyncio.FIRST_COMPLETED)
                self._asking -= done

    def _compute(self, rows: list[str]) -> list[str]:
        with self._passing:  # not before all who come at the same time are there
            self.computed_rows.update(rows)
            self._pass_time(self.clock.now + ROW_S * len(rows))
        return rows

    def _pass_time(self, until: float) -> None:
        """Lets those in who arrive until then."""
        with self._passing:
            while self._arrivals and self._arrivals[0].at <= until:
                arrival, entered = heapq.heappop(self._arrivals), threading.Event()
                self.clock.now = max(self.clock.now, arrival.at)
                self._loop.call_soon_threadsafe(self._enter, arrival, entered)
                assert entered.wait(60)
            self.clock.now = max(self.clock.now, until)

    def _enter(self, arrival: Arrival, entered: threading.Event) -> None:
        task = self._loop.create_task(self._ask(arrival, entered))
        self._asking.add(task)

    async def _ask(self, arrival: Arrival, entered: threading.Event) -> None:
        began, code = self.clock.now, "ok"
        deadline = began + arrival.timeout_s
        rows, units = [arrival.label] * arrival.rows, [1.0] * arrival.rows
        try:
            with self.queue.admit("rank", arrival.rows, deadline, arrival.units_ahead_in_list):
                answer = asyncio.ensure_future(self.queue.run(self.kind, rows, units, deadline))
                await asyncio.sleep(0)  # so that it has handed in its rows
                entered.set()
                await answer
        except Refusal as refusal:
            code = refusal.code
        entered.set()
        self.codes.setdefault(arrival.label, Counter())[code] += 1
        self.seconds.setdefault(arrival.label, []).append(self.clock.now - began)


@pytest.fixture
def simulation(monkeypatch) -> Iterator[Simulation]:
    made = Simulation(monkeypatch)
    yield made
    made.queue.close()


def steady(rate: float, seconds: float, **more: Any) -> list[Arrival]:
    """So many requests a second, at random times."""
    rng, at, arrivals = random.Random(1), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        arrivals.append(Arrival(at, **more))
    return arrivals


def test_small_requests_pass_beside_a_large_one(simulation):
    """They are a quarter of what the replica can do, and wait for the limit and a batch or two."""
    simulation.run([Arrival(0.0, label="large", rows=LARGE), *steady(rate=5, seconds=7)])
    assert simulation.codes["large"] == {"ok": 1}
    assert set(simulation.codes["small"]) == {"ok"}
    assert max(simulation.seconds["small"]) < 2.0 + 2 * 32 * ROW_S


def test_small_requests_pass_beside_a_list(simulation):
    """A list is admitted as a whole; its further requests are not refused."""
    rows = LARGE // 50
    parts = [
        Arrival(0.0, label="list", rows=rows, units_ahead_in_list=place * rows or None)
        for place in range(50)
    ]
    simulation.run([*parts, *steady(rate=5, seconds=7)])
    assert simulation.codes["list"] == {"ok": 50}
    assert set(simulation.codes["small"]) == {"ok"}


def test_a_large_request_keeps_other_large_ones_out(simulation):
    simulation.run([Arrival(at, label="large", rows=LARGE) for at in (0.0, 0.1, 0.2)])
    assert simulation.codes["large"] == {"ok": 1, "overloaded": 2}


def test_a_large_request_waits_for_small_ones_that_come_later(simulation):
    """So it is refused where it would have to wait too long, and then smaller ones may still pass."""
    with simulation.queue.admit("rank", 500, simulation.clock.now + 12):
        assert simulation.queue.refusal(simulation.clock.now + 10) is None
        refusal = simulation.queue.refusal(simulation.clock.now + 10, expected_s=5.0)
    assert refusal is not None
    assert (refusal.code, refusal.retry_after_s) == ("overloaded", pytest.approx(2.5))
    assert not refusal.is_full


def test_a_hopeless_request_is_given_up_at_once(simulation):
    """5 s of work in 3 s: after its first batch, which shows how long the others take."""
    hopeless = Arrival(0.0, label="hopeless", rows=LARGE, timeout_s=3.0)
    simulation.run([hopeless, *steady(rate=5, seconds=3, timeout_s=3.0)])
    assert simulation.codes["hopeless"] == {"too_late": 1}
    assert simulation.seconds["hopeless"][0] < 0.5
    assert simulation.computed_rows["hopeless"] <= 64
    assert set(simulation.codes["small"]) == {"ok"}


def test_an_estimate_that_is_too_high_refuses_nobody_for_ever(simulation):
    """A request that takes 5 s of its 10 s is computed, whatever was measured before."""
    simulation.queue._request_s["rank"].value = simulation.queue._unit_s["pairs"].value = 1.0
    simulation.run([Arrival(0.0, label="large", rows=LARGE)])
    assert simulation.codes["large"] == {"ok": 1}


def test_three_times_the_work_that_can_be_done_is_admitted_up_to_the_limit(simulation):
    """Of requests of one size none is late, none waits much longer than allowed, and no second is idle."""
    simulation.run(steady(rate=60, seconds=20))
    codes = simulation.codes["small"]
    assert set(codes) == {"ok", "overloaded"}
    assert simulation.computed_rows["small"] == SMALL * codes["ok"]
    assert codes["ok"] == pytest.approx((20 + 2) / (SMALL * ROW_S), rel=0.05)
    assert max(simulation.seconds["small"]) < 2 * 2.0


def test_of_a_burst_as_much_is_admitted_as_may_wait(simulation):
    simulation.run([Arrival(0.0, rows=6, timeout_s=5.0) for _ in range(300)])
    assert simulation.codes["small"] == {"ok": 67, "overloaded": 233}
    assert max(simulation.seconds["small"]) < 2.1
