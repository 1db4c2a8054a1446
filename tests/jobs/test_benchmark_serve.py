"""The load that a service meets, and the report on it."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jobs.benchmarks import serve as parts
from jobs.benchmarks.serving import load

from ..helpers import free_port
from ..serve.live import serving

BODIES = [b'{"at": 0}', b'{"at": 1}', b'{"at": 2}']


class Echo:
    """Keeps what it was sent; the answer's status is what the body asks for, or 200."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.at_once = self.most_at_once = 0
        self.open = threading.Event()
        self.open.set()

    async def answer(self, request: Request) -> Response:
        body = await request.body()
        self.bodies.append(body)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        while not self.open.is_set():
            await asyncio.sleep(0.01)
        self.at_once -= 1
        return Response(status_code=json.loads(body).get("status", 200))

    @property
    def app(self) -> Starlette:
        return Starlette(routes=[Route("/", self.answer, methods=["POST"])])


@pytest.fixture
def echo():
    return Echo()


@pytest.fixture
def url(echo):
    with serving(echo.app) as url:
        yield url


def test_all_that_was_due_is_sent_and_counted(echo, url):
    result = load.poisson(f"{url}/", BODIES, 100.0, 0.5)
    assert len(echo.bodies) == len(result.status) == len(result.seconds)
    assert set(result.status.tolist()) == {200}
    assert (np.diff(result.due_s) >= 0).all() and result.due_s[-1] <= 0.5
    assert set(echo.bodies) == set(BODIES)
    # Poisson: within five standard deviations of 50
    assert abs(len(result.status) - 50) < 5 * 50**0.5


def test_the_clock_does_not_wait_for_answers(echo, url):
    """And the time of a request that waited is counted from when it was due."""
    echo.open.clear()
    release = threading.Timer(0.6, echo.open.set)
    release.start()
    result = load.poisson(f"{url}/", BODIES, 60.0, 0.3)
    assert echo.most_at_once == len(result.status) > 5
    assert (result.due_s + result.seconds > 0.55).all()


def test_clients_wait_for_their_answers(echo, url):
    result = load.clients(f"{url}/", BODIES, 3, 0.3)
    assert 1 <= echo.most_at_once <= 3
    assert len(result.status) == len(echo.bodies)


def test_what_is_not_answered_with_200_is_no_throughput(url):
    result = load.clients(f"{url}/", [b'{"status": 429}', b"{}"], 1, 0.3)
    assert set(result.statuses()) == {"200", "429"}
    assert len(result.successes().status) == result.statuses()["200"]
    end_s = float((result.due_s + result.seconds).max()) + 0.01
    assert result.per_s(0.0, end_s) == pytest.approx(result.statuses()["200"] / end_s)


def test_a_service_that_is_not_there_is_heard_as_such():
    with serving(Echo().app) as gone:
        pass
    result = load.poisson(f"{gone}/", BODIES, 50.0, 0.2)
    assert set(result.statuses()) == {"no answer"}


class Ranking:
    """A service that is already there, and asks for a token."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def rank(self, request: Request) -> Response:
        if request.headers.get("authorization") != "Bearer let me in":
            return Response(status_code=401)
        self.bodies.append(await request.body())
        return Response(status_code=200)

    async def ready(self, request: Request) -> Response:
        return Response()

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[Route("/rank", self.rank, methods=["POST"]), Route("/ready", self.ready)]
        )


@pytest.fixture
def measure_there(run_job_here, convai2_corpus, tmp_path, monkeypatch):
    """`measure_there(url, …)`: the job on a service that is already there."""
    size = parts.Size(300, 20, 0.2, 1, 0.2, 0.2)
    monkeypatch.setitem(parts.SIZES, "small", size)
    monkeypatch.setattr(parts, "COUNTS", (1, 4))

    def measure(url: str, *options: object):
        return run_job_here(
            "benchmark", "serve", "--url", url, "--corpus", convai2_corpus.uri, "--work", tmp_path,
            "--json", tmp_path / "rows.json", *options,
        )  # fmt: skip

    return measure


def test_an_address_without_a_service_is_refused(measure_there):
    url = f"http://127.0.0.1:{free_port()}"
    refusal = measure_there(url, "--pool", "replies").refusal
    assert f"--url {url}: <urlopen error [Errno 111]" in refusal


def test_a_service_that_is_already_there_is_measured(measure_there, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYRANK_TOKEN", "let me in")
    service = Ranking()
    with serving(service.app) as url:
        summary = measure_there(f"{url}/", "--pool", "replies").summary
    assert sorted(summary["rows"]) == [
        "serve.by_clients", "serve.load.300_percent.goodput", "serve.load.70_percent.p99_over_p50",
    ]  # fmt: skip
    assert {json.loads(body)["pool"] for body in service.bodies} == {"replies"}
    rows = {row["row"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    note = rows["serve.by_clients"]["detail"]["note"]
    assert note.startswith("Answers a second with 1, 4 clients: ") and "None was refused." in note


def test_a_service_that_refuses_the_first_requests_is_not_measured(measure_there, monkeypatch):
    monkeypatch.delenv("POLYRANK_TOKEN", raising=False)
    with serving(Ranking().app) as url:
        refusal = measure_there(url, "--pool", "replies").refusal
    assert "the service answered {'401': " in refusal


@pytest.mark.parametrize(("options", "said"), [
    (("--url", "localhost:8000", "--pool", "a"), "url: 'localhost:8000' is not allowed"),
    (("--url", "http://localhost:8000"), "pool: '' is not allowed"),
    (("--url", "http://localhost:8000", "--pool", "a", "--only", "overhead"), "only: ('overhead',)"),
    (("--pool", "a", "--model", "m"), "pool: 'a' is not allowed"),
])  # fmt: skip
def test_options_of_a_service_that_is_already_there(run_job_here, options, said):
    assert said in run_job_here("benchmark", "serve", "--corpus", "c", *options).refusal


@pytest.mark.long
def test_the_report_has_all_rows(run_job, tiny_ranker, convai2_corpus, tmp_path, monkeypatch):
    size = parts.Size(300, 20, 1.0, 1, 2.0, 2.0)
    monkeypatch.setitem(parts.SIZES, "small", size)
    monkeypatch.setattr(parts, "COUNTS", (1, 4))
    monkeypatch.setattr(
        parts, "_with_haproxy", lambda *arguments: [parts.BenchmarkRow("haproxy", 1.0, "ms")]
    )
    summary = run_job(
        "benchmark", "serve", "--model", tiny_ranker("poly").uri, "--corpus", convai2_corpus.uri,
        "--work", tmp_path, "--json", tmp_path / "rows.json",
    ).summary  # fmt: skip
    rows = {row["row"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert sorted(rows) == sorted(summary["rows"]) == sorted([
        "serve.rank_100k.overhead_ms", "serve.saturation_vs_in_process", "haproxy",
        "serve.batching_gain_32_clients", "serve.by_clients", "serve.load.70_percent.p99_over_p50",
        "serve.load.300_percent.goodput", "serve.fairness.p50_over_alone", "serve.heavy.p99_over_alone",
    ])  # fmt: skip
    assert [path.name for path in (tmp_path / "serve").glob("*.png")] == ["load.png"]
