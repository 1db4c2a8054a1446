"""Which row groups of a Parquet file are fetched from an object store together."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pyarrow.parquet as pq

HELD_BYTES = 16 << 20
"""The columns of row groups are fetched together up to this size; larger row groups are read as they are
decoded, in bounded memory."""


def plan(
    metadata: pq.FileMetaData, first: int, end: int, columns: Collection[str]
) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """(row groups, starts and ends of their columns in the file; none of a large row group)"""
    groups, starts, ends, size = list[int](), list[int](), list[int](), 0
    for number in range(first, end):
        group = metadata.row_group(number)
        chunks = [
            chunk
            for chunk in map(group.column, range(group.num_columns))
            if any(f"{chunk.path_in_schema}.".startswith(f"{name}.") for name in columns)
        ]
        group_bytes = sum(chunk.total_compressed_size for chunk in chunks)
        if groups and size + group_bytes > HELD_BYTES:
            yield groups, starts, ends
            groups, starts, ends, size = [], [], [], 0
        groups.append(number)
        size += group_bytes
        if size <= HELD_BYTES:
            chunk_starts = [c.dictionary_page_offset or c.data_page_offset for c in chunks]
            starts += chunk_starts
            ends += [s + c.total_compressed_size for s, c in zip(chunk_starts, chunks, strict=True)]
    if groups:
        yield groups, starts, ends
