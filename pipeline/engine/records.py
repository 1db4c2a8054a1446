"""The records that the tasks of a job report to its driver.

A record is a dataclass. It is JSON only in the mark of its task, from which a resumed job reads it
again: `to_json` and `from_json` are that boundary.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from pipeline.artifact import FileEntry
from pipeline.config import from_dict


@dataclass(frozen=True, kw_only=True)
class TaskCost:
    """The cost of a task; see `pipeline.engine.report`."""

    seconds: float = 0.0
    rows: int = 0
    """Rows that the task wrote, or else read."""
    bytes: int = 0
    """Bytes that the task wrote."""
    peak_memory_bytes: int = 0
    """Peak memory of the process during the task."""
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """The report of any task; subclasses add the fields of their stage."""

    files: list[FileEntry] = field(default_factory=list)
    """The files that it wrote and that the manifest lists."""
    counts: dict[str, int] = field(default_factory=dict)
    """The counts in the manifest: `records`, `examples`, `examples.train`, …"""
    dropped: dict[str, int] = field(default_factory=dict)
    """Records that are not in the output, by reason; malformed ones too."""
    malformed: dict[str, int] = field(default_factory=dict)
    """Records that are not what their format says, by reason."""
    notes: list[str] = field(default_factory=list)
    """Notes for a person."""
    cost: TaskCost = field(default_factory=TaskCost, compare=False)
    """Filled in by whoever runs the task."""


RecordT = TypeVar("RecordT", bound=TaskRecord)


def to_json(record: TaskRecord) -> str:
    return json.dumps(dataclasses.asdict(record))


def from_json(kind: type[RecordT], text: str | bytes) -> RecordT:
    """The record of this kind that `to_json` wrote.

    Raises TypeError or ValueError where the JSON is that of no such record.
    """
    return from_dict(kind, json.loads(text))


def sum_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Adds up counts by name."""
    total: Counter[str] = Counter()
    for part in counts:
        total.update(part)
    return dict(total)
