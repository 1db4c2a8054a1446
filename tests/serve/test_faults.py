"""A real service: its answers, and steady requests while a replica or a shard is killed, and while new
versions and a bad one are published. Clients see no failure.

One service for all of it: each of its processes imports torch.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import mlflow
import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from jobs import embed_pool
from pipeline import storage
from pipeline.pools.pool import make_current
from pipeline.ranking.results import Result
from serve import app, replica
from serve.batcher import Stage
from serve.client import Client, ServiceError
from serve.engine import Engine
from serve.versions import Versions
from tests.helpers import free_port, ray_processes

from .conftest import REPLIES, ask

pytestmark = pytest.mark.long  # the service takes a minute to start on two slow cores

CONTEXT = ["hello there", "what do you do ?"]
TEXTS = ["i paint", "rain again today", "no"]
ASKED = {"context": ["hello there"], "pool": "replies", "top_k": 3}
QUIET = LoggingConfig(log_level="ERROR", enable_access_log=False)
_PATIENCE_S = 120.0
_PAUSE_S = 0.02  # between a client's requests: processes that start beside need the processors too
SWAPS = int(os.environ.get("POLYRANK_SWAPS", "50"))


@pytest.fixture(scope="module")
def model(tiny_ranker):
    return tiny_ranker("poly")


@pytest.fixture(scope="module")
def pools(model, tiny_pool, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("served")
    for name in ("replies", "parts"):
        shutil.copytree(Path(tiny_pool(model, name)), root / name)
    return root


@pytest.fixture(scope="module")
def port(local_ray, model, pools) -> Iterator[int]:
    """Two replicas that hold the pool `replies`."""
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config=QUIET)
    try:
        args = app.Args(
            model=model.uri,
            pools=[str(pools / "replies")],
            precision="fp32",
            poll_s=0.5,
        )
        options = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0}}  # jobs run beside
        serve.run(app.application(args, **options), logging_config=QUIET)
        serve_replicas(2)
        yield port
    finally:
        serve.shutdown()


def serve_replicas(count: int) -> None:
    """Waits until so many replicas run."""
    until(lambda: len(replica_pids()) >= count)


def replica_pids() -> list[int]:
    return sorted(pids("ServeReplica:default:ranker"))


def pids(actor: str) -> list[int]:
    """Of our own Ray's processes with that actor."""
    return [process.pid for process in ray_processes(actor)]


def until(condition: Callable[[], bool]) -> None:
    """Looks again and again; fails after two minutes."""
    end = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "not in time"
        threading.Event().wait(0.05)


class Load:
    """What two clients heard that asked all the time, each a second time where a replica had died."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.versions: list[str] = []
        self.served: list[tuple[str, str]] = []
        """(the model's fingerprint, the pool's version) of each answer."""
        self.missing_shards: list[list[int]] = []
        self.uncertified = 0
        self.answers = 0


@contextmanager
def steady_load(port: int, prefix: str = "", pool: str = "replies") -> Iterator[Load]:
    load, stop = Load(), threading.Event()

    def client() -> None:
        with Client(f"http://127.0.0.1:{port}{prefix}", retries=1) as client:
            while not stop.wait(_PAUSE_S):
                try:
                    ranking = client.rank(["hello there"], pool=pool, top_k=3)
                except ServiceError as error:
                    load.statuses[error.status] += 1
                else:
                    load.statuses[200] += 1
                    load.versions.append(str(ranking.pool_version))
                    load.served.append((ranking.model, str(ranking.pool_version)))
                    load.missing_shards.append(list(ranking.missing_shards))
                    load.uncertified += not ranking.certified
                load.answers += 1

    with ThreadPoolExecutor(2) as threads:
        clients = [threads.submit(client) for _ in range(2)]
        try:
            yield load
        finally:
            stop.set()
            for one in clients:
                one.result(60)


def publish(pools: Path, name: str, version: str) -> Path:
    """Another version of a pool, made current."""
    folder = pools / name / version
    shutil.copytree(pools / name / "v-1", folder)
    make_current(str(pools), name, version)
    return folder


@contextmanager
def deployed(name: str, args: app.Args, **options: Any) -> Iterator[None]:
    """A further application below the path of its name."""
    application = app.application(args, ray_actor_options={"num_cpus": 0}, **options)
    serve.run(application, name=name, route_prefix=f"/{name}", logging_config=QUIET)
    try:
        yield
    finally:
        serve.delete(name)


# Its answers


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
    with urlopen(f"http://127.0.0.1:{port}/health") as answer:
        assert len(answer.headers.get_all("x-request-id")) == 1
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


# Faults, under steady requests


def test_a_killed_replica_is_not_noticed(port):
    with steady_load(port) as load:
        until(lambda: load.answers > 20)
        before = set(replica_pids())
        os.kill(min(before), signal.SIGKILL)
        until(lambda: len(set(replica_pids()) - before) >= 1)  # there is another one
        heard = load.answers
        until(lambda: load.answers > heard + 20)
    assert set(load.statuses) <= {200, 429}, load.statuses
    assert load.statuses[200] > 40


def test_a_killed_shard_is_said_until_it_is_back_and_new_versions_reach_all_shards(
    port, model, pools
):
    args = app.Args(
        model=model.uri,
        sharded_pools=[str(pools / "parts")],
        shard_cpus=0,
        on_missing_shard="answer",
        name="parts",
        poll_s=0.5,
    )
    with deployed("parts", args, num_replicas=2), steady_load(port, "/parts", "parts") as load:
        until(lambda: load.answers > 20)
        assert not any(load.missing_shards)
        (shard,) = pids("parts-shard-0")
        os.kill(shard, signal.SIGKILL)
        until(lambda: [0] in load.missing_shards)
        until(lambda: not any(load.missing_shards[-20:]))
        publish(pools, "parts", "v-2")
        until(lambda: load.versions[-20:] == ["v-2"] * 20)
    assert set(load.statuses) <= {200, 429}, load.statuses
    assert load.uncertified == sum(map(bool, load.missing_shards))
    assert set(map(tuple, load.missing_shards)) == {(), (0,)}


def test_a_killed_shard_with_a_second_replica_is_not_noticed(port, model, pools):
    """So even if answers without the rows of a shard are refused."""
    args = app.Args(
        model=model.uri,
        sharded_pools=[str(pools / "parts")],
        shards=1,
        shard_cpus=0,
        shard_replicas=2,
        on_missing_shard="refuse",
        name="pair",
    )
    with deployed("pair", args, num_replicas=1), steady_load(port, "/pair", "parts") as load:
        until(lambda: load.answers > 20)
        before = set(pids("pair-shard-0"))
        os.kill(min(before), signal.SIGKILL)
        until(lambda: len(set(pids("pair-shard-0")) - before) >= 1)  # there is another one
        heard = load.answers
        until(lambda: load.answers > heard + 20)
    assert len(before) == 2
    assert set(load.statuses) <= {200, 429}, load.statuses
    assert load.uncertified == 0 and not any(load.missing_shards)


def info(port: int) -> Any:
    return ask(port, "GET", "/info")[1]


def test_a_new_version_is_taken_by_all_and_a_bad_one_by_none(port, pools):
    with steady_load(port) as load:
        until(lambda: load.answers > 10)
        publish(pools, "replies", "v-2")
        until(lambda: len(load.versions) > 20 and set(load.versions[-20:]) == {"v-2"})
        bad = pools / "replies" / "v-3"
        shutil.copytree(pools / "replies" / "v-1", bad)
        matrix = next((bad / "vectors").glob("*.npy"))
        matrix.write_bytes(matrix.read_bytes()[:-64])
        make_current(str(pools), "replies", "v-3")
        until(lambda: any("v-3" in problem for problem in info(port)["problems"]))
        assert not any(str(pools) in problem for problem in info(port)["problems"])
        heard = len(load.versions)
        until(lambda: len(load.versions) > heard + 20)
    assert set(load.statuses) <= {200, 429}, load.statuses
    assert set(load.versions[heard:]) == {"v-2"}
    switches = sum(a != b for a, b in zip(load.versions, load.versions[1:], strict=False))
    assert switches < 40  # both replicas went over within a moment, and never back


def test_a_killed_proxy_comes_back_and_retries_bridge_it(port):
    """A node's only proxy: nobody listens until it is back. The client asks again until then."""
    with Client(f"http://127.0.0.1:{port}", timeout_s=55.0, retries=1_000) as client:
        client.rank(["hello there"], pool="replies")
        (proxy,) = pids("ProxyActor")
        os.kill(proxy, signal.SIGKILL)
        for _ in range(20):
            assert client.rank(["hello there"], pool="replies", top_k=3).results
    assert pids("ProxyActor") != [proxy]


def test_slow_senders_take_nobody_elses_place(port):
    """20 clients that send a byte now and then: the others are answered, they are told 408."""
    head = (
        b"POST /rank HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
        b"content-length: 1000\r\n\r\n"
    )
    with ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            for _ in range(20)
        ]
        for one in slow:
            one.sendall(head)
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.5):
                for one in slow:
                    with suppress(OSError):  # it has been answered
                        one.sendall(b" ")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            with steady_load(port) as load:
                answers = [one.recv(4096) for one in slow]
        finally:
            stop.set()
            dripping.join()
    assert all(answer.startswith(b"HTTP/1.1 408") for answer in answers), answers[:2]
    assert set(load.statuses) == {200}
    assert load.statuses[200] > 100


class SickReplica(replica.Replica):
    """Its model fails for ever in the process that the file `sick` beside its pools names, as after an error
    of CUDA."""

    def _load(self, versions: Versions) -> Engine:
        engine: Engine = super()._load(versions)
        stage, file = engine.contexts, Path(self._args.pools[0]).with_name("sick")

        def run(rows: list[Any]) -> Sequence[Any]:
            if file.exists() and int(file.read_text()) == os.getpid():
                raise RuntimeError("CUDA error: device-side assert triggered")
            return stage.run(rows)

        engine.contexts = Stage("contexts", run, stage.batch_cost)
        return engine


class SickRanker(app.Ranker.func_or_class):  # type: ignore[name-defined, misc]
    async def __init__(self, args: app.Args, shards: list[DeploymentHandle]) -> None:
        replica.Replica = SickReplica  # in this process  # type: ignore[misc]
        await super().__init__(args, shards)


def test_a_replica_that_cannot_compute_is_replaced(port, model, pools):
    args = app.Args(model=model.uri, pools=[str(pools / "replies")], name="sick", poll_s=0.5)
    with deployed("sick", args, func_or_class=SickRanker, num_replicas=1):
        assert ask(port, "POST", "/sick/rank", ASKED)[0] == 200
        (sick_pid,) = pids("ServeReplica:sick")
        (pools / "sick").write_text(str(sick_pid))
        until(lambda: ask(port, "POST", "/sick/rank", ASKED)[0] == 500)
        until(lambda: ask(port, "POST", "/sick/rank", ASKED)[0] == 200)
        assert sick_pid not in pids("ServeReplica:sick")


def test_a_service_without_replicas_starts_one_for_a_request(port, model, pools):
    args = app.Args(model=model.uri, pools=[str(pools / "replies")], name="asleep")
    scaling = {"min_replicas": 0, "max_replicas": 1, "target_ongoing_requests": 6}
    scaling |= {"upscale_delay_s": 0, "metrics_interval_s": 1}
    with deployed("asleep", args, num_replicas="auto", autoscaling_config=scaling):
        assert pids("ServeReplica:asleep") == []
        headers = {"x-timeout-ms": "60000"}
        status, answer = ask(port, "POST", "/asleep/rank", ASKED, headers=headers)
        assert (status, answer["certified"]) == (200, True)


@pytest.mark.timeout(7200)
def test_fifty_swaps_of_model_and_pool_without_a_failure(port, tiny_ranker, tmp_path):
    """Each from a real jobs.embed_pool and a new alias in MLflow's registry, under steady requests."""
    models = [tiny_ranker("poly", seed) for seed in (0, 1)]
    mlflow_client = mlflow.MlflowClient()
    mlflow_client.create_registered_model("swapped")
    numbers = [
        mlflow_client.create_model_version("swapped", one.uri).version for one in models
    ]  # fmt: skip
    published: list[tuple[str, str]] = []

    def publish_next(number: int) -> None:
        """A pool with one more text, by the other model, which becomes the champion."""
        rows = [{"id": key, "text": text} for key, text in REPLIES.items()]
        rows += [{"id": f"new-{at}", "text": f"number {at}"} for at in range(number)]
        file = tmp_path / "candidates.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        model = models[number % 2]
        config = embed_pool.Config(
            model=model.uri, candidates=(str(file),), pools=str(tmp_path), name="replies"
        )
        version = storage.name_of(embed_pool.run(config)["output"])
        mlflow_client.set_registered_model_alias("swapped", "champion", numbers[number % 2])
        published.append((model.fingerprint, version))

    publish_next(0)
    args = app.Args(
        model="models:/swapped@champion",
        pools=[str(tmp_path / "replies")],
        name="swapped",
        poll_s=0.5,
    )
    with deployed("swapped", args, num_replicas=2), steady_load(port, "/swapped") as load:
        for number in range(1, SWAPS + 1):
            publish_next(number)
            until(lambda: load.served[-20:] == [published[-1]] * 20)
    assert set(load.statuses) <= {200, 429}, load.statuses
    assert load.uncertified == 0
    assert list(dict.fromkeys(load.served)) == published  # each taken, in order, and none mixed
