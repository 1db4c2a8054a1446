"""Drops exact duplicates: examples with the same words in the same order.

A text without a word, such as "?!", is the same only as a text of the same characters.

hash    shard    a hash of every example's words     → filed by hash
first   bucket   of examples with one hash the first stays
"""

from __future__ import annotations

import functools

import numpy as np
import pyarrow as pa

from pipeline.corpora import buckets
from pipeline.corpora.dedup import hashing
from pipeline.corpora.dedup.examples import (
    CLUSTERS,
    COMPARED,
    DedupPlan,
    bucket_tasks,
    file_duplicates,
    keep_mask,
    node_of,
    read_drops,
    read_pieces,
    sides,
)
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord
from pipeline.engine.run import run_tasks

KEY_BYTES = 48  # of one example: hash, place, split, id


def drop(draft: Draft, plan: DedupPlan) -> list[TaskRecord]:
    """Files the drops of tasks "exact-…"; returns the records of all tasks."""
    hash_ = functools.partial(_hash, plan=plan)
    label = "exact duplicates: hashes"
    hash_records = run_tasks(draft, plan.tasks("hash"), hash_, label, TaskRecord)
    work = functools.partial(_file_duplicates, plan=plan)
    tasks = bucket_tasks("exact", plan.exact_buckets)
    return hash_records + run_tasks(draft, tasks, work, "exact duplicates", TaskRecord)


def _hash(draft: Draft, task: str, number: int, plan: DedupPlan) -> TaskRecord:
    shard = plan.shards[number]
    tables = [CLUSTERS.empty_table()]
    row_mask = keep_mask(read_drops(draft, plan, number, "contaminated"), shard.rows)
    for numbers, rows in read_pieces(shard.uri, COMPARED, row_mask):
        columns = [
            hashing.row_hashes(_side_hashes(rows, plan.options.text)),
            node_of(number, numbers),
            np.full(len(numbers), shard.rank, np.int8),
            rows["example_id"],
        ]
        tables.append(pa.table(columns, schema=CLUSTERS))
    entries = pa.concat_tables(tables).combine_chunks()
    bucket = hashing.bucket_of_hash(entries["cluster"].to_numpy(), plan.exact_buckets)
    buckets.write(draft, task, entries, bucket, plan.exact_buckets)
    return TaskRecord()


def _side_hashes(rows: pa.Table, text: str) -> hashing.Hashes:
    """[N, K] hashes of each side's words; of its characters where it has no word."""
    hashes = list[hashing.Hashes]()
    for number, side in enumerate(sides(rows, text, hashing.words)):
        hashes.append(side.sequence_hashes())
        wordless = side.counts == 0
        if wordless.any():
            texts = sides(rows.filter(pa.array(wordless)), text, hashing.whole_texts)[number]
            hashes[-1][wordless] = texts.sequence_hashes()
    return np.stack(hashes, axis=1)


def _file_duplicates(draft: Draft, task: str, bucket: int, plan: DedupPlan) -> TaskRecord:
    rows = buckets.read(draft, plan.tasks("hash"), bucket, CLUSTERS)
    _, places, sizes = np.unique(
        rows["cluster"].to_numpy(), return_inverse=True, return_counts=True
    )
    rows = rows.filter(pa.array(sizes[places] > 1))  # most are alone, and need no sorting
    file_duplicates(draft, task, plan, rows, "duplicate")
    return TaskRecord()
