"""Clients of a service: on a Poisson clock, which does not wait for answers, or one after the other.

Only the first sees what queues do: clients that wait for their answers send less to a service that is slow.
A time counts from the moment that a request was due, so that a generator which is late hides nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from types import MappingProxyType
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from pipeline.arrays import Floats, Ints
from pipeline.config import BadInput

Ask = Callable[[float], Awaitable[None]]
"""Sends the next request, which was due at this moment."""
Headers = Mapping[str, str]
_NO_HEADERS: Headers = MappingProxyType({})
TOKEN = "POLYRANK_TOKEN"
"""Environment variable: the bearer token of a service that asks for one."""
_NO_ANSWER = 0  # in place of a status: the connection broke
_WAIT_S = 70.0  # longer than any deadline of the service


@dataclass(frozen=True)
class LoadResult:
    """The answers to a load: an entry for each request, in the order of their due times."""

    due_s: Floats
    """Due times, from the beginning of the load."""
    seconds: Floats
    """Durations, from the due time to the end of the answer."""
    status: Ints

    def select(self, mask: np.typing.NDArray[np.bool_]) -> LoadResult:
        return LoadResult(self.due_s[mask], self.seconds[mask], self.status[mask])

    def successes(self, start_s: float = 0.0) -> LoadResult:
        """The requests with status 200 that were due from then on."""
        return self.select((self.status == 200) & (self.due_s >= start_s))

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


def poisson(
    url: str, bodies: Sequence[bytes], per_s: float, seconds: float, headers: Headers = _NO_HEADERS
) -> LoadResult:
    """Requests at random moments, at this mean rate; one at least."""
    rng = np.random.default_rng(0)
    due = np.sort(rng.uniform(0, seconds, max(1, rng.poisson(per_s * seconds)))).tolist()

    async def send(ask: Ask) -> None:
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for due_s in due:
                await asyncio.sleep(max(0.0, began + due_s - time.perf_counter()))
                tasks.create_task(ask(began + due_s))  # type: ignore[arg-type]

    return _run(url, bodies, send, headers)


def clients(url: str, bodies: Sequence[bytes], count: int, seconds: float) -> LoadResult:
    """`count` clients; each asks again as soon as it has its answer."""

    async def client(ask: Ask, end: float) -> None:
        while (now := time.perf_counter()) < end:
            await ask(now)

    async def send(ask: Ask) -> None:
        end = time.perf_counter() + seconds
        await asyncio.gather(*(client(ask, end) for _ in range(count)))

    return _run(url, bodies, send, _NO_HEADERS)


def _run(
    url: str, bodies: Sequence[bytes], load: Callable[[Ask], Awaitable[None]], more_headers: Headers
) -> LoadResult:
    headers = {"content-type": "application/json"}
    if token := os.environ.get(TOKEN):
        headers["authorization"] = f"Bearer {token}"
    headers |= more_headers
    next_body, answers = itertools.cycle(bodies), list[tuple[float, float, int]]()

    async def run() -> None:
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=_WAIT_S)
        session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
        async with session:
            began = time.perf_counter()

            async def ask(due: float) -> None:
                try:
                    async with session.post(url, data=next(next_body)) as answer:
                        await answer.read()
                        status = answer.status
                except (aiohttp.ClientError, TimeoutError):
                    status = _NO_ANSWER
                answers.append((due - began, time.perf_counter() - due, status))

            await load(ask)

    asyncio.run(run())
    due, seconds, status = np.array(sorted(answers)).reshape(-1, 3).T
    return LoadResult(due, seconds, status.astype(int))


@contextmanager
def one_client(url: str) -> Iterator[Callable[[bytes], float]]:
    """Asks one request after the other over one connection; returns the seconds until the answer was there,
    and raises BadInput for a status that is not 200. No thread or event loop takes time beside it."""
    address = urlsplit(url)
    made = HTTPConnection(str(address.hostname), address.port, timeout=_WAIT_S)
    with closing(made) as connection:

        def ask(body: bytes) -> float:
            began = time.perf_counter()
            connection.request("POST", address.path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            seconds = time.perf_counter() - began
            if answer.status != 200:
                raise BadInput(f"{url}: status {answer.status}")
            return seconds

        yield ask
