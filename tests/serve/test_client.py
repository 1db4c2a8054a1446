"""The client, blocking and for asyncio, against a live service, one that refuses, and none."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline import Ranker
from pipeline.models.ranker import load_ranker
from serve.client import AsyncClient, Client, Question, Ranking, ServiceError
from serve.engine import Engine
from serve.http import errors
from serve.http.api import create_app
from serve.http.bearer_tokens import BearerTokens
from serve.refusals import CODES, Refusal
from tests.helpers import formula_scores

from .conftest import REPLIES, Asking, hash_of
from .live import serving

CONTEXT = ["hi , what do you do ?", "i paint"]
TEXTS = {"a": "tea", "b": "i sail on the harbour", "c": "no", "d": "a nurse"}


def ask(url: str, method: str, *given: Any, client: Any = None, **more: Any) -> Any:
    """The answer of a method of a new `Client`, which asks by an `AsyncClient`."""
    with Client(url, **(client or {})) as blocking:
        return getattr(blocking, method)(*given, **more)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that clients would have waited; they do not."""
    waited: list[float] = []

    async def wait(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(AsyncClient, "_sleep", staticmethod(wait))
    return waited


@pytest.fixture(scope="module")
def asked(tiny_ranker, tiny_pool, tiny_classifier, asking) -> Asking:
    model = tiny_ranker("poly")
    return asking(model, tiny_pool(model), classifier=tiny_classifier(model))


@pytest.fixture(scope="module")
def engine(asked) -> Engine:
    return asked.engine


@pytest.fixture(scope="module")
def app(asked) -> ASGIApp:
    return create_app(asked.service)


@pytest.fixture(scope="module")
def url(app) -> Iterator[str]:
    with serving(app) as url:
        yield url


class Refusing:
    """Answers the first requests itself, and hands the others on."""

    def __init__(self, app: ASGIApp, *answers: Response) -> None:
        self._app, self._answers = app, list(answers)
        self.seen: list[Mapping[str, str]] = []
        """Headers of the requests."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            self.seen.append({key.decode(): value.decode() for key, value in scope["headers"]})
            app = self._answers.pop(0) if self._answers else app
        await app(scope, receive, send)


def refused(status: int, retry_after: str | None = None) -> Response:
    code = next(code for code, meaning in CODES.items() if meaning.status == status)
    response = errors.response(Refusal(code, "not now"))
    if retry_after is not None:
        response.headers["retry-after"] = retry_after
    return response


@contextmanager
def no_service() -> Iterator[str]:
    """A URL where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    yield f"http://127.0.0.1:{port}"


def error_of(call: Callable[[], Any]) -> ServiceError:
    """The error, which may come from another process."""
    with pytest.raises(ServiceError) as caught:
        call()
    assert str(caught.value) == caught.value.message
    assert vars(pickle.loads(pickle.dumps(caught.value))) == vars(caught.value)
    return caught.value


# Answers


def test_texts_are_ranked(url, engine):
    texts = list(TEXTS.values())
    scores = np.array(formula_scores(load_ranker(Path(engine.model.uri)), CONTEXT, texts))
    order = np.argsort(-scores)[:3]

    ranking = ask(url, "rank", CONTEXT, texts, top_k=3)
    assert [result.id for result in ranking.results] == [str(place) for place in order]
    assert [result.text for result in ranking.results] == [texts[place] for place in order]
    assert [result.score for result in ranking.results] == pytest.approx(scores[order], rel=1e-4)
    assert (ranking.model, ranking.pool, ranking.pool_version) == (
        engine.model.fingerprint, None, None,
    )  # fmt: skip
    named = ask(url, "rank", CONTEXT, TEXTS, top_k=3)
    assert [TEXTS[result.id] for result in named.results] == [r.text for r in ranking.results]


def test_a_client_for_asyncio_gets_the_same_answers(url, engine):
    async def ask_all() -> None:
        async with AsyncClient(url) as client:
            ranking = await client.rank(CONTEXT, TEXTS)
            classified = await client.classify(["hello"])
            assert ranking.results == ask(url, "rank", CONTEXT, TEXTS).results
            assert classified.results == ask(url, "classify", ["hello"]).results
            questions = [Question("hello", TEXTS), Question(CONTEXT, pool="replies", top_k=2)]
            one, other = await client.rank_many(questions)
            assert {result.text for result in one.results} == set(TEXTS.values())
            assert (one.pool, other.pool, len(other.results)) == (None, "replies", 2)
            assert await client.info() == engine.info() and await client.ready()
            with pytest.raises(ServiceError, match="there are: replies"):
                await client.rank(CONTEXT, pool="nope")

    asyncio.run(ask_all())


def test_a_pool_is_ranked(url):
    ranking = ask(url, "rank", "hello", pool="replies", top_k=4)
    assert len(ranking.results) == 4
    assert [REPLIES[result.id] for result in ranking.results] == [r.text for r in ranking.results]
    assert (ranking.pool, ranking.pool_version, ranking.certified) == ("replies", "v-1", True)
    allowed = ask(url, "rank", "hello", pool="replies", allow=["r03", "r07"])
    assert {result.id for result in allowed.results} == {"r03", "r07"}
    denied = ask(url, "rank", "hello", pool="replies", deny=["r03", "r07"], top_k=50)
    assert {result.id for result in denied.results} == set(REPLIES) - {"r03", "r07"}


def test_a_ranking_is_explained_if_the_caller_asks_for_it(url, engine):
    ranking = ask(url, "rank", CONTEXT, pool="replies", top_k=2, explain=True)
    expected = Ranker.load(engine.model.uri).explain(CONTEXT, [r.text for r in ranking.results])
    assert ranking.explanation.tokens == expected.tokens
    np.testing.assert_allclose(ranking.explanation.vectors, expected.attention, atol=1e-5)
    weights = [result.weights for result in ranking.results]
    np.testing.assert_allclose(weights, expected.weights, atol=1e-5)
    (plain,) = ask(url, "rank_many", [Question(CONTEXT, pool="replies", top_k=2)])
    assert (plain.explanation, plain.results[0].weights) == (None, None)


def test_texts_are_classified(url):
    texts = ["please pay my bill", "££ øø"]
    classified = ask(url, "classify", texts, top_k=2)
    expected = httpx2.post(f"{url}/classify", json={"texts": texts, "top_k": 2}).json()
    assert {**asdict(classified), "milliseconds": expected["milliseconds"]} == expected
    assert classified.milliseconds > 0


def test_a_service_that_refuses_or_none_at_all_is_not_ready(waits):
    with serving(refused(503)) as url:
        assert ask(url, "ready") is False
    with no_service() as url:
        assert ask(url, "ready") is False
    assert waits == [0.0, 0.0]


# Errors


def test_a_refusal_says_what_is_wrong(url, waits):
    error = error_of(lambda: ask(url, "rank", CONTEXT, pool="nope", request_id="mine-1"))
    assert (error.code, error.status, error.field) == ("unknown_pool", 404, "pool")
    assert "replies" in error.message and error.request_id == "mine-1"
    where = {"language": ["en"]}
    error = error_of(lambda: ask(url, "rank", CONTEXT, pool="replies", where=where))
    assert (error.code, error.status) == ("invalid_request", 422)
    assert "language" in error.message
    assert waits == [0.0, 0.0]


def test_the_token_is_sent(asked, engine):
    with serving(create_app(asked.service, tokens=BearerTokens([hash_of("open sesame")]))) as url:
        for token in ("open sesame", "open sesame\n"):  # as a file of one line has it
            assert ask(url, "info", client={"token": token}) == engine.info()
        error = error_of(lambda: ask(url, "info", client={"token": "barley"}))
    assert (error.code, error.status) == ("unauthorized", 401)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (PlainTextResponse("no upstream", 502), 502),
        (JSONResponse({"detail": "not found"}, 404), 404),
        (JSONResponse([]), 200),
    ],
)
def test_what_is_not_the_services_answer_is_said(waits, answer, status):
    with serving(answer) as url:
        error = error_of(lambda: ask(url, "rank", CONTEXT, TEXTS))
    assert (error.code, error.status) == ("not_understood", status)
    assert len(waits) == 1


# Attempts


def test_a_refused_request_is_sent_again_when_it_may(app, waits):
    service = Refusing(app, refused(429, "2"), refused(503, "1"), refused(429))
    with serving(service) as url:
        ranking = ask(url, "rank", CONTEXT, TEXTS, request_id="mine-1")
    assert isinstance(ranking, Ranking)
    assert waits[0] == 0.0
    for waited, asked in zip(waits[1:], (2.0, 1.0, 0.4), strict=True):
        assert asked <= waited <= 1.5 * asked
    assert {headers["x-request-id"] for headers in service.seen} == {"mine-1"}


def test_each_attempt_says_how_much_time_is_left(app, waits):
    service = Refusing(app, refused(429, "3"))
    with serving(service) as url:
        ask(url, "rank", CONTEXT, TEXTS, client={"timeout_s": 8.0})
    first, second = (int(headers["x-timeout-ms"]) for headers in service.seen)
    assert 4_000 < first <= 8_000
    assert second <= first - 3_000  # the client did not wait here, but counts what it would have
    ids = {headers["x-request-id"] for headers in service.seen}
    assert len(ids) == 1 and len(ids.pop()) == 32


def test_no_client_waits_longer_than_its_time(app, waits):
    service = Refusing(app, refused(429, "60"))
    with serving(service) as url:
        error = error_of(lambda: ask(url, "rank", CONTEXT, TEXTS, client={"timeout_s": 30.0}))
    assert (error.code, error.status) == ("overloaded", 429)
    assert waits == [0.0] and len(service.seen) == 1


def test_the_last_refusal_is_told(app, waits):
    service = Refusing(app, *(refused(status) for status in (503, 429, 503, 429)))
    with serving(service) as url:
        error = error_of(lambda: ask(url, "rank", CONTEXT, TEXTS, client={"retries": 2}))
    assert (error.code, error.status) == ("not_ready", 503)
    assert len(service.seen) == 3


@pytest.mark.parametrize("status", [422, 500, 504])
def test_what_would_fail_again_is_not_sent_again(app, waits, status):
    service = Refusing(app, refused(status))
    with serving(service) as url:
        assert error_of(lambda: ask(url, "rank", CONTEXT, TEXTS)).status == status
    assert len(service.seen) == 1


@pytest.mark.parametrize(
    ("status", "attempts", "code"),
    [(404, 4, "not_ready"), (408, 1, "too_late"), (500, 2, "replica_died"), (503, 4, "not_ready")],
)
def test_what_proxies_say_without_a_replica_is_understood(waits, status, attempts, code):
    """In plain text. A request under which two replicas died may be what kills them."""
    service = Refusing(PlainTextResponse("Internal Server Error", status))
    with serving(service) as url:
        error = error_of(lambda: ask(url, "rank", CONTEXT, TEXTS))
    assert (error.code, error.status) == (code, status)
    assert len(service.seen) == attempts


def test_one_death_of_a_replica_is_not_noticed(app, waits):
    service = Refusing(app, PlainTextResponse("Internal Server Error", 500), refused(429))
    with serving(service) as url:
        assert isinstance(ask(url, "rank", CONTEXT, TEXTS), Ranking)


def test_a_lost_connection_is_made_again(app):
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with ThreadPoolExecutor(1) as other:
        ranking = other.submit(ask, url, "rank", CONTEXT, TEXTS, client={"timeout_s": 60.0})
        connection, _ = listener.accept()
        connection.close()
        with serving(app, listener):
            assert len(ranking.result(60).results) == len(TEXTS)


def test_where_nobody_listens_the_client_gives_up_after_waits_that_stop_growing(waits):
    """So that a proxy may be away for most of the client's time."""
    options = {"timeout_s": 60.0, "retries": 8}
    with no_service() as url:
        error = error_of(lambda: ask(url, "rank", CONTEXT, TEXTS, client=options))
    assert (error.code, error.status) == ("unreachable", 0)
    for waited, least in zip(waits, (0.0, 0.1, 0.2, 0.4, 0.8, *[1.6] * 4), strict=True):
        assert least <= waited <= 1.5 * least


def trickle(listener: socket.socket, head: bytes) -> bool:
    """Answers one request by `head` and then 100 bytes, 20 a second; whether the client left before."""
    listener.settimeout(60)
    connection, _ = listener.accept()
    with connection, suppress(ConnectionError):
        connection.recv(65536)
        connection.sendall(head)
        connection.settimeout(0.05)
        for _ in range(100):
            with suppress(TimeoutError):
                while connection.recv(65536):
                    pass  # the rest of the request
                return True
            connection.sendall(b"x")
        return False
    return True


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nx-name: ", b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n"]
)
def test_an_answer_that_trickles_is_not_waited_for(head):
    """Each byte comes in time, the whole does not."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as server:
        client_left = server.submit(trickle, listener, head)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        options = {"timeout_s": 0.5, "retries": 0}
        error = error_of(lambda: ask(url, "rank", CONTEXT, TEXTS, client=options))
        assert client_left.result(60)
    assert (error.code, error.status) == ("too_late", 0)
    assert error.message == "no answer within 0.5 s"


def test_threads_may_share_a_client(url):
    with Client(url) as client, ThreadPoolExecutor(4) as threads:
        contexts = [f"turn {number}" for number in range(12)]
        together = threads.map(lambda context: client.rank(context, TEXTS), contexts)
        for context, ranking in zip(contexts, together, strict=True):
            alone = client.rank(context, TEXTS).results
            assert [result.id for result in ranking.results] == [result.id for result in alone]
            assert [result.score for result in ranking.results] == pytest.approx(
                [result.score for result in alone], rel=1e-4
            )


def test_a_client_outlives_a_fork(url, monkeypatch):
    """The forked process has the connections, but no loop that reads from them."""
    client = Client(url)
    assert client.ready()
    parents_http, parents_loop = client._client._http, client._client._loop
    monkeypatch.setattr("serve.client.os.getpid", lambda: -1)
    assert client.ready()
    assert len(client.rank(CONTEXT, TEXTS).results) == len(TEXTS)
    client.close()
    asyncio.run_coroutine_threadsafe(parents_http.aclose(), parents_loop).result(60)
