"""The verdict on every candidate of a pool, by tasks that each hold one bucket of hashes.

A verdict is an int64: the place of the candidate's text in the version before, `NEW` where the text has none
there, `SAME_TEXT` or `SAME_ID` where an earlier candidate has taken the content (the text and its values to
filter by) or the id.

    keys       group    the keys of a million rows or so: of the candidates, of the version before, of
                        unfinished builds                              → filed by text and by id
    texts      bucket   the first candidate with each content, and where the earlier builds have its text
                                                                       → filed by id
    ids        bucket   the first of them with each id keeps it        → filed by group, losers by text
    verdicts   group    all verdicts, in the order of the candidates

A candidate that loses its id leaves its content to a later one: `texts` and `ids` come again, in rounds,
until none loses. Where no id has two contents that is one round. Which candidates stay does not depend on the
earlier builds.

    _plan/<plan>/file-00000-000.npy              the verdicts on that part of the candidates
    _plan/<plan>/file-00000-000-unfinished.npy   the places of those texts in unfinished builds, or NEW, for
                                                 those that are to be copied from there

Every group and bucket has a million rows or so: a task holds some 200 MB, whatever the size of the pool. The
driver holds the names of the parts and the files, 100 bytes for 16,384 rows: 1.2 MB for 100 million
candidates and as many rows before. A pool of one bucket is planned in the driver's process.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from pipeline import shards, storage
from pipeline.arrays import Ints
from pipeline.corpora import raw
from pipeline.drafts import Draft
from pipeline.retrieval.pools.changes import Changes, RowSet
from pipeline.retrieval.pools.verdict_tasks import (
    FOLDER,
    NEW,
    REASONS,
    Files,
    GroupRecord,
    IdsRecord,
    PlanInput,
    PlanJob,
    TextQuery,
    bucket_count,
    compare_task,
    groups_of,
    ids_task,
    keys_task,
    texts_task,
    verdicts_task,
)
from pipeline.tasks import executors
from pipeline.tasks.records import TaskRecord, sum_counts


@dataclass(frozen=True)
class Verdicts:
    """The summary of the tasks; the verdicts themselves are in files."""

    plan: str
    """The plan's name, by which `read_verdicts` finds them."""
    changes: Changes
    known: int
    """Candidates whose text the version before has."""
    salvaged: int
    """Candidates whose vectors come from unfinished builds."""
    dropped: dict[str, int]
    samples: dict[int, list[int]]
    """The first places with each verdict of `REASONS`, some."""
    first: list[int]
    """The places of the texts with the lowest keys."""
    present: list[str]
    new_rows: RowSet
    """The candidates whose ids the version before lacks."""


def decide(draft: Draft, rows: PlanInput, query: TextQuery) -> Verdicts:
    """Writes the verdicts on all candidates, of which there is at least one.

    They are those of candidates that come one by one, each of which takes its content and its id if both are
    free.
    """
    job = PlanJob.of(rows, query)
    with _executor(job):
        _file_keys(
            draft, job, {"candidates": ["text"], "before": ["text", "id"], "unfinished": ["text"]}
        )
        for rounds in itertools.count(1):
            texts = functools.partial(texts_task, job=job, round_number=rounds)
            tasks = job.buckets("texts", rounds)
            shards.run_tasks(draft, tasks, texts, "plan: texts", TaskRecord)
            ids = functools.partial(ids_task, job=job, round_number=rounds, query=query)
            tasks = job.buckets("ids", rounds)
            id_records = shards.run_tasks(draft, tasks, ids, "plan: ids", IdsRecord)
            if not any(record.lost for record in id_records):
                break
        verdicts = functools.partial(verdicts_task, job=job, rounds=rounds)
        tasks = {f"{job.name}-verdicts-{n:05d}": n for n in range(len(job.groups["candidates"]))}
        group_records = shards.run_tasks(draft, tasks, verdicts, "plan: verdicts", GroupRecord)
    samples = {
        verdict: [place for r in group_records for v, place in r.samples if v == verdict][
            : raw.MAX_SAMPLES
        ]
        for verdict in REASONS
    }
    lowest = dict[int, int]()  # a text with several values counts once, by its first place
    for key, place in sorted(pair for record in id_records for pair in record.first):
        lowest.setdefault(key, place)
    present = {hash_ for record in id_records for hash_ in record.present}
    return Verdicts(
        plan=job.name,
        changes=_sum_changes(id_records, rows.before),
        known=sum(record.known for record in id_records),
        salvaged=sum(record.salvaged for record in id_records),
        dropped=sum_counts(record.dropped for record in group_records),
        samples=samples,
        first=list(lowest.values())[: query.texts],
        present=[hash_ for hash_ in query.hashes if hash_ in present],
        new_rows=sum((record.new_rows for record in id_records), RowSet()),
    )


def compare(draft: Draft, rows: Files, before: Files, same_columns: bool = True) -> Changes:
    """The ids of a published version beside those of another one; `draft` is for the files of the tasks.

    `same_columns`: whether both have the same columns to filter by.
    """
    groups = {"after": groups_of(rows), "before": groups_of(before)}
    job = PlanJob("compare", bucket_count(rows, before), groups, False, same_columns)
    with _executor(job):
        _file_keys(draft, job, {"after": ["id"], "before": ["id"]})
        work = functools.partial(compare_task, job=job)
        records = shards.run_tasks(draft, job.buckets("ids"), work, "versions: ids", IdsRecord)
    return _sum_changes(records, before)


def is_small(*files: Files) -> bool:
    """Whether one bucket holds the rows. A cluster then gains nothing, and takes seconds to start."""
    return bucket_count(*files) == 1


def read_verdicts(draft: Draft, plan: str, part: str) -> Ints:
    data = storage.read_bytes(draft.path(FOLDER, plan, f"{part}.npy"))
    verdicts: Ints = np.load(io.BytesIO(data), allow_pickle=False)
    return verdicts


def read_salvaged(draft: Draft, plan: str, part: str) -> Ints:
    """Places in unfinished builds; all NEW if there are no such builds."""
    uri = draft.path(FOLDER, plan, f"{part}-unfinished.npy")
    if not storage.exists(uri):
        return np.full(len(read_verdicts(draft, plan, part)), NEW, np.int64)
    places: Ints = np.load(io.BytesIO(storage.read_bytes(uri)), allow_pickle=False)
    return places


def _executor(job: PlanJob) -> AbstractContextManager[object]:
    """The executor of the tasks: this process for a job of one bucket, else the cluster."""
    return executors.in_this_process() if job.bucket_count == 1 else nullcontext()


def _sum_changes(records: Sequence[IdsRecord], before: Files) -> Changes:
    new, changed, same = (
        sum(getattr(record, name) for record in records) for name in ("new", "changed", "same")
    )
    return Changes(new, changed, same, sum(rows for _, rows in before) - same - changed)


def _file_keys(draft: Draft, job: PlanJob, keys_of_kind: dict[str, list[str]]) -> None:
    """Files the rows of each kind by the keys in `keys_of_kind`."""
    tasks = {
        name: f"{kind} {number}"
        for kind in keys_of_kind
        for number, name in enumerate(job.keys(kind))
    }
    work = functools.partial(keys_task, job=job, keys_of_kind=keys_of_kind)
    shards.run_tasks(draft, tasks, work, "plan: keys", TaskRecord)
