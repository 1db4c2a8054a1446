"""The application on Ray Serve, over real HTTP, and the file that deploys it."""

from __future__ import annotations

import inspect
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

from pipeline.ranking.results import Result
from serve import app
from tests.helpers import free_port

from .conftest import REPLIES, ask

CONFIGS = {
    name: yaml.safe_load(Path(app.__file__).with_name(name).read_text())
    for name in ("config.yaml", "config.cluster.yaml")
}
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
    port = free_port()
    quiet = LoggingConfig(log_level="ERROR", enable_access_log=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config=quiet)
    try:
        served = app.Args(model=model.uri, pools=[tiny_pool(model)], precision="fp32")
        application = app.build(served)
        serve.run(application, logging_config=quiet)
        yield port
    finally:
        serve.shutdown()


def assert_same_ranking(results: list[dict[str, Any]], ranked: list[Result]) -> None:
    """In the same order, with the same scores."""
    assert [result["id"] for result in results] == [one.id for one in ranked]
    scores = [one.score for one in ranked]
    assert [result["score"] for result in results] == pytest.approx(scores, rel=1e-4)


def test_a_replica_answers_as_an_engine_does(port, model, tiny_pool, asking):
    engine = asking(model, tiny_pool(model))
    status, body = ask(port, "POST", "/rank", {"context": CONTEXT, "candidates": TEXTS})
    assert status == 200
    assert_same_ranking(body["results"], engine.rank(CONTEXT, TEXTS, 3))
    assert body["model"] == model.fingerprint

    status, body = ask(port, "POST", "/rank", {"context": CONTEXT, "pool": "replies", "top_k": 50})
    assert status == 200
    assert_same_ranking(body["results"], engine.rank_pool(CONTEXT, "replies", 50))
    assert {r["id"]: r["text"] for r in body["results"]} == REPLIES
    assert body["pool"] == {"name": "replies", "version": "v-1", "missing_shards": []}


def test_a_replica_says_what_it_serves(port, model):
    assert ask(port, "GET", "/health") == ask(port, "GET", "/ready") == (200, {"status": "ok"})
    status, info = ask(port, "GET", "/info")
    assert (status, info["model"]["fingerprint"]) == (200, model.fingerprint)
    assert [pool["name"] for pool in info["pools"]] == ["replies"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/rank", {"context": [""], "candidates": ["a"]}, 422, "invalid_request"),
        ("/rank", {"context": ["a"], "pool": "nope"}, 404, "unknown_pool"),
        ("/rank", b"{", 400, "invalid_json"),
        ("/rank", b"x" * 3_000_000, 413, "too_large"),
        ("/nope", {}, 404, "not_found"),
    ],
)
def test_errors_keep_their_shape_behind_the_proxy(port, path, body, status, code):
    found, answer = ask(port, "POST", path, body)
    assert (found, answer["error"]["code"]) == (status, code)
    assert set(answer["error"]) == {"code", "message", "field"}


def test_rays_own_answers_have_our_shape_in_the_proxy(port):
    """Of an application that is not deployed (yet) Ray says 404 in plain text."""
    serve.delete("default")
    status, answer = ask(port, "POST", "/rank", {"context": "a", "candidates": ["b"]})
    assert (status, answer["error"]["code"]) == (503, "not_ready")


# serve/config.yaml


def unknown_keys(values: dict[str, Any], schema: type[BaseModel]) -> set[str]:
    """ServeDeploySchema puts up with keys that it does not know, so typos would pass."""
    return set(values) - set(schema.model_fields)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_config_has_no_unknown_keys(config):
    ServeDeploySchema.model_validate(config)
    assert unknown_keys(config, ServeDeploySchema) == set()
    assert unknown_keys(config["http_options"], HTTPOptionsSchema) == set()
    for application in config["applications"]:
        assert unknown_keys(application, ServeApplicationSchema) == set()
        for deployment in application["deployments"]:
            assert unknown_keys(deployment, DeploymentSchema) == set()
            assert unknown_keys(deployment["autoscaling_config"], AutoscalingConfig) == set()
            assert unknown_keys(deployment["ray_actor_options"], RayActorOptionsSchema) == set()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_config_names_what_there_is_to_deploy(config):
    (application,) = config["applications"]
    module, _, name = application["import_path"].partition(":")
    assert getattr(import_module(module), name) is app.build
    args = app.Args.model_validate(application["args"])
    assert [deployment["name"] for deployment in application["deployments"]] == [args.name]


def test_the_config_for_one_machine_lets_nobody_else_in():
    assert CONFIGS["config.yaml"]["http_options"]["host"] == "127.0.0.1"
