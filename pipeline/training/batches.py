"""Batches of a corpus for one rank: endless, shuffled, of similar lengths, resumable at any batch.

An epoch is all Parquet row groups of a split in a random order; each rank takes an equal, contiguous
piece of that stream of rows. A rank reads its piece in windows, shuffles and tokenises a window, sorts
it by length, cuts it into batches and shuffles those. Everything follows from (seed, epoch, window),
so a cursor of three numbers is all that a checkpoint needs.
"""

from __future__ import annotations

import queue
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow.parquet as pq
import torch

from pipeline import storage
from pipeline.artifact import Artifact
from pipeline.config import BadInput

BatchT = TypeVar("BatchT")
BatchT_co = TypeVar("BatchT_co", covariant=True)
Row = dict[str, Any]


class Cursor(NamedTuple):
    """The next batch of a rank."""

    epoch: int = 0
    window: int = 0
    batch: int = 0


class Collator(Protocol[BatchT_co]):
    """What a task makes of rows."""

    @property
    def columns(self) -> Sequence[str]:
        """Columns of the corpus that `prepare` needs."""

    def prepare(self, rows: list[Row], generator: torch.Generator) -> list[Any]:
        """Tokenises a window of rows, which come in random order; one item per row."""

    def length(self, item: Any) -> int:
        """Tokens that an item takes in a batch, before padding."""

    def collate(self, items: list[Any], generator: torch.Generator) -> BatchT_co:
        """Items to one padded batch; all chance comes from `generator`."""


@dataclass(frozen=True)
class Rows:
    """One rank's share of a split."""

    groups: tuple[tuple[str, int, int], ...]
    """(file, row group, rows)"""
    columns: tuple[str, ...]
    rank: int
    world: int
    seed: int

    @classmethod
    def of(
        cls, corpus: Artifact, split: str, columns: Sequence[str], rank: int, world: int, seed: int
    ) -> Rows:
        """Raises BadInput where the corpus has no such split."""
        groups = []
        for uri in corpus.files(f"{split}/", ".parquet"):
            with storage.open_input(uri) as stream:
                metadata = pq.ParquetFile(stream).metadata
            counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            groups += [(uri, i, rows) for i, rows in enumerate(counts)]
        if not groups:
            raise BadInput(f"{corpus.uri}: the corpus has no examples in {split}/")
        return cls(tuple(groups), tuple(columns), rank, world, seed)

    def __len__(self) -> int:
        """Rows in an epoch of one rank: the same for all, up to world - 1 rows are left out."""
        return sum(rows for _, _, rows in self.groups) // self.world

    def read(self, epoch: int, start: int, stop: int) -> list[Row]:
        """Rows start to stop of this rank's share of an epoch."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.groups))
        groups = [self.groups[i] for i in order]
        ends = np.cumsum([rows for _, _, rows in groups]).tolist()
        at, last = self.rank * len(self) + start, self.rank * len(self) + min(stop, len(self))
        found: list[Row] = []
        while at < last:
            place = bisect_right(ends, at)
            uri, group, rows = groups[place]
            first = ends[place] - rows
            with storage.open_input(uri) as stream:
                table = pq.ParquetFile(stream).read_row_group(group, columns=list(self.columns))
            found += table.slice(at - first, last - at).to_pylist()
            at = ends[place]
        return found


@dataclass(frozen=True)
class Batches(Generic[BatchT]):
    """Iterates over (batch, cursor of the batch after it) for ever."""

    rows: Rows
    collator: Collator[BatchT]
    examples: int = 0
    """Rows in every batch; 0: as many as `tokens` allow."""
    tokens: int = 0
    """Tokens in a batch at most, padding included."""
    window_rows: int = 4096

    def __post_init__(self) -> None:
        if len(self.rows) < max(1, self.examples):
            have = len(self.rows) * self.rows.world
            raise BadInput(f"the split has {have:,} examples, too few for a batch of "
                           f"{self.examples} on each of {self.rows.world} workers")  # fmt: skip

    @property
    def steps_per_epoch(self) -> int:
        """Batches of fixed size in an epoch: the same on every rank."""
        return len(self.rows) // self.examples

    def start(self, cursor: Cursor) -> Iterator[tuple[BatchT, Cursor]]:
        """Batches from a cursor on, prepared in a thread of their own."""
        return _ahead(self._walk(cursor), depth=4)

    def _walk(self, cursor: Cursor) -> Iterator[tuple[BatchT, Cursor]]:
        epoch, window, skip = cursor
        size = self._window_size()
        while True:
            while window * size < len(self.rows):
                batches = self._window(epoch, window, size)
                for number, items in enumerate(batches):
                    if number >= skip:
                        generator = self._generator(epoch, window, number + 1)
                        batch = self.collator.collate(items, generator)
                        yield batch, Cursor(epoch, window, number + 1)
                window, skip = window + 1, 0
            epoch, window = epoch + 1, 0

    def _window_size(self) -> int:
        if not self.examples:
            return self.window_rows
        # A whole number of batches, so that only an epoch's last window leaves rows over.
        return max(1, self.window_rows // self.examples) * self.examples

    def _window(self, epoch: int, window: int, size: int) -> list[list[Any]]:
        rows = self.rows.read(epoch, window * size, (window + 1) * size)
        rng = np.random.default_rng([self.rows.seed, epoch, window, self.rows.rank])
        shuffled = [rows[i] for i in rng.permutation(len(rows))]
        items = self.collator.prepare(shuffled, self._generator(epoch, window))
        if self.examples:  # what an epoch leaves over is any rows, not the longest
            items = items[: len(items) // self.examples * self.examples]
        items.sort(key=self.collator.length)
        batches = self._cut(items)
        return [batches[i] for i in rng.permutation(len(batches))]

    def _cut(self, items: list[Any]) -> list[list[Any]]:
        if self.examples:
            starts = range(0, len(items), self.examples)
            return [items[start : start + self.examples] for start in starts]
        batches: list[list[Any]] = [[]]
        for item in items:  # ascending: an item is the longest of its batch
            if batches[-1] and (len(batches[-1]) + 1) * self.collator.length(item) > self.tokens:
                batches.append([])
            batches[-1].append(item)
        return batches

    def _generator(self, *place: int) -> torch.Generator:
        seed = np.random.SeedSequence([self.rows.seed, self.rows.rank, *place])
        return torch.Generator().manual_seed(int(seed.generate_state(1, np.uint32)[0]))


def _ahead(source: Iterator[BatchT], depth: int) -> Iterator[BatchT]:
    """Takes from `source` in a thread, up to `depth` items ahead."""
    waiting: queue.Queue[tuple[BatchT | None, BaseException | None]] = queue.Queue(depth)
    stop = threading.Event()

    def fill() -> None:
        error: BaseException | None = None
        try:
            for item in source:
                while not stop.is_set():
                    try:
                        waiting.put((item, None), timeout=0.1)
                        break
                    except queue.Full:
                        continue
                if stop.is_set():
                    return
        except BaseException as caught:
            error = caught
        waiting.put((None, error or StopIteration()))

    threading.Thread(target=fill, daemon=True, name="batches").start()
    try:
        while True:
            item, error = waiting.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]
    finally:
        stop.set()
