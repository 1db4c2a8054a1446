"""A corpus without what it holds twice, and without what it is evaluated on.

    decontaminate   examples of train that share a run of words with an evaluation set
    exact           of examples with the same words all but one
    near            of examples with mostly the same shingles all but one
    write           the examples that stay, and samples of those that go

Each stage works on what the stages before it leave, by tasks per shard or per bucket of hashes that file
what they find for the next ones (`buckets`): memory is bounded by one of them, whatever the corpus's
size, and a killed job goes on where it was. What stays depends on the examples alone, not on how they
lie in shards: of duplicates one of test, else of valid, else of train, and of several there the one with
the smallest example_id.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import shards, storage
from pipeline.artifact import Artifact, Draft
from pipeline.corpora import raw
from pipeline.corpora.dedup import decontaminate, exact, near
from pipeline.corpora.dedup.decontaminate import EvaluationSet
from pipeline.corpora.dedup.examples import COMPARED, Plan, kept, read_drops, shards_of
from pipeline.corpora.dedup.options import Options
from pipeline.records import FileEntry, TaskRecord

_BUCKET_BYTES = 128 << 20  # of keys; some 1 GB while they are sorted
_SAMPLE_CHARACTERS = 2000


def clean(
    draft: Draft,
    corpus: Artifact,
    sets: list[EvaluationSet],
    options: Options,
    sharing: decontaminate.Options,
) -> Sequence[TaskRecord]:
    """Fills the draft; returns the records of its tasks."""
    index = decontaminate.build_index(draft, sets, sharing)
    files = shards_of(corpus)
    examples = sum(shard.rows for shard in files)
    exact_bytes = examples * exact.KEY_BYTES
    near_bytes = examples * options.bands * near.KEY_BYTES
    plan = Plan(
        files,
        options,
        contaminated=index is not None,
        exact_buckets=-(-exact_bytes // _BUCKET_BYTES) if options.exact else 0,
        near_buckets=-(-near_bytes // _BUCKET_BYTES) if options.near else 0,
    )
    records = decontaminate.drop(draft, plan, index, sharing) if index else []
    records += exact.drop(draft, plan) if plan.exact_buckets else []
    records += near.drop(draft, plan) if plan.near_buckets else []
    write = functools.partial(_write, plan=plan)
    records += shards.run_tasks(draft, plan.tasks("write"), write, "write", TaskRecord)
    return [*records, TaskRecord(files=_copy_others(draft, corpus))]


def _copy_others(draft: Draft, corpus: Artifact) -> list[FileEntry]:
    """What the corpus holds besides examples: the fixed other articles of an article search."""
    return [
        draft.write_file(entry["path"], storage.read_bytes(storage.join(corpus.uri, entry["path"])),
                         entry["rows"])
        for entry in corpus.manifest["files"] if entry["path"].startswith("others/")
    ]  # fmt: skip


def _write(draft: Draft, task: str, number: int, plan: Plan) -> TaskRecord:
    shard = plan.shards[number]
    drops = read_drops(draft, plan, number, "contaminated", "exact", "near").sort_by("row")
    with storage.open_input(shard.uri) as stream:
        rows = pq.read_table(stream)
    stays = rows.filter(pa.array(kept(drops, rows.num_rows)))
    dropped = _samples(rows, drops, shard.name)
    dropped.save(draft, task)
    return TaskRecord(
        files=[draft.write_table(shard.name, stays)] if stays.num_rows else [],
        counts={
            "records": rows.num_rows,
            f"records.{shard.split}": rows.num_rows,
            "examples": stays.num_rows,
            f"examples.{shard.split}": stays.num_rows,
        },
        dropped=dict(dropped.counts),
    )


def _samples(rows: pa.Table, drops: pa.Table, file: str) -> raw.Rejects:
    """What goes by reason, and some of it beside the id of what it is the same as."""
    reasons = drops["reason"].to_numpy(zero_copy_only=False)
    found = raw.Rejects(Counter(reasons.tolist()))
    for reason in found.counts:
        some = drops.take(pa.array(np.flatnonzero(reasons == reason)[: raw.MAX_SAMPLES]))
        examples = rows.select(COMPARED).take(some["row"]).to_pylist()
        for example, match in zip(examples, some["match"].to_pylist(), strict=True):
            text = "\n".join([*example["context"], example["response"]])
            found.samples.append({"reason": reason, "file": file, "example_id": example["example_id"],
                                  "same_as": match, "text": text[:_SAMPLE_CHARACTERS]})  # fmt: skip
    return found
