"""Endless shuffled batches of a corpus for one rank, which can resume at any batch.

An epoch is the files of a split in a random order, and the row groups of each in a random order;
each rank takes an equal, contiguous piece of that stream of rows. A rank reads its piece in windows,
shuffles a window and cuts it into batches of a fixed number of rows. Everything follows from (seed, epoch,
window), so a cursor of a few numbers is all that a checkpoint needs. Pre-training's batches are bounded by
tokens instead: pretraining_batches.py.
"""

from __future__ import annotations

import functools
import itertools
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pipeline import storage
from pipeline.artifact import Artifact
from pipeline.config import BadInput

BatchT = TypeVar("BatchT")
BatchT_co = TypeVar("BatchT_co", covariant=True)
ExampleRow = dict[str, Any]
PLACE = "place_in_split"
"""A column that no file has: the row's number in the split, with the files in the order of `Rows.files`."""


class Cursor(NamedTuple):
    """The next batch of a rank."""

    epoch: int = 0
    window: int = 0
    batch: int = 0
    world: int = 0
    """Number of ranks that shared the epoch; 0: as many as there are now."""


class Collator(Protocol[BatchT_co]):
    """Makes batches of rows for a task."""

    @property
    def columns(self) -> Sequence[str]:
        """Columns of the corpus that `prepare` needs."""

    def prepare(self, rows: list[ExampleRow], generator: torch.Generator) -> list[Any]:
        """The items of batches: one per row of a window; the rows come in random order."""

    def collate(self, items: list[Any], generator: torch.Generator) -> BatchT_co:
        """Items to one padded batch; all chance comes from `generator`."""


@dataclass(frozen=True)
class Rows:
    """One rank's share of a split."""

    files: tuple[tuple[str, tuple[int, ...]], ...]
    """(file, rows of each of its row groups)"""
    columns: tuple[str, ...]
    rank: int
    world: int
    seed: int

    @classmethod
    def of(
        cls,
        corpus: Artifact,
        split: str,
        columns: Sequence[str],
        rank: int,
        world: int,
        seed: int,
        excluded: Collection[str] = (),
    ) -> Rows:
        """All files of the split but the `excluded` ones. Raises BadInput where the corpus has none."""
        paths = corpus.paths(f"{split}/", ".parquet")
        files = [storage.join(corpus.uri, path) for path in paths if path not in excluded]
        if not files:
            raise BadInput(f"{corpus.uri}: the corpus has no examples in {split}/")
        with ThreadPoolExecutor(16) as pool:  # of thousands of files, from an object store
            rows = list(pool.map(_rows_of_groups, files))
        return cls(tuple(zip(files, rows, strict=True)), tuple(columns), rank, world, seed)

    @property
    def total(self) -> int:
        """Rows of the split."""
        return sum(sum(rows) for _, rows in self.files)

    def __len__(self) -> int:
        """Rows in an epoch of one rank. All ranks have as many, so up to world - 1 rows are left out."""
        return self.total // self.world

    def epoch(self, number: int) -> Epoch:
        """The order of an epoch."""
        rng = np.random.default_rng([self.seed, number])
        groups = [
            (file, group)
            for file in rng.permutation(len(self.files)).tolist()
            for group in rng.permutation(len(self.files[file][1])).tolist()
        ]
        return self._epoch(groups)

    def in_order(self) -> Epoch:
        """The rows in the order of the files. For rank 0 of 1 the number of a row is its `PLACE`."""
        sizes = [rows for _, rows in self.files]
        return self._epoch([(file, g) for file, rows in enumerate(sizes) for g in range(len(rows))])

    def _epoch(self, groups: Sequence[tuple[int, int]]) -> Epoch:
        """An epoch in this order of (number of the file, row group)."""
        group_starts = itertools.accumulate((n for _, rows in self.files for n in rows), initial=0)
        places = [[next(group_starts) for _ in rows] for _, rows in self.files]
        return Epoch(
            [(self.files[file][0], group) for file, group in groups],
            list(itertools.accumulate(self.files[file][1][group] for file, group in groups)),
            [places[file][group] for file, group in groups],
            self.columns,
            self.rank * len(self),
        )


@dataclass(frozen=True)
class Epoch:
    """One rank's share of a split in the order of one epoch."""

    groups: list[tuple[str, int]]
    """(file, row group) of all ranks' shares."""
    ends: list[int]
    """Rows up to the end of each group."""
    places: list[int]
    """The `PLACE` of each group's first row."""
    columns: tuple[str, ...]
    first_row: int
    """The place of this rank's first row."""

    def read(self, start: int, stop: int) -> pa.Table:
        """Rows `start` to `stop` of this rank's share; `stop` is above `start`."""
        start, stop = self.first_row + start, self.first_row + stop
        place, end = bisect_right(self.ends, start), bisect_left(self.ends, stop) + 1
        # Neighbours in the order lie in the same file: one read for all of them.
        columns = [name for name in self.columns if name != PLACE]
        table = pa.concat_tables(
            _open(uri, threading.get_ident()).read_row_groups(
                [group for _, group in groups], columns=columns
            )
            for uri, groups in itertools.groupby(self.groups[place:end], itemgetter(0))
        )
        ends = [self.ends[place - 1] if place else 0, *self.ends[place:end]]
        if PLACE in self.columns:
            sizes = zip(self.places[place:end], itertools.pairwise(ends), strict=True)
            numbers = [np.arange(first, first + end - begin) for first, (begin, end) in sizes]
            table = table.append_column(PLACE, pa.array(np.concatenate(numbers)))
        return table.slice(start - ends[0], stop - start)


def _rows_of_groups(uri: str) -> tuple[int, ...]:
    with storage.open_input(uri) as stream:
        metadata = pq.ParquetFile(stream).metadata
        return tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))


@functools.lru_cache(maxsize=4)
def _open(uri: str, thread: int) -> pq.ParquetFile:
    """A Parquet file, kept open while its row groups are read: to read a remote footer takes 0.1 s.

    Each thread has its own open file, because two threads that read one file at once get "ReadRangeCache did
    not find matching cache entry", or die. One thread may prepare batches while another one mines.
    """
    return pq.ParquetFile(storage.open_input(uri), pre_buffer=True)


@dataclass(frozen=True)
class Batches(Generic[BatchT]):
    """Iterates over (batch, cursor of the batch after it) for ever."""

    rows: Rows
    collator: Collator[BatchT]
    batch_examples: int
    """Rows in a step of all ranks. Each rank takes an equal share; what is left over is not read."""
    window_rows: int = 16_384
    """Rows that are shuffled together. With 4,096, half of ConvAI2's dialogues, all-MiniLM learnt less: its
    R@1/20 was 0.611 after half an epoch, not 0.623."""

    def __post_init__(self) -> None:
        if len(self.rows) < self.examples:
            row_count = self.rows.total
            raise BadInput(f"the split has {row_count:,} examples, too few for a batch of "
                           f"{self.examples} on each of {self.rows.world} workers; allowed: "
                           f"finetune.batch_examples of {row_count} at most")  # fmt: skip

    @property
    def examples(self) -> int:
        """Rows in every batch of this rank."""
        return self.batch_examples // self.rows.world

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch. With a number of ranks that does not divide `batch_examples` there are a few
        more, but the length of a run must not depend on its ranks."""
        return self.rows.total // self.batch_examples

    def start(self, cursors: Sequence[Sequence[int]] = ()) -> Generator[tuple[BatchT, Cursor]]:
        """Batches from the saved cursors of all ranks on, prepared in a thread of their own."""
        cursor = Cursor()
        if cursors:  # of more ranks than there were, a new one starts where rank 0 stands
            cursor = Cursor(*cursors[self.rows.rank if self.rows.rank < len(cursors) else 0])
        return prefetch(self._walk(self._translate_cursor(cursor)), depth=4)

    def _translate_cursor(self, cursor: Cursor) -> Cursor:
        """A cursor of another number of ranks. It skips as many rows of the epoch as the earlier run had
        read, but not the same rows: some rows of this epoch are read twice, some never."""
        if cursor.world in (0, self.rows.world):
            return cursor
        examples = self.batch_examples // cursor.world
        window_start = cursor.window * self._window_size(examples)
        rows_read = (window_start + cursor.batch * examples) * cursor.world
        batches_done = rows_read // (self.examples * self.rows.world)
        window, batch = divmod(batches_done, self._window_size(self.examples) // self.examples)
        return Cursor(cursor.epoch, window, batch, self.rows.world)

    def _walk(self, cursor: Cursor) -> Iterator[tuple[BatchT, Cursor]]:
        epoch, window, skip, _ = cursor
        size = self._window_size(self.examples)
        while True:
            rows = self.rows.epoch(epoch)
            while window * size < len(self.rows):
                table = rows.read(window * size, min((window + 1) * size, len(self.rows)))
                batches = self._window(table, epoch, window)
                for number, items in enumerate(batches):
                    if number >= skip:
                        generator = self._generator(epoch, window, number + 1)
                        batch = self.collator.collate(items, generator)
                        yield batch, Cursor(epoch, window, number + 1, self.rows.world)
                window, skip = window + 1, 0
            epoch, window = epoch + 1, 0

    def _window_size(self, examples: int) -> int:
        """A whole number of batches, so that only an epoch's last window leaves rows over."""
        return max(1, self.window_rows // examples) * examples

    def _window(self, table: pa.Table, epoch: int, window: int) -> list[list[Any]]:
        rng = np.random.default_rng([self.rows.seed, epoch, window, self.rows.rank])
        rows = table.take(rng.permutation(table.num_rows)).to_pylist()
        items = self.collator.prepare(rows, self._generator(epoch, window))
        # Not sorted by length: a batch of contexts of one length is one of equally old dialogues, and its
        # negatives are too easy. What that costs is within a seed's chance (half an epoch of ConvAI2,
        # all-MiniLM: R@1/20 0.623 ± 0.015 sorted, 0.628 and 0.626 not), and packed rows have no padding.
        starts = range(0, len(items) - self.examples + 1, self.examples)
        return [items[start : start + self.examples] for start in starts]

    def _generator(self, *place: int) -> torch.Generator:
        seed = np.random.SeedSequence([self.rows.seed, self.rows.rank, *place])
        return torch.Generator().manual_seed(int(seed.generate_state(1, np.uint32)[0]))


def prefetch(source: Iterator[BatchT], depth: int) -> Generator[BatchT]:
    """Takes from `source` in a thread, up to `depth` items ahead."""
    end: Any = object()
    thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
    try:
        futures = deque(thread.submit(next, source, end) for _ in range(depth))
        while (item := futures.popleft().result()) is not end:
            futures.append(thread.submit(next, source, end))
            yield item
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
