"""What a proxy passes on after a replica was full."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from serve.errors import FULL, overload_refusal
from serve.guard import Guard
from serve.pass_limit import PassLimit

from .conftest import Clock

GOOD = {"context": ["hello"], "candidates": ["a", "b"]}


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setattr("serve.pass_limit.time", clock := Clock())
    return clock


def full() -> JSONResponse:
    return overload_refusal(waiting_s=2.5, is_full=True).response()


class Replica:
    """Has room for `most` requests, which it answers when it is told to."""

    def __init__(self, most: int) -> None:
        self.most, self.asked = most, 0
        self.waiting: list[asyncio.Event] = []

    async def answer(self, request: Request) -> JSONResponse:
        self.asked += 1
        if len(self.waiting) >= self.most:
            return full()
        self.waiting.append(event := asyncio.Event())
        await event.wait()
        self.waiting.remove(event)
        return JSONResponse({})


async def post(app: Any, path: str = "/rank") -> tuple[int, dict[str, str]]:
    """The status and the headers of the answer."""
    answers: list[dict[str, Any]] = []
    body = json.dumps(GOOD).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        answers.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": headers,
             "query_string": b"", "http_version": "1.1"}  # fmt: skip
    await app(scope, receive, send)
    return answers[0]["status"], {
        name.decode(): value.decode() for name, value in answers[0]["headers"]
    }


def test_a_proxy_passes_on_as_many_at_once_as_a_full_replica_had(clock):
    replica = Replica(most=3)
    routes = [Route(path, replica.answer, methods=["POST"]) for path in ("/rank", "/embed")]
    proxy = Guard(Starlette(routes=routes), is_proxy=True)

    async def run() -> None:
        answers = [asyncio.create_task(post(proxy)) for _ in range(3)]
        while len(replica.waiting) < 3:
            await asyncio.sleep(0)
        for asked in (4, 4, 4):  # the replica is asked once, and then no more
            status, headers = await post(proxy)
            assert (status, replica.asked) == (429, asked)
            assert int(headers["retry-after"]) >= 1
            assert FULL not in headers and headers.get("connection") != "close"
        assert (await post(proxy, "/embed"))[0] == 429  # another path has its own number
        assert replica.asked == 5

        replica.waiting[0].set()
        assert (await answers[0])[0] == 200
        answers.append(asyncio.create_task(post(proxy)))  # its place is free
        while len(replica.waiting) < 3:
            await asyncio.sleep(0)
        assert replica.asked == 6
        assert (await post(proxy))[0] == 429 and replica.asked == 6
        clock.now += 1.5  # one more finds out whether there is room by now
        assert (await post(proxy))[0] == 429 and replica.asked == 7
        for event in list(replica.waiting):
            event.set()
        assert {status for status, _ in await asyncio.gather(*answers)} == {200}

    asyncio.run(run())


def test_one_request_may_always_pass_and_finds_out(clock):
    """Another proxy's requests may fill the replica."""
    limit = PassLimit()
    for _ in range(3):
        assert not limit.is_reached("/rank")
        with limit.passing("/rank") as number:
            limit.lower("/rank", number)
            assert limit.is_reached("/rank")


@pytest.mark.parametrize(
    ("limit_at_first", "seconds", "more"),
    [(9, 1.3, 0), (9, 1.5, 1), (9, 5.0, 13), (200, 1.1, 1), (4000, 20.0, 4200), (9, 59.0, 1818)],
)
def test_the_limit_grows_slowly_at_first(clock, limit_at_first, seconds, more):
    limit = PassLimit()
    with ExitStack() as under_way:

        def pass_until_it_is_reached() -> int:
            while not limit.is_reached("/rank"):
                number = under_way.enter_context(limit.passing("/rank"))
            return number

        for _ in range(limit_at_first):
            under_way.enter_context(limit.passing("/rank"))
        limit.lower("/rank", limit_at_first + 1)
        assert limit.is_reached("/rank")
        clock.now += seconds
        if more:
            assert pass_until_it_is_reached() == limit_at_first + more
        assert limit.is_reached("/rank")
        clock.now += 60
        assert not limit.is_reached("/rank")


def test_a_late_refusal_does_not_raise_the_limit(clock):
    limit = PassLimit()
    with ExitStack() as under_way:
        numbers = [under_way.enter_context(limit.passing("/rank")) for _ in range(9)]
        limit.lower("/rank", numbers[4])
        limit.lower("/rank", numbers[8])
        under_way.close()
        for _ in range(4):
            assert not limit.is_reached("/rank")
            under_way.enter_context(limit.passing("/rank"))
        assert limit.is_reached("/rank")


def test_paths_that_a_client_invents_are_forgotten():
    async def refuse(request: Request) -> JSONResponse:
        return full()

    proxy = Guard(Starlette(routes=[Route("/{path}", refuse, methods=["POST"])]), is_proxy=True)
    client = TestClient(proxy)
    for number in range(250):
        assert client.post(f"/{number}", json=GOOD).status_code == 429
    assert len(proxy._pass_limit._paths) <= 100


def test_a_path_without_refusals_is_forgotten_with_its_last_request():
    limit = PassLimit()
    with limit.passing("/a"), limit.passing("/b"):
        pass
    assert not limit._paths


def test_under_three_times_too_much_few_requests_reach_a_full_replica_and_none_idles(clock):
    """A simulation: two replicas that compute 50 and 25 requests a second, each with room for 2 s of work,
    and 225 requests a second, each to the replica with fewer of them."""
    rates, limit = (50.0, 25.0), PassLimit()
    free_at, had = [clock.now, clock.now], [0, 0]
    ends: list[tuple[float, int, int, ExitStack]] = []
    counts, ties = Counter[str](), itertools.count()
    began = clock.now
    for arrival in range(225 * 20):
        clock.now = began + arrival / 225
        while ends and ends[0][0] <= clock.now:
            _, _, replica, under_way = heapq.heappop(ends)
            had[replica] -= 1
            counts["answered"] += 1
            under_way.close()
        if limit.is_reached("/rank"):
            counts["refused by the proxy"] += 1
            continue
        replica = min((0, 1), key=lambda number: had[number])
        under_way = ExitStack()
        number = under_way.enter_context(limit.passing("/rank"))
        free_at[replica] = max(free_at[replica], clock.now)
        if free_at[replica] - clock.now > 2.0:
            counts["refused by a replica"] += 1
            limit.lower("/rank", number)
            under_way.close()
            continue
        free_at[replica] += 1 / rates[replica]
        had[replica] += 1
        heapq.heappush(ends, (free_at[replica], next(ties), replica, under_way))
    assert counts["answered"] > 0.98 * 75 * 20
    assert counts["refused by a replica"] < 20
