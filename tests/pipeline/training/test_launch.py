"""How fast a training is, over all its reports, and what it needed; its checkpoints on the node's disk."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import ray.train.torch
import torch
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError

from pipeline.config import MAX_WAIT_VARIABLE, BadInput, Stopped, Terminated
from pipeline.engine import executors
from pipeline.training import launch
from pipeline.training.launch import Pace, _Rank, fit
from pipeline.training.settings import LoopConfig, Workers

CPU = torch.device("cpu")


def test_the_mean_rate_is_all_own_steps_by_all_their_seconds():
    """Of a run that was resumed at step 100: 10 steps in 2 s, then 30 in 1 s."""
    pace = Pace(CPU, 100)
    assert pace.measure(110, 5.0)["mean_steps_per_s"] == 5
    found = pace.measure(140, 30.0)["mean_steps_per_s"]
    assert found == pytest.approx(40 / 3)


@pytest.mark.slow
def test_the_peak_holds_what_was_needed_since_and_not_before():
    np.ones(400 << 20, np.uint8)
    pace = Pace(CPU, 0)
    before = pace.measure(1, 1.0)["peak_memory_mib"]
    np.ones(200 << 20, np.uint8)
    after = pace.measure(2, 1.0)["peak_memory_mib"]
    assert 150 < after - before < 250


def test_a_wait_for_room_in_place_of_a_lost_node_ends(monkeypatch, tmp_path):
    """Ray Train would wait for ever, a minute at a time."""
    limits = []

    def trainer(*args, run_config, **options):
        limits.append(run_config.failure_config.controller_failure_limit)
        error = ray.train.ControllerError(WorkerGroupStartupTimeoutError(2))
        return SimpleNamespace(fit=Mock(side_effect=error))

    monkeypatch.setattr(ray.train.torch, "TorchTrainer", trainer)
    monkeypatch.setenv(MAX_WAIT_VARIABLE, "2.5")
    spec = SimpleNamespace(
        workers=Workers(), threads=1, attempt="first", recipe=SimpleNamespace(loop=LoopConfig()),
        draft=SimpleNamespace(path=lambda *names: str(tmp_path)),
    )  # fmt: skip
    with pytest.raises(Stopped, match=r"within 2\.5 minutes there was no room for another one"):
        launch._fit_workers(spec, None, None)
    assert limits == [3]


def lost(*causes: Exception) -> ray.train.WorkerGroupError:
    """A failure of workers, as Ray Train raises it."""
    return ray.train.WorkerGroupError("workers failed", dict(enumerate(causes)))


@pytest.fixture
def fit_after(monkeypatch, tmp_path):
    """`fit_after([error, …], **workers)`: a training of two workers, whose first attempts fail so.

    Returns how often it waited for room, and whether for nodes that may return.
    """

    def run(failures: list[Exception], **options: int) -> list[tuple[int, bool]]:
        waits = list[tuple[int, bool]]()

        def attempt(*_: object) -> launch.Trained:
            if failures:
                raise failures.pop(0)
            return launch.Trained({}, "", "fp32", True)

        def await_room(threads, gpus, least, nodes_may_return):
            waits.append((least, nodes_may_return))

        for name, replacement in {"_fit_on_cluster": attempt, "await_room": await_room,
                                  "cpus_each": lambda *_: 1}.items():  # fmt: skip
            monkeypatch.setattr(launch, name, replacement)
        draft = SimpleNamespace(path=lambda *parts: str(tmp_path.joinpath(*parts)))
        workers = Workers(**{"workers": 2, "min_workers": 1, "max_restarts": 1, **options})
        fit(SimpleNamespace(), 1, workers, draft, SimpleNamespace(log=print), "training")
        return waits

    return run


def test_a_training_that_lost_workers_waits_for_room_as_at_its_start(fit_after, capsys):
    """With a word, and an end. Ray Train would wait for the least number of workers in silence, for ever."""
    drained = RayActorError(preempted=True)
    assert fit_after([lost(RayActorError()), lost(drained)]) == [(1, False), (1, True), (1, True)]
    line = "a worker, or its node, has failed; the training goes on from its last checkpoint when 1 workers"
    assert capsys.readouterr().out.count(line) == 2


@pytest.mark.parametrize("error", [BadInput("a setting"), Stopped("no numbers"), TypeError("code")])
def test_what_the_same_code_would_do_again_ends_a_run(fit_after, error):
    failed = RuntimeError("a task failed")
    failed.__cause__ = error
    with pytest.raises(ray.train.WorkerGroupError):
        fit_after([lost(RuntimeError("of the other's end"), failed)])


def test_workers_that_fail_too_often_end_a_run(fit_after):
    with pytest.raises(
        Stopped, match=r"^a worker died, after 1 restarts \(resources.max_restarts\); "
    ):
        fit_after([lost(RayActorError()), lost(RayActorError())])
    full = lost(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(ray.train.WorkerGroupError):
        fit_after([full], max_restarts=0)


def test_checkpoints_that_are_not_uploaded_leave_no_files_behind(tmp_path, monkeypatch):
    """Each attempt on a full disk would leave less room on it, and so would each kill."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "checkpoint-of-another").mkdir()
    written = list[list[str]]()

    def rank(keep) -> _Rank:
        spec = SimpleNamespace(draft=SimpleNamespace(staging="s3://b/out"), recipe=None)
        return _Rank(spec, 0, 1, CPU, print, keep, lambda: None, lambda: False)

    def killed(folder, metrics):
        written.append(sorted(path.name for path in folder.iterdir()))

    def full(folder, metrics):
        raise OSError(errno.ENOSPC, "No space left on device")

    state = {"step": 1, "module": {"weight": torch.ones(3)}}
    rank(killed)._save_checkpoint(state, [0])
    assert written == [["cursor-00000.json", "state.json", "state.safetensors"]]
    with pytest.raises(OSError, match="No space left"):
        rank(full)._save_checkpoint(state, [0])
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(AttributeError):  # there is no recipe
        rank(killed).train()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-of-another"]


@dataclass(frozen=True)
class GoneWithRay:
    """SIGTERM comes, and then whatever a Ray without its processes raises."""

    loop: LoopConfig = field(default_factory=LoopConfig)

    def build(self, rank: int, world: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        for thread in threading.enumerate():
            if thread.name == "sigterm":  # it ends when it has noticed
                thread.join()
        raise RuntimeError("the actor is unavailable")


def test_sigterm_to_all_processes_is_one_line(tmp_path):
    """As `timeout`, systemd and Slurm send it: the worker that would save its step is dead, too."""
    draft = SimpleNamespace(
        path=lambda *parts: str(tmp_path.joinpath(*parts)), staging=str(tmp_path)
    )
    with (
        executors.in_this_process(),
        pytest.raises(Terminated, match="the same command resumes at"),
    ):
        fit(GoneWithRay(), 1, Workers(), draft, SimpleNamespace(log=print), "training")
