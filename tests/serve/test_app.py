"""The application on Ray Serve, over real HTTP, and the file that deploys it."""

from __future__ import annotations

import http.client
import inspect
import select
import socket
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError
from ray import serve
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    LoggingConfig,
    RayActorOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from serve import app
from serve.ranker import Engine

from .conftest import REPLIES, ask

CONFIG = yaml.safe_load(Path(app.__file__).with_name("config.yaml").read_text())
CONTEXT = ["hello there", "what do you do ?"]
TEXTS = ["i paint", "rain again today", "no"]


# Arguments


@pytest.mark.parametrize(
    ("pools", "found"),
    [("a", ["a"]), ("p/a,p/b", ["p/a", "p/b"]), ("", []), (["a", "b"], ["a", "b"])],
)
def test_pools_are_a_list_or_as_on_the_command_line(pools, found):
    assert app.Args.model_validate({"model": "m", "pools": pools}).pools == found


@pytest.mark.parametrize(
    "values", [{}, {"model": ""}, {"model": "m", "pool": "a"}, {"model": "m", "pools": [1]}]
)
def test_arguments_that_are_not_allowed_are_refused(values):
    with pytest.raises(ValidationError):
        app.Args.model_validate(values)


def test_ray_finds_the_class_that_checks_the_arguments():
    """Else it passes an unchecked dictionary."""
    (parameter,) = inspect.signature(app.build).parameters.values()
    assert parameter.annotation is app.Args


# A replica


@pytest.fixture(scope="module")
def model(tiny_ranker):
    return tiny_ranker("poly")


@pytest.fixture(scope="module")
def port(local_ray, model, tiny_pool) -> int:
    """Where the service of a poly-encoder and its pool listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    quiet = LoggingConfig(log_level="ERROR", enable_access_log=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config=quiet)
    try:
        application = app.build(app.Args(model=model.uri, pools=[tiny_pool(model)]))
        serve.run(application, logging_config=quiet)
        yield port
    finally:
        serve.shutdown()


def test_a_replica_answers_as_an_engine_does(port, model, tiny_pool):
    engine = Engine(model.uri, [tiny_pool(model)])
    near = {"rel": 0.05, "abs": 0.05}  # the replica may have bf16
    status, body = ask(port, "POST", "/rank", {"context": CONTEXT, "candidates": TEXTS})
    assert status == 200
    own = {one.id: one.score for one in engine.rank(CONTEXT, TEXTS, 3)}
    assert {r["id"]: r["score"] for r in body["results"]} == pytest.approx(own, **near)
    assert body["model"] == model.fingerprint

    status, body = ask(port, "POST", "/rank", {"context": CONTEXT, "pool": "replies", "top_k": 50})
    assert status == 200
    own = {one.id: one.score for one in engine.rank_pool(CONTEXT, "replies", 50)}
    assert {r["id"]: r["score"] for r in body["results"]} == pytest.approx(own, **near)
    assert {r["id"]: r["text"] for r in body["results"]} == REPLIES
    assert body["pool"] == {"name": "replies", "version": "v-1"}


def test_a_replica_says_what_it_serves(port, model):
    assert ask(port, "GET", "/health") == (200, {"status": "ok"})
    status, info = ask(port, "GET", "/info")
    assert (status, info["model"]["fingerprint"]) == (200, model.fingerprint)
    assert [pool["name"] for pool in info["pools"]] == ["replies"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/rank", {"context": [""], "candidates": ["a"]}, 422, "invalid_request"),
        ("/rank", {"context": ["a"], "pool": "nope"}, 404, "unknown_pool"),
        ("/rank", b"{", 400, "invalid_json"),
        ("/rank", b"x" * 10_000_000, 413, "too_large"),
        ("/nope", {}, 404, "not_found"),
    ],
)
def test_errors_keep_their_shape_behind_the_proxy(port, path, body, status, code):
    found, answer = ask(port, "POST", path, body)
    assert (found, answer["error"]["code"]) == (status, code)
    assert set(answer["error"]) == {"code", "message", "field"}


def test_overload_is_refused_with_429_and_a_time_to_come_again(port, model):
    """Requests whose bodies have not ended hold their places: 1 in the replica, 1 in the queue."""
    narrow = app.Ranker.options(max_ongoing_requests=1, max_queued_requests=1)
    quiet = LoggingConfig(log_level="ERROR", enable_access_log=False)
    application = narrow.bind(app.Args(model=model.uri))
    serve.run(application, name="narrow", route_prefix="/narrow", logging_config=quiet)
    head = b"POST /narrow/rank HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            for _ in range(8)
        ]
        for client in clients:
            client.sendall(head + b"content-length: 2\r\n\r\n{")
        refused, _, _ = select.select(clients, [], [], 60)
        status, headers = answer_from(refused[0])
        assert (status, headers["retry-after"]) == (429, "1")
        waiting = [client for client in clients if client is not refused[0]]
        for client in waiting:
            with suppress(BrokenPipeError, ConnectionResetError):  # it was refused before
                client.sendall(b"}")
        while status == 429:  # until one that was not refused is answered
            answered, _, _ = select.select(waiting, [], [], 60)
            waiting.remove(answered[0])
            status, _ = answer_from(answered[0])
    assert status == 422


def answer_from(client: socket.socket) -> tuple[int, http.client.HTTPMessage]:
    with http.client.HTTPResponse(client) as response:
        response.begin()
        response.read()
        return response.status, response.headers


# serve/config.yaml


def unknown_keys(values: dict[str, Any], schema: type[BaseModel]) -> set[str]:
    """ServeDeploySchema puts up with keys that it does not know, so typos would pass."""
    return set(values) - set(schema.model_fields)


def test_config_yaml_is_a_serve_config_without_unknown_keys():
    ServeDeploySchema.model_validate(CONFIG)
    assert unknown_keys(CONFIG, ServeDeploySchema) == set()
    assert unknown_keys(CONFIG["http_options"], HTTPOptionsSchema) == set()
    for application in CONFIG["applications"]:
        assert unknown_keys(application, ServeApplicationSchema) == set()
        for deployment in application["deployments"]:
            assert unknown_keys(deployment, DeploymentSchema) == set()
            assert unknown_keys(deployment["autoscaling_config"], AutoscalingConfig) == set()
            assert unknown_keys(deployment["ray_actor_options"], RayActorOptionsSchema) == set()


def test_config_yaml_names_what_there_is_to_deploy():
    (application,) = CONFIG["applications"]
    module, _, name = application["import_path"].partition(":")
    assert getattr(import_module(module), name) is app.build
    args = app.Args.model_validate(application["args"])
    assert [deployment["name"] for deployment in application["deployments"]] == [args.name]
