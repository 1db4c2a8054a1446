"""Shares out the cores and GPUs of a cluster, and tells their precision.

A cluster may have only its head, which does no work, until a task needs a node. `await_node` asks for a node,
waits for the autoscaler, and refuses needs that no node type meets.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

from pipeline.config import BadInput
from pipeline.models.precision import Precision, Resolved, resolve_precision
from pipeline.tasks import executors

# An autoscaler that starts no node in this time will start none: it looks every 5 s.
_GRACE_S = 30.0
# The processes of a job's last stage have ended by then.
_BUSY_S = 5.0


def await_node(cpus: float, gpus: int = 0) -> None:
    """Returns once a node is up on which a process with so many cores and GPUs fits; says so if others keep
    it busy.

    Raises BadInput where the cluster has no such node and cannot start one.
    """
    import ray

    needed = {"CPU": cpus, "GPU": gpus}
    if any(_process_count(node, needed) for node in _nodes()):
        _say_if_busy(needed)
        return
    text = _text(needed)
    print(f"waiting for a node with {text}", file=sys.stderr, flush=True)
    # The autoscaler starts nodes for tasks that wait; this one has nothing to do.
    task = ray.remote(_no_op).options(num_cpus=cpus, num_gpus=gpus).remote()
    refused_at = time.monotonic() + _GRACE_S
    while not ray.wait([task], timeout=1)[0]:
        autoscaler = _autoscaler(needed)
        if autoscaler.is_starting_nodes:
            refused_at = time.monotonic() + _GRACE_S
        static = autoscaler.has_reported and not autoscaler.may_grow
        if autoscaler.refuses or static or time.monotonic() > refused_at:
            ray.cancel(task)
            raise BadInput(
                f"--resources: a process needs {text}; no node of the cluster has that, and none that "
                f"has can be started (largest node now: {_largest_node()})"
            )


def cpus_each(processes: int, gpu: bool = False, chosen: int = 0) -> int:
    """Cores to ask for, for each of so many processes; waits for a node where one fits.

    `chosen`: what the configuration says; 0: with a GPU each, the cores that its node has for each of
    its GPUs; otherwise the cores of all nodes that are up, shared out, and no more than one node has.

    Raises BadInput as `await_node`.
    """
    await_node(chosen or 1, int(gpu))
    if chosen:
        return chosen
    nodes = _nodes()
    if gpu:
        shares = [node["CPU"] // node["GPU"] for node in nodes if node.get("GPU")]
        return max(1, int(min(shares)))
    cores = [node.get("CPU", 0) for node in nodes]
    share = min(int(sum(cores)) // processes, int(max(cores)))
    while share > 1 and fitting(share) < processes:  # 2 of 4 cores do not fit on nodes of 3 and 5
        share -= 1
    return max(1, share)


def require_room(processes: int, cpus: float, gpus: int = 0) -> None:
    """Says that the cluster starts nodes first, where so many processes that wait for each other do not fit
    on those that are up.

    Raises BadInput where it starts none: they would wait for ever.
    """
    fit_now = fitting(cpus, gpus)
    if fit_now >= processes:
        _say_if_busy({"CPU": processes * cpus, "GPU": processes * gpus})
        return
    given_up_at = time.monotonic() + _GRACE_S
    while not (autoscaler := _autoscaler({})).has_reported and time.monotonic() < given_up_at:
        time.sleep(0.5)
    text = _text({"CPU": cpus, "GPU": gpus})
    if not autoscaler.may_grow:
        raise BadInput(
            f"--resources: {processes} workers need {text} each; {fit_now} of them fit on the cluster, which "
            "starts no more nodes; fewer --resources.workers, or --resources.min-workers 1 to train on those "
            "that fit"
        )
    print(
        f"waiting for nodes: {processes} workers need {text} each, and {fit_now} of them fit now",
        file=sys.stderr,
        flush=True,
    )


def _say_if_busy(needed: dict[str, float]) -> None:
    """Says that the job waits, if the cluster has less than this free for a while, and starts no nodes."""
    if executors.current() or may_grow():
        return
    import ray

    given_up_at = time.monotonic() + _BUSY_S
    while not _process_count(free := ray.available_resources(), needed):
        if time.monotonic() > given_up_at:
            now = _text({name: free.get(name, 0) for name in needed}) or "nothing"
            text = f"waiting for {_text(needed)}: others use the cluster; free now: {now}"
            print(text, file=sys.stderr, flush=True)
            return
        time.sleep(0.1)


def fitting(cpus: float, gpus: int = 0) -> int:
    """Number of processes with these cores and GPUs that fit on the nodes that are up, if all are idle."""
    return sum(_process_count(node, {"CPU": cpus, "GPU": gpus}) for node in _nodes())


def largest_memory() -> int:
    """Bytes for tasks on the node with the most memory, among the nodes with a core."""
    return int(max((node.get("memory", 0) for node in _nodes() if node.get("CPU")), default=0))


def may_grow() -> bool:
    """Whether an autoscaler may start nodes for tasks that wait."""
    return _autoscaler({}).may_grow


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
    """The precision that "auto" means for the cluster's tasks, on GPUs or not; a task looks it up."""
    if precision != "auto":
        return precision
    if executors.current():
        return _precision_here(precision)
    import ray
    import torch

    await_node(1, int(gpu))
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


def _no_op() -> None:
    pass


def _nodes() -> list[dict[str, float]]:
    """The resources of the nodes that are up, without those that a node has none of."""
    if executors.current():
        return [{"CPU": float(os.cpu_count() or 1)}]
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _process_count(node: dict[str, float], needed: dict[str, float]) -> int:
    """The number of processes with these needs that fit on a node."""
    return min(
        (int(node.get(name, 0) // value) for name, value in needed.items() if value), default=0
    )


@dataclass(frozen=True)
class _Autoscaler:
    """The state that the autoscaler reports."""

    has_reported: bool = True
    """False in the first seconds of a cluster."""
    may_grow: bool = True
    is_starting_nodes: bool = False
    refuses: bool = False
    """True where no node type offers the needed resources."""


def _autoscaler(needed: dict[str, float]) -> _Autoscaler:
    """The state of the cluster's autoscaler, whichever of Ray's two it is (2.60).

    The newer one names requests that it cannot satisfy. The older one, and a cluster without any, tell
    which nodes are up and which are being started.
    """
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply
    from ray.experimental.internal_kv import _internal_kv_get

    reply = GetClusterStatusReply()
    address = ray.get_runtime_context().gcs_address
    reply.ParseFromString(GcsClient(address).get_cluster_status(timeout_s=10))
    state = reply.autoscaling_state
    if state.autoscaler_state_version:
        bundle = {name: value for name, value in needed.items() if value}
        refused_bundles = [
            dict(request.resources_bundle) for request in state.infeasible_resource_requests
        ]
        starting = bool(state.pending_instance_requests or state.pending_instances)
        return _Autoscaler(is_starting_nodes=starting, refuses=bundle in refused_bundles)
    if not (text := _internal_kv_get("__autoscaling_status")):
        return _Autoscaler(has_reported=False, may_grow=False)
    report: dict[str, Any] = json.loads(text).get("autoscaler_report") or {}
    # A cluster that starts no nodes names each one that is up: node_<id>.
    only_mirrored = all(name.startswith("node_") for name in report.get("active_nodes", {}))
    starting = bool(report.get("pending_launches") or report.get("pending_nodes"))
    return _Autoscaler(may_grow=not only_mirrored, is_starting_nodes=starting)


def _largest_node() -> str:
    nodes = [{name: node.get(name, 0) for name in ("GPU", "CPU")} for node in _nodes()]
    return _text(max(nodes, key=lambda node: (node["GPU"], node["CPU"]), default={})) or "none"


def _text(resources: dict[str, float]) -> str:
    """ "2 CPUs, 1 GPU" """
    parts = (f"{n:g} {name}{'' if n == 1 else 's'}" for name, n in resources.items() if n)
    return ", ".join(parts)
