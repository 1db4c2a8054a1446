"""The whole path, from the corpus to requests over HTTP.

The jobs run in this process, as in a notebook: each process imports torch again. The service is a process.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pyarrow.parquet as pq
import pytest
import ray
from ray import serve

from pipeline.artifact import open_artifact
from pipeline.config import parse
from pipeline.engine import executors
from tests.helpers import free_port, job_command, wait_until

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(900)  # processes, and their workers, import torch


@pytest.fixture(scope="module")
def cluster(local_ray) -> Iterator[None]:
    """Processes join the Ray of this one, as they would a cluster's: each saves a start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        yield


@pytest.fixture(scope="module")
def made(tracking_uri, sample_files, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The folder of all artifacts, and what each job said."""
    work = tmp_path_factory.mktemp("work")
    names = ("corpus", "tokenizer", "encoder", "ranker")
    corpus, tokenizer, encoder, ranker = (work / name for name in names)
    commands = (
        ("prepare_corpus", "--corpus", "convai2", "--input", sample_files / "convai2",
         "--output", corpus),
        ("train_tokenizer", "--corpus", corpus, "--tokenizer.vocabulary", 300,
         "--output", tokenizer),
        ("pretrain", "--corpus", corpus, "--tokenizer", tokenizer, "--output", encoder,
         "--encoder.layers", 1, "--encoder.width", 16, "--encoder.heads", 2,
         "--encoder.positions", 128, "--pretrain.steps", 2, "--pretrain.batch-tokens", 800,
         "--pretrain.micro-batch-tokens", 400,
         "--pretrain.max-context-tokens", 64, "--pretrain.max-response-tokens", 32),
    )  # fmt: skip
    said = {command[0]: summary_here(*command) for command in commands}
    said["finetune"] = summary_here(
        "finetune", "--corpus", corpus, "--encoder", encoder, "--output", ranker,
        "--ranker.m", 4, "--ranker.max-context-tokens", 64, "--ranker.max-candidate-tokens", 32,
        "--finetune.max-steps", 2, "--finetune.batch-examples", 16, "--finetune.valid-examples", 20,
        "--loop.precision", "fp32", "--resources.cpus-per-worker", 1,
    )  # fmt: skip
    said["embed_pool"] = summary_here(
        "embed_pool", "--model", ranker, "--candidates", corpus / "train",
        "--embed.text-column", "response", "--embed.id-column", "example_id",
        "--pools", work / "pools", "--name", "replies", "--embed.precision", "fp32",
        "--embed.dtype", "float32", "--resources.actors", 1,
    )  # fmt: skip
    said["evaluate"] = summary_here(
        "evaluate", "--model", ranker, "--corpus", corpus, "--max-examples", 40,
        "--latency-queries", 0, "--json", work / "table.json",
    )  # fmt: skip
    return SimpleNamespace(work=work, said=said)


def summary_here(verb: str, *arguments: object) -> dict[str, Any]:
    """What a job says that runs in this process, with all its tasks."""
    job = import_module(f"jobs.{verb}")
    with executors.in_this_process():
        return {"job": verb, **job.run(parse(job.Config, list(map(str, arguments)), verb))}


@pytest.fixture(scope="module")
def port(made, cluster) -> Iterator[int]:
    """Where jobs.serve answers. Ctrl-C ends it, and it says what it served."""
    port = free_port()
    command = job_command(
        "serve", "--model", made.work / "ranker", "--pools", made.work / "pools/replies",
        "--port", port, "--arguments", "precision=fp32",
    )  # fmt: skip
    log = made.work / "serve.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, start_new_session=True, stdout=stream, stderr=stream
        )
    try:
        try:
            wait_until(lambda: answers(port), process)
        except pytest.fail.Exception:
            pytest.fail(log.read_text())
        yield port
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0
        first, *_, last_line = log.read_text().splitlines()
        assert first.endswith(f"reads {made.work}/ranker and {made.work}/pools/replies")
        last = json.loads(last_line)
        assert last == {"job": "serve", "served": f"http://127.0.0.1:{port}"}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        serve.shutdown()


def answers(port: int) -> bool:
    try:
        return ask(port, "GET", "/health")[0] == 200
    except (OSError, ValueError, http.client.HTTPException):
        return False


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        data = body and json.dumps(body)
        connection.request(method, path, data, {"content-type": "application/json"})
        with connection.getresponse() as response:
            return response.status, json.loads(response.read())


ARTIFACTS = {
    "prepare_corpus": "corpus", "train_tokenizer": "tokenizer", "pretrain": "encoder",
    "finetune": "ranker", "embed_pool": "pool",
}  # fmt: skip


def test_every_job_says_what_it_made_and_leaves_nothing_unfinished(made):
    for verb, kind in ARTIFACTS.items():
        said = made.said[verb]
        artifact = open_artifact(said["output"], kind)
        assert (said["job"], said["already_done"]) == (verb, False)
        assert (said["fingerprint"], said["counts"]) == (artifact.fingerprint, artifact.counts)
    table = json.loads((made.work / "table.json").read_text())["table"]
    assert table == made.said["evaluate"]["table"]
    assert set(table) == {"chance", "tf-idf", "bm25", "poly"}
    assert not list(made.work.rglob("*.partial"))


def test_the_data_base_holds_the_lineage_from_the_pool_to_the_corpus(made, tracking_uri):
    client = mlflow.MlflowClient(tracking_uri)
    fingerprints = {kind: made.said[verb]["fingerprint"] for verb, kind in ARTIFACTS.items()}
    # jobs.pretrain has tokenized the corpus first.
    tokens = open_artifact(f"{made.said['pretrain']['output']}.tokens/0", "tokens")
    fingerprints["tokens"] = tokens.fingerprint

    def tags_of(kind: str) -> dict[str, str]:
        """The tags of the run that made it."""
        experiment = client.get_experiment_by_name("polyrank").experiment_id
        made_it = f"tags.output_fingerprint = '{fingerprints[kind]}'"
        runs = client.search_runs([experiment], made_it, order_by=["start_time DESC"])
        assert runs[0].info.status == "FINISHED"
        return dict(runs[0].data.tags)

    for kind, name, origin in (
        ("pool", "model", "ranker"), ("ranker", "encoder", "encoder"), ("ranker", "corpus", "corpus"),
        ("encoder", "corpus.0", "tokens"), ("tokens", "corpus", "corpus"),
        ("tokens", "tokenizer", "tokenizer"), ("tokenizer", "corpus.0", "corpus"),
    ):  # fmt: skip
        assert tags_of(kind)[f"input.{name}.fingerprint"] == fingerprints[origin]
    note = tags_of("pool")["mlflow.note.content"]
    assert all(fingerprints[kind] in note for kind in ("ranker", "encoder", "tokenizer", "corpus"))


@pytest.mark.long  # 72 s on two slow cores; test_serve_files.py starts a service
def test_the_service_ranks_a_pool(made, port):
    context = ["how is work going ?"]
    status, body = ask(port, "POST", "/rank", {"context": context, "pool": "replies", "top_k": 5})
    assert status == 200
    assert body["model"] == made.said["finetune"]["fingerprint"]
    assert body["pool"]["version"] == made.said["embed_pool"]["version"]
    results = body["results"]
    files = open_artifact(f"{made.work}/corpus", "corpus").files("train/", ".parquet")
    columns = ["example_id", "response"]
    rows = [row for file in files for row in pq.read_table(file, columns=columns).to_pylist()]
    replies = {row["example_id"]: row["response"] for row in rows}
    assert [replies[result["id"]] for result in results] == [r["text"] for r in results]
    texts = [result["text"] for result in results]
    given = ask(port, "POST", "/rank", {"context": context, "candidates": texts, "top_k": 5})[1]
    assert [result["text"] for result in given["results"]] == texts
    scores = [result["score"] for result in results]
    assert [result["score"] for result in given["results"]] == pytest.approx(scores, rel=1e-3)
