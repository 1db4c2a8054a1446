"""The arguments of the application, and the files that deploy it. How it answers: test_faults.py."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    RayActorOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from pipeline.config import BadInput
from pipeline.registry import REGISTRY
from serve import app
from serve.http.bearer_tokens import HASHES, BearerTokens
from serve.metrics import Metrics
from serve.replica import Replica
from serve.service import RankAnswer, Service
from serve.versions import Versions

_FOLDER = Path(app.__file__).parent
CONFIGS = {
    file.name: yaml.safe_load(file.read_text())
    for file in [*_FOLDER.glob("*.yaml"), *_FOLDER.glob("examples/*.yaml")]
}
BUILD = """import sys
from serve.app import Args, build
build(Args(model=sys.argv[1], pools=sys.argv[2:]))
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""


# Loading


def test_a_replica_knows_how_long_requests_take_before_the_first_one_comes(tiny_ranker, tiny_pool):
    """It does not count its own questions as answers."""
    model, answers = tiny_ranker("poly"), list[RankAnswer]()
    pool = tiny_pool(model)

    def no_engine() -> Any:
        raise AssertionError("the loaded engine is meant")

    service = Service(no_engine, max_wait_s=2.0, record_ranking=answers.append)
    args = app.Args(model=model.uri, pools=[pool])
    replica = SimpleNamespace(_args=args, _shards=[], _metrics=Metrics(), _service=service)
    engine = Replica._load(replica, Versions(model.uri, model.fingerprint, (pool,)))
    engine.close()
    service.close()
    for stage in (engine.contexts, engine.candidates, engine.pools["replies"].stage):
        assert stage.unit_s.value > 0.0
    assert answers == []


def test_errors_are_added_together(monkeypatch):
    """One by one they took a fifth of the event loop's time under overload."""
    metrics, added = Metrics(), list[tuple[float, dict[str, str]]]()
    monkeypatch.setattr(metrics._errors, "inc", lambda count, tags: added.append((count, tags)))

    async def refuse() -> None:
        for status in (*[429] * 50, 422):
            metrics.record_error(status)
        assert added == []
        metrics._write()

    asyncio.run(refuse())
    assert added == [(50, {"status": "429"}), (1, {"status": "422"})]


def test_whoever_deploys_a_service_does_not_wait_for_the_libraries_of_its_replicas(
    tiny_ranker, tiny_pool
):
    """torch and transformers took 10 of the 46 s until a service answered."""
    model = tiny_ranker("poly")
    command = [sys.executable, "-c", BUILD, model.uri, tiny_pool(model)]
    ended = subprocess.run(command, cwd=_FOLDER.parent, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr


# Arguments


@pytest.mark.parametrize(
    ("pools", "found"),
    [("a", ["a"]), ("p/a,p/b", ["p/a", "p/b"]), ("", []), (["a", "b"], ["a", "b"])],
)
def test_pools_are_a_list_or_as_on_the_command_line(pools, found):
    assert app.Args.model_validate({"model": "m", "pools": pools}).pools == found


@pytest.mark.parametrize(
    "values",
    [{}, {"model": ""}, {"model": "m", "pool": "a"}, {"model": "m", "pools": [1]},
     {"model": "m", "origins": ["https://app.example/"]}, {"model": "m", "origins": "app.example"}],
)  # fmt: skip
def test_arguments_that_are_not_allowed_are_refused(values):
    with pytest.raises(ValidationError):
        app.Args.model_validate(values)


def test_ray_finds_the_class_that_checks_the_arguments():
    """Else it passes an unchecked dictionary."""
    (parameter,) = inspect.signature(app.build).parameters.values()
    assert parameter.annotation is app.Args


def test_a_shard_asks_for_the_hardware_that_it_is_given():
    hardware = {"shard_cpus": 2, "shard_gpus": 0.5, "shard_resources": {"serving": 1}}
    deployment = app._shard(0, app.Args(model="m", **hardware))._bound_deployment
    options = {"num_cpus": 2, "num_gpus": 0.5, "resources": {"serving": 1}}
    assert deployment.ray_actor_options.items() >= options.items()


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
            autoscaling = deployment.get("autoscaling_config", {})
            assert unknown_keys(autoscaling, AutoscalingConfig) == set()
            assert unknown_keys(deployment["ray_actor_options"], RayActorOptionsSchema) == set()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_config_names_what_there_is_to_deploy(config):
    for application in config["applications"]:
        module, _, name = application["import_path"].partition(":")
        assert getattr(import_module(module), name) is app.build
        args = app.Args.model_validate(application["args"])
        assert [deployment["name"] for deployment in application["deployments"]] == [args.name]


def test_the_config_for_one_machine_lets_nobody_else_in():
    assert CONFIGS["config.yaml"]["http_options"]["host"] == "127.0.0.1"


def test_replicas_on_a_cluster_get_the_registry_s_address_and_refuse_to_start_without_tokens(
    monkeypatch,
):
    """`serve deploy` sends no variables of the terminal in which it is typed."""
    (application,) = CONFIGS["config.cluster.yaml"]["applications"]
    assert application["args"]["model"].startswith(REGISTRY)
    variables = application["runtime_env"]["env_vars"]
    assert variables["MLFLOW_TRACKING_URI"].startswith("http")
    monkeypatch.setenv(HASHES, variables[HASHES])
    with pytest.raises(BadInput, match="SHA-256 in hex"):
        BearerTokens.of_environment()


def test_a_processor_that_is_none_is_refused_before_a_replica_starts(
    tiny_ranker, tiny_pool, monkeypatch
):
    model = tiny_ranker("poly")
    monkeypatch.setenv("POLYRANK_PROCESSOR", "pentium")
    with pytest.raises(BadInput, match="POLYRANK_PROCESSOR: 'pentium' is not allowed"):
        app.build(app.Args(model=model.uri, pools=[tiny_pool(model)]))
