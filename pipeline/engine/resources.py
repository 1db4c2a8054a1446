"""Shares out the cores and GPUs of a cluster, and tells their precision.

A cluster may have only its head, which does no work, until a task needs a node, and it may have a service,
which keeps its cores. Shares are of what is left (`pipeline.engine.waiting`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

from pipeline.engine import executors
from pipeline.engine.waiting import Need, await_node, await_room, may_grow, nodes_beside_services
from pipeline.models.precision import Precision, Resolved, resolve_precision


def cpus_each(processes: int, gpu: bool = False, chosen: int = 0) -> int:
    """Cores to ask for, for each of so many processes; waits for a node where one process fits.

    `chosen`: what the configuration says; 0: with a GPU each, the cores that its node has for each of
    its GPUs; otherwise the cores of all nodes that are up, shared out, and no more than one node has. The
    cores and GPUs of services (`nodes_beside_services`) are left out.

    Raises BadInput and Stopped as `await_room`.
    """
    await_node(chosen or 1, int(gpu))
    if chosen:
        return chosen
    nodes = nodes_beside_services()
    if gpu:
        shares = [node["CPU"] // node["GPU"] for node in nodes if node.get("GPU", 0) >= 1]
        return max(1, int(min(shares, default=1)))
    cores = [node.get("CPU", 0) for node in nodes]
    share = min(int(sum(cores)) // processes, int(max(cores)))
    while share > 1 and Need(share).count_on(nodes) < processes:
        share -= 1  # 2 of 4 cores do not fit on nodes of 3 and 5
    return max(1, share)


def fitting(cpus: float, gpus: int = 0) -> int:
    """Number of processes with these cores and GPUs that fit on the nodes that are up, beside services."""
    return Need(cpus, gpus).count_on(nodes_beside_services())


def largest_memory() -> int:
    """Bytes for tasks on the node with the most memory, among the nodes with a core."""
    return max(_memory_of_nodes(), default=0)


def total_memory() -> int:
    """Bytes for tasks on all nodes with a core."""
    return sum(_memory_of_nodes())


def _memory_of_nodes() -> list[int]:
    return [int(node.get("memory", 0)) for node in nodes_beside_services() if node.get("CPU")]


def best_device() -> torch.device:
    """The GPU that this process may use, else the CPU.

    A task or an actor may use those it asked for; since Ray 2.60 it sees all of its node.
    """
    import torch

    allowed = torch.cuda.is_available()
    ray = sys.modules.get("ray")  # a process without it, such as a notebook's, is no worker
    if ray and ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
        allowed = allowed and bool(ray.get_gpu_ids())
    return torch.device("cuda" if allowed else "cpu")


def precision_of_tasks(precision: Precision, gpu: bool) -> Resolved:
    """The precision that "auto" means for the cluster's tasks, on GPUs or not; a task looks it up.

    Raises BadInput for int8 on GPUs.
    """
    import torch

    if precision != "auto":
        return resolve_precision(precision, torch.device("cuda" if gpu else "cpu"))
    if executors.current():
        return _precision_here(precision)
    import ray

    await_room(1, int(gpu))
    if not gpu and _is_only_node():
        return resolve_precision(precision, torch.device("cpu"))  # a task would take 3 s
    # A core, so that it is not the head's processor that is looked at.
    task = ray.remote(num_cpus=1, num_gpus=int(gpu))(_precision_here)
    resolved: Resolved = ray.get(task.remote(precision))
    return resolved


def _precision_here(precision: Precision) -> Resolved:
    return resolve_precision(precision, best_device())


def _is_only_node() -> bool:
    """Whether tasks can run on this process's node only."""
    import ray

    up = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    return up == [ray.get_runtime_context().get_node_id()] and not may_grow()
