"""The work queue of a replica: one thread computes the rows of all requests in batches.

A request hands in rows: contexts to encode, pairs to score, searches of a pool. Rows of one kind are computed
together. Rows are ordered by their turn: the request's deadline for its first row, and for each further row
later by the time that the request's earlier rows take. So a small request passes between the rows of a large
one. The thread never waits for a batch to fill: rows that arrive during a batch form the next one.

Admission (`admit`) is by request, not by row. The rows of a request arrive stage by stage, so a limit on the
rows in the queue accepted four times the work that could be done. A request waits for the work whose turn is
before that of its own last row, and for nothing else. So this work, not all work, decides whether it is
admitted: a large request in progress refuses other large ones, and lets small ones pass. Requests of one size
and one timeout wait for all that came before them. Serve's `max_ongoing_requests` limits the memory.

A list of requests is admitted as a whole, by its first one: otherwise its own work would refuse it, on an
idle replica, too. The further ones have later turns, as if the list were one large request.

A request's own expected work does not refuse it. The mean is coarse (a candidate may have 5 tokens or 500),
and a mean that is too high would refuse every such request, so no measurement would ever correct it. Instead
the first rows of a request are computed, and the request is given up as soon as their speed shows that the
others would be too late.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from serve.errors import Refusal, overload_refusal, too_late_refusal

_SMOOTHING = 0.1  # weight of the latest batch in the mean time of a unit; 1/n for the first ten


class _Mean:
    """A moving mean of the seconds that a unit takes. It ignores the first measurement, which includes
    allocation and compilation."""

    def __init__(self) -> None:
        self.value, self._count = 0.0, -1

    def add(self, seconds: float) -> None:
        self._count += 1
        if self._count:
            self.value += max(_SMOOTHING, 1 / self._count) * (seconds - self.value)


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of work, whose rows can be computed together."""

    name: str
    run: Callable[[list[Any]], Sequence[Any]]
    """Rows to their results, in order."""
    batch_units: float
    """The most units (usually tokens) in a batch. A row with more is computed alone."""


@dataclass(frozen=True)
class Batch:
    """Measurements of a batch, for the metrics."""

    kind: str
    rows: int
    units: float
    waited_s: float
    """The longest wait of its rows."""
    seconds: float


@dataclass(eq=False)
class _Request:
    """An admitted request, whose work has the turns from `first_turn` on."""

    first_turn: float
    units: float = 0.0
    unit_s: _Mean = field(default_factory=_Mean)
    """Seconds of a unit, as measured by now: when it was admitted, none may have been measured yet."""
    spent_s: float = 0.0
    """Seconds of work that it has taken so far."""
    next_turn: float = field(init=False)
    """The turn of the next row that is handed in."""

    def __post_init__(self) -> None:
        self.next_turn = self.first_turn

    def seconds_before(self, turn: float) -> float:
        """Seconds of work that it has left before this turn."""
        end = min(turn - self.first_turn, self.units * self.unit_s.value)
        return max(0.0, end - self.spent_s)


_current: ContextVar[_Request | None] = ContextVar("request", default=None)


@dataclass(eq=False)
class _Call:
    """The rows of one request, of one kind."""

    results: list[Any]
    pending_rows: int
    pending_units: float
    deadline: float
    request: _Request
    future: asyncio.Future[list[Any]]
    loop: asyncio.AbstractEventLoop
    computed_units: float = 0.0
    spent_s: float = 0.0

    def left_s(self, unit_s: float) -> float:
        """Seconds that its other rows take at least: at this speed or at its own, whichever is faster; 0
        before its first rows are computed. Units in a small batch take longer than in a large one."""
        own_unit_s = self.spent_s / self.computed_units if self.computed_units else 0.0
        return self.pending_units * min(unit_s, own_unit_s)


@dataclass(order=True)
class _Row:
    turn: float
    number: int
    kind: Kind = field(compare=False)
    row: Any = field(compare=False)
    units: float = field(compare=False)
    place: int = field(compare=False)
    call: _Call = field(compare=False)
    since: float = field(compare=False)


class WorkQueue:
    """Computes rows in batches on a thread of its own. Deadlines are of `time.monotonic`."""

    def __init__(
        self,
        most_waiting_s: float,
        watch: Callable[[Batch], None] = lambda batch: None,
        batch_rows: int = 1024,
    ) -> None:
        """`most_waiting_s`: seconds of work for which a request may wait. `batch_rows`: most rows of a batch.
        `watch` is called after each batch."""
        self._most_s, self._watch, self._batch_rows = most_waiting_s, watch, batch_rows
        self._changed = threading.Condition()
        self._rows: dict[Kind, list[_Row]] = {}
        self._numbers = itertools.count()
        self._unit_s: dict[str, _Mean] = defaultdict(_Mean)  # seconds of a unit, by kind
        self._request_s: dict[str, _Mean] = defaultdict(
            _Mean
        )  # seconds of a request's unit, by name
        self._requests: set[_Request] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="work-queue", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after the current batch. Waiting rows are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def seconds_before(self, turn: float) -> float:
        """Seconds of the admitted requests' work that is left before this turn; an estimate."""
        # A copy: an engine that is loaded in the background rehearses on a thread of its own.
        return sum(request.seconds_before(turn) for request in list(self._requests))

    def refusal(self, deadline: float, expected_s: float = 0.0) -> Refusal | None:
        """The refusal that a request with this deadline and expected time would get now, or None."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return too_late_refusal()
        waiting_s = self.seconds_before(deadline + expected_s)
        if waiting_s <= min(self._most_s, left_s):
            return None
        is_full = self.seconds_before(deadline) > self._most_s  # or smaller requests may pass
        return overload_refusal(waiting_s, is_full)

    @contextmanager
    def admit(
        self, name: str, units: float, deadline: float, units_ahead_in_list: float | None = None
    ) -> Iterator[None]:
        """Admits a request, whose rows are handed in inside the `with` block.

        Requests with the same name are expected to take the same time for each unit. Raises Refusal
        (overloaded) if the request would have to wait for too much work, or beyond its deadline, and
        (too_late) after its deadline. A further request of a list that was admitted is not refused: the
        requests of its name that stand before it in the list have `units_ahead_in_list`, the first one None.
        """
        unit_s = self._request_s[name]
        expected_s = units * unit_s.value
        if units_ahead_in_list is None and (refusal := self.refusal(deadline, expected_s)):
            raise refusal
        request = _Request(deadline + (units_ahead_in_list or 0.0) * unit_s.value, units, unit_s)
        self._requests.add(request)
        token = _current.set(request)
        try:
            yield
            unit_s.add(request.spent_s / units)
        finally:
            _current.reset(token)
            self._requests.discard(request)

    async def run(
        self, kind: Kind, rows: Sequence[Any], units: Sequence[float], deadline: float
    ) -> list[Any]:
        """The rows' results, in order. Raises Refusal (too_late) if the deadline passes first."""
        if not rows:
            return []
        loop = asyncio.get_running_loop()
        request = _current.get() or _Request(deadline)
        results = [None] * len(rows)
        call = _Call(results, len(rows), sum(units), deadline, request, loop.create_future(), loop)
        now = time.monotonic()
        unit_s = self._unit_s[kind.name].value
        with self._changed:
            heap = self._rows.setdefault(kind, [])
            for place, (row, size) in enumerate(zip(rows, units, strict=True)):
                number = next(self._numbers)
                turn = request.next_turn
                heapq.heappush(heap, _Row(turn, number, kind, row, size, place, call, now))
                request.next_turn += size * unit_s
            self._changed.notify()
        return await call.future

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not any(self._rows.values()):
                    self._rows.clear()  # including kinds of models that are no longer served
                    self._changed.wait()
                if self._closed:
                    return
                rows = self._next_batch()
            if timely_rows := self._timely_rows(rows):
                self._compute(timely_rows)

    def _next_batch(self) -> list[_Row]:
        """The row that is next, and others of its kind."""
        heap = min((heap for heap in self._rows.values() if heap), key=lambda heap: heap[0])
        kind = heap[0].kind
        batch: list[_Row] = []
        units = 0.0
        while heap and len(batch) < self._batch_rows:
            if batch and units + heap[0].units > kind.batch_units:
                break
            batch.append(heapq.heappop(heap))
            units += batch[-1].units
        return batch

    def _timely_rows(self, rows: list[_Row]) -> list[_Row]:
        now, unit_s = time.monotonic(), self._unit_s[rows[0].kind.name].value
        late_calls = {row.call for row in rows if row.call.deadline < now + row.call.left_s(unit_s)}
        for call in late_calls:
            _deliver(call.loop, [(call, too_late_refusal())])
        return [row for row in rows if row.call not in late_calls and not row.call.future.done()]

    def _compute(self, rows: list[_Row]) -> None:
        kind, began = rows[0].kind, time.monotonic()
        try:
            results = kind.run([row.row for row in rows])
        except Exception as error:
            self._compute_apart(rows, error)
            return
        seconds, units = time.monotonic() - began, sum(row.units for row in rows)
        self._unit_s[kind.name].add(seconds / units)
        waited_s = began - min(row.since for row in rows)
        self._watch(Batch(kind.name, len(rows), units, waited_s, seconds))
        finished_calls: dict[asyncio.AbstractEventLoop, list[tuple[_Call, Exception | None]]] = {}
        for row, result in zip(rows, results, strict=True):
            call, row_s = row.call, seconds * row.units / units
            call.results[row.place] = result
            call.pending_rows -= 1
            call.pending_units -= row.units
            call.computed_units += row.units
            call.spent_s += row_s
            call.request.spent_s += row_s
            if not call.pending_rows:
                finished_calls.setdefault(call.loop, []).append((call, None))
        for loop, calls in finished_calls.items():
            _deliver(loop, calls)

    def _compute_apart(self, rows: list[_Row], error: Exception) -> None:
        """Computes a failed batch again, request by request, so one bad request does not fail the others."""
        calls = {row.call for row in rows}
        if len(calls) == 1:
            _deliver(rows[0].call.loop, [(rows[0].call, error)])
            return
        for call in calls:
            self._compute([row for row in rows if row.call is call])


def _deliver(
    loop: asyncio.AbstractEventLoop, calls: Sequence[tuple[_Call, Exception | None]]
) -> None:
    def set_all() -> None:
        for call, error in calls:
            if call.future.done():  # the client has gone, or an earlier row failed
                continue
            if error is not None:
                call.future.set_exception(error)
            else:
                call.future.set_result(call.results)

    with suppress(RuntimeError):  # the loop is closed, so nobody waits
        loop.call_soon_threadsafe(set_all)
