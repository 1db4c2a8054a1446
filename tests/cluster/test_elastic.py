"""Elastic training on a cluster that loses a node, and gets one again.

python -m pytest -m long tests/cluster/test_elastic.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import mlflow
import pytest
import torch
from safetensors.torch import load_file

from jobs import pretrain
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import parse
from pipeline.engine import executors
from pipeline.models.sources import External
from tests.helpers import wait_until

from .conftest import ROOT, nodes_of_one_core

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

# jobs.pretrain, whose workers note each step, and which stands still until the test has killed or added a
# node. Ray looks for more room every 2 s instead of every minute.
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
            while (step, world) == (30, 2) and not (notes / "60 of 1").exists():
                threading.Event().wait(0.1)
            while (step, world) == (60, 1):
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


def curve(encoder: Artifact) -> dict[int, float]:
    history = mlflow.MlflowClient().get_metric_history(encoder.manifest["run_id"], "loss")
    return {point.step: point.value for point in history}


def test_a_run_goes_on_with_one_worker_and_with_two_when_there_is_room_again(
    tiny_ranker, reddit_corpus, tokenize_in_process, tmp_path
):
    """With the losses and weights of one that nothing disturbs."""
    tokenizer = External(str(tiny_ranker("bi").local() / "context_encoder"), "")
    tokens = tokenize_in_process(reddit_corpus, tokenizer, tmp_path / "tokens", valid_share=0.1)
    options = (
        "--corpus", tokens.artifact.uri, "--shape.layers", 1, "--shape.width", 16,
        "--shape.heads", 2, "--shape.positions", 96, "--pretrain.batch-tokens", 480,
        "--pretrain.micro-batch-tokens", 120, "--pretrain.max-context-tokens", 40,
        "--pretrain.max-response-tokens", 20, "--pretrain.steps", STEPS,
        "--pretrain.window-rows", 64, "--loop.warmup-steps", 10, "--loop.precision", "fp32",
        "--loop.epsilon", 1e-4, "--loop.checkpoint-every-steps", 10, "--loop.log-every-steps", 1,
        "--loop.validate-every-steps", 0, "--loop.validate-every-epochs", 0,
        "--resources.cpus-per-worker", 1,
    )  # fmt: skip
    alone = [str(option) for option in (*options, "--output", tmp_path / "alone")]
    with executors.in_this_process():
        pretrain.run(parse(pretrain.Config, alone, "test"))

    notes, output = tmp_path / "notes", tmp_path / "elastic"
    notes.mkdir()
    elastic = ("--output", output, "--resources.workers", 2, "--resources.min-workers", 1)
    command = [sys.executable, "-c", DRIVER, notes, *options, *elastic]
    with nodes_of_one_core(2) as nodes, (tmp_path / "log").open("w") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": nodes.address,
                       "RAY_AUTH_MODE": "token"}  # fmt: skip
        process = subprocess.Popen(
            list(map(str, command)), cwd=ROOT, env=environment, start_new_session=True,
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            wait_until((notes / "30 of 2").exists, process)
            driver = (notes / "driver").read_text()
            victims = [n for n, node in enumerate(nodes.workers) if node.unique_id != driver]
            nodes.kill(victims[0])
            wait_until((notes / "60 of 1").exists, process)
            nodes.add()
            assert process.wait(timeout=300) == 0, Path(log.name).read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
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
