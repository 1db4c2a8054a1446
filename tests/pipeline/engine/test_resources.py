"""Which device a process may use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import ray
import torch

from pipeline.config import MAX_WAIT_VARIABLE, BadInput, Stopped
from pipeline.engine import waiting
from pipeline.engine.resources import best_device


def device_on_a_node_with_a_gpu(assigned: list[int]) -> str:
    """Ray Train and Ray Serve run a user's code in a thread of their actors, not in the first one."""
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(ray, "get_gpu_ids", return_value=assigned),
        ThreadPoolExecutor(1) as pool,
    ):
        return pool.submit(best_device).result().type


class Holder:
    def ready(self) -> None: ...


def test_a_task_has_the_gpus_that_it_asked_for(local_ray):
    task = ray.remote(num_cpus=0)(lambda: [device_on_a_node_with_a_gpu(gpus) for gpus in ([], [3])])
    assert ray.get(task.remote()) == ["cpu", "cuda"]
    assert device_on_a_node_with_a_gpu([]) == "cuda"  # a driver has all of its machine


def test_without_gpus_it_is_the_cpu():
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert best_device().type == "cpu"


def test_a_node_that_was_lost_may_return(monkeypatch, capsys):
    """A cluster that starts no nodes is waited for, as one of them may be starting anew."""
    monkeypatch.setattr(waiting.Need, "fits_idle_nodes", lambda need: False)
    monkeypatch.setattr(waiting, "_GRACE_S", -1)
    for name, value in {"may_grow": False, "_refusal": "refused", "_state": "no node"}.items():
        monkeypatch.setattr(waiting, name, lambda *_, value=value: value)
    monkeypatch.setenv(MAX_WAIT_VARIABLE, "0.0001")
    group = mock.Mock(wait=mock.Mock(return_value=False))
    with pytest.raises(BadInput, match="refused"):
        waiting._wait(group, waiting.Need(1), nodes_may_return=False)
    with pytest.raises(
        Stopped, match=r"waited 0\.0001 minutes for 1 CPU: no node; the same command"
    ):
        waiting._wait(group, waiting.Need(1), nodes_may_return=True)
    assert capsys.readouterr().err == "waits for 1 CPU: no node\n"


@pytest.mark.long  # 22 s on two slow cores
def test_a_job_that_waits_for_others_says_so_and_gives_up(local_ray, monkeypatch, capsys):
    monkeypatch.setattr(waiting, "_SILENT_S", 1)
    monkeypatch.setattr(waiting, "_LOOK_EVERY_S", 1)
    monkeypatch.setenv(MAX_WAIT_VARIABLE, "0.02")
    others = ray.remote(num_cpus=2)(Holder).remote()
    ray.get(others.ready.remote())
    state = "1 CPU: 0 of 2 CPUs free, 2 held by others"
    with pytest.raises(Stopped, match=f"waited 0.02 minutes for {state}; the same command resumes"):
        waiting.await_room(1)
    assert capsys.readouterr().err == f"waits for {state}\n"
    ray.kill(others)
    monkeypatch.setenv(MAX_WAIT_VARIABLE, "1")
    waiting.await_room(1, processes=2)
    waiting.await_node(2)
