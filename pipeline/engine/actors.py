"""Processes of a cluster that keep a model in memory, as `--resources.*` describes them."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import require
from pipeline.engine import executors
from pipeline.engine.resources import fitting
from pipeline.engine.waiting import await_node, may_grow


@dataclass(frozen=True, kw_only=True)
class Actors:
    """Processes that keep a model in memory. Their number never changes the output."""

    actors: int = 0
    """Processes at the start; 0: one for each GPU, or else for each core, of the nodes that are up, beside
    services."""
    max_actors: int = 0
    """Most processes while tasks wait, as far as the cluster can grow. 0: `actors`; if this is 0 too and
    the cluster has an autoscaler, as many as there are tasks."""
    cpus_per_actor: int = 0
    """Cores, and threads, of each process; 0: the processes share out the nodes' cores."""
    gpu: bool = False
    """One GPU per actor."""

    def __post_init__(self) -> None:
        require(self.actors >= 0, "resources.actors", self.actors, ">= 0")
        require(self.max_actors == 0 or self.max_actors >= self.actors, "resources.max_actors",
                self.max_actors, f"0, or resources.actors {self.actors} at least")  # fmt: skip
        require(self.cpus_per_actor >= 0, "resources.cpus_per_actor", self.cpus_per_actor, ">= 0")

    def count(self, tasks: int) -> int:
        """Processes at the start, no more than there are tasks.

        Waits for a first node on which one fits. Raises BadInput and Stopped as `await_node`.
        """
        if executors.current():
            return 1
        if not self.actors:
            await_node(self.cpus_per_actor or 1, int(self.gpu))
        cpus = 0 if self.gpu else self.cpus_per_actor or 1
        return max(1, min(tasks, self.actors or fitting(cpus, int(self.gpu))))

    def max_count(self, tasks: int) -> int:
        """The largest number of processes while tasks wait."""
        if executors.current():
            return 1
        start_count = self.count(tasks)
        if self.max_actors:
            return max(start_count, self.max_actors)
        return tasks if not self.actors and tasks > start_count and may_grow() else start_count


HERE = Actors()
"""This process alone, without a cluster, in jobs that allow it."""
