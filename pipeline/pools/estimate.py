"""The cost of embedding a pool, by its plan and the rate of the version before."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline import cost, storage
from pipeline.pools.build_records import PlanRecord

# Of an object store: a part of the candidates is written in two files, planned by two reads and a write,
# and read by the shards; a shard is written in four files and a mark.
_PART_REQUESTS, _SHARD_REQUESTS = 8, 5


def estimate(files: Sequence[str], prepared: PlanRecord, rate: float, cores: int) -> cost.Estimate:
    """`rate`: texts that an actor embeds in a second; `cores`: of an actor, 0: it has a GPU."""
    sizes = [storage.size_of(file) for file in files]
    parts = {part for slices in prepared.plan.shards.values() for part, _, _ in slices}
    rows = prepared.rows_to_embed
    hours = rows / rate / 3600 if rate else 0.0 if not rows else None
    return cost.Estimate(
        input_files=len(sizes),
        input_bytes=sum(sizes),
        rows=prepared.counts.get("records"),
        tasks=len(sizes) + len(prepared.plan.shards),
        requests=cost.reads(sizes) + _PART_REQUESTS * len(parts)
        + _SHARD_REQUESTS * len(prepared.plan.shards),
        cpu_hours=hours * cores if cores and hours is not None else None,
        gpu_hours=None if cores else hours,
        basis=f"the version before, {rate:,.0f} texts a second by an actor" if rate
        else "no version before: not known how long a text takes; a pool of some thousand candidates "
        "under another --name tells it",
    )  # fmt: skip
