"""The HTTP interface: rankings, one shape for every error, and a loop that stays free."""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import httpx2
import jsonschema
import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import BadInput
from pipeline.pools.pool import Pool
from serve import app
from serve.batcher import SENDER, Batch, Stage
from serve.http import api
from serve.limits import Limits
from serve.refusals import CODES, REFUSALS
from serve.service import Service

from .conftest import INTERFACE, ask, error_of, run, serving

CONTEXT = ["hi , what do you do ?", "i paint", "and what else ?"]
TEXTS = ["tea", "i sail on the harbour", "no", "a nurse"]


FEW = Limits(candidates=3, top_k=10, requests=2)


@pytest.fixture(scope="module")
def limited(poly) -> TestClient:
    return TestClient(api.create_app(poly.service, FEW))


def results_of(client: TestClient, **request: Any) -> list[dict[str, Any]]:
    """Of a ranking of CONTEXT, if there is no other context."""
    return client.post("/rank", json={"context": CONTEXT, **request}).json()["results"]


# Rankings


@pytest.mark.parametrize(
    ("path", "body", "field", "limit"),
    [
        ("/rank", {"context": "hi", "candidates": ["a"] * 4}, "candidates", "candidates"),
        ("/rank", {"context": "hi", "pool": "replies", "allow": ["a"] * 4}, "allow", "candidates"),
        ("/rank", {"context": "hi", "pool": "replies", "top_k": 11}, "top_k", "top_k"),
        ("/rank", [{"context": "hi", "candidates": ["a"]}] * 3, "body", "requests"),
        ("/classify", {"texts": ["a"] * 4}, "texts", "candidates"),
        ("/classify", {"texts": ["a"], "top_k": 11}, "top_k", "top_k"),
        # The message named the most that any operator may allow.
        ("/rank", {"context": "hi", "candidates": ["a"] * 10_001}, "candidates", "candidates"),
        ("/rank", {"context": "hi", "pool": "replies", "top_k": 10_001}, "top_k", "top_k"),
        ("/rank", [{"context": "hi", "candidates": ["a"]}] * 1_001, "body", "requests"),
        ("/v1/embeddings", {"input": ["a"] * 10_001}, "input", "candidates"),
        ("/rerank", {"query": "hi", "texts": ["a"] * 4}, "texts", "candidates"),
        ("/v2/rerank", {"query": "hi", "documents": ["a"] * 4}, "documents", "candidates"),
        ("/embed", {"inputs": ["a"] * 4}, "inputs", "candidates"),
        ("/", {"inputs": ["a"] * 4}, "inputs", "candidates"),
        ("/v1/embeddings", {"input": ["a"] * 4}, "input", "candidates"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["a"] * 4}},
         "inputs.sentences", "candidates"),
    ],
)  # fmt: skip
def test_an_operator_sets_how_much_a_request_may_have(limited, path, body, field, limit):
    error = error_of(limited.post(path, json=body))
    assert (error["code"], error["field"]) == ("invalid_request", field)
    assert error["message"].endswith(f"at most {getattr(FEW, limit)} (limits.{limit})")


def test_a_large_answer_is_compressed_for_who_reads_it(client):
    texts = [f"text number {number}" for number in range(900)]
    body = {"context": "hi", "candidates": texts, "top_k": 900}
    plain = client.post("/rank", json=body, headers={"accept-encoding": "identity"})
    packed = client.post("/rank", json=body, headers={"accept-encoding": "gzip"})
    small = client.get("/info", headers={"accept-encoding": "gzip"})
    assert packed.json()["results"] == plain.json()["results"]
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"]) / 3
    assert "content-encoding" not in {**plain.headers, **small.headers}


@pytest.mark.parametrize("of", [{"candidates": ["a", "b"]}, {"pool": "replies"}])
def test_an_answer_says_how_many_tokens_of_the_context_were_read(client, of):
    most = client.get("/info").json()["limits"]["max_context_tokens"]
    answers = (
        client.post("/rank", json={"context": "hello " * words, **of}).json()
        for words in (1, 2, 2 * most)
    )
    one, two, cut = (answer["context_tokens"] for answer in answers)
    assert one < two < most == cut


def test_an_answer_of_two_stages_names_both(tiny_ranker, tiny_pool, asking):
    model, cross = tiny_ranker("poly"), tiny_ranker("cross")
    two_stages = asking(model, tiny_pool(model), second_stage=cross.uri)
    client = TestClient(api.create_app(two_stages.service))
    answer = client.post("/rank", json={"context": CONTEXT, "pool": "replies"}).json()
    assert (answer["model"], answer["second_stage"]) == (model.fingerprint, cross.fingerprint)
    answer = client.post("/rank", json={"context": CONTEXT, "candidates": TEXTS}).json()
    assert (answer["model"], answer["second_stage"]) == (model.fingerprint, None)


@pytest.mark.parametrize("source", ["candidates", "pool"])
def test_a_list_is_admitted_by_the_work_of_all_its_parts_or_refused_at_once(
    poly, monkeypatch, source
):
    """Its first part decided for all: most lists were computed in part, and then too late."""
    batches = list[Batch]()
    service = Service(lambda: poly.engine, 2.0, batches.append)
    texts = [f"text {number}" for number in range(20)]
    question = {
        "context": CONTEXT,
        **{"candidates": {"candidates": texts}, "pool": {"pool": "replies"}}[source],
    }
    stage = poly.engine.candidates if source == "candidates" else poly.engine.pools["replies"].stage
    part_cost = (
        sum(map(len, poly.engine.ranker.candidate_rows(texts))) if source == "candidates" else 1.05
    )

    def post(parts: int) -> httpx2.Response:
        monkeypatch.setattr(stage.unit_s, "value", 3 / part_cost)  # a part takes 3 of its 10 s
        return client.post("/rank", json=[question] * parts)

    with TestClient(api.create_app(service)) as client:
        answer = post(5)
        assert (answer.status_code, len(answer.json())) == (200, 5), "nothing waits before it"
        SENDER.set("testclient")
        with service.batcher.admit({stage: 0.1 * part_cost}, time.monotonic() + 5):
            batches.clear()
            assert error_of(post(5), 429)["code"] == "overloaded"
            assert {batch.stage for batch in batches} <= {"tokenize"}
            assert post(1).status_code == 200
    service.close()


@pytest.mark.parametrize("is_sick", [True, False])
def test_a_replica_that_cannot_compute_is_not_ready(poly, monkeypatch, is_sick):
    """As after an error of CUDA, which stays. Requests that cannot be computed make nobody sick."""
    service = Service(lambda: poly.engine, max_wait_s=2.0)
    encode = poly.engine.ranker.context_rows

    def fail(rows: list[Any]) -> list[Any]:
        if is_sick or len(rows[0]) == poison_tokens:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return stage.run(rows)

    poison = {"context": "a poison", "candidates": TEXTS}
    poison_tokens = len(encode([["a poison"]])[0])
    assert poison_tokens != len(encode([poly.engine.sample_texts()[:1]])[0])
    stage = poly.engine.contexts
    monkeypatch.setattr(poly.engine, "contexts", Stage("contexts", fail, stage.batch_cost))
    with TestClient(api.create_app(service), raise_server_exceptions=False) as client:
        assert client.get("/ready").status_code == 200
        for _ in range(5):
            assert client.post("/rank", json=poison).status_code == 500
        ready = client.get("/ready")
        deployment = SimpleNamespace(_replica=service)  # of which a replica says the problem
        check = app.Ranker.func_or_class.check_health(deployment)
        if is_sick:
            assert error_of(ready, 503)["code"] == "not_ready"
            with pytest.raises(RuntimeError, match=r"batches fail: .*CUDA error"):
                run(check)
        else:
            assert ready.status_code == 200
            run(check)
        assert client.get("/health").status_code == 200
    service.close()


def test_a_list_with_a_refused_request_leaves_no_work(poly):
    batcher, may_end = poly.service.batcher, threading.Event()

    def wait(rows: list[Any]) -> list[Any]:
        assert may_end.wait(60)
        return rows

    waiting = batcher.run(Stage("wait", wait, 1.0), [1], [1.0], time.monotonic() + 60)
    good = {"context": CONTEXT, "candidates": TEXTS}
    with TestClient(api.create_app(poly.service)) as client, ThreadPoolExecutor(1) as thread:
        for _ in range(3):  # so that the batcher knows how long a request takes
            assert client.post("/rank", json=good).status_code == 200
        thread.submit(run, waiting)
        refused = client.post("/rank", json=[good, {"context": CONTEXT, "pool": "nope"}])
        left_s = sum(queue.seconds() for queue in batcher._queues.values())
        may_end.set()
    assert (refused.status_code, left_s) == (404, 0.0)


def test_a_large_answer_is_made_beside_the_event_loop(poly, monkeypatch):
    """64 queries with `top_k` 1,000 blocked it for 2 s."""
    threads = set()
    response = api._response

    def note(*answer: Any) -> Any:
        threads.add(threading.get_ident())
        return response(*answer)

    monkeypatch.setattr(api, "_response", note)
    texts = [f"text number {number}" for number in range(300)]
    query = {"context": CONTEXT, "candidates": texts, "top_k": 300}
    loop_threads = []

    async def ask() -> None:
        loop_threads.append(threading.get_ident())
        transport = httpx2.ASGITransport(api.create_app(poly.service))
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
            for asked in (query, [query, query]):
                answer = await client.post("/rank", json=asked)
                assert answer.status_code == 200

    run(ask())
    assert threads and not threads & set(loop_threads)


def test_a_search_reads_the_texts_of_its_results_beside_the_event_loop(poly, monkeypatch):
    threads = set()
    read = Pool.rows_at

    def note(*asked: Any) -> Any:
        threads.add(threading.get_ident())
        return read(*asked)

    monkeypatch.setattr(Pool, "rows_at", note)
    assert poly.rank_pool(CONTEXT, "replies", 5)
    assert threads == {poly.service.batcher._thread.ident}


def test_a_context_may_be_a_text(client):
    text, turns = (
        {row["id"]: row["score"] for row in results_of(client, context=context, candidates=TEXTS)}
        for context in ("hello", ["hello"])
    )
    assert list(text) == list(turns)
    assert text == pytest.approx(turns, rel=1e-4)  # their batches may differ


def test_a_pool_answers_without_the_ids_that_are_denied(client):
    """As for a second page of results."""

    def ids(top_k: int = 4, **rows: Any) -> list[str]:
        return [r["id"] for r in results_of(client, pool="replies", top_k=top_k, **rows)]

    every = ids(top_k=50)
    assert ids(deny=every[:4]) == every[4:8]
    assert ids(deny=["nobody"]) == ids() == every[:4]
    assert ids(allow=every[:3], deny=every[:1]) == every[1:3]
    assert ids(deny=every) == []


def test_top_k_bounds_the_results_and_is_10_by_default(client):
    many = [f"text {number}" for number in range(30)]
    whole = results_of(client, candidates=many, top_k=1000)
    assert len(whole) == 30
    assert results_of(client, candidates=many) == whole[:10]
    assert results_of(client, candidates=many, top_k=1) == whole[:1]
    assert len(results_of(client, pool="replies")) == 10


@pytest.mark.parametrize("text", ["😀 ñ 漢字 عرب", "a\x00b", "[CLS] [SEP]", "x" * 5000])
def test_any_text_can_be_ranked(client, text):
    request = {"context": [text, ""], "candidates": [text, "other"], "top_k": 2}
    response = client.post("/rank", json=request)
    assert response.status_code == 200
    assert {result["text"] for result in response.json()["results"]} == {text, "other"}


# Bad requests

GOOD = {"context": ["hello"], "candidates": ["a", "b"]}
JSON_TYPE = {"content-type": "application/json"}
MANY = ["x"] * 10_001


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"context": []}, "context", "at least 1"),
        ({"context": ["", " \t\n"]}, None, "context: every turn is empty"),
        ({"context": 5}, "context", "string"),
        ({"context": [5]}, "context.0", "string"),
        ({"context": MANY}, "context", "at most 1000"),
        ({"candidates": []}, "candidates", "at least 1"),
        ({"candidates": ["a", ""]}, "candidates.1", "empty"),
        ({"candidates": [1, 2]}, "candidates.0", "string"),
        ({"candidates": {"a": "b"}}, "candidates", "list"),
        ({"candidates": MANY}, "candidates", "at most 1000 (limits.candidates)"),
        ({"pool": "replies"}, None, "candidates, pool: exactly one"),
        ({"candidates": None}, None, "candidates, pool: exactly one"),
        ({"candidates": None, "pool": ""}, "pool", "at least 1"),
        ({"candidates": None, "pool": "p" * 201}, "pool", "at most 200"),
        ({"top_k": "3"}, "top_k", "integer"),
        ({"top_k": 0}, "top_k", "greater than or equal to 1"),
        ({"top_k": 10_001}, "top_k", "at most 1000 (limits.top_k)"),
        ({"top_k": 10**30}, "top_k", "1000"),
        ({"top_k": 2.5}, "top_k", "integer"),
        ({"where": {"language": ["en"]}}, None, "where: allowed: only with a pool"),
        ({"deny": ["r03"]}, None, "deny: allowed: only with a pool"),
        ({"deny": MANY}, "deny", "at most 1000 (limits.candidates)"),
        ({"candidates": [{"id": "a"}]}, "candidates.0.text", "required"),
        ({"top_k": True}, "top_k", "integer"),
        ({"topk": 3}, "topk", "not permitted"),
        ({"explain": "yes"}, "explain", "boolean"),
    ],
)
def test_a_field_that_is_not_allowed_is_named(client, change, field, said):
    error = error_of(client.post("/rank", json={**GOOD, **change}))
    assert (error["code"], error["field"]) == ("invalid_request", field)
    assert said in error["message"]


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"", 422, "body: Field required"),
        (b"null", 422, "body: Input should be a valid dictionary"),
        (b"[]", 422, "at least 1"),
        (b"NaN", 422, "body: "),
        (b"nope", 400, "not JSON"),
        (b'{"query": "a",}', 400, "not JSON: Expecting property name .* at character 14"),
        (b"{} {}", 400, "not JSON: Extra data at character 3"),
        (b"\xff\xfe\xfd", 400, "not JSON"),
        (b'{"context": ["\xe9"], "candidates": ["b"]}', 400, "not JSON: 'utf-8' codec .* 0xe9"),
        (b"[" * 100_000, 400, "not JSON: .*recursion"),
        (b'{"top_k": ' + b"9" * 5000 + b"}", 400, "not JSON"),
    ],
    ids=range(11),
)
def test_a_body_that_is_no_json_object_is_refused_and_told_where(client, content, status, message):
    error = error_of(client.post("/rank", content=content, headers=JSON_TYPE), status)
    assert error["code"] == {400: "invalid_json", 422: "invalid_request"}[status]
    assert re.search(message, error["message"])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (rb'{"context": ["\ud800"], "candidates": ["a"]}', "context.0"),
        (rb'{"context": ["a"], "candidates": ["b \udfff c"]}', "candidates.0"),
        (rb'{"context": ["a"], "pool": "\ud800"}', "pool"),
        (rb'{"context": ["a"], "candidates": [{"id": "\ud800", "text": "b"}]}', "candidates.0.id"),
        (rb'{"context": ["a"], "pool": "replies", "allow": ["\ud800"]}', "allow.0"),
        (rb'{"context": ["a"], "pool": "replies", "deny": ["\ud800"]}', "deny.0"),
        (rb'{"context": ["a"], "pool": "replies", "where": {"lang": ["\ud800"]}}', "where.lang.0"),
        (rb'{"context": ["a"], "candidates": ["b"], "\ud800": 1}', ANY),  # an unknown field
    ],
)
def test_half_of_a_surrogate_pair_is_refused(client, body, field):
    response = client.post("/rank", content=body, headers=JSON_TYPE)
    assert error_of(response)["field"] == field


def test_a_body_of_another_type_is_refused(client):
    form = {"content-type": "application/x-www-form-urlencoded"}
    error = error_of(client.post("/rank", content=b"context=a", headers=form), 415)
    assert error["code"] == "unsupported_media_type"
    assert "application/json" in error["message"]


@pytest.mark.parametrize("path", ["/rank/", "//v1//rerank", "/V1/rerank"])
def test_a_route_that_is_written_otherwise_is_named(client, path):
    error = error_of(client.post(f"http://testserver{path}", json={}), 404)
    usual_path = "/rank" if path == "/rank/" else "/v1/rerank"
    assert error["message"].endswith(f"There is {usual_path}")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/nope", 404, "not_found"),
        ("GET", "/rank", 405, "method_not_allowed"),
        ("PUT", "/rank", 405, "method_not_allowed"),
    ],
)
def test_unknown_routes_and_wrong_methods_have_the_same_shape(client, method, path, status, code):
    response = client.request(method, path, json=None if method == "GET" else {})
    error = error_of(response, status)
    assert error["code"] == code
    assert response.headers["allow"] if status == 405 else "/v1/embeddings" in error["message"]


@pytest.mark.slow
def test_a_body_is_allowed_up_to_the_bound_and_not_a_byte_more(client):
    empty = json.dumps({**GOOD, "context": [""]}).encode()
    for more, status in ((0, 200), (1, 413)):
        text = "x" * (Limits().body_bytes - len(empty) + more)
        body = empty.replace(b'[""]', f'["{text}"]'.encode())
        response = client.post("/rank", content=body, headers=JSON_TYPE)
        assert response.status_code == status
    error = error_of(response, 413)
    assert error["code"] == "too_large" and f"{Limits().body_bytes:,}" in error["message"]


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


@pytest.mark.slow
@settings(max_examples=60)
@given(value=JSON | ALMOST)
def test_no_json_makes_the_service_fail(client, value):
    content = json.dumps(value).encode()
    response = client.post("/rank", content=content, headers=JSON_TYPE)
    if response.status_code != 200:
        assert 400 <= response.status_code < 500
        error_of(response, response.status_code)


@settings(max_examples=40)
@given(content=st.binary(max_size=40))
def test_no_bytes_make_the_service_fail(client, content):
    response = client.post("/rank", content=content, headers=JSON_TYPE)
    assert 400 <= response.status_code < 500
    error_of(response, response.status_code)


# When the engine fails


@pytest.fixture
def failing(tiny_ranker, asking, monkeypatch):
    """`failing(error)`: a client of a service whose tokenizer raises it."""

    def make(error: Exception) -> TestClient:
        def raise_it(texts: Any) -> Any:
            raise error

        one = asking(tiny_ranker("poly"))
        monkeypatch.setattr(one.engine.ranker, "candidate_rows", raise_it)
        return TestClient(api.create_app(one.service), raise_server_exceptions=False)

    return make


def test_a_failure_inside_is_an_answer_that_gives_nothing_away(failing, caplog):
    response = failing(RuntimeError("the password is hunter2")).post("/rank", json=GOOD)
    assert error_of(response, 500)["code"] == "internal"
    assert "hunter2" not in response.text and "RuntimeError" not in response.text
    assert "hunter2" in caplog.text


def test_what_the_engine_refuses_is_the_callers_fault(failing):
    error = error_of(failing(BadInput("context: too strange")).post("/rank", json=GOOD))
    assert (error["code"], error["message"]) == ("invalid_request", "context: too strange")


# Over real connections


def test_other_requests_are_answered_while_a_ranking_is_at_work(tiny_ranker, asking, monkeypatch):
    entered, release = threading.Event(), threading.Event()
    one = asking(tiny_ranker("poly"))
    encode = one.engine.candidates.run

    def wait(rows: Any) -> Any:
        entered.set()
        assert release.wait(60)
        return encode(rows)

    object.__setattr__(one.engine.candidates, "run", wait)
    with serving(api.create_app(one.service)) as port, ThreadPoolExecutor(1) as other:
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
    assert len(body["results"]) == 2


def test_a_body_of_10_mb_that_says_no_length_is_refused(poly):
    with serving(api.create_app(poly.service)) as port:
        body = iter([b"x" * 1_000_000] * 10)
        # A client that still sends when the connection is closed may get no answer.
        with suppress(ConnectionError):
            status, answer = ask(port, "POST", "/rank", body, encode_chunked=True)
            assert (status, answer["error"]["code"]) == (413, "too_large")
        assert ask(port, "GET", "/health")[0] == 200


# What is written down


def test_openapi_json_is_what_the_application_says():
    said = "openapi.json is old; make openapi writes it again"
    assert api.interface() == INTERFACE, said


def test_every_error_of_a_ranking_is_documented_in_the_one_shape():
    responses = dict(INTERFACE["paths"]["/rank"]["post"]["responses"])
    assert responses.pop("200")
    assert set(responses) == {str(CODES[code].status) for code in (*REFUSALS, "unknown_pool")}
    for response in responses.values():
        (content,) = response["content"].values()
        assert content["schema"]["$ref"].endswith("/ErrorResponse")


@pytest.mark.parametrize(
    ("change", "is_allowed"),
    [
        ({}, True),
        ({"top_k": 10.0}, True),
        ({"candidates": [""]}, False),
        ({"candidates": None}, False),
        ({"pool": "replies"}, False),
        ({"top_k": 20_000}, False),
    ],
)
def test_openapi_json_allows_what_the_service_allows(client, change, is_allowed):
    schema = {"$ref": "#/components/schemas/RankRequest", "components": INTERFACE["components"]}
    asked = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    assert jsonschema.Draft202012Validator(schema).is_valid(asked) is is_allowed
    assert (client.post("/rank", json=asked).status_code == 200) is is_allowed
