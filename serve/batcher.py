"""Computes the rows of all requests in batches, on one thread. No HTTP, no Ray.

A request is admitted, and then hands in rows stage by stage: contexts to encode, pairs to score, searches of
a pool. The thread never waits for a batch to fill: rows that arrive during a batch form the next one. Where a
stage needs only the results of the stage before, the thread goes on with it, without the event loop, which
may be busy.

Order: each sender has two queues, one for interactive requests and one for bulk requests, whose work is
more than a batch. Each queue is first come, first served: a request that was begun is finished, stage by
stage. Queues take turns, by start-time fair queueing (Goyal, Vin and Cheng, 1996): a queue's finish grows by
the seconds that each row is expected to take, which count `_BULK` times for bulk, and the queue with the
least finish is next. One that had no rows begins where the others are. So neither a short deadline, nor many
requests, nor large ones move a sender before the others. Beside a dominant sender (`demand.py`) batches are
short, and the rows of the others are computed without its rows.

Admission: a request is refused if it would wait for too many seconds of work, or could not end in time after
that wait. Only admitted work that comes before it counts as waiting. A list of requests is one request, which
costs what its parts cost. The seconds are those that batches of each stage took for each unit of cost.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from serve import tracing
from serve.demand import Demand
from serve.refusals import Refusal

_BULK = 4.0
"""Beside interactive requests, bulk requests get a fifth of the time."""
_SMOOTHING = 0.1  # weight of the latest request in a mean; 1/n for the first ten
_WAITING_SHARE = 0.5
"""The part of a request's time for which it may wait. With 1.0 the requests of a client that asked too often
ended after their deadlines: of 600 that could be computed in time 100 were."""
_LOAD_STAYS_S = 1.0
"""After a refusal its sender is expected to have more such work for so long."""
_MOST_OF_A_SENDER = 400
"""Requests of a sender that may wait. A replica has 512 places (`max_ongoing_requests`). With a fast model 2
seconds of work would fill them all, and the requests of other senders would wait for a place."""
_NICENESS_STEP = 10
_NOTHING = 1e-6  # of a batch
_OVERDUE_S = 30.0  # no batch takes so long: a pass over the largest pools takes some 5 s
_SHORT_BATCH_S = 0.01
"""What a batch takes at most, about, while one sender asks for most and others are there: a row that arrives
waits for the end of a batch."""
_MOST_FAILURES = 5
"""After so many failed batches of a stage in a row the batcher counts as failing, as after an error of CUDA,
which stays."""

RowT = TypeVar("RowT")
ResultT = TypeVar("ResultT")
SENDER: ContextVar[str] = ContextVar("sender", default="")
"""The sender of the current request."""

_log = logging.getLogger("polyrank.serve")


class _Mean:
    """A moving mean. It ignores the first measurement, which includes allocation and compilation."""

    def __init__(self) -> None:
        self.value, self._count = 0.0, -1

    def add(self, value: float) -> None:
        self._count += 1
        if self._count:
            self.value += max(_SMOOTHING, 1 / self._count) * (value - self.value)


@dataclass(frozen=True, eq=False)
class Stage(Generic[RowT, ResultT]):
    """A kind of work, whose rows can be computed together."""

    name: str
    run: Callable[[Sequence[RowT]], Sequence[ResultT]]
    """Rows to their results, in order."""
    batch_cost: float
    """The most cost (usually tokens) in a batch. A row that costs more is computed alone."""
    cost: Callable[[Any], float] = len
    """The cost of a row."""
    unit_s: _Mean = field(default_factory=_Mean)
    """Seconds of a unit of cost."""
    row_cost: _Mean = field(default_factory=_Mean)
    """The cost of the rows of a batch."""


class Step(NamedTuple):
    """A further stage of a request."""

    stage: Stage[Any, Any]
    rows: Callable[[list[Any]], Sequence[Any]]
    """The results of the stage before to the rows of this one, at least one; called by the thread."""


Costs = Mapping[Stage[Any, Any], float]
"""The work of a request: what its rows cost in each stage, as far as it is known."""


def _seconds(costs: Costs) -> float:
    return sum(cost * stage.unit_s.value for stage, cost in list(costs.items()))


def _batches(costs: Costs) -> float:
    return sum(cost / stage.batch_cost for stage, cost in costs.items())


@dataclass(frozen=True)
class Batch:
    """Measurements of a batch, for the metrics."""

    stage: str
    rows: int
    cost: float
    waited_s: float
    """The longest wait of its rows."""
    seconds: float


@dataclass(eq=False)
class _Queue:
    """The work of one sender and class."""

    sender: str
    is_bulk: bool
    finish: float = 0.0
    """Grows with the seconds of what was computed."""
    rows: int = 0
    """Those that wait."""
    requests: int = 0
    """Those that are admitted."""
    costs: dict[Stage[Any, Any], float] = field(default_factory=dict)
    """The admitted work that is left."""
    refused_at: float = -math.inf
    """When a request of this sender and class was refused last."""

    @property
    def factor(self) -> float:
        """How many times its seconds count."""
        return _BULK if self.is_bulk else 1.0


@dataclass(eq=False)
class _Request:
    """An admitted request."""

    queue: _Queue
    costs: dict[Stage[Any, Any], float] = field(default_factory=dict)
    """Its work that is left."""
    number: int = field(default_factory=itertools.count().__next__)
    """In the order of admission."""

    def spend(self, costs: Costs) -> None:
        """Notes that this work is done, or not needed any more."""
        for stage, cost in costs.items():
            left = self.costs.get(stage, 0.0)
            self.costs[stage] = left - min(cost, left)
            queue_left = self.queue.costs.get(stage, 0.0) - min(cost, left)
            if queue_left > _NOTHING * stage.batch_cost:
                self.queue.costs[stage] = queue_left
            else:  # a sum of what floats rounded, or of a model that is no longer served
                self.queue.costs.pop(stage, None)


_request: ContextVar[_Request | None] = ContextVar("request", default=None)


@dataclass(eq=False)
class _Call:
    """The rows of one request and stage."""

    stage: Stage[Any, Any]
    rows: Sequence[Any]
    costs: Sequence[float]
    request: _Request
    future: asyncio.Future[list[Any]]
    since: float
    began: float = math.inf
    """When its first row was computed."""
    taken: int = 0
    """Rows that are in a batch, or were."""
    results: list[Any] = field(default_factory=list)
    """Of the first rows; batches take them in order."""
    then: Sequence[Step] = ()
    computed: list[tuple[_Call, float]] = field(default_factory=list)
    """The steps of the request by now, and when they ended."""


_Heap = list[tuple[int, int, _Call]]
"""Calls that have rows to take, in the order of their requests and then of the calls."""
_Batch = list[tuple[_Call, int]]
"""Calls, and the places of the rows that are computed."""


def lower_priority() -> None:
    """Lowers the priority of this thread, which computes, or is the event loop (`Guard` calls it there).

    Both by the same, or one takes the cores from the other. With the event loop's alone, one short question
    and twice the load that 2 cores answer beside their clients, a refusal took 0.7 s in the median, not 3 ms,
    and 160 requests/s were answered, not 290. With longer contexts it gains less: 5 %. With neither, 200
    clients got 5 rankings a second, not 13. Ray's workers have niceness 15, which only root may lower.
    """
    if sys.platform == "linux":  # where a thread has a niceness of its own
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS_STEP
        os.setpriority(os.PRIO_PROCESS, thread, min(19, niceness))


async def all_of(*parts: Coroutine[Any, Any, ResultT]) -> list[ResultT]:
    """The results of a request's parts, in order. If one part fails, its error is raised, and the others are
    cancelled, because nobody waits for them."""
    if len(parts) == 1:
        return [await parts[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in parts]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


class Batcher:
    """Deadlines are of `time.monotonic`."""

    def __init__(
        self,
        max_wait_s: float,
        on_batch: Callable[[Batch], None] = lambda batch: None,
        batch_rows: int = 1024,
    ) -> None:
        """`max_wait_s`: seconds of work for which a request may wait. `batch_rows`: most rows of a batch.
        `on_batch` is called after each batch."""
        self._max_wait_s, self._on_batch, self._batch_rows = max_wait_s, on_batch, batch_rows
        self._changed = threading.Condition()
        self._calls: dict[tuple[Stage[Any, Any], float], dict[_Queue, _Heap]] = {}
        """Heaps, by what is computed together (stage and factor) and by queue. No heap is empty."""
        self._numbers = itertools.count()
        self._finish = 0.0  # of the queue that was computed last, before that
        self._queues: dict[tuple[str, bool], _Queue] = {}
        self._demand = Demand()
        self._closed = False
        self._failures: dict[str, int] = {}  # in a row, by stage
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._work, name="batcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after the current batch. Waiting rows are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    @property
    def requests(self) -> int:
        """The requests that are admitted and not answered; a list is one."""
        return sum(queue.requests for queue in list(self._queues.values()))

    @property
    def waiting_rows(self) -> int:
        """The rows that wait for a batch."""
        return sum(queue.rows for queue in list(self._queues.values()))

    def problem(self) -> str:
        """The reason why no request can be computed, or ""."""
        busy_since = self._busy_since
        if not self._thread.is_alive():
            return "the thread that computes has ended"
        if busy_since is not None and time.monotonic() - busy_since > _OVERDUE_S:
            return f"a batch has not ended after {_OVERDUE_S:g} s"
        return ""

    @property
    def is_failing(self) -> bool:
        """Whether the latest batches of a stage failed: by requests that cannot be computed, or all do."""
        return max(list(self._failures.values()), default=0) >= _MOST_FAILURES

    def _waiting_s(
        self, is_bulk: bool, own_s: float = 0.0, refused_since: float = math.inf
    ) -> float:
        """Seconds of others' work before the end of a new request of this sender, which itself takes `own_s`.
        While its own queue is computed for a second, another one is for 1, 4 or 0.25 s, until its work is
        done. To one that was refused since `refused_since`, more comes until then."""
        key = SENDER.get(), is_bulk
        own = self._queues.get(key) or _Queue(*key)
        before_s = _seconds(own.costs)
        return before_s + sum(
            min(
                math.inf if queue.refused_at > refused_since else _seconds(queue.costs),
                (before_s + own_s) * own.factor / queue.factor,
            )
            for queue in list(self._queues.values())
            if queue is not own
        )

    def refusal(self, deadline: float, costs: Costs = MappingProxyType({})) -> Refusal | None:
        """The refusal that a request of the current sender would get now, or None."""
        now, is_bulk, own_s = time.monotonic(), _batches(costs) > 1.0, _seconds(costs)
        if (left_s := deadline - now) <= 0:  # as overloaded, clients would send it again
            return Refusal("too_late")
        queue = self._queues.get((SENDER.get(), is_bulk))
        if queue is not None and queue.requests >= _MOST_OF_A_SENDER:
            message = f"{queue.requests} requests of this sender are waiting"
            return Refusal("overloaded", message, retry_after_s=1.0)
        waiting_s = self._waiting_s(is_bulk, own_s)
        # With nothing before it a request is computed, or an estimate that is too high would never change.
        ends_in_time = (
            not waiting_s or self._waiting_s(is_bulk, own_s, now - _LOAD_STAYS_S) + own_s <= left_s
        )
        if ends_in_time and waiting_s <= min(self._max_wait_s, left_s * _WAITING_SHARE):
            return None
        if queue is not None:
            queue.refused_at = now
        message = f"{waiting_s:.1f} s of work are waiting"
        return Refusal("overloaded", message, retry_after_s=max(1.0, waiting_s))

    @contextmanager
    def admit(self, costs: Costs, deadline: float, is_checked: bool = False) -> Iterator[None]:
        """Admits a request, whose rows are handed in inside the `with` block. Rows that its task hands in
        later keep its place.

        `is_checked`: it belongs to an admitted request, and is not refused. Raises Refusal (overloaded) if it
        would wait for too much work, or for over half of its time, or so long that it cannot end in time; and
        (too_late) after its deadline.
        """
        sender, batches = SENDER.get(), _batches(costs)
        self._demand.add(sender, batches, time.monotonic())
        if not is_checked and (refusal := self.refusal(deadline, costs)):
            raise refusal
        key = sender, batches > 1.0
        with self._changed:
            queue = self._queues.setdefault(key, _Queue(*key))
            queue.requests += 1
            for stage, cost in costs.items():
                queue.costs[stage] = queue.costs.get(stage, 0.0) + cost
        request = _Request(queue, dict(costs))
        _request.set(request)
        try:
            yield
        finally:
            with self._changed:
                request.spend(dict(request.costs))
                queue.requests -= 1
                if not queue.requests:
                    self._queues.pop(key, None)

    async def run(
        self,
        stage: Stage[RowT, ResultT],
        rows: Sequence[RowT],
        costs: Sequence[float],
        deadline: float,
        *then: Step,
    ) -> list[Any]:
        """The rows' results, in order, or those of the last step. Raises Refusal (too_late) when the deadline
        passes."""
        if not rows:
            return []
        if (left_s := deadline - time.monotonic()) <= 0:
            raise Refusal("too_late")
        request = _request.get() or _Request(_Queue(SENDER.get(), False))
        future = asyncio.get_running_loop().create_future()
        call = _Call(stage, rows, costs, request, future, time.monotonic(), then=then)
        self._hand_in(call)
        try:
            async with asyncio.timeout(left_s) as timer:
                results: list[Any] = await future
            for step, ended in call.computed:
                tracing.record("queue", step.since, step.began, stage=step.stage.name)
                tracing.record(step.stage.name, step.began, ended, rows=len(step.rows))
            return results
        except TimeoutError:
            if timer.expired():
                raise Refusal("too_late") from None
            raise

    def _hand_in(self, call: _Call) -> None:
        queue = call.request.queue
        with self._changed:
            if not queue.rows:
                queue.finish = max(self._finish, queue.finish)
            queue.rows += len(call.rows)
            heap = self._calls.setdefault((call.stage, queue.factor), {}).setdefault(queue, [])
            heapq.heappush(heap, (call.request.number, next(self._numbers), call))
            self._changed.notify()

    def _work(self) -> None:
        lower_priority()
        while True:
            with self._changed:
                while not self._closed and not self._calls:
                    self._changed.wait()
                if self._closed:
                    return
                batch = self._next_batch()
            if batch:
                self._compute(batch)
                self._busy_since = None

    def _next_batch(self) -> _Batch:
        """The row that is next, and others of its stage.

        Rows that nobody waits for any more are dropped.
        Rows of bulk requests do not fill a batch of interactive ones, which would take longer by them.
        """
        together = min(self._calls, key=lambda key: _next_queue(self._calls[key])[:2])
        heaps, stage = self._calls[together], together[0]
        self._finish = max(self._finish, _next_queue(heaps)[0])
        batch: _Batch = []
        dominant = self._demand.dominant_sender(time.monotonic())
        mean_s = stage.unit_s.value
        unit_s = mean_s or 1 / stage.batch_cost
        cost, most_cost = 0.0, stage.batch_cost
        if dominant and mean_s:
            most_cost = min(most_cost, _SHORT_BATCH_S / unit_s)
        while heaps and len(batch) < self._batch_rows:
            _, (_, _, call), queue = _next_queue(heaps)
            rows_left, row_cost = len(call.rows) - call.taken, call.costs[call.taken]
            if call.future.done():  # it is too late, or its client has left
                taken = rows_left
            elif batch and cost + row_cost > most_cost:
                break
            elif batch and queue.sender == dominant != batch[0][0].request.queue.sender:
                break  # the first would wait for the rows of the others, too
            else:
                taken = 1
                batch.append((call, call.taken))
                cost += row_cost
                queue.finish += row_cost * unit_s * queue.factor
            call.taken += taken
            queue.rows -= taken
            if taken == rows_left:
                heapq.heappop(heaps[queue])
                if not heaps[queue]:
                    del heaps[queue]
        if not heaps:  # also of stages of models that are no longer served
            del self._calls[together]
        return batch

    def _compute(self, batch: _Batch) -> None:
        """`batch`: of one stage."""
        stage = batch[0][0].stage
        self._busy_since = began = time.monotonic()
        for call, _ in batch:
            call.began = min(call.began, began)
        try:
            results = stage.run([call.rows[place] for call, place in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"{stage.name}: {len(results)} results of {len(batch)} rows")
        except Exception as error:
            self._failures[stage.name] = self._failures.get(stage.name, 0) + 1
            self._compute_apart(batch, error)
            return
        self._failures.pop(stage.name, None)
        seconds, cost = time.monotonic() - began, sum(call.costs[place] for call, place in batch)
        stage.unit_s.add(seconds / cost)
        stage.row_cost.add(cost / len(batch))
        try:
            waited_s = began - min(call.since for call, _ in batch)
            self._on_batch(Batch(stage.name, len(batch), cost, waited_s, seconds))
        except Exception:  # of the metrics: no reason to answer nobody any more
            _log.exception("cannot record a batch")
        finished_calls: dict[asyncio.AbstractEventLoop, list[_Call]] = defaultdict(list)
        for (call, _), result in zip(batch, results, strict=True):
            call.results.append(result)
            if len(call.results) == len(call.rows):
                call.computed.append((call, time.monotonic()))
                if not self._go_on(call):
                    finished_calls[call.future.get_loop()].append(call)
        with self._changed:
            for call, place in batch:
                call.request.spend({stage: call.costs[place]})
        for loop, calls in finished_calls.items():
            _deliver(loop, calls)

    def _go_on(self, call: _Call) -> bool:
        """Hands in the rows of the call's next step. Whether there is one."""
        if not call.then or call.future.done():
            return False
        (stage, rows_of), *then = call.then
        try:
            rows = rows_of(call.results)
            costs = list(map(stage.cost, rows))
        except Exception as error:
            _deliver(call.future.get_loop(), [call], error)
        else:
            kept = call.request, call.future, time.monotonic()
            self._hand_in(_Call(stage, rows, costs, *kept, then=then, computed=call.computed))
        return True

    def _compute_apart(self, batch: _Batch, error: Exception) -> None:
        """Computes a failed batch again, request by request, so one bad request does not fail the others."""
        calls = {call for call, _ in batch}
        if len(calls) == 1:
            (call,) = calls
            _deliver(call.future.get_loop(), [call], error)
            return
        for call in calls:
            self._compute([row for row in batch if row[0] is call])


def _next_queue(heaps: Mapping[_Queue, _Heap]) -> tuple[float, tuple[int, int, _Call], _Queue]:
    """(finish, first call, queue) of the queue that is next."""
    queue = min(heaps, key=lambda queue: (queue.finish, heaps[queue][0]))
    return queue.finish, heaps[queue][0], queue


def _deliver(
    loop: asyncio.AbstractEventLoop, calls: Sequence[_Call], error: Exception | None = None
) -> None:
    def set_all() -> None:
        for call in calls:
            if call.future.done():  # too late, the client has left, or an earlier row failed
                continue
            if error is not None:
                call.future.set_exception(error)
            else:
                call.future.set_result(call.results)

    with suppress(RuntimeError):  # the loop is closed, so nobody waits
        loop.call_soon_threadsafe(set_all)
