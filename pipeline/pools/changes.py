"""The ids of a pool beside those of the version before: how many are new, changed, the same or gone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.arrays import Keys


@dataclass(frozen=True)
class RowSet:
    """A set of candidates by their ids and contents. It is equal for the same candidates in any order and
    files."""

    rows: int = 0
    digest: int = 0
    """Sum mod 2^64 of a product for each row, so that tasks can add theirs up."""

    @classmethod
    def of(cls, ids: Keys, contents: Keys) -> RowSet:
        """`ids`, `contents` [N]: see `candidates`."""
        # A sum of sums would be the same where two ids have exchanged their texts.
        return cls(len(ids), int((ids * (contents | np.uint64(1))).sum(dtype=np.uint64)))

    def __add__(self, other: RowSet) -> RowSet:
        return RowSet(self.rows + other.rows, (self.digest + other.digest) % 2**64)


@dataclass(frozen=True)
class Changes:
    """The ids of a pool beside those of the version before."""

    new: int
    changed: int
    """Ids with another text."""
    same: int
    gone: int

    @property
    def none(self) -> bool:
        return not (self.new or self.changed or self.gone)
