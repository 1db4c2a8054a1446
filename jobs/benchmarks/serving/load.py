"""Clients of a service: on a Poisson clock, which does not wait for answers, or one after the other.

Only the first sees what queues do: clients that wait for their answers send less to a service that is slow.
A time counts from the moment that a request was due, so that a generator which is late hides nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from types import MappingProxyType
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from pipeline.arrays import Floats, Ints
from pipeline.config import BadInput

Ask = Callable[[float], Awaitable[None]]
NO_ANSWER = 0
"""In place of a status: the connection broke."""
TOKEN = "POLYRANK_TOKEN"
"""Environment variable: the bearer token of a service that asks for one."""
_WAIT_S = 70.0  # longer than any deadline of the service


@dataclass(frozen=True)
class LoadResult:
    """The answers to a load: an entry for each request, in the order of their due times."""

    due_s: Floats
    """Due times, from the beginning of the load."""
    seconds: Floats
    """Durations, from the due time to the end of the answer."""
    status: Ints
    end_s: float
    """When the last answer was there."""

    def successes(self) -> LoadResult:
        """The requests with status 200."""
        return self.select(self.status == 200)

    def select(self, mask: np.typing.NDArray[np.bool_]) -> LoadResult:
        return LoadResult(self.due_s[mask], self.seconds[mask], self.status[mask], self.end_s)

    def between(self, start_s: float, end_s: float) -> LoadResult:
        """The requests that were due in this time."""
        return self.select((self.due_s >= start_s) & (self.due_s < end_s))

    def ms(self, percentile: float) -> float:
        """Milliseconds; NaN: there are none."""
        return float(1e3 * np.percentile(self.seconds, percentile)) if len(self.seconds) else np.nan

    def per_s(self, start_s: float, end_s: float) -> float:
        """Answers with status 200 a second, by the time that they were there."""
        done_s = (self.due_s + self.seconds)[self.status == 200]
        return float(np.count_nonzero((done_s >= start_s) & (done_s < end_s)) / (end_s - start_s))

    def statuses(self) -> dict[str, int]:
        names, counts = np.unique(self.status, return_counts=True)
        pairs = zip(names.tolist(), counts.tolist(), strict=True)
        return {str(name or "no answer"): count for name, count in pairs}


@dataclass(frozen=True)
class Step:
    """A part of a load."""

    seconds: float
    per_s: float


def poisson(
    url: str,
    bodies: Sequence[bytes],
    steps: Sequence[Step],
    seed: int = 0,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> LoadResult:
    """Requests at random moments, at the mean rate of each step. No body: GET."""
    rng, due = np.random.default_rng(seed), list[float]()
    began = 0.0
    for step in steps:
        count = rng.poisson(step.per_s * step.seconds)
        due += sorted(began + rng.uniform(0, step.seconds, count))
        began += step.seconds
    return _run(url, bodies, lambda ask: _send_on_time(ask, due), headers)


def clients(url: str, bodies: Sequence[bytes], count: int, seconds: float) -> LoadResult:
    """`count` clients; each asks again as soon as it has its answer."""
    return _run(url, bodies, lambda ask: _send_in_turn(ask, count, seconds))


class Client:
    """Asks one request after the other over one connection. No thread or event loop takes time beside it."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._path = address.path
        self._connection = HTTPConnection(str(address.hostname), address.port, timeout=_WAIT_S)

    def close(self) -> None:
        self._connection.close()

    def ask(self, body: bytes) -> float:
        """Seconds until the answer was there. Raises BadInput for a status that is not 200."""
        began = time.perf_counter()
        self._connection.request("POST", self._path, body, {"content-type": "application/json"})
        answer = self._connection.getresponse()
        answer.read()
        seconds = time.perf_counter() - began
        if answer.status != 200:
            raise BadInput(f"{self._path}: status {answer.status}")
        return seconds


async def _send_on_time(ask: Ask, due: Iterable[float]) -> None:
    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for due_s in due:
            await asyncio.sleep(max(0.0, began + due_s - time.perf_counter()))
            tasks.create_task(ask(began + due_s))  # type: ignore[arg-type]


async def _send_in_turn(ask: Ask, count: int, seconds: float) -> None:
    end = time.perf_counter() + seconds

    async def client() -> None:
        while (now := time.perf_counter()) < end:
            await ask(now)

    await asyncio.gather(*(client() for _ in range(count)))


def _run(
    url: str,
    bodies: Sequence[bytes],
    load: Callable[[Ask], Awaitable[None]],
    headers: Mapping[str, str] = MappingProxyType({}),
) -> LoadResult:
    due, seconds, status = list[float](), list[float](), list[int]()

    async def run() -> float:
        async with _open_session(url, bodies, headers) as send:
            began = time.perf_counter()

            async def ask(due_at: float) -> None:
                answer_status = await send()
                due.append(due_at - began)
                seconds.append(time.perf_counter() - due_at)
                status.append(answer_status)

            await load(ask)
            return time.perf_counter() - began

    end_s = asyncio.run(run())
    order = np.argsort(due, kind="stable")
    return LoadResult(
        np.array(due)[order], np.array(seconds)[order], np.array(status)[order], end_s
    )


@asynccontextmanager
async def _open_session(
    url: str, bodies: Sequence[bytes], more_headers: Mapping[str, str]
) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """Sends the next body, and returns the answer's status."""
    ring = itertools.cycle(bodies)
    headers = {"content-type": "application/json"} if bodies else {}
    if token := os.environ.get(TOKEN):
        headers["authorization"] = f"Bearer {token}"
    headers |= more_headers
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=_WAIT_S)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers
    ) as session:

        async def send() -> int:
            method, body = ("POST", next(ring)) if bodies else ("GET", None)
            try:
                async with session.request(method, url, data=body) as answer:
                    await answer.read()
                    return answer.status
            except (aiohttp.ClientError, TimeoutError):
                return NO_ANSWER

        yield send
