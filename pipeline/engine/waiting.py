"""Waits for cores and GPUs of a cluster: says who holds them, and gives up after `--max-wait-minutes`.

A service beside the jobs holds its cores for ever, and another job holds its own until its end. Ray lets a
task, an actor or a training wait without a word and without an end. So a job waits here before it starts
any, in a placement group: Ray reserves the room for all processes at once, and an autoscaler starts nodes
for it.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.config import BadInput, Stopped, max_wait_minutes
from pipeline.engine import executors

# The processes of a job's last stage have ended by then.
_SILENT_S = 4
_LOOK_EVERY_S = 5
_SAY_EVERY_S = 60.0
# A cluster that is being started has its nodes by then.
_GRACE_S = 30.0
# Ray's label of nodes that an autoscaler knows: `ray up` and KubeRay set it.
_AUTOSCALED = "ray.io/node-group"

Resources = dict[str, float]


@dataclass(frozen=True)
class Need:
    """Processes that run at the same time, and what each of them needs of its node."""

    cpus: float
    gpus: int = 0
    processes: int = 1

    @property
    def each(self) -> Resources:
        needed = {"CPU": float(self.cpus), "GPU": float(self.gpus)}
        return {name: value for name, value in needed.items() if value}

    def count_on(self, nodes: list[Resources]) -> int:
        """The number of such processes that fit on nodes with these resources."""
        return sum(
            min(int(node.get(name, 0) // value) for name, value in self.each.items())
            for node in nodes
        )

    def fits_idle_nodes(self) -> bool:
        """Whether the processes fit on the nodes that are up, if all are idle."""
        return self.count_on(_all_nodes()) >= self.processes

    def __str__(self) -> str:
        """ "2 CPUs, 1 GPU", or "3 processes with 2 CPUs, 1 GPU each" """
        text = _text(self.each)
        return text if self.processes == 1 else f"{self.processes} processes with {text} each"


def await_room(
    cpus: float, gpus: int = 0, processes: int = 1, nodes_may_return: bool = False
) -> None:
    """Returns once so many processes with these cores and GPUs fit on the cluster at the same time.

    Raises BadInput where no node that is up or can be started has that, and Stopped where the room is not
    free after `--max-wait-minutes`. `nodes_may_return`: a node that was lost may be back later, so only the
    limit ends the wait.
    """
    if executors.current():
        return
    from ray.util.placement_group import placement_group, remove_placement_group

    need = Need(cpus, gpus, processes)
    if not _is_joined() and not need.fits_idle_nodes():
        raise BadInput(_refusal(need))
    group = placement_group([need.each] * processes)
    try:
        _wait(group, need, nodes_may_return)
    finally:
        remove_placement_group(group)


def await_node(cpus: float, gpus: int = 0) -> None:
    """Returns once a node is up on which such a process fits beside services, though others may keep it busy.

    Raises as `await_room`.
    """
    if not executors.current() and not Need(cpus, gpus).count_on(nodes_beside_services()):
        await_room(cpus, gpus)


def _wait(group: Any, need: Need, nodes_may_return: bool) -> None:
    if group.wait(_SILENT_S):
        return
    began = said_at = time.monotonic()
    limit_s = 60 * max_wait_minutes()
    said = ""
    while (waited_s := time.monotonic() - began) < limit_s:
        if (
            not nodes_may_return
            and not need.fits_idle_nodes()
            and (_is_refused(group) if may_grow() else waited_s > _GRACE_S)
        ):
            raise BadInput(_refusal(need))
        state = _state(need)
        if not said or (state != said and time.monotonic() - said_at > _SAY_EVERY_S):
            print(f"waits for {need}: {state}", file=sys.stderr, flush=True)
            said, said_at = state, time.monotonic()
        if group.wait(int(max(1, min(_LOOK_EVERY_S, limit_s - waited_s)))):
            return
    raise Stopped(
        f"waited {max_wait_minutes():g} minutes for {need}: {_state(need)}; the same command resumes, and "
        "--max-wait-minutes waits longer"
    )


def _is_refused(group: Any) -> bool:
    """Whether the autoscaler says that no node that it could start has room for the group.

    Ray's older autoscaler (version 1) says nothing: the wait ends by its limit where the cluster is known to
    grow (`may_grow`), and else after `_GRACE_S`.
    """
    messages = (str(event["message"]) for event in _of_state_api("list_cluster_events"))
    return any("No available node types" in text and group.id.hex() in text for text in messages)


def _refusal(need: Need) -> str:
    if need.processes == 1:
        return (
            f"--resources: needs {need}; no node of the cluster has that, and none that has can be started "
            f"(largest node now: {_largest_node()})"
        )
    fitting = need.count_on(_all_nodes())
    return (
        f"--resources: {need.processes} workers need {_text(need.each)} each; {fitting} of them fit on the "
        "cluster, which starts no more nodes; fewer --resources.workers, or --resources.min-workers 1 to "
        "train on those that fit"
    )


def _state(need: Need) -> str:
    """ "8 of 10 CPUs free, 2 held by Serve" """
    import ray

    if not need.fits_idle_nodes():
        return (
            f"no node that is up has room for that (largest: {_largest_node()}); `ray status` says which "
            "ones are being started"
        )
    total, free = ray.cluster_resources(), ray.available_resources()
    parts = []
    for name in need.each:
        held = {holder: amounts[name] for holder, amounts in _holders().items() if name in amounts}
        rest = total.get(name, 0) - free.get(name, 0) - sum(held.values())
        if rest > 0:
            held["others"] = rest
        by = "".join(f", {amount:g} held by {holder}" for holder, amount in held.items())
        parts.append(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}s free{by}")
    return "; ".join(parts)


def _holders() -> dict[str, Resources]:
    """What actors of the cluster hold, by a name for a person."""
    import ray

    this_job = ray.get_runtime_context().get_job_id()
    holders: dict[str, Counter[str]] = {}
    for actor in _actors():
        if actor.ray_namespace == "serve":
            name = "Serve"
        elif actor.is_detached:
            name = f"actor {actor.name or actor.class_name}"
        else:
            name = "this job" if actor.job_id == this_job else f"job {actor.job_id}"
        holders.setdefault(name, Counter()).update(actor.required_resources)
    return {name: dict(amounts) for name, amounts in holders.items()}


def _all_nodes() -> list[Resources]:
    """The resources of the nodes that are up, without those that a node has none of."""
    return [node["Resources"] for node in _nodes()]


def nodes_beside_services() -> list[Resources]:
    """The resources of the nodes that are up, less what lasting actors hold, such as replicas of Serve.

    Other jobs hold theirs until they end: a job waits for them.
    """
    if executors.current():
        return [{"CPU": float(os.cpu_count() or 1)}]
    held: dict[str, Counter[str]] = {}
    for actor in _actors():
        if actor.is_detached:
            held.setdefault(actor.node_id, Counter()).update(actor.required_resources)
    return [
        {
            name: value - held.get(node["NodeID"], Counter())[name]
            for name, value in node["Resources"].items()
        }
        for node in _nodes()
    ]


def may_grow() -> bool:
    """Whether an autoscaler may start nodes for tasks that wait."""
    return any(_AUTOSCALED in node["Labels"] for node in _nodes())


def _nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _is_joined() -> bool:
    """Whether the cluster is another process's; in one of our own nobody else runs."""
    return "RAY_ADDRESS" in os.environ


def _actors() -> Iterator[Any]:
    """The living actors of the cluster that hold something, of all its jobs and services."""
    for actor in _of_state_api("list_actors", filters=[("state", "=", "ALIVE")], detail=True):
        if actor.required_resources:
            yield actor


def _of_state_api(function: str, **options: Any) -> list[Any]:
    """What the cluster's dashboard knows; nothing where it has none, or none that this node reaches."""
    if not _is_joined():
        return []
    import ray
    from ray.util import state

    address = ray.get_runtime_context().gcs_address
    try:
        entries: list[Any] = getattr(state, function)(
            address=address, limit=10_000, raise_on_missing_output=False, **options
        )
    except Exception:
        return []
    return entries


def _largest_node() -> str:
    nodes = [{name: node.get(name, 0) for name in ("GPU", "CPU")} for node in _all_nodes()]
    return _text(max(nodes, key=lambda node: (node["GPU"], node["CPU"]), default={})) or "none"


def _text(resources: Resources) -> str:
    """ "2 CPUs, 1 GPU" """
    parts = (f"{n:g} {name}{'' if n == 1 else 's'}" for name, n in resources.items() if n)
    return ", ".join(parts)
