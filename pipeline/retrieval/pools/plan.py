"""What a pool will hold, shard by shard, and what of it the version before has already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.arrays import Ints
from pipeline.corpora import raw
from pipeline.drafts import Draft
from pipeline.retrieval.pools import candidates, verdicts
from pipeline.retrieval.pools.changes import Changes
from pipeline.retrieval.pools.verdict_tasks import (
    NEW,
    REASONS,
    SAME_ID,
    Files,
    PlanInput,
    Wanted,
    ahead,
)
from pipeline.retrieval.pools.verdicts import Verdicts

_SHARD_BYTES = 64 << 20  # of text in a shard; an actor holds all of it in memory
# A small pool is cut finer, so that all actors have work and a kill loses little.
_LEAST_SHARDS, _LEAST_ROWS = 16, 512

Slices = list[tuple[str, int, int]]
"""(part, first row, behind the last row) each"""


@dataclass(frozen=True)
class Plan:
    """What `make` found."""

    shards: dict[str, Slices]
    """The candidates of each shard of the pool, by its name; those with a verdict from NEW on count."""
    changes: Changes
    known: int
    """Candidates whose text the version before has."""
    dropped: dict[str, int]
    first: tuple[str, ...]
    """Some texts, those with the lowest hashes."""
    present: tuple[str, ...]
    """Which of the `hashes` that were asked about are in the pool."""
    repeated_id: str = ""
    """An id that rows with different texts have; "": there is none."""
    salvaged: int = 0
    """Candidates whose vectors come from builds that were never finished."""

    @property
    def rows(self) -> int:
        return self.changes.new + self.changes.changed + self.changes.same


def make(draft: Draft, rows: PlanInput, rows_per_shard: int, wanted: Wanted) -> Plan:
    """Writes the verdicts on all candidates, and samples of those that are dropped.

    `rows` has a candidate at least. `wanted`: what the plan tells besides.
    """
    found = verdicts.decide(draft, rows, wanted)
    parts = rows.candidates
    kept = found.changes.new + found.changes.changed + found.changes.same
    size = min(rows_per_shard, max(_LEAST_ROWS, -(-kept // _LEAST_SHARDS)))
    shards = _cut(draft, parts, size)
    repeated = _rows_at(draft, parts, found.samples[SAME_ID][:1])
    first = _rows_at(draft, parts, found.first)
    return Plan(
        shards={f"part-{number:05d}": slices for number, slices in enumerate(shards)},
        changes=found.changes,
        known=found.known,
        dropped=_drop(draft, parts, found),
        first=tuple(text for _, text in first),
        repeated_id=repeated[0][0] if repeated else "",
        present=tuple(found.present),
        salvaged=found.salvaged,
    )


def _cut(draft: Draft, parts: Files, rows_per_shard: int) -> Iterator[Slices]:
    """Shards of so many rows that are kept, or of fewer that hold much text.

    Some parts are held in memory, 16 bytes a row.
    """

    def read(part: tuple[str, int]) -> tuple[str, Ints, Ints]:
        name = part[0]
        kept = np.flatnonzero(verdicts.read_verdicts(draft, name) >= NEW)
        sizes = candidates.read_keys(draft, name)[kept, candidates.BYTES].astype(np.int64)
        return name, kept, np.cumsum(sizes)

    slices: Slices = []
    rows = size = 0
    for part, kept, ends in ahead(read, parts):
        done = 0
        while done < len(kept):
            if rows >= rows_per_shard or size >= _SHARD_BYTES:
                yield slices
                slices, rows, size = [], 0, 0
            before = int(ends[done - 1]) if done else 0
            fits = int(np.searchsorted(ends, before + _SHARD_BYTES - size)) + 1
            end = min(len(kept), done + rows_per_shard - rows, fits)
            slices.append((part, int(kept[done]), int(kept[end - 1]) + 1))
            rows += end - done
            size += int(ends[end - 1]) - before
            done = end
    if slices:
        yield slices


def _drop(draft: Draft, parts: Files, found: Verdicts) -> dict[str, int]:
    """Counts what is dropped by reason, and names the first ones."""
    rejects = raw.Rejects()
    for verdict, reason in REASONS.items():
        places = found.samples[verdict]
        for place, (name, text) in zip(places, _rows_at(draft, parts, places), strict=True):
            rejects.add(reason, "all candidates", place + 1, f"id {name!r}: {text!r}")
        if reason in found.dropped:
            rejects.counts[reason] = found.dropped[reason]
    rejects.save(draft, "plan")
    return dict(rejects.counts)


def _rows_at(draft: Draft, parts: Files, places: Sequence[int]) -> list[tuple[str, str]]:
    """(id, text) of each place among all candidates. A part is read once, and one is held at a time."""
    found: dict[int, tuple[str, str]] = {}
    waiting = sorted(set(places))
    end = 0
    for part, rows in parts:
        start, end = end, end + rows
        here = [place - start for place in waiting if start <= place < end]
        if here:
            some = candidates.read_rows(draft, part).select(["id", "text"]).take(here).to_pylist()
            found |= {
                start + at: (row["id"], row["text"]) for at, row in zip(here, some, strict=True)
            }
    return [found[place] for place in places]
