"""What stands before the routes: bounds on bodies and time, tokens, request ids, HEAD."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPResponse
from select import select
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from ray.serve._private.http_util import RequestIdMiddleware

from serve.batcher import Batcher
from serve.http import api, guard
from serve.http.bearer_tokens import BearerTokens
from serve.limits import Limits

from .conftest import Clock, ask, error_of, hash_of, serving

GOOD = {"context": ["hello"], "candidates": ["a", "b"]}
JSON = {"content-type": "application/json"}
TOKEN = "s3cret"
HASH = hash_of(TOKEN)


@pytest.fixture(scope="module")
def service(poly):
    return poly.service


# Bodies


def read_answer(connection: socket.socket) -> tuple[int, Any]:
    """The answer to what was sent by hand."""
    with HTTPResponse(connection) as response:
        response.begin()
        return response.status, json.load(response)


@contextmanager
def connected(app: FastAPI) -> Iterator[socket.socket]:
    """A connection to an application under a real server."""
    with (
        serving(app) as port,
        socket.create_connection(("127.0.0.1", port), timeout=60) as connection,
    ):
        yield connection


def head(length: int) -> bytes:
    return (
        b"POST /rank HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % length
    )


@pytest.mark.parametrize(
    ("options", "sent", "status", "code"),
    [
        ({}, head(10**9), 413, "too_large"),
        ({"limits": Limits(upload_s=0.2)}, head(100) + b"{", 408, "upload_too_slow"),
        # 200 unknown senders held 398 MiB for 10 s.
        ({"tokens": BearerTokens([HASH])}, head(100), 401, "unauthorized"),
    ],
)
def test_a_request_is_refused_before_its_body_has_come(service, options, sent, status, code):
    with connected(api.create_app(service, **options)) as connection:
        connection.sendall(sent)
        found, answer = read_answer(connection)
    assert (found, answer["error"]["code"]) == (status, code)


def test_a_client_that_is_still_sending_when_it_is_refused_is_not_cut_off(service):
    rest = b"x" * 3_000_000
    with connected(api.create_app(service)) as connection:
        connection.sendall(head(len(rest)))
        status, _ = read_answer(connection)
        connection.sendall(rest)  # a reset connection would raise here
        assert (status, connection.recv(1)) == (413, b"")  # and here


def test_slow_senders_of_large_bodies_hold_no_more_memory_than_is_allowed(service):
    app = api.create_app(service, Limits(all_bodies_bytes=1_000_000))
    part = head(900_000) + b"x" * 600_000
    with serving(app) as port, ExitStack() as connections:
        first, second = (
            connections.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            for _ in range(2)
        )
        first.sendall(part)
        second.sendall(part)
        refused, *_ = select([first, second], [], [], 60)
        status, answer = read_answer(refused[0])
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        assert ask(port, "POST", "/rank", GOOD)[0] == 200  # small bodies always pass
    with TestClient(app) as client:  # all is given back
        assert client.post("/rank", content=b"x" * 990_000, headers=JSON).status_code == 400


def test_a_body_that_is_lost_by_an_upgrade_is_told(service):
    """Java's client asks for HTTP/2. uvicorn answers in HTTP/1.1, without the body: a field was missing."""
    body = json.dumps(GOOD).encode()
    with connected(api.create_app(service)) as connection:
        upgrade = (
            b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\nhost:"
        )
        connection.sendall(head(len(body)).replace(b"host:", upgrade) + body)
        status, answer = read_answer(connection)
    assert (status, answer["error"]["field"]) == (422, "upgrade")
    assert "HTTP/1.1 without it" in answer["error"]["message"]


SENT = json.dumps(GOOD).encode()


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "", "identity"])
def test_a_body_may_be_compressed(client, encoding):
    content = gzip.compress(SENT) if "gzip" in encoding else SENT
    headers = {**JSON, "content-encoding": encoding}
    assert client.post("/rank", content=content, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("encoding", "content", "status", "said"),
    [
        ("br", b"{}", 415, "content-encoding: allowed: gzip"),
        ("gzip", b"{}", 400, "not gzip"),
        ("gzip", gzip.compress(SENT)[:-9], 400, "truncated"),
        ("gzip", gzip.compress(SENT) + gzip.compress(b" "), 400, "several members; allowed: one"),
        ("gzip", gzip.compress(b" " * 10_000_000), 413, "over 2,000,000 bytes"),
    ],
    ids=["unknown", "plain", "cut off", "two", "a bomb"],  # gzip's bytes hold the time
)
def test_a_body_that_cannot_be_decompressed_is_refused(client, encoding, content, status, said):
    headers = {**JSON, "content-encoding": encoding}
    response = client.post("/rank", content=content, headers=headers)
    assert said in error_of(response, status)["message"]
    # A body that was read leaves nothing to wait for before the connection may go on.
    assert ("connection" in response.headers) == (status == 415)


def test_what_a_body_takes_when_it_is_decompressed_counts(service):
    """4 kB made 2 MB, of which the service counted 4 kB."""
    app = api.create_app(service, Limits(all_bodies_bytes=1_000_000))
    headers = {**JSON, "content-encoding": "gzip"}
    with TestClient(app) as client:
        for size, status in ((1_100_000, 429), (900_000, 400)):
            content = gzip.compress(b" " * size)
            assert client.post("/rank", content=content, headers=headers).status_code == status


@pytest.mark.parametrize("media", ["application/json", "application/json; charset=utf-8",
                                   "application/problem+json"])  # fmt: skip
def test_json_is_json_by_any_of_its_names(client, media):
    assert client.post("/rank", content=SENT, headers={"content-type": media}).status_code == 200


# Deadlines


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "60001", "000000001" + "0" * 4_300])
def test_a_timeout_that_is_not_allowed_is_named(client, value):
    response = client.post("/rank", json=GOOD, headers={"x-timeout-ms": value})
    assert error_of(response)["field"] == "x-timeout-ms"


def test_what_cannot_be_answered_in_time_is_not_computed(tiny_ranker, asking, monkeypatch):
    one, clock = asking(tiny_ranker("poly")), Clock()
    ranker = one.engine.ranker
    tokenize = ranker.candidate_rows

    def tokenize_slowly(texts: Any) -> Any:
        clock.now += 100
        return tokenize(texts)

    monkeypatch.setattr("serve.http.guard.time", clock)
    monkeypatch.setattr("serve.batcher.time", clock)
    monkeypatch.setattr(ranker, "candidate_rows", tokenize_slowly)
    response = TestClient(api.create_app(one.service)).post("/rank", json=GOOD)
    assert error_of(response, 504)["code"] == "too_late"


def test_a_request_whose_time_is_over_is_no_overload(tiny_ranker, asking, monkeypatch):
    """It is not read either."""
    client = TestClient(api.create_app(asking(tiny_ranker("poly")).service))
    clock = iter(range(0, 10**6, 100))  # each look at the clock is 100 s later
    monkeypatch.setattr("serve.http.guard.time.monotonic", lambda: float(next(clock)))
    for waiting_s in (0.0, 61.5):
        monkeypatch.setattr(Batcher, "_waiting_s", lambda *_, s=waiting_s: s)
        response = client.post("/rank", content=b"{", headers={"content-type": "application/json"})
        assert error_of(response, 504)["code"] == "too_late"
        assert "retry-after" not in response.headers


# Tokens


def test_a_token_is_needed_where_some_are_set(service):
    client = TestClient(api.create_app(service, tokens=BearerTokens(["0" * 64, HASH])))
    asked = {"url": "/rank", "json": GOOD}
    assert client.post(**asked, headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    for value in ("", "Bearer", "Bearer other", f"Basic {TOKEN}", f"Bearer {HASH}"):
        response = client.post(**asked, headers={"authorization": value})
        assert error_of(response, 401)["code"] == "unauthorized"
        assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/", "/rerank", "/v1/rerank", "/v2/rerank", "/embed", "/v1/embeddings"):
        assert client.post(path, json={}).status_code == 401
    assert [client.get(path).status_code for path in ("/info", "/v1/models")] == [401, 401]
    for path in ("/health", "/ready", "/", "/playground/main.js"):
        assert client.get(path).status_code == 200


def test_a_sender_asks_no_more_often_than_is_allowed(service, monkeypatch):
    """It saves up for 10 s; others have their own."""
    monkeypatch.setattr("serve.http.guard.time", clock := Clock())
    clock.now = time.monotonic()  # the batcher's clock goes on
    tokens = BearerTokens([f"{name}={hash_of(name)}" for name in ("red", "blue")])
    limits = Limits(requests_per_s=0.5, timeout_ms=60_000)
    client = TestClient(api.create_app(service, limits, tokens))

    def asked(name: str) -> Any:
        headers = {"authorization": f"Bearer {name}"}
        return client.post("/rank", content=b"{", headers={**JSON, **headers})

    assert [asked("red").status_code for _ in range(6)] == [400] * 5 + [429]
    assert asked("red").headers["retry-after"] == "2"
    assert "0.5 times a second" in asked("red").json()["error"]["message"]
    assert asked("blue").status_code == 400
    assert client.get("/info", headers={"authorization": "Bearer red"}).status_code == 200
    clock.now += 2
    assert [asked("red").status_code for _ in range(2)] == [400, 429]


def test_a_rate_of_less_than_one_request_in_10_s_is_kept(service, monkeypatch):
    """After 10 s the sender was forgotten, and asked again."""
    monkeypatch.setattr("serve.http.guard.time", clock := Clock())
    clock.now = time.monotonic()
    client = TestClient(api.create_app(service, Limits(requests_per_s=0.01)))

    def status_after(seconds: float) -> int:
        clock.now += seconds
        return client.post("/rank", content=b"{", headers=JSON).status_code

    assert [status_after(seconds) for seconds in (0, 11, 60, 30)] == [400, 429, 429, 400]


def test_the_log_names_the_sender(service, caplog):
    caplog.set_level("INFO", "polyrank.serve.access")
    tokens = BearerTokens([f"search-team={hash_of('red')}", hash_of("blue")])
    client = TestClient(api.create_app(service, tokens=tokens))
    for token in ("red", "blue", "green"):
        client.get("/info", headers={"authorization": f"Bearer {token}"})
    lines = [entry.getMessage() for entry in caplog.records if entry.name.endswith(".access")]
    senders = [line.partition(" ms")[2].strip() for line in lines]
    assert senders == ["search-team", hash_of("blue")[:16], ""]


def test_health_and_the_playground_need_no_token_under_a_route_prefix_either(service):
    app = api.create_app(service, tokens=BearerTokens([HASH]))
    client = TestClient(app, root_path="/prefix")
    for path in ("/prefix/health", "/prefix/ready", "/prefix/"):
        assert client.get(path).status_code == 200, path
    assert client.get("/prefix/info").status_code == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("ranker", 200),
        ("evil.example:8000", 422),
        ("127.0.0.1.evil.example", 422),
        ("[evil.example", 422),
    ],
)
def test_without_tokens_no_page_reaches_this_machine_by_a_name_of_its_own(service, host, status):
    """By DNS rebinding any page of the web could ask a service on the machine of its reader."""
    client = TestClient(api.create_app(service), client=("127.0.0.1", 1))
    assert client.get("/info", headers={"host": host}).status_code == status
    elsewhere = TestClient(api.create_app(service), client=("10.0.0.1", 1))
    assert elsewhere.get("/info", headers={"host": "ranker.example"}).status_code == 200
    app = api.create_app(service, tokens=BearerTokens([HASH]))
    known = TestClient(app, client=("127.0.0.1", 1), headers={"authorization": f"Bearer {TOKEN}"})
    assert known.get("/info", headers={"host": "ranker.example"}).status_code == 200


# Request ids, HEAD, other hosts' pages


def test_a_request_id_comes_back_and_a_strange_one_is_replaced(client):
    assert client.get("/health", headers={"x-request-id": "a-1"}).headers["x-request-id"] == "a-1"
    for strange in ("x" * 129, "a b", "<script>"):
        found = client.get("/health", headers={"x-request-id": strange}).headers["x-request-id"]
        assert len(found) == 32 and found.isalnum()
    first, second = (client.get("/health").headers["x-request-id"] for _ in range(2))
    assert first != second


@pytest.mark.parametrize("sent", [{"x-request-id": "a-1"}, {}])
def test_the_id_that_ray_serve_adds_is_there_once(service, sent):
    """Twice it was "a-1, a-1" for most clients."""
    app = api.create_app(service, echoes_request_id=False)
    client = TestClient(RequestIdMiddleware(app))
    for path in ("/health", "/nope"):
        (found,) = client.get(path, headers=sent).headers.get_list("x-request-id")
        assert found == sent.get("x-request-id", found) != ""


def test_head_is_get_without_a_body(client):
    response = client.head("/health")
    assert (response.status_code, response.content) == (200, b"")
    assert client.head("/nope").status_code == 404


def test_texts_are_not_logged(client, caplog):
    caplog.set_level("DEBUG")
    asked = {"context": ["my secret turn"], "candidates": ["my secret candidate"]}
    assert client.post("/rank", json=asked).status_code == 200
    assert "/rank 200" in caplog.text
    assert "secret" not in caplog.text


def test_a_route_that_fails_has_its_line_in_the_log_and_its_id(service, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(service.batcher, "admit", None)
    client = TestClient(api.create_app(service))
    response = client.post("/rank", json=GOOD, headers={"x-request-id": "a-1"})
    assert error_of(response, 500)["code"] == "internal"
    assert response.headers["x-request-id"] == "a-1"
    assert "a-1 POST /rank 500" in caplog.text
    assert "TypeError" in caplog.text


@contextmanager
def logging_as_a_replica() -> Iterator[logging.Logger]:
    log = logging.getLogger("polyrank.serve")
    level, handler = log.level, guard.log_to_stderr()
    try:
        yield log
    finally:
        handler.flush()
        log.removeHandler(handler)
        log.setLevel(level)


def test_a_replica_writes_its_access_lines(client, capsys):
    with logging_as_a_replica():
        client.get("/health")
    assert "GET /health 200" in capsys.readouterr().err


def test_a_replica_writes_its_lines_together_and_a_warning_at_once(monkeypatch):
    """Each line was a write, which passes the interpreter's lock: under overload most of the loop's time."""
    writes: list[str] = []
    monkeypatch.setattr("sys.stderr", SimpleNamespace(write=writes.append, flush=lambda: None))

    async def answer(log: logging.Logger) -> None:
        for number in range(50):
            logging.getLogger("polyrank.serve.access").info("line %d", number)
        assert writes == []
        log.warning("sick")

    with logging_as_a_replica() as log:
        asyncio.run(answer(log))
    (written,) = writes
    lines = [line.partition(": ")[2] for line in written.splitlines()]
    assert lines == [*(f"line {number}" for number in range(50)), "sick"]


@pytest.mark.parametrize(
    ("path", "logged"),
    [
        ("/x%0A2026-01-01%20forged%20GET%20/rank%20200", None),
        ("/x%0D%1B%5B2J", None),
        ("/x%E2%80%A8y", None),  # a line end of Unicode
        ("/x%20200%201.0%20ms", None),
        ("/caf%C3%A9/a:b@c;d=1,(2)+3", None),
        ("/%FF", "/%EF%BF%BD"),  # no UTF-8
        ("/" + "%0A" * 100, "/" + "%0A" * 66 + "%"),
    ],
)
def test_a_path_writes_no_line_of_the_log_itself(client, caplog, path, logged):
    caplog.set_level("INFO", "polyrank.serve.access")
    assert client.get(path, headers={"x-request-id": "a-1"}).status_code == 404
    (line,) = [entry.getMessage() for entry in caplog.records if entry.name.endswith(".access")]
    assert re.fullmatch(rf"a-1 GET {re.escape(logged or path)} 404 [0-9.]+ ms testclient", line)


def test_a_full_disk_for_logs_costs_no_answer(client, caplog, capsys):
    """Linux' /dev/full says of every write that no space is left."""
    access = logging.getLogger("polyrank.serve.access")
    full = logging.FileHandler("/dev/full")
    access.addHandler(full)
    try:
        with caplog.at_level("INFO", access.name):
            assert client.post("/rank", json=GOOD).status_code == 200
            assert client.post("/rank", content=b"{").status_code == 415
    finally:
        access.removeHandler(full)
        with suppress(OSError):
            full.close()
    assert "No space left" in capsys.readouterr().err


def test_origins_that_are_listed_may_ask(service):
    client = TestClient(api.create_app(service, origins=["https://a.example"]))
    asked = {"access-control-request-method": "POST"}
    allowed = client.options("/rank", headers={"origin": "https://a.example", **asked})
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    other = client.options("/rank", headers={"origin": "https://b.example", **asked})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("waiting_s", "asked_ms", "retry_after"), [(61.5, "60000", "62"), (1.5, "1000", "2")]
)
def test_a_replica_refuses_what_it_cannot_answer_before_it_reads_the_request(
    tiny_ranker, asking, monkeypatch, waiting_s, asked_ms, retry_after
):
    client = TestClient(api.create_app(asking(tiny_ranker("poly")).service))
    monkeypatch.setattr(Batcher, "_waiting_s", lambda *_: waiting_s)
    headers = {"content-type": "application/json", "x-timeout-ms": asked_ms}
    response = client.post("/rank", content=b"{", headers=headers)
    assert error_of(response, 429)["code"] == "overloaded"
    assert response.headers["retry-after"] == retry_after
    assert client.get("/health").status_code == 200


def test_errors_are_counted_and_logged_once_and_have_the_request_s_id(service, caplog):
    caplog.set_level("INFO", "polyrank.serve.access")
    errors: list[int] = []
    client = TestClient(api.create_app(service, record_error=errors.append))
    assert client.post("/rank", json=GOOD).status_code == 200
    refused = client.post("/rank", content=b"x", headers={"x-request-id": "a-1"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (415, "a-1")
    assert client.post("/nope", json=GOOD).status_code == 404
    assert errors == [415, 404]
    lines = [entry.getMessage() for entry in caplog.records if entry.name.endswith(".access")]
    assert [line.split()[3] for line in lines] == ["200", "415", "404"]
