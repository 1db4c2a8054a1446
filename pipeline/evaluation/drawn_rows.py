"""Reads examples at chosen places of a split. It reads only footers, and the row groups with these places."""

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
_COLUMNS = ["example_id", "group_id", "context", "response", "candidates", "label", "source"]
_FILES_AT_ONCE = 16  # an object store answers in a tenth of a second each


def draw_places(rows: int, count: int, seed: int) -> list[int]:
    """At most `count` places of `rows` rows, in random order."""
    return random.Random(f"examples {seed}").sample(range(rows), min(rows, count))


def read_rows(corpus: Artifact, split: str, places: Sequence[int]) -> list[DrawnRow]:
    """The examples at some places of a split, in the order of `places`."""
    order = np.argsort(places)
    sorted_places = np.asarray(places, np.int64)[order]
    parts, file_start = list[tuple[str, Ints]](), 0
    for path in corpus.paths(f"{split}/", ".parquet"):
        file_end = file_start + corpus.rows(path)
        places_in_file = (
            sorted_places[(sorted_places >= file_start) & (sorted_places < file_end)] - file_start
        )
        if len(places_in_file):
            parts.append((storage.join(corpus.uri, path), places_in_file))
        file_start = file_end
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        tables = list(pool.map(lambda part: _read_places(*part), parts))
    rows: list[DrawnRow] = [row for table in tables for row in table.to_pylist()]
    return [rows[index] for index in np.argsort(order)]


def _read_places(uri: str, places: Ints) -> pa.Table:
    """The rows of a file at ascending places."""
    with storage.open_input(uri) as stream:
        file = pq.ParquetFile(stream)
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        ends = np.cumsum(sizes)
        group_of_place = np.searchsorted(ends, places, side="right")
        groups = np.unique(group_of_place)
        # Where each group that is read begins in the table, less where it begins in the file.
        ends_in_table = np.cumsum(np.asarray(sizes)[groups])
        shift = ends_in_table - ends[groups]
        table = file.read_row_groups(groups.tolist(), columns=_COLUMNS)
        return table.take(pa.array(places + shift[np.searchsorted(groups, group_of_place)]))
