"""Examples at chosen places of a split: only footers, and the row groups that hold them, are read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.arrays import Ints
from pipeline.artifact import Artifact

DrawnRow = dict[str, Any]
_COLUMNS = ["example_id", "group_id", "context", "response", "candidates", "label"]
_FILES_AT_ONCE = 16  # an object store answers in a tenth of a second each


def draw_places(rows: int, count: int, seed: int) -> list[int]:
    """At most `count` of so many places, in random order."""
    return random.Random(f"examples {seed}").sample(range(rows), min(rows, count))


def read_rows(corpus: Artifact, split: str, places: Sequence[int]) -> list[DrawnRow]:
    """The examples at some places of a split, in the order of `places`."""
    order = np.argsort(places)
    wanted = np.asarray(places, np.int64)[order]
    parts, first = list[tuple[str, Ints]](), 0
    for path in corpus.paths(f"{split}/", ".parquet"):
        end = first + corpus.rows(path)
        inside = wanted[(wanted >= first) & (wanted < end)] - first
        if len(inside):
            parts.append((storage.join(corpus.uri, path), inside))
        first = end
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        tables = list(pool.map(lambda part: _read(*part), parts))
    rows: list[DrawnRow] = [row for table in tables for row in table.to_pylist()]
    return [rows[at] for at in np.argsort(order)]


def _read(uri: str, places: Ints) -> pa.Table:
    """The rows of a file at ascending places."""
    with storage.open_input(uri) as stream:
        file = pq.ParquetFile(stream)
        sizes = [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)]
        ends = np.cumsum(sizes)
        group_of = np.searchsorted(ends, places, side="right")
        groups = np.unique(group_of)
        # Where each group that is read begins in the table, less where it begins in the file.
        read_ends = np.cumsum(np.asarray(sizes)[groups])
        shift = read_ends - ends[groups]
        table = file.read_row_groups(groups.tolist(), columns=_COLUMNS)
        return table.take(pa.array(places + shift[np.searchsorted(groups, group_of)]))
