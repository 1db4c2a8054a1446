"""The HTTP interface: rankings, one shape for every error, and a loop that stays free."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import BadInput
from serve import api
from serve.ranker import Engine, Ranked

from .conftest import REPLIES, ask

OPENAPI = Path(api.__file__).with_name("openapi.json")
CONTEXT = ["hi , what do you do ?", "i paint", "and what else ?"]
TEXTS = ["tea", "i sail on the harbour", "no", "a nurse"]


@pytest.fixture(scope="module")
def engine(tiny_ranker, tiny_pool) -> Engine:
    model = tiny_ranker("poly")
    return Engine(model.uri, [tiny_pool(model)])


@pytest.fixture(scope="module")
def client(engine) -> TestClient:
    return TestClient(api.create_app(engine), raise_server_exceptions=False)


def error_of(response: Any, status: int) -> dict[str, Any]:
    """The error of an answer in the one shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert set(error) == {"code", "message", "field"}
    assert error["message"] and "\n" not in error["message"]
    return error


# Rankings


def test_candidates_of_the_request_are_ranked(client, engine):
    body = client.post("/rank", json={"context": CONTEXT, "candidates": TEXTS}).json()
    ranked = engine.rank(CONTEXT, TEXTS, len(TEXTS))
    assert body["results"] == [
        {"id": str(one.place), "text": TEXTS[one.place], "score": one.score} for one in ranked
    ]
    scores = [result["score"] for result in body["results"]]
    assert scores == sorted(scores, reverse=True)
    assert (body["model"], body["pool"]) == (engine.model.fingerprint, None)


def test_a_pool_is_ranked(client, engine):
    body = client.post("/rank", json={"context": CONTEXT, "pool": "replies", "top_k": 5}).json()
    ranked = engine.rank(CONTEXT, list(REPLIES.values()), 5)
    assert [result["text"] for result in body["results"]] == [one.text for one in ranked]
    assert [REPLIES[result["id"]] for result in body["results"]] == [one.text for one in ranked]
    expected = [one.score for one in ranked]
    assert [r["score"] for r in body["results"]] == pytest.approx(expected, rel=1e-5)
    assert body["pool"] == {"name": "replies", "version": "v-1"}
    assert body["model"] == engine.model.fingerprint


def test_top_k_bounds_the_results_and_is_10_by_default(client):
    def results(**request: Any) -> list[Any]:
        return client.post("/rank", json={"context": CONTEXT, **request}).json()["results"]

    many = [f"text {number}" for number in range(30)]
    whole = results(candidates=many, top_k=1000)
    assert len(whole) == 30
    assert results(candidates=many) == whole[:10]
    assert results(candidates=many, top_k=1) == whole[:1]
    assert len(results(pool="replies")) == 10


@pytest.mark.parametrize("text", ["😀 ñ 漢字 عرب", "a\x00b", "[CLS] [SEP]", "x" * 5000])
def test_any_text_can_be_ranked(client, text):
    request = {"context": [text, ""], "candidates": [text, "other"], "top_k": 2}
    response = client.post("/rank", json=request)
    assert response.status_code == 200
    assert {result["text"] for result in response.json()["results"]} == {text, "other"}


def test_health_and_info(client, engine):
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/info").json() == engine.info()


def test_without_a_model_the_service_is_not_ready():
    client = TestClient(api.create_app(None))
    asked = client.post("/rank", json={"context": ["x"], "candidates": ["y"]})
    for response in (asked, client.get("/health"), client.get("/info")):
        assert error_of(response, 503)["code"] == "not_ready"


# Bad requests

GOOD = {"context": ["hello"], "candidates": ["a", "b"]}
MANY = ["x"] * 1001


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"context": None}, "context", "list"),
        ({"context": []}, "context", "at least 1"),
        ({"context": ["", " \t\n"]}, None, "context: every turn is empty"),
        ({"context": "hello"}, "context", "list"),
        ({"context": [5]}, "context.0", "string"),
        ({"context": [["hello"]]}, "context.0", "string"),
        ({"context": MANY}, "context", "at most 1000"),
        ({"candidates": []}, "candidates", "at least 1"),
        ({"candidates": ["a", ""]}, "candidates.1", "empty"),
        ({"candidates": [" "]}, "candidates.0", "empty"),
        ({"candidates": [1, 2]}, "candidates.0", "string"),
        ({"candidates": {"a": "b"}}, "candidates", "list"),
        ({"candidates": MANY}, "candidates", "at most 1000"),
        ({"pool": "replies"}, None, "candidates, pool: exactly one"),
        ({"candidates": None}, None, "candidates, pool: exactly one"),
        ({"candidates": None, "pool": ""}, "pool", "at least 1"),
        ({"candidates": None, "pool": 3}, "pool", "string"),
        ({"top_k": "3"}, "top_k", "integer"),
        ({"top_k": 0}, "top_k", "greater than or equal to 1"),
        ({"top_k": -1}, "top_k", "greater than or equal to 1"),
        ({"top_k": 1001}, "top_k", "less than or equal to 1000"),
        ({"top_k": 10**30}, "top_k", "1000"),
        ({"top_k": 2.0}, "top_k", "integer"),
        ({"top_k": True}, "top_k", "integer"),
        ({"top_k": None}, "top_k", "integer"),
        ({"topk": 3}, "topk", "not permitted"),
    ],
)
def test_a_field_that_is_not_allowed_is_named(client, change, field, said):
    error = error_of(client.post("/rank", json={**GOOD, **change}), 422)
    assert (error["code"], error["field"]) == ("invalid_request", field)
    assert said in error["message"]


def test_a_missing_field_is_named(client):
    error = error_of(client.post("/rank", json={"candidates": ["a"]}), 422)
    assert error["field"] == "context" and "required" in error["message"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"{", 400),
        (b"nope", 400),
        (b'{"context": ["a"], "candidates": ["b"]} x', 400),
        (b"\xff\xfe\xfd", 400),
        (b'{"context": ["\xe9"], "candidates": ["b"]}', 400),
        (b"[" * 100_000, 400),
        (b'{"context": ["a"], "candidates": ["b"], "top_k": ' + b"9" * 5000 + b"}", 400),
        (b"null", 422),
        (b"[]", 422),
        (b'"context"', 422),
        (b"3", 422),
        (b"NaN", 422),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(client, body, status):
    headers = {"content-type": "application/json"}
    error = error_of(client.post("/rank", content=body, headers=headers), status)
    assert error["code"] == {400: "invalid_json", 422: "invalid_request"}[status]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (rb'{"context": ["\ud800"], "candidates": ["a"]}', "context.0"),
        (rb'{"context": ["a"], "candidates": ["b \udfff c"]}', "candidates.0"),
        (rb'{"context": ["a"], "pool": "\ud800"}', "pool"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused(client, body, field):
    response = client.post("/rank", content=body, headers={"content-type": "application/json"})
    assert response.status_code in (404, 422)
    assert error_of(response, response.status_code)["field"] == field


def test_an_unknown_field_of_half_a_surrogate_pair_is_refused(client):
    body = rb'{"context": ["a"], "candidates": ["b"], "\ud800": 1}'
    error_of(client.post("/rank", content=body, headers={"content-type": "application/json"}), 422)


def test_a_body_of_another_type_is_refused(client):
    form = {"content-type": "application/x-www-form-urlencoded"}
    error_of(client.post("/rank", content=b"context=a", headers=form), 422)


def test_an_unknown_pool_is_not_found(client):
    error = error_of(client.post("/rank", json={"context": ["a"], "pool": "nope"}), 404)
    assert (error["code"], error["field"]) == ("unknown_pool", "pool")
    assert "'nope'" in error["message"] and "replies" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("POST", "/", 404, "not_found"),
        ("GET", "/rank", 405, "method_not_allowed"),
        ("PUT", "/rank", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_unknown_routes_and_wrong_methods_have_the_same_shape(client, method, path, status, code):
    assert error_of(client.request(method, path), status)["code"] == code


def test_a_body_is_allowed_up_to_the_bound_and_not_a_byte_more(client):
    empty = json.dumps({**GOOD, "context": [""]}).encode()
    for more, status in ((0, 200), (1, 413)):
        text = "x" * (api.MAX_BODY_BYTES - len(empty) + more)
        body = empty.replace(b'[""]', f'["{text}"]'.encode())
        response = client.post("/rank", content=body, headers={"content-type": "application/json"})
        assert response.status_code == status
    assert error_of(response, 413)["code"] == "too_large"
    assert f"{api.MAX_BODY_BYTES:,}" in error_of(response, 413)["message"]


TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates too
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
ALMOST = st.fixed_dictionaries(
    {"context": JSON | st.lists(TEXT, max_size=3)},
    optional={
        "candidates": JSON | st.lists(TEXT, max_size=3),
        "pool": JSON | st.just("replies"),
        "top_k": JSON,
        "more": JSON,
    },
)


@settings(max_examples=200)
@given(value=JSON | ALMOST)
def test_no_json_makes_the_service_fail(client, value):
    content = json.dumps(value).encode()
    response = client.post("/rank", content=content, headers={"content-type": "application/json"})
    if response.status_code != 200:
        assert 400 <= response.status_code < 500
        error_of(response, response.status_code)


@settings(max_examples=100)
@given(content=st.binary(max_size=40))
def test_no_bytes_make_the_service_fail(client, content):
    response = client.post("/rank", content=content, headers={"content-type": "application/json"})
    assert 400 <= response.status_code < 500
    error_of(response, response.status_code)


# When the engine fails


class FakeEngine:
    """An engine whose `rank` is the given function."""

    model = SimpleNamespace(fingerprint="f00d")

    def __init__(self, rank: Any) -> None:
        self.rank = rank


def raiser(error: Exception) -> Any:
    def rank(*arguments: Any) -> list[Ranked]:
        raise error

    return rank


def test_a_failure_inside_is_an_answer_that_gives_nothing_away(caplog):
    app = api.create_app(FakeEngine(raiser(RuntimeError("the password is hunter2"))))
    response = TestClient(app, raise_server_exceptions=False).post("/rank", json=GOOD)
    assert error_of(response, 500)["code"] == "internal"
    assert "hunter2" not in response.text and "RuntimeError" not in response.text
    assert "hunter2" in caplog.text


def test_what_the_engine_refuses_is_the_callers_fault():
    app = api.create_app(FakeEngine(raiser(BadInput("context: too strange"))))
    error = error_of(TestClient(app).post("/rank", json=GOOD), 422)
    assert (error["code"], error["message"]) == ("invalid_request", "context: too strange")


# Over real connections


@contextmanager
def serving(engine: Any) -> Iterator[int]:
    """uvicorn on a free port; connections wait in the socket until it is up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(api.create_app(engine), log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def test_other_requests_are_answered_while_a_ranking_is_at_work():
    entered, release = threading.Event(), threading.Event()

    def rank(context: list[str], candidates: list[str], top_k: int) -> list[Ranked]:
        entered.set()
        assert release.wait(60)
        return [Ranked(0, candidates[0], 1.0, "0")]

    with serving(FakeEngine(rank)) as port, ThreadPoolExecutor(1) as other:
        ranking = other.submit(ask, port, "POST", "/rank", GOOD)
        try:
            assert entered.wait(60)
            assert ask(port, "GET", "/health") == (200, {"status": "ok"})
            assert ask(port, "POST", "/rank", b"{")[0] == 400
            assert not ranking.done()
        finally:
            release.set()
        status, body = ranking.result(60)
    assert status == 200
    assert body["results"] == [{"id": "0", "text": "a", "score": 1.0}]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_10_mb_is_refused_however_it_is_sent(engine, chunked):
    parts = [b"x" * 1_000_000] * 10
    with serving(engine) as port:
        body = iter(parts) if chunked else b"".join(parts)
        status, answer = ask(port, "POST", "/rank", body, encode_chunked=chunked)
        assert (status, answer["error"]["code"]) == (413, "too_large")
        assert ask(port, "GET", "/health")[0] == 200


# What is written down


def test_openapi_json_is_what_the_application_says():
    said = "openapi.json is old; make openapi writes it again"
    assert json.loads(OPENAPI.read_text()) == api.create_app(None).openapi(), said


def test_every_error_of_a_ranking_is_documented_in_the_one_shape():
    interface = api.create_app(None).openapi()
    responses = interface["paths"]["/rank"]["post"]["responses"]
    assert set(responses) == {"200", "400", "404", "413", "422", "429"}
    shapes = {
        status: response["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for status, response in responses.items()
    }
    assert shapes.pop("200") == "RankResponse"
    assert set(shapes.values()) == {"ErrorResponse"}
