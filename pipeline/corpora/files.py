"""The shape of every corpus whose files can be read one by one: one task per input file."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from pipeline import shards, storage
from pipeline.artifact import Draft
from pipeline.corpora import raw
from pipeline.corpora.schema import SPLITS

ROWS_PER_SHARD = 250_000

Row = dict[str, Any]


class Account:
    """What a parser reports beside its rows."""

    def __init__(self) -> None:
        self.records = 0
        """Units of the format that were read: lines, documents."""
        self.malformed = raw.Rejects()
        """Units that are not what the format says."""
        self.dropped: Counter[str] = Counter()
        """Units that are well formed and make no example, by reason."""


Parser = Callable[[str, raw.Reading, Account], Iterator[Row]]


def prepare(
    draft: Draft, files: list[str], parse: Parser, schema: pa.Schema, reading: raw.Reading, label: str
) -> list[dict[str, Any]]:
    """Fills the draft and returns the records of its tasks (`files`, `counts`, `dropped`).

    `parse(uri, reading, account)` yields a file's rows; each names its `split`.
    """
    files = sorted(files, key=storage.name_of)
    work = functools.partial(_convert, parse=parse, schema=schema, reading=reading)
    tasks = {f"file-{index:05d}": uri for index, uri in enumerate(files)}
    records = shards.run_tasks(draft, tasks, work, label)
    raw.check_share(draft, records, reading)
    return records


def _convert(
    draft: Draft, task: str, uri: str, parse: Parser, schema: pa.Schema, reading: raw.Reading
) -> dict[str, Any]:
    account = Account()
    waiting: dict[str, list[Row]] = {split: [] for split in SPLITS}
    files: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()

    def write(split: str) -> None:
        rows, waiting[split] = waiting[split], []
        if not rows:
            return
        name = f"{split}/{task}-{sum(file['path'].startswith(split) for file in files):03d}.parquet"
        if split == "train":  # neighbours in a file are neighbours in a dialogue or an article
            random.Random(name).shuffle(rows)
        files.append(draft.write_table(name, pa.Table.from_pylist(rows, schema=schema)))
        counts["examples"] += len(rows)
        counts[f"examples.{split}"] += len(rows)

    for row in parse(uri, reading, account):
        waiting[row["split"]].append(row)
        if len(waiting[row["split"]]) == ROWS_PER_SHARD:
            write(row["split"])
    for split in SPLITS:
        write(split)
    account.malformed.save(draft, task)
    counts["records"] = account.records
    malformed = dict(account.malformed.counts)
    dropped = {**account.dropped, **malformed}
    return {"files": files, "counts": counts, "malformed": malformed, "dropped": dropped}
