"""Removes duplicates from a corpus, and training examples that share text with evaluation sets.

    decontaminate   drops examples of train that share a run of words with an evaluation set
    exact           drops all but one of the examples with the same words
    near            drops all but one of the examples with mostly the same shingles
    write           writes the examples that stay, and samples of the others

Each stage works on the examples that the stages before it leave. Its tasks, one per shard or per bucket of
hashes, write their results for the next stage (`buckets`). So memory is bounded by one task, whatever the
size of the corpus, and a killed job resumes where it was. Which examples stay does not depend on the
shards: of duplicates one in test stays, else one in valid, else one in train; of several there, the one
with the smallest example_id.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import cost, storage
from pipeline.artifact import Artifact, FileEntry
from pipeline.corpora import raw
from pipeline.corpora.dedup import decontaminate, exact, near
from pipeline.corpora.dedup.evaluation_sets import EvaluationSet
from pipeline.corpora.dedup.examples import COMPARED, CorpusFile, DedupPlan, keep_mask, read_drops
from pipeline.corpora.dedup.options import Options
from pipeline.corpora.schema import example_files
from pipeline.cost import Estimate
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord
from pipeline.engine.run import run_tasks

_BUCKET_BYTES = 128 << 20  # of keys; some 1 GB while they are sorted
_SAMPLE_CHARACTERS = 2000


def clean(
    draft: Draft,
    corpus: Artifact,
    sets: list[EvaluationSet],
    options: Options,
    decontamination: decontaminate.Options,
) -> Sequence[TaskRecord]:
    """Fills the draft; returns the records of its tasks."""
    shards = example_files(corpus)
    train_bytes = sum(entry["bytes"] for entry in shards if entry["path"].startswith("train/"))
    evaluation_bytes = sum(storage.size_of(uri) for one in sets for uri in one.files)
    layout = decontaminate.Layout.for_sizes(evaluation_bytes, train_bytes)
    has_ngrams = decontaminate.build_index(draft, sets, layout, decontamination)
    key_bytes = _key_bytes(sum(entry["rows"] for entry in shards), options)
    plan = DedupPlan(
        tuple(
            CorpusFile(storage.join(corpus.uri, entry["path"]), entry["path"], entry["rows"])
            for entry in shards
        ),
        options,
        layout.bucket_count if has_ngrams else 0,
        *(-(-size // _BUCKET_BYTES) for size in key_bytes),
    )
    records = decontaminate.drop(draft, plan, sets, layout, decontamination) if has_ngrams else []
    records += exact.drop(draft, plan) if plan.exact_buckets else []
    records += near.drop(draft, plan) if plan.near_buckets else []
    write = functools.partial(_write, plan=plan)
    records += run_tasks(draft, plan.tasks("write"), write, "write", TaskRecord)
    return [*records, TaskRecord(files=_copy_others(draft, corpus))]


def _key_bytes(examples: int, options: Options) -> tuple[int, int]:
    """Bytes of the keys that find (exact, near) duplicates; 0: that search is off."""
    exact_bytes = examples * exact.KEY_BYTES if options.exact else 0
    near_bytes = examples * options.bands * near.KEY_BYTES if options.near else 0
    return exact_bytes, near_bytes


def estimate(
    sizes: Sequence[int], rows: int, options: Options, evaluation_sizes: Sequence[int]
) -> Estimate:
    """The cost of cleaning a corpus of shards of these sizes.

    `evaluation_sizes`: of the files of the evaluation sets, the corpus's own ones too.
    """
    key_bytes = _key_bytes(rows, options)
    layout = decontaminate.Layout.for_sizes(sum(evaluation_sizes), sum(sizes))
    # Each step reads the shards, and so does the one that writes.
    passes = bool(evaluation_sizes) + sum(size > 0 for size in key_bytes) + 1
    bucket_count = sum(-(-size // _BUCKET_BYTES) for size in key_bytes)
    tasks = passes * len(sizes) + bucket_count
    requests = passes * cost.reads(sizes) + bucket_count * len(sizes)
    if evaluation_sizes:
        tasks += len(evaluation_sizes) + 2 * layout.bucket_count
        requests += cost.reads(evaluation_sizes)
        requests += layout.bucket_count * (len(evaluation_sizes) + len(sizes))
    return Estimate(
        input_files=len(sizes),
        input_bytes=sum(sizes),
        rows=rows,
        tasks=tasks,
        requests=requests + 2 * tasks,
        shuffle_bytes=sum(key_bytes) + layout.filed_bytes,
    )


def _copy_others(draft: Draft, corpus: Artifact) -> list[FileEntry]:
    """Copies the fixed other articles of an article search, which are no examples."""
    return [
        draft.write_file(entry["path"], storage.read_bytes(storage.join(corpus.uri, entry["path"])),
                         entry["rows"])
        for entry in corpus.manifest["files"] if entry["path"].startswith("others/")
    ]  # fmt: skip


def _write(draft: Draft, task: str, number: int, plan: DedupPlan) -> TaskRecord:
    shard = plan.shards[number]
    drops = read_drops(draft, plan, number, "contaminated", "exact", "near").sort_by("row")
    with storage.open_input(shard.uri) as stream:
        rows = pq.read_table(stream)
    kept_rows = rows.filter(pa.array(keep_mask(drops, rows.num_rows)))
    dropped = _samples(rows, drops, shard.name)
    dropped.save(draft, task)
    return TaskRecord(
        files=[draft.write_table(shard.name, kept_rows)] if kept_rows.num_rows else [],
        counts={
            "records": rows.num_rows,
            f"records.{shard.split}": rows.num_rows,
            "examples": kept_rows.num_rows,
            f"examples.{shard.split}": kept_rows.num_rows,
        },
        dropped=dict(dropped.counts),
    )


def _samples(rows: pa.Table, drops: pa.Table, file: str) -> raw.Rejects:
    """Counts of the dropped rows by reason, and samples with the id of the matching example."""
    reasons = drops["reason"].to_numpy(zero_copy_only=False)
    rejects = raw.Rejects(Counter(reasons.tolist()))
    for reason in rejects.counts:
        sampled_drops = drops.take(pa.array(np.flatnonzero(reasons == reason)[: raw.MAX_SAMPLES]))
        examples = rows.select(COMPARED).take(sampled_drops["row"]).to_pylist()
        for example, match in zip(examples, sampled_drops["match"].to_pylist(), strict=True):
            text = "\n".join([*example["context"], example["response"]])
            rejects.samples.append({"reason": reason, "file": file, "example_id": example["example_id"],
                                  "same_as": match, "text": text[:_SAMPLE_CHARACTERS]})  # fmt: skip
    return rejects
