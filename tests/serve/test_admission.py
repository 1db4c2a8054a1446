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

from serve.batcher import SENDER, Batcher, Stage, all_of
from serve.refusals import Refusal

from .conftest import Clock

ROW_S = 0.005
SMALL, LARGE = 10, 1000  # rows: 50 ms and 5 s of work
BATCH = 32  # rows


@dataclass(order=True)
class Arrival:
    """A request that comes at a time."""

    at: float
    number: int = field(default_factory=itertools.count().__next__)
    label: str = field(default="small", compare=False)
    rows: int = field(default=SMALL, compare=False)
    timeout_s: float = field(default=10.0, compare=False)
    sender: str = field(default="", compare=False)
    parts: int = field(default=1, compare=False)
    """Requests in a list, of `rows` each."""


class Simulation:
    """A queue, and requests that arrive while it computes. No time passes but that of the rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr("serve.batcher.time", self.clock)
        self.batcher = Batcher(max_wait_s=2.0)
        self.stage = Stage("pairs", self._compute, BATCH)
        # It takes no time, but comes after a batch.
        self.scores = Stage("scores", lambda rows: rows, BATCH)
        self.stage.unit_s.value = ROW_S
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
        # Not before the answers of the batch before have come: the clock stands until then.
        asyncio.run_coroutine_threadsafe(_let_others_run(), self._loop).result(60)
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
        SENDER.set(arrival.sender)
        answer = asyncio.ensure_future(self._answer(arrival))
        await _let_others_run()  # so that each part has handed in its rows
        entered.set()
        try:
            await answer
        except Refusal as refusal:
            code = refusal.code
        self.codes.setdefault(arrival.label, Counter())[code] += 1
        self.seconds.setdefault(arrival.label, []).append(self.clock.now - began)

    async def _answer(self, arrival: Arrival) -> None:
        deadline = self.clock.now + arrival.timeout_s
        with self.batcher.admit({self.stage: arrival.rows * arrival.parts}, deadline):
            await all_of(*(self._part(arrival, deadline) for _ in range(arrival.parts)))

    async def _part(self, arrival: Arrival, deadline: float) -> None:
        rows, costs = [arrival.label] * arrival.rows, [1.0] * arrival.rows
        await self.batcher.run(self.stage, rows, costs, deadline)
        await self.batcher.run(self.scores, [arrival.label], [1e-3], deadline)


async def _let_others_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def simulation(monkeypatch) -> Iterator[Simulation]:
    made = Simulation(monkeypatch)
    yield made
    made.batcher.close()


def steady(rate: float, seconds: float, **more: Any) -> list[Arrival]:
    """So many requests a second, at random times."""
    rng, at, arrivals = random.Random(1), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        arrivals.append(Arrival(at, **more))
    return arrivals


def p50(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]


@pytest.mark.parametrize("sender", ["impatient", "patient"])
def test_a_short_deadline_moves_nobody_before_others(simulation, sender):
    """Capacity 20/s. 40/s with a timeout of 0.5 s starved 1/s with 10 s, who waited for 9.96 s. Those of
    another sender wait for a batch or two, those of the same one as long as all of its requests."""
    impatient = steady(rate=40, seconds=20, label="impatient", sender="impatient", timeout_s=0.5)
    simulation.run([*impatient, *steady(rate=1, seconds=20, label="patient", sender=sender)])
    assert simulation.codes["impatient"]["ok"] > 0.8 * 20 / (SMALL * ROW_S)
    assert simulation.codes["patient"].keys() == {"ok"}
    waits = 0.5 if sender == "impatient" else 0.0
    assert p50(simulation.seconds["patient"]) < waits + 3 * BATCH * ROW_S


def test_who_asks_most_is_refused_and_nobody_else(simulation):
    """Each sender waits for its own requests, and for as much of the others' work."""
    arrivals = [*steady(rate=60, seconds=10, label="most", sender="most")]
    for name in ("one", "two"):
        arrivals += steady(rate=3, seconds=10, label=name, sender=name)
    simulation.run(arrivals)
    assert simulation.codes["one"].keys() == simulation.codes["two"].keys() == {"ok"}
    assert simulation.codes["most"].keys() == {"ok", "overloaded"}
    assert max(simulation.seconds["one"] + simulation.seconds["two"]) < 1.0


@pytest.mark.parametrize(("parts", "sender"), [(1, ""), (50, "other")])
def test_small_requests_pass_beside_a_large_one(simulation, parts, sender):
    """They are a quarter of what the replica can do, and wait for a batch or two. A list is one large
    request, and its parts are not refused."""
    large = [
        Arrival(at, label="large", rows=LARGE // parts, parts=parts, timeout_s=30.0)
        for at in (0.0, 7.0)
    ]
    simulation.run([*large, *steady(rate=5, seconds=14, sender=sender)])
    assert simulation.codes["large"] == {"ok": 2}
    assert set(simulation.codes["small"]) == {"ok"}
    assert max(simulation.seconds["small"]) < 6 * BATCH * ROW_S
    assert p50(simulation.seconds["small"]) < 3 * BATCH * ROW_S


def test_small_requests_starve_no_large_one(simulation):
    """It gets a fifth of the time: 5 s of work take 25 s."""
    large = Arrival(0.0, label="large", rows=LARGE, timeout_s=60.0)
    simulation.run([large, *steady(rate=40, seconds=40)])
    assert simulation.codes["large"] == {"ok": 1}
    assert 23.0 < simulation.seconds["large"][0] < 27.0


def test_a_large_request_keeps_other_large_ones_out(simulation):
    simulation.run([Arrival(at, label="large", rows=LARGE) for at in (0.0, 0.1, 0.2)])
    assert simulation.codes["large"] == {"ok": 1, "overloaded": 2}


def test_where_a_large_request_is_refused_a_small_one_may_pass(simulation):
    stage = simulation.stage
    with simulation.batcher.admit({stage: 16 * BATCH}, simulation.clock.now + 12):  # 2.56 s
        deadline = simulation.clock.now + 10
        assert simulation.batcher.refusal(deadline) is None
        refusal = simulation.batcher.refusal(deadline, {stage: 2 * BATCH})
    assert refusal is not None
    assert (refusal.code, refusal.retry_after_s) == ("overloaded", pytest.approx(2.56))


def test_an_estimate_that_is_too_high_refuses_nobody_for_ever(simulation):
    """A request that takes 5 s of its 10 s is computed, whatever was measured before."""
    simulation.stage.unit_s.value = 3.0
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


def test_a_request_that_cannot_end_in_time_after_its_wait_is_not_begun(simulation):
    """Each tenth takes half a second of its 0.6 s. Beside three times too much work they were admitted, and
    two fifths of what was computed was for requests that ended too late."""
    arrivals = steady(rate=60, seconds=20, timeout_s=0.6)
    for number, arrival in enumerate(arrivals):
        arrival.label, arrival.rows = str(number), 4 if number % 10 else 100
    simulation.run(arrivals)
    computed = simulation.computed_rows
    in_vain = [label for label in computed if simulation.codes[label]["ok"] == 0]
    assert sum(computed[label] for label in in_vain) < 0.1 * computed.total()


def test_a_large_request_that_others_would_make_too_late_is_refused(simulation):
    """It takes half a second, or 2.5 s while small ones keep coming, of which only those that waited counted:
    of 15 that were admitted 6 came too late."""
    large = steady(rate=1, seconds=20, label="large", rows=100, timeout_s=5.0)
    simulation.run([*steady(rate=30, seconds=20, timeout_s=1.0), *large])
    assert simulation.codes["large"].keys() == {"ok", "overloaded"}
    assert simulation.codes["large"]["ok"] > 9


def test_of_a_burst_as_much_is_admitted_as_may_wait(simulation):
    simulation.run([Arrival(0.0, rows=6, timeout_s=5.0) for _ in range(300)])
    assert simulation.codes["small"] == {"ok": 67, "overloaded": 233}
    assert max(simulation.seconds["small"]) < 2.1


def test_a_sender_leaves_places_for_others_however_short_its_requests_are(simulation):
    """Ray Serve lets 512 requests in. With a fast model those are less than 2 s of work, so one sender had
    all places, and the requests of others waited for one before the batcher knew them."""
    many = [Arrival(0.0, label="many", rows=1, sender="many") for _ in range(500)]
    few = [Arrival(0.001, label="few", rows=1, sender="few") for _ in range(10)]
    simulation.stage.unit_s.value = 0.001
    simulation.run([*many, *few])
    assert simulation.codes == {"many": {"ok": 400, "overloaded": 100}, "few": {"ok": 10}}
