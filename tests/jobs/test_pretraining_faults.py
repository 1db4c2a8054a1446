"""jobs.pretrain when something dies: what is left, what the job says, and that the same command goes on."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import numpy as np
import psutil
import pyarrow as pa
import pytest
import ray.cloudpickle
import torch

from jobs import pretrain
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import BadInput, parse
from pipeline.corpora.schema import EXAMPLE
from pipeline.engine import executors
from pipeline.engine.draft import draft
from pipeline.models.encoder import Encoder
from pipeline.models.pretraining_heads import PretrainingModel
from pipeline.models.settings import Shape
from pipeline.models.sources import External
from pipeline.models.tokens import Tokenizer, Tokens
from pipeline.training import estimate
from pipeline.training.checkpoint import read_saved
from pipeline.training.pretraining import Pretraining
from tests.helpers import INTERRUPTED, TERMINATED, curve, same_weights, wait_until

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests
pytestmark = pytest.mark.timeout(900)  # some train three times, and Ray starts each in seconds

STEPS = 90
SHAPE = (
    "--encoder.layers", 1, "--encoder.width", 16, "--encoder.heads", 2, "--encoder.positions", 96,
)  # fmt: skip
SETTINGS = (
    "--pretrain.batch-tokens", 480, "--pretrain.micro-batch-tokens", 120,
    "--pretrain.max-context-tokens", 40, "--pretrain.max-response-tokens", 20,
    "--pretrain.window-rows", 16, "--pretrain.valid-examples", 20,
    "--loop.warmup-steps", 10, "--loop.learning-rate", 0.003, "--loop.precision", "fp32",
    "--loop.epsilon", 1e-4,  # Adam makes no step of a gradient that is 0 but for rounding
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
    """`command(output, workers=2, …)`: the job's arguments; later ones replace earlier ones. `new=False`: the
    encoder has its shape from a published one."""

    def arguments(
        output: Path, *more: object, workers: int = 2, steps: int = STEPS, new: bool = True
    ) -> list[str]:
        given = ("--corpus", tokens.uri, "--output", output, *(SHAPE if new else ()), *SETTINGS,
                 "--resources.workers", workers, "--pretrain.steps", steps, *more)  # fmt: skip
        return [str(argument) for argument in given]

    return arguments


@pytest.fixture(scope="module")
def whole(local_ray, command, tmp_path_factory) -> SimpleNamespace:
    """A run that nothing disturbs, by two workers."""
    output = tmp_path_factory.mktemp("whole") / "encoder"
    summary = pretrain.run(parse(pretrain.Config, command(output), "test"))
    return SimpleNamespace(artifact=open_artifact(str(output), "encoder"), summary=summary)


@pytest.fixture(scope="module")
def whole_here(tokens, command, tmp_path_factory) -> SimpleNamespace:
    """A fifth of it, by one rank in this process."""
    output = tmp_path_factory.mktemp("whole-here") / "encoder"
    with executors.in_this_process():
        summary = pretrain.run(parse(pretrain.Config, command(output, steps=18), "test"))
    return SimpleNamespace(artifact=open_artifact(str(output), "encoder"), summary=summary)


def points(encoder: Artifact) -> list[tuple[int, float]]:
    """All points of the curve of losses; a step that was computed twice has two."""
    history = mlflow.MlflowClient().get_metric_history(encoder.manifest["run_id"], "loss")
    return sorted((point.step, point.value) for point in history)


def checkpoints(output: Path) -> list[Path]:
    """The folders that are whole, the oldest first; the others may be in the making."""
    found = []
    for folder in sorted(Path(f"{output}.partial").glob("_checkpoints/training_*/checkpoint_*")):
        with suppress(BadInput, OSError):
            read_saved(folder)
            found.append(folder)
    return found


def processes(title: bytes) -> Iterator[int]:
    """Those of this test session's own clusters whose command line has the title."""
    token = f"RAY_AUTH_TOKEN={os.environ['RAY_AUTH_TOKEN']}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            named = title in (folder / "cmdline").read_bytes()
            if named and token in (folder / "environ").read_bytes():
                yield int(folder.name)


# Processes die. One of several workers: tests/cluster/test_chaos.py, with its node


@pytest.mark.long
@pytest.mark.parametrize("dies", ["driver and cluster", "cluster"])
def test_a_killed_job_ends_with_the_same_weights(
    start_job, run_job, command, whole, tmp_path, dies
):
    """Also with more steps than it was started for, and past a checkpoint that was not complete and one that
    is damaged."""
    output, titles = tmp_path / "encoder", (b"raylet", b"gcs_server", b"ray::")
    others = {pid for title in titles for pid in processes(title)}

    def of_cluster() -> set[int]:
        return {pid for title in titles for pid in processes(title)} - others

    process = start_job("pretrain", *command(output, steps=STEPS - 1))
    wait_until(lambda: len(checkpoints(output)) == 2, process)
    if dies == "cluster":
        for pid in of_cluster():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert process.wait() != 0
    else:
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        # Workers, which have groups of their own, train on and save until they miss their cluster.
        for pid in of_cluster():
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).wait(timeout=60)
    assert not output.exists()
    last = checkpoints(output)[-1]
    resumed_at = read_saved(last).state["step"]
    partial = last.with_name("checkpoint_2100-01-01_00-00-00.000000")
    partial.mkdir()
    data = (last / "state.safetensors").read_bytes()
    (partial / "state.safetensors").write_bytes(data[: len(data) // 2])
    damaged = shutil.copytree(last, last.with_name("checkpoint_2099-01-01_00-00-00.000000"))
    (damaged / "state.safetensors").write_bytes(data[:-100].ljust(len(data), b"\0"))

    finished = run_job("pretrain", *command(output))
    assert [line.split(":")[0] for line in finished.stdout.splitlines() if "goes on from" in line] == [
        str(partial), str(damaged),
    ]  # fmt: skip
    assert finished.summary["already_done"] is False
    encoder = open_artifact(str(output), "encoder")
    assert same_weights(encoder.local(), whole.artifact.local())
    # Points that the driver had not sent to MLflow yet when it was killed are lost; none is wrong, and
    # none is missing after the checkpoint.
    shown, expected = curve(encoder), curve(whole.artifact)
    assert {step: expected[step] for step in shown} == shown
    assert set(range(resumed_at + 1, STEPS + 1)) <= shown.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["encoder"]


@pytest.mark.long
def test_ctrl_c_ends_a_job_which_can_go_on(start_job, command, tmp_path):
    # A shell's background job ignores SIGINT, and so would what it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = start_job("pretrain", *command(tmp_path / "encoder"))
    wait_until(lambda: checkpoints(tmp_path / "encoder"), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == INTERRUPTED
    assert not (tmp_path / "encoder").exists()


def said_step(error: str) -> int:
    """The step that a terminated job says it has saved."""
    (step,) = re.findall(r"terminated; step (\d+) is saved", error)
    return int(step)


@pytest.mark.long
@pytest.mark.parametrize("target", ["group", "all"])
def test_a_job_that_gets_sigterm_saves_its_step_and_goes_on_from_there(
    start_job, run_job, command, whole, tmp_path, target
):
    """Two workers of a Ray that the job has started. group: as `timeout` and a shell's `kill %1` send it, to
    Ray's own processes, too. all: as systemd and Slurm send it, to the workers and other actors, too."""
    argv = command(tmp_path / "encoder")
    process = start_job("pretrain", *argv, output=tmp_path / "log")
    wait_until(lambda: checkpoints(tmp_path / "encoder"), process)
    others = psutil.Process(process.pid).children(recursive=True) if target == "all" else []
    os.killpg(process.pid, signal.SIGTERM)
    for other in others:
        with suppress(psutil.NoSuchProcess):
            other.terminate()
    assert process.wait(timeout=120) == TERMINATED
    said = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert said["exit_code"] == TERMINATED
    last = read_saved(checkpoints(tmp_path / "encoder")[-1])
    assert last.state["step"] == said_step(said["error"]) < STEPS

    assert run_job("pretrain", *argv).code == 0
    encoder = open_artifact(str(tmp_path / "encoder"), "encoder")
    assert same_weights(encoder.local(), whole.artifact.local())
    assert points(encoder) == sorted(curve(whole.artifact).items())  # no step was computed twice


def train_workers(job: subprocess.Popen) -> list[psutil.Process]:
    """Those of a job that has started a Ray of its own."""
    below = psutil.Process(job.pid).children(recursive=True)
    return [each for each in below if "RayTrainWorker" in " ".join(each.cmdline())]


@pytest.mark.long
def test_a_worker_that_gets_sigterm_saves_its_step_and_others_go_on(
    start_job, command, whole, tmp_path
):
    argv = command(tmp_path / "encoder")
    process = start_job("pretrain", *argv, output=tmp_path / "log")
    wait_until(lambda: checkpoints(tmp_path / "encoder"), process)
    train_workers(process)[-1].terminate()
    assert process.wait(timeout=200) == 0
    assert re.search(r"is going; step \d+ is saved", (tmp_path / "log").read_text())
    encoder = open_artifact(str(tmp_path / "encoder"), "encoder")
    assert same_weights(encoder.local(), whole.artifact.local())
    assert points(encoder) == sorted(curve(whole.artifact).items())


@pytest.mark.long
def test_a_worker_that_dies_too_often_is_one_line(start_job, command, tmp_path):
    argv = command(tmp_path / "encoder", "--resources.max-restarts", 0)
    process = start_job("pretrain", *argv, output=tmp_path / "log")
    wait_until(lambda: checkpoints(tmp_path / "encoder"), process)
    train_workers(process)[-1].kill()
    assert process.wait(timeout=200) == 1
    said = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert said["error"].startswith("a worker died, after 0 restarts (resources.max_restarts); ")
    assert "the same command resumes" in said["error"]


@dataclass(frozen=True)
class Terminated(Pretraining):
    """Its process gets SIGTERM in step 13 of a run from the start."""

    def build(self, rank, world):
        task = Pretraining.build(self, rank, world)
        before_step, is_first = task.before_step, []

        def terminate(step):
            before_step(step)
            is_first.append(step)
            if step == 12 and is_first[0] == 0:
                os.kill(os.getpid(), signal.SIGTERM)

        task.before_step = terminate
        return task


def test_a_job_that_gets_sigterm_goes_on_from_the_step_that_it_names(
    run_job_here, command, whole_here, tmp_path, monkeypatch
):
    monkeypatch.setattr("pipeline.training.pretraining.Pretraining", Terminated)
    argv = command(tmp_path / "encoder", "--loop.checkpoint-every-steps", 100, steps=18)
    finished = run_job_here("pretrain", *argv)
    assert finished.code == TERMINATED
    step = said_step(line_of(finished))
    assert 13 <= step < 18
    (saved,) = checkpoints(tmp_path / "encoder")
    assert read_saved(saved).state["step"] == step
    fewer = run_job_here("pretrain", *command(tmp_path / "encoder", steps=12)).refusal
    assert f"steps: 12 is not allowed; allowed: at least {step}" in fewer
    assert run_job_here("pretrain", *argv).summary["counts"]["steps"] == 18
    encoder = open_artifact(str(tmp_path / "encoder"), "encoder")
    assert same_weights(encoder.local(), whole_here.artifact.local())
    assert points(encoder) == sorted(curve(whole_here.artifact).items())


NO_BETTER = ("--loop.learning-rate", 1e-20, "--loop.validate-every-steps", 2,
             "--loop.stop-after-validations", 1)  # fmt: skip
"""Weights that hardly move: the validation at step 4 is no better than that at step 2."""


@pytest.mark.slow
def test_a_run_that_stopped_early_can_be_continued(run_job_here, command, tmp_path, monkeypatch):
    more = NO_BETTER
    first = run_job_here("pretrain", *command(tmp_path / "first", *more)).summary
    assert first["counts"]["steps"] == 4
    again = command(tmp_path / "again", "--continue-from", tmp_path / "first", *more)
    monkeypatch.setattr("pipeline.training.estimate._MEASURED_SECONDS", 0.0)
    said = run_job_here("pretrain", *again, "--dry-run", "true").summary
    assert said["estimate"]["steps"] == STEPS - 4
    assert said["tokens_to_train"] == (STEPS - 4) * 480
    assert run_job_here("pretrain", *again).summary["counts"]["steps"] == 6


@pytest.mark.slow
def test_a_run_that_stopped_early_and_was_killed_trains_no_further_step(
    run_job_here, command, tmp_path, monkeypatch
):
    more = NO_BETTER
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.training.launch.collect_model", interrupted)
        assert run_job_here("pretrain", *command(tmp_path / "out", *more)).code == 130
    summary = run_job_here("pretrain", *command(tmp_path / "out", *more)).summary
    assert summary["counts"]["steps"] == summary["metrics"]["step"] == 4
    assert summary["metrics"]["best_step"] == 2


def interrupted(*given: object) -> None:
    raise KeyboardInterrupt


# Faults that are said in one line


@dataclass(frozen=True)
class FullDisk(Pretraining):
    """The disk of the workers is full; each attempt leaves a file in `notes`, of the last rank."""

    notes: Path = Path()
    driver: int = 0

    def build(self, rank, world):
        task = Pretraining.build(self, rank, world)
        if os.getpid() == self.driver:
            return task
        if rank == world - 1:
            (self.notes / str(os.getpid())).write_text("")
        before_step = task.before_step

        def fill(step):
            before_step(step)
            if step == 12:  # a checkpoint has some 100 kB
                hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
                resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, hard))

        task.before_step = fill
        return task


@pytest.fixture
def faulty(run_job, command, tmp_path):
    """`faulty(output, …)`: how the job ended, and how many attempts there were."""

    def run(output: Path, *more: object):
        notes = tmp_path / "attempts"
        notes.mkdir()
        recipe = functools.partial(FullDisk, notes=notes, driver=os.getpid())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pipeline.training.pretraining.Pretraining", recipe)
            finished = run_job("pretrain", *command(output, *more))
        return finished, len(list(notes.iterdir()))

    return run


def line_of(finished) -> str:
    """The one line that says why the job failed."""
    lines = [line for line in finished.stderr.splitlines() if line.startswith("python -m jobs.")]
    assert len(lines) == 1, finished.stderr
    assert "Traceback" not in finished.stderr
    return lines[0]


@pytest.mark.long
def test_a_full_disk_is_one_line_and_the_job_goes_on_when_there_is_room(
    faulty, run_job, command, whole, tmp_path
):
    output = tmp_path / "out"
    finished, attempts = faulty(output, "--resources.max-restarts", 0)
    assert (finished.code, attempts) == (1, 1)
    assert "File too large" in line_of(finished)
    assert read_saved(checkpoints(output)[-1]).state["step"] == 10
    assert not output.exists()
    assert run_job("pretrain", *command(output)).code == 0
    encoder = open_artifact(str(output), "encoder")
    assert same_weights(encoder.local(), whole.artifact.local())
    assert curve(encoder) == curve(whole.artifact)


def test_an_output_that_cannot_be_written_is_one_line(run_job_here, command, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    finished = run_job_here("pretrain", *command(tmp_path / "file" / "out"))
    assert finished.code == 1
    assert os.strerror(errno.ENOTDIR) in line_of(finished)


# More steps


@pytest.mark.long
def test_a_run_from_a_published_encoder_continues_as_it(run_job_here, command, tokens, tmp_path):
    """Not as one of --shape, whose weights have other names."""
    tokenizer = Tokenizer.load(tokens.local() / "tokenizer")
    shape = Shape(architecture="modernbert", layers=3, width=16, heads=2, positions=96,
                  global_attention_every=3)  # fmt: skip
    special = {"pad": tokenizer.pad, "cls": tokenizer.cls, "sep": tokenizer.sep}
    Encoder.new(shape, len(tokenizer), special).save(tmp_path / "published")
    tokenizer.save(tmp_path / "published")
    of_published = functools.partial(command, workers=1, new=False)
    first = of_published(tmp_path / "first", "--start", tmp_path / "published", steps=3)
    assert run_job_here("pretrain", *first).code == 0
    again = of_published(tmp_path / "again", "--continue-from", tmp_path / "first", steps=6)
    assert run_job_here("pretrain", *again).summary["counts"]["steps"] == 6
    files = [tmp_path / name / "config.json" for name in ("first", "again")]
    configs = [json.loads(file.read_text()) for file in files]
    assert configs[0] == configs[1] and configs[0]["model_type"] == "modernbert"


@pytest.mark.long
def test_a_published_run_continues_with_more_steps(run_job_here, command, whole_here, tmp_path):
    """To the weights of one long run."""
    assert run_job_here("pretrain", *command(tmp_path / "short", steps=12)).code == 0
    more = ("--continue-from", tmp_path / "short")
    finished = run_job_here("pretrain", *command(tmp_path / "long", *more, steps=18))
    assert finished.summary["counts"]["steps"] == 18
    encoder = open_artifact(str(tmp_path / "long"), "encoder")
    assert same_weights(encoder.local(), whole_here.artifact.local())
    assert encoder.manifest["precision"] == "fp32"
    short = open_artifact(str(tmp_path / "short"), "encoder")
    assert {**curve(short), **curve(encoder)} == curve(whole_here.artifact)
    assert not same_weights(short.local(), whole_here.artifact.local())

    def refusal(*options: object, **changed: int) -> str:
        refused = run_job_here("pretrain", *command(tmp_path / "no", *options, **changed)).refusal
        assert not list(tmp_path.glob("no*"))
        return refused

    assert "pretrain.steps: 12" in refusal(*more, steps=12)
    assert "pretrain.steps: 10" in refusal(*more, steps=10)
    assert "loop.weight_decay is 0.0 there, 0.2 here" in refusal(*more, "--loop.weight-decay", 0.2)
    other = refusal(*more, "--pretrain.objective", "mlm")
    assert "pretrain.objective is 'joint' there, 'mlm' here" in other
    assert "shape.layers is 1 there, 2 here" in refusal(*more, "--encoder.layers", 2)
    fewer = run_job_here("pretrain", *command(tmp_path / "short", steps=10)).refusal
    assert "was trained for 12 steps, not 10" in fewer


SHARDED = ("--resources.shard-weights", "true", "--resources.gpu", "true")


@pytest.mark.parametrize(("options", "parts"), [
    (["--weights", "[1, 2]"], ["weights", "1: one for each corpus"]),
    (["--weights", "[0]"], ["weights: (0.0,) is not allowed", "above 0"]),
    (["--corpus", "[]"], ["corpus: 'none' is not allowed; allowed: one or more"]),
    (["--resources.workers", 5], ["resources.workers: 5", "at most 4"]),
    (["--resources.shard-weights", "true"], ["shard_weights: True", "false without resources.gpu"]),
    ([*SHARDED, "--resources.workers", 3], ["resources.workers: 3", "a divisor of 4"]),
    ([*SHARDED, "--resources.workers", 4, "--resources.min-workers", 2],
     ["resources.min_workers: 2", "each number up to 4 divides 4"]),
    (["--loop.validate-every-epochs", 0], ["validate_every_epochs: 0", "validate_every_steps 2000"]),
    (["--loop.head-lr-factor", 3], ["loop.head_lr_factor: 3.0 has", "(no option here)"]),
    (["--start", "x", "--continue-from", "y"], ["start: 'x'", "--continue-from"]),
    (["--pretrain.objective", "mlm", "--pretrain.random-share", 0.3],
     ["pretrain.random_share: 0.3 has no effect", "'joint', 'alternate' (here 'mlm')"]),
    (["--pretrain.max-context-tokens", 90], ["max_context_tokens", "positions, 96"]),
])  # fmt: skip
def test_a_misfit_is_refused_before_anything_is_written(
    run_job_here, command, tmp_path, options, parts
):
    more = ["--pretrain.batch-tokens", 480, "--pretrain.micro-batch-tokens", 120]
    if "--pretrain.max-context-tokens" in options:
        more = ["--pretrain.micro-batch-tokens", 0]
    argv = command(tmp_path / "out", *more, *options, new="--start" not in options)
    refusal = run_job_here("pretrain", *argv).refusal
    assert [part for part in parts if part not in refusal] == []
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_what_it_takes_and_writes_nothing(run_job_here, command, tmp_path):
    finished = run_job_here("pretrain", *command(tmp_path / "out", "--dry-run", "true"))
    said, cost = finished.summary, finished.summary["estimate"]
    assert "pretrain: nothing is written; the job would take about" in finished.stdout
    names = {"parameters", "corpus_tokens", "epochs", "tokens_per_s_per_worker", "hours"}
    assert names <= set(said)
    assert (cost["steps"], said["batch_tokens"], said["workers"]) == (STEPS, 480, 2)
    assert cost["input_bytes"] > 0 and cost["memory_bytes"] > 16 * said["parameters"]
    threads = max(1, torch.get_num_threads() // 2)  # of each of two workers
    hours = said["tokens_to_train"] / said["tokens_per_s_per_worker"] / 3600
    assert cost["cpu_hours"] == pytest.approx(hours * threads, rel=0.01)
    assert f"micro-batches, measured on cpu ({threads} threads)" in cost["basis"]
    assert said["tokens_to_train"] == STEPS * 480
    assert said["micro_batches_per_step"] == 4
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_counts_tokens_without_padding(
    run_job_here, command, tmp_path, tokens, monkeypatch
):
    """A step has eight pairs, however short they are: not 640 tokens."""
    monkeypatch.setattr(
        estimate, "_MEASURED_SECONDS", 0.5
    )  # a mean over more than ten micro-batches
    argv = command(tmp_path / "out", "--dry-run", "true", "--pretrain.objective", "contrastive",
                   "--pretrain.batch-tokens", 640, "--pretrain.micro-batch-tokens", 160)  # fmt: skip
    said = run_job_here("pretrain", *argv).summary
    assert said["micro_batches_per_step"] == 4
    assert said["epochs"] == pytest.approx(STEPS * 8 / tokens.rows("train/"), rel=0.35)
    assert said["tokens_to_train"] < 0.6 * STEPS * 640


@pytest.fixture
def computed(monkeypatch) -> list[torch.Size]:
    """[pairs, tokens of the longest] of each micro-batch that is computed; a dry run computes few."""
    forward, shapes = PretrainingModel.forward, list[torch.Size]()

    def noted(model: PretrainingModel, tokens: Tokens, *more: torch.Tensor) -> object:
        shapes.append(tokens.ids_BT.shape)
        return forward(model, tokens, *more)

    monkeypatch.setattr(PretrainingModel, "forward", noted)
    monkeypatch.setattr("pipeline.training.estimate._MEASURED_SECONDS", 0.0)
    return shapes


def test_a_dry_run_computes_two_micro_batches(run_job_here, command, tmp_path, computed):
    """A step of reddit-base has 32 of 32,000 tokens each, so a CPU takes long for one step."""
    more = ("--dry-run", "true", "--pretrain.batch-tokens", 3840)
    argv = command(tmp_path / "out", *more, workers=4)
    said = run_job_here("pretrain", *argv).summary
    assert said["micro_batches_per_step"] == 32
    assert said["tokens_to_train"] == STEPS * 3840
    assert len(computed) == 2
    assert all(pairs * tokens <= 120 for pairs, tokens in computed)


def test_the_memory_of_a_dry_run_is_that_of_training(run_job_here, command, tmp_path, computed):
    """A layer keeps the inputs of its six matrices, and on CPUs the weights of attention before and after
    dropout, in float32."""
    layers, heads, width = 6, 8, 16
    shape = ("--encoder.layers", layers, "--encoder.heads", heads)

    def said(*more: object) -> dict[str, Any]:
        argv = command(tmp_path / "out", "--dry-run", "true", *shape, *more)
        return run_job_here("pretrain", *argv).summary

    whole = said()
    pairs, tokens = computed[0]
    inputs_of_matrices = 4 * pairs * tokens * (5 * width + 4 * width)
    weights_of_attention = 4 * 2 * pairs * heads * tokens**2
    weights = 16 * whole["parameters"]
    activations = whole["estimate"]["memory_bytes"] - weights
    assert activations > layers * (inputs_of_matrices + weights_of_attention)
    sharded = said(*SHARDED)["estimate"]["memory_bytes"]
    assert sharded == weights // 2 + activations
    recomputed = said("--pretrain.gradient-checkpointing", "true")
    assert recomputed["estimate"]["memory_bytes"] - weights < activations / 3
    assert recomputed["memory_is"] == f"{whole['memory_is']}; those of one layer come on top"


def test_on_a_gpu_the_memory_of_a_dry_run_is_the_peak(monkeypatch):
    """Of one GPU that holds all weights; sharded, each of four has a quarter of them."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 10_000)
    monkeypatch.setattr(estimate, "best_device", lambda: torch.device("cuda"))
    memory = functools.partial(estimate._pretraining_memory, 77, 100)
    assert memory(sharded=1)[0] == 10_000
    assert memory(sharded=4)[0] == 10_000 - 1_600 + 400
