"""The fixed wrong answers of article search.

    <corpus>/test/*.parquet              a query (`context`) and its article without it (`response`)
    <corpus>/others/part-00000.parquet   id, text: articles that are no example of valid or test

R@1/10001 is the share of the queries of `test` whose own article a ranker puts before all 10,000 others:
the candidates of a query are its `response` and every `text`. `id` is the article's `group_id`. The
columns are those that `jobs.embed_pool` reads by default, so that `<corpus>/others` makes a pool.

The others are the articles of `train` with the smallest hashes of their ids: the same ones in every
run, whatever the order of the files. Their texts are as those of `train`, without one random sentence.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.corpora.file_tasks import ParseReport, redacted_count
from pipeline.corpora.privacy import Privacy
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord
from pipeline.engine.run import run_tasks

SCHEMA = pa.schema(
    [pa.field("id", pa.string(), nullable=False), pa.field("text", pa.string(), nullable=False)]
)
Articles = Callable[[Draft, ParseReport], Iterator[tuple[str, str]]]
"""(id, text) of every article that may be chosen."""


def choose_others(
    draft: Draft,
    examples: Sequence[TaskRecord],
    count: int,
    privacy: Privacy,
    articles: Articles | None = None,
) -> list[TaskRecord]:
    """Writes the others; the record's counts hold `others` and, where they are too few, `others.missing`.

    They are chosen from `articles`, or else from the train split of the `examples`, each as its first query
    leaves it. An article that is in valid or test is never taken. One task reads all articles and holds
    `count` of them: some 3 minutes for 5 million.
    """
    if not count:
        return []
    paths = sorted(file["path"] for record in examples for file in record.files)
    train = [path for path in paths if path.startswith("train/")]
    held_out = [path for path in paths if path.startswith(("valid/", "test/"))]
    source = articles or (lambda draft, _: _rows(draft, train, "group_id", "response"))

    def choose(draft: Draft, task: str, _: int) -> TaskRecord:
        report = ParseReport()
        excluded = {name for (name,) in _rows(draft, held_out, "group_id")}
        text_by_id: dict[str, str] = {}
        hash_heap: list[tuple[int, str]] = []  # a heap of (-hash, id) of the chosen articles
        for name, text in source(draft, report):
            if name in text_by_id or name in excluded:
                continue
            text_by_id[name] = text
            heapq.heappush(hash_heap, (-_hash(name), name))
            if len(hash_heap) > count:
                del text_by_id[heapq.heappop(hash_heap)[1]]
        names = [name for _, name in sorted(hash_heap, reverse=True)]
        texts = pa.array([text_by_id[name] for name in names], pa.string())
        texts, redacted = privacy.redacted_and_counted(texts)
        files = []
        if names:
            table = pa.table([pa.array(names, pa.string()), texts], schema=SCHEMA)
            files.append(draft.write_table("others/part-00000.parquet", table))
        counts = {"others": len(names), **redacted_count(redacted)}
        if len(names) < count:
            counts["others.missing"] = count - len(names)
        return report.close(draft, task, privacy, TaskRecord, files=files, counts=counts)

    return run_tasks(draft, {"others": 0}, choose, "articles to others", TaskRecord)


def _rows(draft: Draft, files: Sequence[str], *columns: str) -> Iterator[Any]:
    for file in files:
        with storage.open_input(draft.path(file)) as stream:
            for batch in pq.ParquetFile(stream).iter_batches(2048, columns=list(columns)):
                yield from zip(*(batch.column(name).to_pylist() for name in columns), strict=True)


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
