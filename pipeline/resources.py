"""How a cluster's cores are shared out."""

from __future__ import annotations

import ray


def cpus_each(processes: int) -> int:
    """Cores for each of so many processes: the cluster's, shared out, and no more than a node has.

    Nodes that an autoscaler has yet to start do not count; a process gets one core at least.
    """
    nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    return max(1, min(int(sum(nodes)) // processes, int(max(nodes, default=0))))
