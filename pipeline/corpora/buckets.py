"""Stores rows of a draft's tasks in buckets, so that a later task reads one bucket of every file only.

    _buckets/block-00003-000017   `bucket_count` + 1 offsets (int64, little endian), then the rows of each
                                  bucket as a stream of Arrow's IPC format; an empty bucket has no bytes

A reader needs two short reads of a file, however many buckets the file has. Many files are merged first, so
that there are fewer to read from: a bucket of a merged file is the streams of its files, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from pipeline import storage
from pipeline.arrays import Ints
from pipeline.engine.draft import Draft
from pipeline.storage.prefetch import map_prefetched

_FOLDER = "_buckets"
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")
_READERS = 16  # an object store answers in some 20 ms, whatever the size
MERGE_BYTES = 256 << 20  # held in memory by a merge


def write(
    draft: Draft,
    name: str,
    rows: pa.Table,
    bucket_of_row: Ints | None = None,
    bucket_count: int = 1,
) -> None:
    """Writes the file `name`: row i goes to bucket_of_row[i], in the order of the rows.

    Without `bucket_of_row` all rows go to bucket 0.
    """
    if bucket_of_row is None:
        bucket_of_row = np.zeros(rows.num_rows, np.int64)
    order = np.argsort(bucket_of_row, kind="stable")
    ends = np.searchsorted(bucket_of_row[order], np.arange(bucket_count), side="right")
    rows = rows.take(pa.array(order)).combine_chunks()
    offsets = np.full(bucket_count + 1, 8 * (bucket_count + 1), np.int64)
    streams = list[pa.Buffer]()
    start = 0
    for bucket, end in enumerate(ends.tolist()):
        size = 0
        if end > start:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, rows.schema, options=_OPTIONS) as writer:
                writer.write_table(rows.slice(start, end - start))
            streams.append(sink.getvalue())
            size = streams[-1].size
        offsets[bucket + 1] = offsets[bucket] + size
        start = end
    data = b"".join([offsets.astype("<i8").tobytes(), *streams])
    storage.write_bytes(draft.path(_FOLDER, name), data)


def read(draft: Draft, names: Iterable[str], bucket: int, schema: pa.Schema) -> pa.Table:
    """The rows of one bucket of all the files, in the order of `names`; each column in one chunk.

    `schema` is that of all the files.
    """

    def read_file(name: str) -> list[pa.Table]:
        uri = draft.path(_FOLDER, name)
        start, end = np.frombuffer(storage.read_range(uri, 8 * bucket, 16), "<i8").tolist()
        if start == end:
            return []
        data = storage.read_range(uri, start, end - start)
        tables = []
        with pa.BufferReader(data) as streams:
            while streams.tell() < end - start:
                tables.append(pa.ipc.open_stream(streams).read_all())
        return tables

    tables = [table for tables in map_prefetched(read_file, names) for table in tables]
    return pa.concat_tables([schema.empty_table(), *tables]).combine_chunks()


def merge(draft: Draft, names: Sequence[str], target: str, bucket_count: int) -> None:
    """Writes a file that reads as all the files `names` do, in their order.

    Each of them is read in long pieces: of many neighbouring buckets at once.
    """
    head_bytes = 8 * (bucket_count + 1)

    def read_piece(name: str, start: int, end: int) -> bytes:
        return storage.read_range(draft.path(_FOLDER, name), start, end - start)

    def pieces() -> Iterator[bytes]:
        ends = head_bytes + np.cumsum(sizes.sum(axis=0))
        yield np.concatenate([[head_bytes], ends]).astype("<i8").tobytes()
        first = 0
        while first < bucket_count:
            cumulative_bytes = np.cumsum(sizes[:, first:].sum(axis=0))
            last = first + max(1, int(np.searchsorted(cumulative_bytes, MERGE_BYTES, side="right")))
            starts, stops = offsets[:, first], offsets[:, last]
            pieces_of_files = list(pool.map(read_piece, names, starts.tolist(), stops.tolist()))
            for bucket in range(first, last):
                for file, piece in enumerate(pieces_of_files):
                    offset, size = offsets[file, bucket] - starts[file], sizes[file, bucket]
                    if size:
                        yield piece[offset : offset + size]
            first = last

    with ThreadPoolExecutor(_READERS) as pool:
        heads = pool.map(lambda name: read_piece(name, 0, head_bytes), names)
        offsets = np.stack([np.frombuffer(head, "<i8") for head in heads])
        sizes = np.diff(offsets, axis=1)
        storage.write_pieces(draft.path(_FOLDER, target), pieces())


def remove(draft: Draft, names: Iterable[str]) -> None:
    """Removes merged files, if they exist."""
    for _ in map_prefetched(lambda name: storage.delete(draft.path(_FOLDER, name)), names):
        pass
