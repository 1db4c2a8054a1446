"""The whole path, from the corpus to requests over HTTP.

The jobs run in this process, as in a notebook: each process imports torch again. In the long tests the
service is a process, and so are trainings, which are interrupted, killed, and started again.
"""

from __future__ import annotations

import http.client
import json
import os
import pickle
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import psutil
import pyarrow.parquet as pq
import pytest
import ray
import torch
from ray import serve
from ray.util.placement_group import (
    PlacementGroup,
    placement_group_table,
    remove_placement_group,
)
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

from jobs import finetune
from pipeline.artifact import open_artifact
from pipeline.config import parse
from pipeline.engine import executors
from pipeline.models.encoder import prepare_for_training
from pipeline.models.sources import open_encoder
from pipeline.training.finetuning import Finetuning
from pipeline.training.loop import Listener, train
from tests.helpers import (
    INTERRUPTED,
    free_port,
    job_command,
    ray_processes,
    run_in_processes,
    wait_until,
)

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(900)  # four processes, and their workers, import torch


STEPS, WORKERS = 60, 2


@pytest.fixture(scope="module")
def cluster(local_ray) -> Iterator[None]:
    """Processes join the Ray of this one, as they would a cluster's: each saves a start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        yield


@pytest.fixture(scope="module")
def prepared(
    tracking_uri, sample_files, tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """The folder with a corpus, a tokenizer and an encoder, what each job said, and options of finetune."""
    work = tmp_path_factory.mktemp("work")
    corpus, tokenizer, encoder = (work / name for name in ("corpus", "tokenizer", "encoder"))
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
    training = (
        "--corpus", corpus, "--encoder", encoder,
        "--ranker.m", 4, "--ranker.max-context-tokens", 64, "--ranker.max-candidate-tokens", 32,
        "--finetune.max-steps", STEPS, "--finetune.batch-examples", 16,
        "--finetune.valid-examples", 20, "--loop.precision", "fp32", "--loop.log-every-steps", 1,
        "--loop.checkpoint-every-steps", 5, "--resources.workers", 1,
        "--resources.cpus-per-worker", 1,
    )  # fmt: skip
    said = {command[0]: summary_here(*command) for command in commands}
    return SimpleNamespace(work=work, said=said, training=training)


@pytest.fixture(scope="module")
def made(prepared) -> SimpleNamespace:
    """The rest: the ranker, a pool and a table."""
    work, corpus, ranker = prepared.work, prepared.work / "corpus", prepared.work / "ranker"
    said, short = prepared.said, ("--output", ranker, "--finetune.max-steps", 2)
    said["finetune"] = summary_here("finetune", *prepared.training, *short)
    said["embed_pool"] = summary_here(
        "embed_pool", "--model", ranker, "--candidates", corpus / "train",
        "--embed.text-column", "response", "--embed.id-column", "example_id",
        "--pools", work / "pools", "--name", "replies", "--embed.precision", "fp32",
        "--embed.dtype", "float32", "--resources.actors", 1,
    )  # fmt: skip
    said["evaluate"] = summary_here(
        "evaluate", "--model", ranker, "--corpus", corpus, "--max-examples", 40,
        "--json", work / "table.json",
    )  # fmt: skip
    return prepared


@pytest.fixture(scope="module")
def killed(prepared, cluster, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A training by two workers that was killed, in a folder of its own."""
    ranker = tmp_path_factory.mktemp("killed") / "ranker"
    training = (*prepared.training, "--output", ranker, "--resources.workers", WORKERS)
    kill_in_mid_training(ranker, training)
    return SimpleNamespace(training=training, ranker=ranker, at=time.time())


def summary_here(verb: str, *arguments: object) -> dict[str, Any]:
    """What a job says that runs in this process, with all its tasks."""
    with executors.in_this_process():
        return summary_of(verb, *arguments)


def summary_of(verb: str, *arguments: object) -> dict[str, Any]:
    """What a job says whose driver is this process."""
    job = import_module(f"jobs.{verb}")
    return {"job": verb, **job.run(parse(job.Config, list(map(str, arguments)), verb))}


@contextmanager
def in_mid_training(
    ranker: Path, arguments: tuple[object, ...], checkpoints: int
) -> Iterator[subprocess.Popen[bytes]]:
    """jobs.finetune, when it has saved so often; killed at the end. What it says is in "said"."""
    partial = ranker.with_name(f"{ranker.name}.partial")

    def saved() -> set[Path]:
        return set(partial.glob("_checkpoints/training_*/checkpoint_*/state.json"))

    earlier = saved()
    # A shell's background job ignores SIGINT, and so would what it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with ranker.with_name("said").open("wb") as said:
        process = subprocess.Popen(
            job_command("finetune", *arguments),
            cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=said,
        )  # fmt: skip
    try:
        wait_until(lambda: len(saved() - earlier) >= checkpoints, process)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not ranker.exists()


def kill_in_mid_training(ranker: Path, arguments: tuple[object, ...]) -> None:
    """Kills a worker and the driver with -9. Nothing that looks complete is left."""
    with in_mid_training(ranker, arguments, checkpoints=2):
        workers = ray_processes("RayTrainWorker")
        assert len(workers) == WORKERS
        workers[0].kill()
    psutil.wait_procs(ray_processes("RayTrainWorker") + ray_processes("TrainController"))
    remove_placement_groups()


def remove_placement_groups() -> None:
    """Frees the CPUs that the dead job had reserved. Ray does it as a rule, but Ray Train's own cleaner dies
    where a machine has two Rays, as under xdist, and a resumed job once waited for these CPUs for ever."""
    for name in placement_group_table():
        remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(name))))


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


@pytest.mark.long
def test_ctrl_c_ends_a_training_which_says_how_to_go_on(prepared, tmp_path):
    ranker = tmp_path / "ranker"
    training = (*prepared.training, "--output", ranker)
    with in_mid_training(ranker, training, checkpoints=1) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == INTERRUPTED
    said = ranker.with_name("said").read_text().splitlines()
    assert "python -m jobs.finetune: interrupted; the same command resumes" in said


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


def train_undisturbed(folder: Path, rank: int) -> None:
    """One of the ranks, without Ray; the first one saves what they have trained."""
    recipe, device = pickle.loads((folder / "recipe").read_bytes()), torch.device("cpu")
    task = recipe.build(rank, WORKERS)
    prepare_for_training(task.module, device, recipe.loop.precision)
    model = DistributedDataParallel(task.module)
    listener = Listener(lambda progress: None, lambda state, cursor: None)
    train(task, model, recipe.loop, device, rank, listener)
    if rank == 0:
        task.save(folder / "ranker")


@pytest.mark.long
def test_a_training_that_was_killed_has_the_weights_of_one_that_was_not(killed, tmp_path):
    """Bit for bit; by two workers, of which one was killed, and then the driver."""
    # What has been killed is no other job with other names of its files.
    again = [os.path.relpath(word) if isinstance(word, Path) else word for word in killed.training]
    summary_of("finetune", *again)
    config = parse(finetune.Config, list(map(str, killed.training)), "test")
    corpus, source = open_artifact(config.corpus, "corpus"), open_encoder(config.encoder)[0]
    recipe = Finetuning(corpus, source, config.ranker, config.finetune, config.loop)
    (tmp_path / "recipe").write_bytes(pickle.dumps(recipe))
    run_in_processes(train_undisturbed, tmp_path, WORKERS, timeout_s=300)
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.glob("ranker/**/*.safetensors"))
    assert len(files) == 3  # two towers and the codes
    for file in files:
        found, expected = load_file(killed.ranker.parent / file), load_file(tmp_path / file)
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in found.items()), file
    run_id = open_artifact(str(killed.ranker), "ranker").manifest["run_id"]
    client = mlflow.MlflowClient()
    run = client.get_run(run_id)
    assert run.info.start_time / 1e3 < killed.at and run.info.status == "FINISHED"
    # The run is that of the killed one, of whose curve the last second is lost: here often all.
    history = client.get_metric_history(run_id, "loss")
    steps = [point.step for point in history if point.timestamp / 1e3 > killed.at]
    assert steps[0] > 5
    assert steps == list(range(steps[0], STEPS + 1))


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
        ("pool", "model", "ranker"),
        ("ranker", "encoder", "encoder"),
        ("ranker", "corpus", "corpus"),
        ("encoder", "corpus.0", "tokens"),
        ("tokens", "corpus", "corpus"),
        ("tokens", "tokenizer", "tokenizer"),
        ("tokenizer", "corpus.0", "corpus"),
    ):
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
