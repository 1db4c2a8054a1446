"""Processes of a cluster that keep a model in memory, as `--resources.*` describes them."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import require


@dataclass(frozen=True, kw_only=True)
class Actors:
    """Processes that keep a model in memory. They never change what comes out."""

    actors: int = 0
    """Processes; 0: one for each GPU, or else for each core, that the cluster has."""
    max_actors: int = 0
    """While work waits, there come to be so many, as far as the cluster can grow; 0: no more."""
    cpus_per_actor: int = 0
    """Cores, and threads, of each; 0: the cluster's cores shared out among the actors."""
    gpu: bool = False
    """One GPU per actor."""

    def __post_init__(self) -> None:
        require(self.actors >= 0, "resources.actors", self.actors, ">= 0")
        require(self.max_actors == 0 or self.max_actors >= self.actors, "resources.max_actors",
                self.max_actors, f"0, or resources.actors {self.actors} at least")  # fmt: skip
        require(self.cpus_per_actor >= 0, "resources.cpus_per_actor", self.cpus_per_actor, ">= 0")

    def count(self, tasks: int) -> int:
        """Processes at the start, no more than there are tasks."""
        import ray

        found = ray.cluster_resources().get("GPU" if self.gpu else "CPU", 0)
        fitting = int(found) if self.gpu else int(found) // max(1, self.cpus_per_actor)
        return max(1, min(tasks, self.actors or fitting))


HERE = Actors()
"""In this process, without a cluster, where a job allows it."""
