"""Elastic training on a cluster that loses a node, and gets one again.

python -m pytest -m long tests/cluster/test_elastic.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jobs import pretrain
from pipeline.artifact import open_artifact
from pipeline.config import parse
from pipeline.engine import executors
from pipeline.models.sources import External
from tests.helpers import curve, wait_until

from .conftest import ROOT, nodes_of_one_core

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

# jobs.pretrain, whose workers note each step, and which stands still, if it finds the note "waits", until the
# test has killed or added a node. Ray looks for more room every 2 s instead of every minute.
DRIVER = """
import functools, os, sys, threading
from dataclasses import dataclass
from pathlib import Path

import ray
import ray.train

from jobs import pretrain
from pipeline.training import pretraining
from pipeline.training.pretraining import Pretraining

NOTES = Path(sys.argv.pop(1))


@dataclass(frozen=True)
class Watched(Pretraining):
    def build(self, rank, world):
        task = Pretraining.build(self, rank, world)
        before_step, notes = task.before_step, NOTES

        def note(step):
            (notes / f"{step} of {world}").touch()
            waits = (notes / "waits").exists()
            while waits and (step, world) == (30, 2) and not (notes / "60 of 1").exists():
                threading.Event().wait(0.1)
            while waits and (step, world) == (60, 1):
                threading.Event().wait(0.1)
            before_step(step)

        task.before_step = note
        return task


pretraining.Pretraining = Watched
ray.train.ScalingConfig = functools.partial(
    ray.train.ScalingConfig, elastic_resize_monitor_interval_s=2.0
)
ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False)
(NOTES / "driver").write_text(ray.get_runtime_context().get_node_id())
pretrain.program.main(pretrain.Config, pretrain.run, "pretrain")
"""
STEPS = 90


@pytest.fixture(scope="module")
def options(
    tiny_ranker, reddit_corpus, tokenize_in_process, tmp_path_factory
) -> tuple[object, ...]:
    """Of a run without its output and its number of workers."""
    tokenizer = External(str(tiny_ranker("bi").local() / "context_encoder"), "")
    folder = tmp_path_factory.mktemp("elastic") / "tokens"
    tokens = tokenize_in_process(reddit_corpus, tokenizer, folder, valid_share=0.1)
    return (
        "--corpus", tokens.artifact.uri, "--shape.layers", 1, "--shape.width", 16,
        "--shape.heads", 2, "--shape.positions", 96, "--pretrain.batch-tokens", 480,
        "--pretrain.micro-batch-tokens", 120, "--pretrain.max-context-tokens", 40,
        "--pretrain.max-response-tokens", 20, "--pretrain.steps", STEPS,
        "--pretrain.window-rows", 64, "--loop.warmup-steps", 10, "--loop.precision", "fp32",
        "--loop.epsilon", 1e-4, "--loop.checkpoint-every-steps", 10, "--loop.log-every-steps", 1,
        "--loop.validate-every-steps", 0, "--loop.validate-every-epochs", 0,
        "--resources.cpus-per-worker", 1,
    )  # fmt: skip


@contextmanager
def driver(address: str, log: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """`DRIVER`, until the end of the block."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": address,
                   "RAY_AUTH_MODE": "token", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "1",
                   "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5"}  # fmt: skip
    command = [sys.executable, "-c", DRIVER, *map(str, arguments)]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, start_new_session=True, stdout=stream, stderr=stream
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_run_goes_on_with_one_worker_and_with_two_when_there_is_room_again(options, tmp_path):
    """With the losses and weights of one that nothing disturbs."""
    alone = [str(option) for option in (*options, "--output", tmp_path / "alone")]
    with executors.in_this_process():
        pretrain.run(parse(pretrain.Config, alone, "test"))

    notes, output = tmp_path / "notes", tmp_path / "elastic"
    notes.mkdir()
    (notes / "waits").touch()
    elastic = ("--output", output, "--resources.workers", 2, "--resources.min-workers", 1)
    log = tmp_path / "log"
    with (
        nodes_of_one_core(2) as nodes,
        driver(nodes.address, log, notes, *options, *elastic) as process,
    ):
        wait_until((notes / "30 of 2").exists, process)
        on_driver = (notes / "driver").read_text()
        victims = [n for n, node in enumerate(nodes.workers) if node.unique_id != on_driver]
        nodes.kill(victims[0])
        wait_until((notes / "60 of 1").exists, process)
        nodes.add()
        assert process.wait(timeout=300) == 0, log.read_text()
    assert (notes / f"{STEPS - 1} of 2").exists()
    undisturbed, disturbed = (
        open_artifact(str(folder), "encoder") for folder in (tmp_path / "alone", output)
    )
    assert disturbed.counts["steps"] == STEPS
    assert curve(disturbed) == pytest.approx(curve(undisturbed), abs=1e-3)
    for name in ("model.safetensors", "next_head.safetensors"):
        expected, found = (load_file(each.local() / name) for each in (undisturbed, disturbed))
        assert found.keys() == expected.keys()
        for weight, value in expected.items():
            torch.testing.assert_close(found[weight], value, rtol=0, atol=1e-3, msg=weight)


def test_a_node_that_is_drained_costs_no_step(options, tmp_path):
    """All save the step, and one worker continues from the next one. Ray drains a node when its `ray start`
    gets SIGTERM."""
    notes, output, log = tmp_path / "notes", tmp_path / "drained", tmp_path / "log"
    notes.mkdir()
    arguments = (
        notes, *options, "--output", output, "--pretrain.steps", 100_000,
        "--loop.checkpoint-every-steps", 100_000,
        "--resources.workers", 2, "--resources.min-workers", 1,
    )  # fmt: skip

    def steps(world: int) -> list[int]:
        return sorted(int(note.name.split()[0]) for note in notes.glob(f"* of {world}"))

    with (
        nodes_of_one_core(2) as nodes,
        driver(nodes.address, log, *arguments) as process,
    ):
        wait_until(lambda: len(steps(2)) > 30, process)
        on_driver = (notes / "driver").read_text()
        victim, *_ = (node.node_id for node in nodes.workers if node.node_id != on_driver)
        subprocess.run(
            [Path(sys.executable).with_name("ray"), "drain-node", "--address", nodes.address,
             "--node-id", victim, "--reason", "DRAIN_NODE_REASON_PREEMPTION",
             "--reason-message", "test", "--deadline-remaining-seconds", "100"],
            env={**os.environ, "RAY_AUTH_MODE": "token"}, check=True, capture_output=True,
        )  # fmt: skip
        wait_until(lambda: len(steps(1)) > 3, process)
    assert f"step {steps(2)[-1] + 1} is saved" in log.read_text()
    assert steps(2) == list(range(len(steps(2))))
    assert steps(1)[0] == steps(2)[-1] + 1
