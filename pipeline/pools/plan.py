"""Plans a pool: the content of each shard, and which texts the version before already has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.arrays import Ints
from pipeline.corpora import raw
from pipeline.engine.draft import Draft
from pipeline.pools import candidates, verdicts
from pipeline.pools.changes import Changes, RowSet
from pipeline.pools.verdicts import (
    NEW,
    REASONS,
    SAME_ID,
    CandidateDecisions,
    Files,
    PlanInput,
    TextQuery,
)
from pipeline.storage.prefetch import map_prefetched

SHARD_PREFIX = "part-"
_SHARD_BYTES = 64 << 20  # of text in a shard; an actor holds all of it in memory
# A small pool is cut finer, so that all actors have work and a kill loses little.
_LEAST_SHARDS, _LEAST_ROWS = 16, 512

Slices = list[tuple[str, int, int]]
"""(part, first row, behind the last row) each"""


@dataclass(frozen=True)
class Plan:
    """The result of `make`."""

    shards: dict[str, Slices]
    """The candidates of each shard of the pool, by its name; those with a verdict from NEW on count."""
    changes: Changes
    known: int
    """Candidates whose text the version before has."""
    dropped: dict[str, int]
    first: tuple[str, ...]
    """The texts with the lowest hashes."""
    present: tuple[str, ...]
    """The `hashes` of the query that are in the pool."""
    repeated_id: str = ""
    """An id that rows with different texts have; "": there is none."""
    name: str = ""  # of earlier builds, whose verdicts are in no folder of their own
    """The name by which `verdicts` finds its verdicts."""
    salvaged: int = 0  # the name in the records of earlier code
    """Candidates whose text is in the version to copy from, if that is not the one before."""
    new_rows: RowSet = field(default_factory=RowSet)
    """The candidates whose ids the version before lacks."""

    @property
    def rows(self) -> int:
        return self.changes.new + self.changes.changed + self.changes.same


def make(draft: Draft, rows: PlanInput, rows_per_shard: int, query: TextQuery) -> Plan:
    """Writes the verdicts on all candidates, and samples of those that are dropped.

    `rows` has a candidate at least. `query`: further questions about the candidates.
    """
    decided = verdicts.decide(draft, rows, query)
    parts = rows.candidates
    kept_rows = decided.changes.new + decided.changes.changed + decided.changes.same
    size = min(rows_per_shard, max(_LEAST_ROWS, -(-kept_rows // _LEAST_SHARDS)))
    shards = _cut_shards(draft, decided.plan, parts, size)
    repeated_rows = _rows_at(draft, parts, _sampled(decided, SAME_ID)[:1])
    first_rows = _rows_at(draft, parts, decided.first)
    return Plan(
        shards={f"{SHARD_PREFIX}{number:05d}": slices for number, slices in enumerate(shards)},
        changes=decided.changes,
        known=decided.known,
        dropped=_count_dropped(draft, parts, decided),
        first=tuple(text for _, text in first_rows),
        repeated_id=repeated_rows[0][0] if repeated_rows else "",
        present=tuple(decided.present),
        name=decided.plan,
        salvaged=decided.in_source,
        new_rows=decided.new_rows,
    )


def _cut_shards(draft: Draft, plan: str, parts: Files, rows_per_shard: int) -> Iterator[Slices]:
    """Shards of `rows_per_shard` kept rows, or of fewer rows with much text.

    Some parts are held in memory, 16 bytes a row.
    """

    def read_part(part: tuple[str, int]) -> tuple[str, Ints, Ints]:
        name = part[0]
        kept_rows = np.flatnonzero(verdicts.read_verdicts(draft, plan, name)[0] >= NEW)
        sizes = candidates.read_keys(draft, name)[kept_rows, candidates.BYTES].astype(np.int64)
        return name, kept_rows, np.cumsum(sizes)

    slices: Slices = []
    rows = size = 0
    for part, kept_rows, ends in map_prefetched(read_part, parts):
        start = 0
        while start < len(kept_rows):
            if rows >= rows_per_shard or size >= _SHARD_BYTES:
                yield slices
                slices, rows, size = [], 0, 0
            bytes_before = int(ends[start - 1]) if start else 0
            fitting_end = int(np.searchsorted(ends, bytes_before + _SHARD_BYTES - size)) + 1
            end = min(len(kept_rows), start + rows_per_shard - rows, fitting_end)
            slices.append((part, int(kept_rows[start]), int(kept_rows[end - 1]) + 1))
            rows += end - start
            size += int(ends[end - 1]) - bytes_before
            start = end
    if slices:
        yield slices


def _count_dropped(draft: Draft, parts: Files, decided: CandidateDecisions) -> dict[str, int]:
    """Counts dropped candidates by reason, and saves the first ones as samples."""
    rejects = raw.Rejects()
    for verdict, reason in REASONS.items():
        places = _sampled(decided, verdict)
        for place, (name, text) in zip(places, _rows_at(draft, parts, places), strict=True):
            rejects.add(reason, "all candidates", place + 1, f"id {name!r}: {text!r}")
        if reason in decided.dropped:
            rejects.counts[reason] = decided.dropped[reason]
    rejects.save(draft, "plan")
    return dict(rejects.counts)


def _sampled(decided: CandidateDecisions, verdict: int) -> list[int]:
    return [place for sample_verdict, place in decided.samples if sample_verdict == verdict]


def _rows_at(draft: Draft, parts: Files, places: Sequence[int]) -> list[tuple[str, str]]:
    """(id, text) of each place among all candidates. A part is read once, and one is held at a time."""
    row_at_place: dict[int, tuple[str, str]] = {}
    sorted_places = sorted(set(places))
    end = 0
    for part, rows in parts:
        start, end = end, end + rows
        part_places = [place for place in sorted_places if start <= place < end]
        if part_places:
            columns = candidates.read_rows(draft, part).select(["id", "text"])
            part_rows = columns.take([place - start for place in part_places]).to_pylist()
            for place, row in zip(part_places, part_rows, strict=True):
                row_at_place[place] = row["id"], row["text"]
    return [row_at_place[place] for place in places]
