"""The files that start a service, started as a user starts them: by `serve run`, `serve deploy` and
`jobs.deploy` in processes, and asked over HTTP. Only addresses, URIs and ports are replaced in their text."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import mlflow
import pytest
import ray
import yaml
from ray import serve

from jobs import dashboard
from pipeline import storage
from pipeline.artifact import Artifact
from serve.client import Client
from tests.helpers import free_port, job_command
from tests.manifests import rendered
from tests.serve.conftest import INTENTS, REPLIES, ask

from .conftest import ROOT, Store, head

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
SERVE = ROOT / "serve"
TOKENS = ("first token", "second token")
CONTEXT = {"context": "hello there", "pool": "replies", "top_k": len(REPLIES)}
_PATIENCE_S = 400.0


def until(condition: Callable[[], Any]) -> Any:
    """The first true value. Fails if none comes in time."""
    end = time.monotonic() + _PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < end, "not in time"
        time.sleep(0.2)
    return value


def hash_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def substituted(text: str, values: Mapping[str, object]) -> str:
    """The text with these in place of the keys, each of which stands in it."""
    for old, new in values.items():
        assert old in text, f"{old} is not in the file"
        text = text.replace(old, str(new))
    return text


def rank(port: int, token: str = "", **headers: str) -> tuple[int, Any]:
    """(status, answer) of a request for all rows of the pool."""
    if token:
        headers["authorization"] = f"Bearer {token}"
    return ask(port, "POST", "/rank", CONTEXT, headers=headers)


def require_ranking(answered: tuple[int, Any], model: Artifact) -> Any:
    """The answer, which this model gave, with all rows of the pool."""
    status, answer = answered
    assert status == 200, answer
    assert answer["model"] == model.fingerprint
    assert {result["text"] for result in answer["results"]} == set(REPLIES.values())
    assert answer["certified"]
    return answer


# One machine


def is_ready(port: int) -> bool:
    try:
        return ask(port, "GET", "/ready")[0] == 200
    except (OSError, AssertionError):  # nobody listens yet, or a proxy without an application
        return False


@pytest.fixture(scope="module")
def model(tiny_ranker) -> Artifact:
    return tiny_ranker("poly")


def test_the_file_for_one_machine_starts(local_ray, model, tiny_pool, tmp_path):
    """By `serve run FILE`, on the Ray of this process; paths are as seen from where it is started."""
    port, file, log = free_port(), tmp_path / "config.yaml", tmp_path / "log"
    values = {
        ".demo/rankers/poly": os.path.relpath(model.uri, ROOT),
        ".demo/pools/replies": os.path.relpath(tiny_pool(model), ROOT),
        "port: 8000": f"port: {port}",
    }
    file.write_text(substituted((SERVE / "config.yaml").read_text(), values))
    command = [sys.executable, "-m", "ray.serve.scripts", "run", str(file)]
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stream, stderr=stream)

    def is_there() -> bool:
        said = log.read_text()
        assert process.poll() is None and "DEPLOY_FAILED" not in said, said
        return is_ready(port)

    def accesses() -> list[str]:
        return [line for line in log.read_text().splitlines() if " POST /rank 200 " in line]

    try:
        until(is_there)
        require_ranking(rank(port), model)
        rank(port)  # its line comes after Serve's own of the request before, if Serve writes one
        until(lambda: len(accesses()) == 2)
        assert all("polyrank.serve.access: " in line for line in accesses())  # each has one line
    finally:
        process.kill()
        process.wait()
        serve.shutdown()


def haproxy_in(folder: str) -> dict[str, str]:
    """Variables for a HAProxy beside those of other Rays of this machine, with which it shares its files and
    ports otherwise."""
    values = {
        "STATS_PORT": free_port(),
        "METRICS_PORT": free_port(),
        "CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "SOCKET_PATH": f"{folder}/admin.sock",
        "SERVER_STATE_BASE": folder,
        "SERVER_STATE_FILE": f"{folder}/server-state",
    }
    return {f"RAY_SERVE_HAPROXY_{name}": str(value) for name, value in values.items()}


# A cluster


@dataclass
class Cluster:
    """A head with 8 cores and the resource `serving`, whose environment is that of ray.env."""

    address: str
    port: int
    """Port of its service; Serve takes the one of the first file."""
    statistics: int
    """Port of HAProxy's page."""
    folder: Path

    def run(self, *command: str, **environment: str) -> None:
        """A command of a user. Fails with its output if it fails."""
        of_cluster = {"RAY_AUTH_MODE": "token", "RAY_DASHBOARD_ADDRESS": self.address}
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=_PATIENCE_S,
            env={**os.environ, **of_cluster, **environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def write(self, name: str, text: str, values: Mapping[str, object]) -> Path:
        """A file with this text, but for the values and the port."""
        file = self.folder / name
        file.write_text(substituted(text, {**values, "port: 8000": f"port: {self.port}"}))
        return file

    def serve_deploy(self, file: Path) -> None:
        """`serve deploy`, which returns before the service runs; then waits until it does."""
        self.run(sys.executable, "-m", "ray.serve.scripts", "deploy", str(file), "-a", self.address)
        names = [each["name"] for each in yaml.safe_load(file.read_text())["applications"]]

        def are_running() -> bool:
            applications = [self.application(name) for name in names]
            for application in applications:
                assert application["status"] != "DEPLOY_FAILED", application["message"]
            return all(application["status"] == "RUNNING" for application in applications)

        until(are_running)

    def application(self, name: str) -> Any:
        """What Serve says about an application."""
        return dashboard.applications(self.address)[name]


@pytest.fixture(scope="module")
def cluster(s3: Store, tracking_uri: str, tmp_path_factory) -> Iterator[Cluster]:
    lines = [line for line in (ROOT / "ray.env").read_text().splitlines() if "=" in line]
    variables = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    folder, jobs_port = tmp_path_factory.mktemp("cluster"), free_port()
    haproxy = haproxy_in(tempfile.mkdtemp(prefix="prh", dir="/tmp"))  # paths of sockets are short
    here = {"POLYRANK_CACHE": str(folder / "cache"), **haproxy}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        with head(jobs_port=jobs_port, cpus=8, resources={"serving": 2}, **{**variables, **here}):
            statistics = int(haproxy["RAY_SERVE_HAPROXY_STATS_PORT"])
            yield Cluster(f"http://127.0.0.1:{jobs_port}", free_port(), statistics, folder)


@pytest.fixture(scope="module")
def lake(s3: Store, tracking_uri: str, model, tiny_pool) -> dict[str, object]:
    """The bucket and the champion that the files for a cluster name, and the values that they leave open."""
    storage.upload(Path(tiny_pool(model)), f"{s3.bucket('lake')}/pools/replies")
    client = mlflow.MlflowClient()
    client.create_registered_model("dialogue")
    version = client.create_model_version("dialogue", model.uri).version
    client.set_registered_model_alias("dialogue", "champion", version)
    return {"http://mlflow:5000": tracking_uri, "HASH,HASH": ",".join(map(hash_of, TOKENS))}


def require_two_replicas_with_tokens(cluster: Cluster, model: Artifact) -> None:
    for token in TOKENS:
        require_ranking(rank(cluster.port, token), model)
    assert rank(cluster.port)[0] == 401
    (ranker,) = cluster.application("dialogue")["deployments"].values()
    assert [replica["state"] for replica in ranker["replicas"]] == ["RUNNING"] * 2


@pytest.mark.long  # 40 s; the long demo of a cluster deploys the file, too
def test_the_file_for_a_cluster_starts_by_the_last_step_of_the_workflow(cluster, lake, model):
    """The code is this checkout's, from an archive that `jobs.deploy` writes into the bucket."""
    file = cluster.write("service.yaml", (SERVE / "config.cluster.yaml").read_text(), lake)
    workflow = ("jobs/workflows/dialogue.yaml", "--start-at", "deploy")
    deploy = f"deploy=python -m jobs.deploy {file}"
    cluster.run(*job_command("workflow", *workflow, "--set", deploy), POLYRANK_AUTHOR_SALT="salt")
    require_two_replicas_with_tokens(cluster, model)
    environment = cluster.application("dialogue")["deployed_app_config"]["runtime_env"]
    assert environment["working_dir"].startswith("s3://lake/code/polyrank-")


@pytest.mark.long
def test_the_text_of_the_rayservice_starts(cluster, lake, model):
    manifest = rendered("overlays/service")["RayService", "polyrank-service"]
    file = cluster.write("rayservice.yaml", manifest["spec"]["serveConfigV2"], lake)
    cluster.serve_deploy(file)
    require_two_replicas_with_tokens(cluster, model)


@pytest.mark.long
def test_the_death_of_a_replica_costs_no_client_a_request(cluster):
    """Of the service that the test before has deployed, behind HAProxy. Each client asks once more."""
    cohere, openai, httpx = map(pytest.importorskip, ("cohere", "openai", "httpx"))
    url, token = f"http://127.0.0.1:{cluster.port}", TOKENS[0]
    ours = Client(url, token, retries=1)
    openai_client = openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=1)
    http = httpx.Client(timeout=60)
    cohere_client = cohere.ClientV2(api_key=token, base_url=url, httpx_client=http)
    # Without the second option Cohere's client gives up where HAProxy closes a connection.
    ask_once_more = {"max_retries": 1, "retry_remote_protocol_errors": True}
    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: ours.rank(CONTEXT["context"], pool="replies").results,
        "openai": lambda: openai_client.embeddings.create(model="dialogue", input=["hi"]).data,
        "cohere": lambda: (
            cohere_client.rerank(
                model="dialogue", query="hi", documents=["a"], request_options=ask_once_more
            ).results
        ),
    }
    answers, stop = Counter[str](), threading.Event()

    def go_on_asking(name: str) -> None:
        while not stop.is_set():
            assert calls[name]()
            answers[name] += 1

    def pids() -> set[int]:
        (ranker,) = cluster.application("dialogue")["deployments"].values()
        return {each["pid"] for each in ranker["replicas"] if each["state"] == "RUNNING"}

    def all_have_asked(times: int) -> bool:
        assert not any(each.done() for each in asking)  # else it raises what a client was told
        return all(answers[name] >= times for name in calls)

    before = pids()
    with ThreadPoolExecutor(len(calls)) as threads:
        asking = [threads.submit(go_on_asking, name) for name in calls]
        try:
            until(lambda: all_have_asked(20))
            os.kill(min(before), signal.SIGKILL)
            until(lambda: len(pids() - {min(before)}) == 2 and all_have_asked(20))
            heard = max(answers.values())
            until(lambda: all_have_asked(heard + 20))
        finally:
            stop.set()
            for each in asking:
                each.result(60)
            ours.close()
            openai_client.close()
            http.close()


# The examples, one after the other on the same cluster


@pytest.fixture
def example(cluster, model, tiny_pool) -> Callable[..., None]:
    """`example(name, values)`: deploys serve/examples/NAME.yaml, and waits until it runs."""

    def deploy(name: str, values: Mapping[str, object] = MappingProxyType({})) -> None:
        text = (SERVE / "examples" / f"{name}.yaml").read_text()
        paths = {".demo/rankers/poly": model.uri, ".demo/pools/replies": tiny_pool(model)}
        cluster.serve_deploy(cluster.write(f"{name}.yaml", text, {**paths, **values}))

    return deploy


@pytest.mark.long
def test_haproxy_stands_before_the_service(cluster, example, model):
    """Its own page of statistics counts the requests."""
    example("haproxy")
    require_ranking(rank(cluster.port), model)
    with urlopen(f"http://127.0.0.1:{cluster.statistics}/stats;csv") as page:
        rows = list(csv.DictReader(page.read().decode().removeprefix("# ").splitlines()))
    assert sum(int(row["stot"] or 0) for row in rows if row["svname"] == "BACKEND") > 0


@pytest.mark.long
def test_a_pool_in_shards_is_ranked_whole(cluster, example, model):
    example("sharded-pools")
    answer = require_ranking(rank(cluster.port), model)
    assert answer["pool"]["missing_shards"] == []
    shards = {"ranker-shard-0", "ranker-shard-1"}
    assert set(cluster.application("dialogue")["deployments"]) == {"ranker", *shards}


@pytest.mark.long
def test_a_second_stage_scores_again(cluster, example, model, tiny_ranker):
    cross = tiny_ranker("cross")
    example("second-stage", {".demo/rankers/cross": cross.uri})
    assert require_ranking(rank(cluster.port), model)["second_stage"] == cross.fingerprint


@pytest.mark.long
def test_two_models_answer_below_their_paths(cluster, example, model, tiny_ranker, tiny_pool):
    other = tiny_ranker("bi")
    articles = tiny_pool(other, name="articles")
    uris = {".demo/rankers/articles": other.uri, ".demo/pools/articles": articles}
    example("two-models", uris)
    for path, served in (("replies", model), ("articles", other)):
        context = {**CONTEXT, "pool": path}
        require_ranking(ask(cluster.port, "POST", f"/{path}/rank", context), served)
        with Client(f"http://127.0.0.1:{cluster.port}/{path}") as client:
            assert client.info()["model"]["fingerprint"] == served.fingerprint
        with urlopen(f"http://127.0.0.1:{cluster.port}/{path}/") as page:
            assert b"<title>" in page.read()


@pytest.mark.long
def test_a_classifier_answers_beside_the_ranking(cluster, example, model, tiny_classifier):
    example("classifier", {"classifier: .demo/intents": f"classifier: {tiny_classifier(model)}"})
    texts = list(INTENTS.values())
    status, answer = ask(cluster.port, "POST", "/classify", {"texts": texts, "top_k": 1})
    assert status == 200, answer
    intents = [result["intents"][0]["intent"] for result in answer["results"]]
    assert intents[:3] == [intent for intent in INTENTS if intent != "oos"]
    require_ranking(rank(cluster.port), model)


@pytest.mark.long
def test_a_candidate_answers_its_share(cluster, example, model, tiny_ranker, tiny_pool, tmp_path):
    """It needs a version of the pool of its own; the CURRENT one is the champion's."""
    candidate = tiny_ranker("bi")
    pool = tmp_path / "replies"
    shutil.copytree(tiny_pool(model), pool)
    shutil.copytree(Path(tiny_pool(candidate)) / "v-1", pool / "v-2")
    pools = {".demo/rankers/bi": candidate.uri, f"[{tiny_pool(model)}]": f"[{pool}]"}
    example("candidate", pools)
    models = Counter[str]()

    def both_have_answered() -> bool:
        status, answer = rank(cluster.port)
        assert status == 200, answer
        models[answer["model"]] += 1
        return len(models) == 2

    until(both_have_answered)
    assert set(models) == {model.fingerprint, candidate.fingerprint}


@pytest.mark.long
def test_tokens_change_without_a_restart(cluster, example, model, tmp_path):
    file = tmp_path / "tokens"
    old, new = TOKENS
    file.write_text(f"{hash_of(old)}\n")
    example("tokens", {"/etc/polyrank/tokens": file})
    (ranker,) = cluster.application("dialogue")["deployments"].values()
    accepted = {(old,): [200, 401], (old, new): [200, 200], (new,): [401, 200]}
    for tokens, statuses in accepted.items():
        file.write_text("".join(f"{hash_of(token)}\n" for token in tokens))
        assert [rank(cluster.port, token)[0] for token in TOKENS] == statuses
    (ranker_after,) = cluster.application("dialogue")["deployments"].values()
    pids = [[each["pid"] for each in one["replicas"]] for one in (ranker, ranker_after)]
    assert pids[0] == pids[1]


@pytest.mark.long
def test_a_page_of_another_origin_may_read_answers_and_refusals(cluster, example, model):
    example("cors")
    allowed, other = "https://app.example", "https://other.example"
    for origin, text, status in (
        (allowed, "hello", 200), (allowed, "x" * 3_000_000, 413), (other, "hello", 200),
    ):  # fmt: skip
        request = Request(f"http://127.0.0.1:{cluster.port}/rank", method="POST")
        request.add_header("origin", origin)
        request.add_header("content-type", "application/json")
        request.data = json.dumps({**CONTEXT, "context": text}).encode()
        with opened(request) as answer:
            assert answer.status == status
            read_by = answer.headers["access-control-allow-origin"]
            assert read_by == (allowed if origin == allowed else None)


def opened(request: Request) -> Any:
    """The answer, also if it is a refusal."""
    try:
        return urlopen(request)
    except HTTPError as error:
        return error


@pytest.mark.long
def test_a_service_ends_at_zero_and_answers_again(cluster, example, model):
    """With 2 s instead of 10 minutes without requests."""
    example("scale-to-zero", {"delay_s: 600": "delay_s: 2"})

    def replicas() -> list[Any]:
        return cluster.application("dialogue")["deployments"]["ranker"]["replicas"]

    def answers() -> bool:  # on a busy machine a start takes longer than a request may
        return rank(cluster.port, **{"x-timeout-ms": "60000"})[0] == 200

    for _ in range(2):
        until(answers)
        assert replicas()
        until(lambda: not replicas())
