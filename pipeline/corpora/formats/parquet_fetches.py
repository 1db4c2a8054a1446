"""Which row groups of a Parquet file one request to an object store brings together."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import pyarrow.parquet as pq

HELD_BYTES = 16 << 20
"""Row groups up to this size are fetched together."""
_ANSWER_BYTES = 4 << 20  # what a store sends in the time in which it answers a request


class Fetch(NamedTuple):
    """Neighbouring row groups, and where the bytes of the columns that are read lie in the file."""

    groups: range
    start: int
    stop: int
    wanted: int
    """Bytes of these columns; the others lie between them."""

    @property
    def is_cheap(self) -> bool:
        """Whether one request for all is cheaper than one for each column."""
        size = self.stop - self.start
        return size <= HELD_BYTES and (size <= _ANSWER_BYTES or size <= 4 * self.wanted)

    def joined(self, later: Fetch) -> Fetch:
        return Fetch(
            range(self.groups.start, later.groups.stop),
            min(self.start, later.start),
            max(self.stop, later.stop),
            self.wanted + later.wanted,
        )


def plan(
    metadata: pq.FileMetaData, first: int, end: int, columns: Collection[str]
) -> Iterator[Fetch]:
    """The row groups, those together that one request brings best."""
    current = None
    for number in range(first, end):
        group = _fetch(number, metadata.row_group(number), columns)
        if current is None:
            current = group
        elif (joint := current.joined(group)).is_cheap:
            current = joint
        else:
            yield current
            current = group
    if current is not None:
        yield current


def _fetch(number: int, group: pq.RowGroupMetaData, columns: Collection[str]) -> Fetch:
    chunks = [
        chunk
        for chunk in map(group.column, range(group.num_columns))
        if any(f"{chunk.path_in_schema}.".startswith(f"{name}.") for name in columns)
    ]
    starts = [chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks]
    sizes = [chunk.total_compressed_size for chunk in chunks]
    stops = [start + size for start, size in zip(starts, sizes, strict=True)]
    start = max(0, min(starts, default=0))
    return Fetch(range(number, number + 1), start, max(stops, default=0), sum(sizes))
