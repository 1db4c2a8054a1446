"""jobs.pretrain when something dies: what is left, what the job says, and that the same command goes on."""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import mlflow
import numpy as np
import pyarrow as pa
import pytest
import ray.cloudpickle
import torch
from safetensors.torch import load_file

from jobs import pretrain
from pipeline.artifact import Artifact, draft, open_artifact
from pipeline.config import BadInput, parse
from pipeline.corpora.schema import EXAMPLE
from pipeline.models.sources import External
from pipeline.training.checkpoints import read_state
from pipeline.training.launch import read_saved
from pipeline.training.pretraining import Pretraining

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

STEPS = 90
SETTINGS = (
    "--encoder.layers", 1, "--encoder.width", 16, "--encoder.heads", 2, "--encoder.positions", 96,
    "--pretrain.batch-tokens", 480, "--pretrain.micro-batch-tokens", 120,
    "--pretrain.max-context-tokens", 40, "--pretrain.max-response-tokens", 20,
    "--pretrain.window-rows", 16, "--pretrain.valid-examples", 20,
    "--loop.warmup-steps", 10, "--loop.learning-rate", 0.003, "--loop.precision", "fp32",
    "--loop.log-every-steps", 1, "--loop.checkpoint-every-steps", 5,
    "--resources.cpus-per-worker", 1,
)  # fmt: skip


@pytest.fixture(scope="module")
def tokens(tiny_ranker, tokenize_in_process, tmp_path_factory) -> Artifact:
    """300 pairs of made-up words, of various lengths; a byte is a token."""
    folder, rng = tmp_path_factory.mktemp("pretraining"), np.random.default_rng(0)

    def words(most: int) -> str:
        return " ".join(f"w{rng.integers(50)}" for _ in range(rng.integers(1, most)))

    rows = [
        {"example_id": str(n), "group_id": str(n), "context": [words(9)], "response": words(5),
         "candidates": None, "label": None, "source": "test", "split": "train"}
        for n in range(300)
    ]  # fmt: skip
    config = pretrain.Config(corpus=(), output=str(folder / "corpus"))
    out = draft(config.output, "corpus", config, {})
    file = out.write_table("train/0.parquet", pa.Table.from_pylist(rows, schema=EXAMPLE), 50)
    corpus = out.publish([file], {"examples": len(rows)})
    tokenizer = External(str(tiny_ranker("bi").local() / "context_encoder"), "")
    made = tokenize_in_process(corpus, tokenizer, folder / "tokens", valid_share=0.1)
    return made.artifact


@pytest.fixture(scope="module")
def command(tokens) -> Callable[..., list[str]]:
    """`command(output, workers=2, …)`: the job's arguments; later ones replace earlier ones."""

    def arguments(output: Path, *more: object, workers: int = 2, steps: int = STEPS) -> list[str]:
        given = ("--corpus", tokens.uri, "--output", output, *SETTINGS,
                 "--resources.workers", workers, "--pretrain.steps", steps, *more)  # fmt: skip
        return [str(argument) for argument in given]

    return arguments


@pytest.fixture(scope="module")
def whole(local_ray, command, tmp_path_factory) -> SimpleNamespace:
    """A run that nothing disturbs, by two workers."""
    output = tmp_path_factory.mktemp("whole") / "encoder"
    summary = pretrain.run(parse(pretrain.Config, command(output), "test"))
    return SimpleNamespace(artifact=open_artifact(str(output), "encoder"), summary=summary)


def weights(encoder: Artifact) -> dict[str, torch.Tensor]:
    files = [path for path in sorted(encoder.local().glob("*.safetensors"))]
    assert len(files) == 2  # the masked language model and the next head
    return {
        f"{file.name} {name}": value for file in files for name, value in load_file(file).items()
    }


def same_weights(one: Artifact, other: Artifact) -> bool:
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    return all(torch.equal(value, right[name]) for name, value in left.items())


def curve(encoder: Artifact, since_ms: int = 0, name: str = "loss") -> dict[int, float]:
    run_id = encoder.manifest["run_id"]
    points = mlflow.MlflowClient().get_metric_history(run_id, name)
    return {point.step: point.value for point in points if point.timestamp >= since_ms}


def checkpoints(output: Path) -> list[Path]:
    """The folders that Ray has registered, the oldest first; the others may be in the making."""
    root = Path(f"{output}.partial") / "_checkpoints" / "training"
    try:
        snapshot = json.loads((root / "checkpoint_manager_snapshot.json").read_text())
    except (OSError, ValueError):  # not there, or being written
        return []
    return [root / entry["checkpoint_dir_name"] for entry in snapshot["checkpoint_results"]]


def processes(title: bytes) -> Iterator[int]:
    """Those of this test session's own clusters whose command line has the title."""
    token = f"RAY_AUTH_TOKEN={os.environ['RAY_AUTH_TOKEN']}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if title in (folder / "cmdline").read_bytes():
                if token in (folder / "environ").read_bytes():
                    yield int(folder.name)


def wait_until(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    while not condition():
        try:
            process.wait(timeout=0.02)
        except subprocess.TimeoutExpired:
            continue
        pytest.fail("the job ended too early")


# A process dies


def test_a_worker_that_is_killed_is_replaced_and_the_weights_are_the_same(
    run_job, command, whole, tmp_path
):
    output, killed, over = tmp_path / "encoder", [], threading.Event()

    def kill() -> None:
        while not over.wait(0.02):
            if len(checkpoints(output)) == 2:
                killed.append(max(processes(b"RayTrainWorker")))
                os.kill(killed[0], signal.SIGKILL)
                return

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        finished = run_job("pretrain", *command(output))
    finally:
        over.set()
        killer.join()
    assert finished.summary["counts"]["steps"] == STEPS
    assert len(killed) == 1
    encoder = open_artifact(str(output), "encoder")
    assert same_weights(encoder, whole.artifact)
    assert curve(encoder) == curve(whole.artifact)


@pytest.mark.parametrize("dies", ["driver and cluster", "cluster"])
def test_a_job_that_is_killed_goes_on_to_the_same_weights(
    start_job, run_job, command, whole, tmp_path, dies
):
    output = tmp_path / "encoder"
    before = {title: set(processes(title)) for title in (b"raylet", b"gcs_server", b"ray::")}
    process = start_job("pretrain", *command(output))
    wait_until(lambda: len(checkpoints(output)) == 2, process)
    if dies == "cluster":
        for title, others in before.items():
            for pid in set(processes(title)) - others - {process.pid}:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert process.wait() != 0
    else:
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not output.exists()
    killed_ms = int(Path(f"{output}.partial").stat().st_ctime * 1000)

    finished = run_job("pretrain", *command(output))
    assert finished.summary["already_done"] is False
    encoder = open_artifact(str(output), "encoder")
    assert same_weights(encoder, whole.artifact)
    assert curve(encoder) == curve(whole.artifact)
    assert [path.name for path in tmp_path.iterdir()] == ["encoder"]
