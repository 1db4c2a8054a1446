"""What tests of several folders share and no fixture has to set up."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pipeline.artifact import Artifact
from pipeline.config import BadInput
from pipeline.models import inference
from pipeline.models.ranker import Ranker
from pipeline.training.data import DualCollator, RankingBatch

Row = dict[str, Any]


INTERRUPTED = 130
"""The exit code of a job that Ctrl-C ended."""
TERMINATED = 128 + 15
"""The exit code of a job that SIGTERM ended."""


@dataclass(frozen=True)
class Finished:
    """What a user sees of a job."""

    code: int
    stdout: str
    stderr: str

    @property
    def summary(self) -> dict[str, Any]:
        """The last line of standard output."""
        assert self.code == 0, self.stderr
        return json.loads(self.stdout.splitlines()[-1])

    @property
    def refusal(self) -> str:
        """The one line that says what is wrong with the input."""
        assert self.code == 2, (self.code, self.stderr)
        lines = [line for line in self.stderr.splitlines() if line.startswith("python -m jobs.")]
        assert len(lines) == 1, self.stderr
        assert "Traceback" not in self.stderr
        return lines[0]


def job_command(verb: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", f"jobs.{verb}", *map(str, arguments)]


def rows_of(artifact: Artifact, split: str = "") -> list[Row]:
    """All rows of a corpus, or those of a split; the column `split` agrees with the folder of each."""
    rows = []
    for file in artifact.files(f"{split}/" if split else "", ".parquet"):
        found = pq.read_table(file, partitioning=None).to_pylist()
        assert {row.get("split", Path(file).parent.name) for row in found} <= {
            Path(file).parent.name
        }
        rows += found
    return rows


def curve(artifact: Artifact, name: str = "loss") -> dict[int, float]:
    """What the artifact's run has logged, by the step."""
    history = mlflow.MlflowClient().get_metric_history(artifact.manifest["run_id"], name)
    return {point.step: point.value for point in history}


def same_weights(one: Path, other: Path) -> bool:
    """Of two published models, bit for bit."""
    left, right = (
        {f"{file.relative_to(folder)} {name}": value
         for file in sorted(folder.rglob("*.safetensors")) if "training_state" not in file.parts
         for name, value in load_file(file).items()}
        for folder in (one, other)
    )  # fmt: skip
    assert left.keys() == right.keys() and left
    return all(torch.equal(value, right[name]) for name, value in left.items())


def rejected(folder: Path) -> list[Row]:
    """The samples of records that a job set aside."""
    lines = [line for f in sorted(folder.iterdir()) for line in f.read_text().splitlines()]
    return [json.loads(line) for line in lines]


@contextmanager
def computing_in_fp32() -> Iterator[None]:
    """Where the hardware has bf16, numbers computed in two ways differ in the third digit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYRANK_PROCESSOR", "avx2")
        yield


def refusal(call: Callable[..., object], *arguments: Any, **more: Any) -> str:
    """The one line of the `BadInput` that a call raises."""
    with pytest.raises(BadInput) as caught:
        call(*arguments, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Oracles


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def formula_scores(ranker: Ranker, context: Sequence[str], texts: Sequence[str]) -> list[float]:
    """By the papers' formulas in float64; a cross-encoder's one candidate at a time."""
    if ranker.config.architecture == "cross":
        return [float(inference.pair_scores(ranker, [context], [[text]])[0]) for text in texts]
    vectors, mask = inference.context_vectors(ranker, [context])
    candidates_CD = inference.candidate_vectors(ranker, texts).double().numpy()
    logits_CM = candidates_CD @ vectors[0][mask[0]].double().numpy().T
    return [float(softmax(logits_M) @ logits_M) for logits_M in logits_CM]


def collated(collator: DualCollator, rows: list[Row], seed: int = 0) -> RankingBatch:
    """A training batch of all these rows; their negatives are drawn by the seed."""
    return collator.collate(collator.prepare(rows, torch.Generator().manual_seed(seed)))


# Processes


def run_in_processes(
    work: Callable[[Path, int], None], folder: Path, count: int, timeout_s: float
) -> None:
    """Runs `work(folder, number)` in so many processes at once, and waits for them.

    Several are the ranks of one process group.

    They are forks of a process that has imported torch and transformers, which takes 5 s of a processor.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "pipeline.training.launch",
            "pipeline.training.finetuning",
            "pipeline.training.pretraining",
            "torch.nn.parallel",
        ]
    )
    processes = [
        context.Process(target=_work_in_process, args=(work, folder, number, count, timeout_s))
        for number in range(count)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
    said = [path.read_text() for path in sorted(folder.glob("failed-*"))]
    assert [process.exitcode for process in processes] == [0] * count, "\n".join(said)


def _work_in_process(
    work: Callable[[Path, int], None], folder: Path, number: int, count: int, timeout_s: float
) -> None:
    """Writes where it failed, or where each of its threads stood when the time was nearly over."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with (folder / f"failed-{number}").open("w") as failed:
        faulthandler.dump_traceback_later(0.9 * timeout_s, file=failed)
        try:
            if count > 1:
                rendezvous = f"file://{folder}/rendezvous"
                dist.init_process_group(
                    "gloo", init_method=rendezvous, rank=number, world_size=count
                )
            work(folder, number)
            if count > 1:
                # Not in `work`: when its DistributedDataParallel dies after the group, the two wait for
                # each other, now and then (3 times of 12).
                dist.destroy_process_group()
        except BaseException:
            traceback.print_exc(file=failed)
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()


def memory_kib(name: str) -> int:
    """Of this process: "VmRSS", what it has now, or "VmHWM", the most that it had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(name)]
    return int(line.split()[1])


def restart_peak_memory() -> None:
    """Lets "VmHWM" begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def ray_processes(title: str) -> list[psutil.Process]:
    """The processes of this test process's own Ray with this in their title; others of the machine
    belong to tests that run beside."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if line.startswith("ray::") and title in line:
                found.append(process)
    return found


def wait_until(condition: Callable[[], object], process: subprocess.Popen[Any]) -> None:
    """Looks again and again while the process runs; fails when it ends too early."""
    while not condition():
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.02)
            pytest.fail(f"the process ended too early: {process.returncode}")
