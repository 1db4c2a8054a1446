"""Reads examples at chosen places of a split. It reads only footers, and the row groups with these places."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.arrays import Ints
from pipeline.artifact import Artifact
from pipeline.config import BadInput
from pipeline.storage.prefetch import map_prefetched

DrawnRow = dict[str, Any]
_COLUMNS = ["example_id", "group_id", "context", "response", "candidates", "label", "source"]


def draw_places(rows: int, count: int, seed: int) -> list[int]:
    """At most `count` places of `rows` rows, in random order."""
    return random.Random(f"examples {seed}").sample(range(rows), min(rows, count))


def read_rows(
    corpus: Artifact, split: str, places: Sequence[int], columns: list[str] | None = _COLUMNS
) -> list[DrawnRow]:
    """The examples at some places of a split, in the order of `places`; `columns` None: all of them.

    Raises BadInput for a damaged file.
    """
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

    def read(part: tuple[str, Ints]) -> list[DrawnRow]:
        uri, places_in_file = part
        with open_parquet(uri) as file:
            rows: list[DrawnRow] = read_places(file, places_in_file, columns).to_pylist()
            return rows

    rows = [row for rows in map_prefetched(read, parts) for row in rows]
    return [rows[index] for index in np.argsort(order)]


def open_parquet(uri: str) -> pq.ParquetFile:
    """Raises BadInput for a damaged file."""
    try:
        return pq.ParquetFile(storage.open_input(uri), pre_buffer=True)
    except (OSError, pa.ArrowInvalid) as error:
        if isinstance(error, OSError) and error.errno:  # of the system, such as too many open files
            raise
        raise BadInput(f"{uri}: no readable Parquet file ({error})") from None


def read_places(file: pq.ParquetFile, places: Ints, columns: list[str] | None) -> pa.Table:
    """The rows of a file at ascending places."""
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    ends = np.cumsum(sizes)
    group_of_place = np.searchsorted(ends, places, side="right")
    groups = np.unique(group_of_place)
    # Where each group that is read begins in the table, less where it begins in the file.
    ends_in_table = np.cumsum(np.asarray(sizes)[groups])
    shift = ends_in_table - ends[groups]
    table = file.read_row_groups(groups.tolist(), columns=columns)
    return table.take(pa.array(places + shift[np.searchsorted(groups, group_of_place)]))
