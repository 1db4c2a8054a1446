"""Rows filed by bucket, so that a later task reads one bucket of every file and nothing else.

A file is `buckets` + 1 offsets (int64, little endian), then each bucket's rows as a stream of Arrow's
IPC format. A reader needs two short reads of a file, however many buckets it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from pipeline import storage
from pipeline.arrays import Ints
from pipeline.artifact import Draft

_FOLDER = "_dedup"
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")


def write(draft: Draft, name: str, rows: pa.Table, bucket: Ints, buckets: int) -> None:
    """Files `rows`; row i goes to bucket[i]. Rows of a bucket stay in their order."""
    order = np.argsort(bucket, kind="stable")
    ends = np.searchsorted(bucket[order], np.arange(buckets), side="right")
    rows = rows.take(pa.array(order))
    offsets = np.full(buckets + 1, 8 * (buckets + 1), np.int64)
    streams = []
    start = 0
    for number, end in enumerate(ends.tolist()):
        size = 0
        if end > start:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, rows.schema, options=_OPTIONS) as writer:
                writer.write_table(rows.slice(start, end - start))
            streams.append(sink.getvalue())
            size = streams[-1].size
        offsets[number + 1] = offsets[number] + size
        start = end
    storage.write_bytes(draft.path(_FOLDER, name), b"".join([offsets.astype("<i8").data, *streams]))


def read(draft: Draft, names: Iterable[str], bucket: int, schema: pa.Schema) -> pa.Table:
    """One bucket's rows of all the files, in the files' order."""

    def rows(name: str) -> pa.Table:
        with storage.open_input(draft.path(_FOLDER, name)) as stream:
            start, end = np.frombuffer(stream.read_at(16, 8 * bucket), "<i8").tolist()
            if start == end:
                return schema.empty_table()
            return pa.ipc.open_stream(stream.read_at(end - start, start)).read_all()

    with ThreadPoolExecutor(16) as pool:  # 20 ms a read from an object store
        return pa.concat_tables([schema.empty_table(), *pool.map(rows, names)]).combine_chunks()
