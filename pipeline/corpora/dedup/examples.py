"""The shards of a corpus, the compared texts of their examples, and the dropped examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.arrays import Bools, Ints
from pipeline.corpora import buckets
from pipeline.corpora.dedup.hashing import Tokens
from pipeline.corpora.dedup.options import Options
from pipeline.engine.draft import Draft

COMPARED = ["example_id", "context", "response"]
"""Columns that the comparing stages read."""

_PIECE_BYTES = 1 << 18  # hashed at once: the arrays, 8 bytes a letter, stay in cache
_ROWS_READ = 2048
_ROW_BITS = 32  # a node is an example of the corpus: its shard's number, then its row

# Which of two duplicates stays: an example of test, then one of valid, then one of train.
_RANKS = {"test": 0, "valid": 1, "train": 2}

CLUSTERS = pa.schema(
    [("cluster", pa.uint64()), ("node", pa.int64()), ("rank", pa.int8()), ("id", pa.string())]
)
"""Examples that are the same have one cluster."""
DROPS = pa.schema([("row", pa.int64()), ("reason", pa.string()), ("match", pa.string())])
"""Dropped rows of a shard, and the id of the example that each one repeats."""
CONTAMINATED = pa.schema([*DROPS, ("set", pa.int32()), ("place", pa.int32())])
"""The number of the evaluation set, and of the example's run of words that the set has."""


@dataclass(frozen=True)
class CorpusFile:
    """A Parquet file of a corpus."""

    uri: str
    name: str
    """Its path in the corpus: "train/part-00000.parquet"."""
    rows: int

    @property
    def split(self) -> str:
        return self.name.partition("/")[0]

    @property
    def rank(self) -> int:
        return _RANKS[self.split]


@dataclass(frozen=True)
class DedupPlan:
    """Input of every task of the job."""

    shards: tuple[CorpusFile, ...]
    options: Options
    contaminated_buckets: int
    """Number of buckets of evaluation n-grams; 0: there are none to check train against."""
    exact_buckets: int
    """0: exact duplicates stay."""
    near_buckets: int
    """0: near duplicates stay."""

    def tasks(self, stage: str, split: str = "") -> dict[str, int]:
        """A task per shard, of one split or all."""
        return {
            f"{stage}-{number:05d}": number
            for number, shard in enumerate(self.shards)
            if shard.name.startswith(split)
        }


def bucket_tasks(stage: str, count: int) -> dict[str, int]:
    """A task per bucket."""
    return {f"{stage}-{bucket:05d}": bucket for bucket in range(count)}


def node_of(shard: int, rows: Ints) -> Ints:
    return (shard << _ROW_BITS) + rows


def shard_and_row(nodes: Ints) -> tuple[Ints, Ints]:
    return nodes >> _ROW_BITS, nodes & ((1 << _ROW_BITS) - 1)


# Reading


def read_pieces(
    uri: str, columns: list[str], row_mask: Bools | None = None
) -> Iterator[tuple[Ints, pa.Table]]:
    """(row numbers, rows) of a Parquet file, some 512 KiB at a time, each column in one chunk.

    `row_mask` says for every row of the file whether it is read.
    """
    first = 0
    with storage.open_input(uri) as stream:
        for batch in pq.ParquetFile(stream).iter_batches(_ROWS_READ, columns=columns):
            numbers = np.arange(first, first + batch.num_rows)
            first += batch.num_rows
            if row_mask is not None:
                batch_mask = row_mask[numbers]
                numbers, batch = numbers[batch_mask], batch.filter(pa.array(batch_mask))
            step = max(1, batch.num_rows * _PIECE_BYTES // max(1, batch.nbytes))
            for start in range(0, batch.num_rows, step):
                yield numbers[start : start + step], pa.table(batch.slice(start, step))


def sides(rows: pa.Table, text: str, tokenise: Callable[[pa.Array], Tokens]) -> list[Tokens]:
    """The tokens of the compared texts: [the context's, the response's], or [the response's].

    The turns of a context are one text; `tokenise` makes texts to tokens.
    """
    response = tokenise(rows["response"].chunk(0))
    if text == "response":
        return [response]
    context = rows["context"].chunk(0)
    turns = context.flatten()
    offsets = np.concatenate([[0], np.cumsum(pc.fill_null(pc.list_value_length(context), 0))])
    if text == "pair":
        newest = np.unique(offsets[1:][np.diff(offsets) > 0]) - 1
        turns = turns.take(pa.array(newest))
        offsets = np.searchsorted(newest, offsets)
    return [tokenise(turns).joined(offsets), response]


# Drops: each stage files them by shard for the later stages


def file_duplicates(draft: Draft, task: str, plan: DedupPlan, rows: pa.Table, reason: str) -> None:
    """Files as drops all examples of each cluster (`CLUSTERS`) but the first, by split and id."""
    order = [(name, "ascending") for name in ("cluster", "rank", "id", "node")]
    rows = rows.sort_by(order).combine_chunks()
    cluster = rows["cluster"].to_numpy()
    first_of_cluster = np.searchsorted(cluster, cluster)
    may_drop = np.isin(rows["rank"].to_numpy(), [_RANKS[split] for split in plan.options.drop_from])
    dropped = np.flatnonzero((first_of_cluster != np.arange(len(first_of_cluster))) & may_drop)
    shard, row = shard_and_row(rows["node"].to_numpy()[dropped])
    match = rows["id"].take(pa.array(first_of_cluster[dropped]))
    drops = pa.table([row, pa.repeat(pa.scalar(reason), len(dropped)), match], schema=DROPS)
    buckets.write(draft, f"{task}-drops", drops, shard, len(plan.shards))


def read_drops(draft: Draft, plan: DedupPlan, shard: int, *stages: str) -> pa.Table:
    """The drops of a shard by these stages: "contaminated", "exact", "near"."""
    tasks = [*bucket_tasks("exact", plan.exact_buckets)] if "exact" in stages else []
    tasks += ["near-join"] if "near" in stages and plan.near_buckets else []
    names = [f"{task}-drops" for task in tasks]
    tables = [buckets.read(draft, names, shard, DROPS)]
    if "contaminated" in stages and plan.shards[shard].split == "train":
        names = [f"{task}-drops" for task in bucket_tasks("match", plan.contaminated_buckets)]
        rows = buckets.read(draft, names, shard, CONTAMINATED)
        # An example may have runs in several buckets: of the first set, the first one counts.
        rows = rows.sort_by([(name, "ascending") for name in ("row", "set", "place")])
        first = np.unique(rows["row"].to_numpy(), return_index=True)[1]
        tables.append(rows.select(DROPS.names).take(pa.array(first)))
    return pa.concat_tables(tables)


def keep_mask(drops: pa.Table, rows: int) -> Bools:
    """Whether each row of a shard stays."""
    mask = np.ones(rows, bool)
    mask[drops["row"].to_numpy()] = False
    return mask
