"""How a cluster's cores and GPUs are shared out, and what they compute in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

from pipeline.models.precision import Precision, Resolved, resolve_precision


def cpus_each(processes: int) -> int:
    """Cores for each of so many processes: the cluster's, shared out, and no more than a node has.

    Nodes that an autoscaler has yet to start do not count; a process gets one core at least.
    """
    import ray

    nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    return max(1, min(int(sum(nodes)) // processes, int(max(nodes, default=0))))


def best_device() -> torch.device:
    """The GPU that this process may use, else the CPU.

    A task or an actor may use those it asked for; since Ray 2.60 it sees all of its node.
    """
    import ray
    import torch

    allowed = torch.cuda.is_available()
    if ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
        allowed = allowed and bool(ray.get_gpu_ids())
    return torch.device("cuda" if allowed else "cpu")


def precision_of_tasks(precision: Precision, gpu: bool) -> Resolved:
    """What a precision is where the cluster's tasks run, on GPUs or not: one of them looks."""
    if precision != "auto":
        return precision
    import ray

    task = ray.remote(num_cpus=0, num_gpus=int(gpu))(_precision_here)
    found: Resolved = ray.get(task.remote(precision))
    return found


def _precision_here(precision: Precision) -> Resolved:
    return resolve_precision(precision, best_device())
