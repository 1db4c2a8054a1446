"""The records of a pool's build: its plan, and each shard. They are JSON in a draft, so that another polyrank
resumes it: a field that is added needs a default, and none is removed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.config import digest, to_dict
from pipeline.engine.records import TaskRecord
from pipeline.models.precision import Resolved
from pipeline.models.truncation import Truncated
from pipeline.pools.changes import RowSet
from pipeline.pools.gate import Canaries, ShardCheck
from pipeline.pools.plan import Plan


@dataclass(frozen=True)
class GateInputs:
    """The gate's questions to every shard. If they change, a resumed build is planned anew and asks
    finished shards again. Their rows and vectors stay."""

    previous: str
    """URI of the version that the gate compares with; "": there is none."""
    contexts: list[list[str]] | None
    """The canaries; None: texts that the plan chooses."""
    canary_texts: int
    """How many texts the plan chooses."""
    top_k: int
    """Answers to each canary."""

    @property
    def name(self) -> str:
        return digest(to_dict(self))[:8]


@dataclass(frozen=True, kw_only=True)
class PlanRecord(TaskRecord):
    """The plan of a pool, before the first text is embedded."""

    plan: Plan
    asked: GateInputs
    copies: bool
    """Whether vectors are copied from the version before."""
    source: str = ""
    """URI of another version to copy vectors from; "": none."""
    precision: Resolved
    """The precision in which the model computes."""
    canary_file: str
    """"": the canaries are texts of the pool's own."""
    canaries: list[list[str]]
    """The contexts of the canaries."""
    canaries_before: Canaries | None
    """The canaries of the version before."""
    seconds: float
    numerics: int = 1
    """See `pipeline.models.precision`."""
    unfinished: list[Any] = field(default_factory=list)
    """Of records by earlier code; nobody reads it."""
    planned_at: float = 0.0
    """Seconds since 1970; see `versions.remove_old`."""

    @property
    def rows_to_embed(self) -> int:
        """The number of rows whose vectors cannot be copied."""
        return self.plan.rows - (self.plan.known if self.copies else self.plan.salvaged)


@dataclass(frozen=True, kw_only=True)
class EmbedRecord(TaskRecord):
    """A shard of the pool."""

    check: ShardCheck | None
    """None: all rows of the shard were dropped."""
    asked: str = ""  # "": a build of earlier code, so the gate asks it again
    """The name of the `GateInputs` that `check` answers."""
    rows_embedded: int
    """The other rows were copied from another version."""
    actor_seconds: float
    """Seconds in the model."""
    started: float
    ended: float
    """Seconds since 1970."""
    set_aside: RowSet = field(default_factory=RowSet)
    """The rows that the model has no vector for; `dropped` counts them by reason."""
    truncated: Truncated = field(default_factory=Truncated)
    """Of the first 200 rows that were embedded."""


@dataclass(frozen=True, kw_only=True)
class CheckRecord(TaskRecord):
    """The answers of a shard that was finished before the gate's questions changed."""

    check: ShardCheck
