"""The verdict on every candidate of a pool, by tasks that each hold one bucket of hashes.

A verdict is an int64: the place of the candidate's text in the version before, `NEW` where the text has none
there, `SAME_TEXT` or `SAME_ID` where an earlier candidate has taken the text or the id.

    keys       group    the keys of a million rows or so: of the candidates, of the version before, of
                        unfinished builds                              → filed by text and by id
    texts      bucket   the first candidate with each text, and where the earlier builds have the text
                                                                       → filed by id
    ids        bucket   the first of them with each id keeps it        → filed by group, losers by text
    verdicts   group    all verdicts, in the order of the candidates

A candidate that loses its id leaves its text to a later one: `texts` and `ids` come again, in rounds, until
none loses. Where no id has two texts that is one round.

    _plan/file-00000-000.npy              the verdicts on that part of the candidates
    _plan/file-00000-000-unfinished.npy   the places of those texts in unfinished builds, or NEW, for those
                                          that are to be copied from there

Every group and bucket has a million rows or so: a task holds some 200 MB, whatever the size of the pool. The
driver holds the names of the parts and the files, 100 bytes for 16,384 rows: 1.2 MB for 100 million
candidates and as many rows before. A pool of one bucket is planned in the driver's process.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pyarrow as pa

from pipeline import executors, shards, storage
from pipeline.arrays import Ints, Keys
from pipeline.artifact import Draft
from pipeline.config import digest
from pipeline.corpora import buckets, raw
from pipeline.records import TaskRecord, sum_counts
from pipeline.retrieval.pools import candidates
from pipeline.retrieval.pools.changes import Changes

NEW, SAME_TEXT, SAME_ID = -1, -2, -3
REASONS = {SAME_TEXT: "the same text again", SAME_ID: "the same id again"}
_FOLDER = "_plan"
_BUCKET_ROWS = 1 << 20
_READS_AT_ONCE = 16

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
Files = Sequence[tuple[str, int]]
"""(part, or URI of a file of rows; its rows) each"""

_KEYS = pa.schema([("text", pa.uint64()), ("id", pa.uint64()), ("place", pa.int64())])
_FIRST = pa.schema([*_KEYS, ("before", pa.int64()), ("unfinished", pa.int64())])
_LOST = pa.schema([("place", pa.int64())])
_VERDICTS = pa.schema([("place", pa.int64()), ("verdict", pa.int64()), ("unfinished", pa.int64())])


@dataclass(frozen=True)
class PlanInput:
    """What a plan is made of; places count over all files of a kind."""

    candidates: Files
    """Parts."""
    before: Files = ()
    """Of the version before."""
    unfinished: Files = ()
    """Of builds that were never finished, for texts that are not copied from the version before."""
    copies: bool = True
    """Whether any text is copied from the version before."""


@dataclass(frozen=True)
class Wanted:
    """What else is to be found among the candidates that are kept."""

    texts: int = 0
    """How many with the lowest keys."""
    hashes: Sequence[str] = ()
    """Which of these are there: the first 16 digits of content hashes."""


@dataclass(frozen=True)
class Verdicts:
    """What the tasks found; the verdicts themselves are in files."""

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


@dataclass(frozen=True, kw_only=True)
class IdsRecord(TaskRecord):
    """A bucket of ids."""

    new: int
    changed: int
    same: int
    lost: int = 0
    """Candidates that an earlier one has taken the id of."""
    known: int = 0
    salvaged: int = 0
    first: list[tuple[int, int]] = field(default_factory=list)
    """(key, place) of the texts with the lowest keys"""
    present: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class GroupRecord(TaskRecord):
    """The verdicts on a group of candidates."""

    samples: list[tuple[int, int]]
    """(verdict, place) of the first ones that are dropped"""


@dataclass(frozen=True)
class _Group:
    """Files one after the other, a million rows or so."""

    files: tuple[tuple[str, int], ...]
    first: int
    """The place of its first row."""

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.files)


@dataclass(frozen=True)
class _Job:
    """What every task knows."""

    name: str
    """Before the names of all tasks: a job that is resumed after the version before has changed, or another
    build was killed, takes none for done."""
    bucket_count: int
    groups: dict[str, list[_Group]]
    """By what they are of: "candidates", "before", "unfinished"."""
    copies: bool

    @classmethod
    def of(cls, rows: PlanInput) -> _Job:
        kinds = {
            "candidates": rows.candidates,
            "before": rows.before,
            "unfinished": rows.unfinished,
        }
        count = _bucket_count(*kinds.values())
        named = digest([[list(map(list, files)) for files in kinds.values()], rows.copies, count])
        return cls(
            f"plan-{named[:8]}", count, {k: _groups(f) for k, f in kinds.items()}, rows.copies
        )

    def keys(self, kind: str) -> list[str]:
        return [f"{self.name}-keys-{kind}-{number:05d}" for number in range(len(self.groups[kind]))]

    def buckets(self, stage: str, round_number: int = 0) -> dict[str, int]:
        """A task per bucket."""
        name = f"{self.name}-{stage}-{round_number}"
        return {f"{name}-{bucket:05d}": bucket for bucket in range(self.bucket_count)}

    def file(self, draft: Draft, name: str, rows: pa.Table, by: str) -> None:
        """Files rows by the bucket of their key `by`."""
        bucket = (rows[by].to_numpy() % np.uint64(self.bucket_count)).astype(np.int64)
        buckets.write(draft, f"{name}-by-{by}", rows, bucket, self.bucket_count)

    def read(self, draft: Draft, kind: str, by: str, bucket: int) -> pa.Table:
        """The keys in a bucket, in the order of places."""
        names = [f"{task}-by-{by}" for task in self.keys(kind)]
        return buckets.read(draft, names, bucket, _KEYS)


def decide(draft: Draft, rows: PlanInput, wanted: Wanted) -> Verdicts:
    """Writes the verdicts on all candidates, a row at least: as if they came one by one, and each took a
    text and an id if both are free."""
    job = _Job.of(rows)
    with _place(job):
        _file_keys(
            draft, job, {"candidates": ["text"], "before": ["text", "id"], "unfinished": ["text"]}
        )
        for rounds in itertools.count(1):
            texts = functools.partial(_texts, job=job, round_number=rounds)
            tasks = job.buckets("texts", rounds)
            shards.run_tasks(draft, tasks, texts, "plan: texts", TaskRecord)
            ids = functools.partial(_ids, job=job, round_number=rounds, wanted=wanted)
            tasks = job.buckets("ids", rounds)
            found = shards.run_tasks(draft, tasks, ids, "plan: ids", IdsRecord)
            if not any(record.lost for record in found):
                break
        verdicts = functools.partial(_verdicts, job=job, rounds=rounds)
        tasks = {f"{job.name}-verdicts-{at:05d}": at for at in range(len(job.groups["candidates"]))}
        written = shards.run_tasks(draft, tasks, verdicts, "plan: verdicts", GroupRecord)
    samples = {
        verdict: [place for r in written for v, place in r.samples if v == verdict][
            : raw.MAX_SAMPLES
        ]
        for verdict in REASONS
    }
    lowest = sorted(key_and_place for record in found for key_and_place in record.first)
    present = {hash_ for record in found for hash_ in record.present}
    return Verdicts(
        changes=_sum(found, rows.before),
        known=sum(record.known for record in found),
        salvaged=sum(record.salvaged for record in found),
        dropped=sum_counts(record.dropped for record in written),
        samples=samples,
        first=[place for _, place in lowest[: wanted.texts]],
        present=[hash_ for hash_ in wanted.hashes if hash_ in present],
    )


def compare(draft: Draft, rows: Files, before: Files) -> Changes:
    """The ids of a published version beside those of another one; `draft` is for the files of the tasks."""
    groups = {"after": _groups(rows), "before": _groups(before)}
    job = _Job("compare", _bucket_count(rows, before), groups, copies=False)
    with _place(job):
        _file_keys(draft, job, {"after": ["id"], "before": ["id"]})
        work = functools.partial(_compare, job=job)
        found = shards.run_tasks(draft, job.buckets("ids"), work, "versions: ids", IdsRecord)
    return _sum(found, before)


def is_small(*files: Files) -> bool:
    """Whether one bucket holds the rows: then a cluster gains nothing, and takes seconds to start."""
    return _bucket_count(*files) == 1


def read_verdicts(draft: Draft, part: str) -> Ints:
    data = storage.read_bytes(draft.path(_FOLDER, f"{part}.npy"))
    verdicts: Ints = np.load(io.BytesIO(data), allow_pickle=False)
    return verdicts


def read_salvaged(draft: Draft, part: str) -> Ints:
    """Places in unfinished builds; all NEW where there are none."""
    uri = draft.path(_FOLDER, f"{part}-unfinished.npy")
    if not storage.exists(uri):
        return np.full(len(read_verdicts(draft, part)), NEW, np.int64)
    places: Ints = np.load(io.BytesIO(storage.read_bytes(uri)), allow_pickle=False)
    return places


def ahead(read: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> Iterator[ResultT]:
    """`read(item)` of each item, in order, while the next ones are read: from an object store each takes
    20 ms or more, and a large pool has thousands."""
    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        waiting: deque[Future[ResultT]] = deque()
        for item in items:
            waiting.append(pool.submit(read, item))
            if len(waiting) > 2 * _READS_AT_ONCE:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _place(job: _Job) -> AbstractContextManager[object]:
    """Where the tasks run."""
    return executors.in_this_process() if job.bucket_count == 1 else nullcontext()


def _bucket_count(*kinds: Files) -> int:
    most = max(sum(rows for _, rows in files) for files in kinds)
    return max(1, -(-most // _BUCKET_ROWS))


def _groups(files: Files) -> list[_Group]:
    groups = list[_Group]()
    taken = list[tuple[str, int]]()
    rows = start = 0
    for name, count in files:
        if taken and rows + count > _BUCKET_ROWS:
            groups.append(_Group(tuple(taken), start))
            start += rows
            taken, rows = [], 0
        taken.append((name, count))
        rows += count
    return [*groups, _Group(tuple(taken), start)] if taken else groups


def _sum(found: Sequence[IdsRecord], before: Files) -> Changes:
    new, changed, same = (
        sum(getattr(record, name) for record in found) for name in ("new", "changed", "same")
    )
    return Changes(new, changed, same, sum(rows for _, rows in before) - same - changed)


def _file_keys(draft: Draft, job: _Job, by: dict[str, list[str]]) -> None:
    """Files the rows of each kind `by` some of their keys."""
    tasks = {name: f"{kind} {number}" for kind in by for number, name in enumerate(job.keys(kind))}
    work = functools.partial(_keys, job=job, by=by)
    shards.run_tasks(draft, tasks, work, "plan: keys", TaskRecord)


# The tasks


def _keys(
    draft: Draft, task: str, argument: str, job: _Job, by: dict[str, list[str]]
) -> TaskRecord:
    kind, _, number = argument.partition(" ")
    group = job.groups[kind][int(number)]

    def read(name: str) -> tuple[Keys, Keys]:
        if kind != "candidates":
            return candidates.read_published_keys(name)
        keys = candidates.read_keys(draft, name)
        return keys[:, candidates.TEXT_KEY], keys[:, candidates.ID_KEY]

    found = list(ahead(read, [name for name, _ in group.files]))
    texts, ids = (np.concatenate(keys) for keys in zip(*found, strict=True))
    rows = pa.table([texts, ids, group.first + np.arange(len(texts))], schema=_KEYS)
    for key in by[kind]:
        job.file(draft, task, rows, key)
    return TaskRecord(counts={"records": len(rows)})


def _texts(draft: Draft, task: str, bucket: int, job: _Job, round_number: int) -> TaskRecord:
    """The first candidate with each text, of those that have not lost their id."""
    rows = job.read(draft, "candidates", "text", bucket)
    lost = [
        f"{name}-lost" for number in range(1, round_number) for name in job.buckets("ids", number)
    ]
    gone = buckets.read(draft, lost, bucket, _LOST)["place"].to_numpy()
    rows = rows.filter(pa.array(~np.isin(rows["place"].to_numpy(), gone)))
    rows = rows.take(pa.array(_first(rows["text"].to_numpy())))
    texts = rows["text"].to_numpy()
    before = _places(job.read(draft, "before", "text", bucket), texts)
    unfinished = _places(job.read(draft, "unfinished", "text", bucket), texts)
    if job.copies:
        unfinished[before >= 0] = NEW
    columns = [*rows.columns, before, unfinished]
    job.file(draft, task, pa.table(columns, schema=_FIRST), "id")
    return TaskRecord()


def _ids(
    draft: Draft, task: str, bucket: int, job: _Job, round_number: int, wanted: Wanted
) -> IdsRecord:
    """The first candidate with each id, of those that are the first with their text."""
    names = [f"{name}-by-id" for name in job.buckets("texts", round_number)]
    rows = buckets.read(draft, names, bucket, _FIRST).sort_by("place").combine_chunks()
    is_first = np.zeros(len(rows), bool)
    is_first[_first(rows["id"].to_numpy())] = True
    kept, lost = rows.filter(pa.array(is_first)), rows.filter(pa.array(~is_first))
    text_bucket = (lost["text"].to_numpy() % np.uint64(job.bucket_count)).astype(np.int64)
    buckets.write(draft, f"{task}-lost", lost.select(["place"]), text_bucket, job.bucket_count)
    places = rows["place"].to_numpy()
    before = np.where(is_first, rows["before"].to_numpy(), SAME_ID)
    unfinished = np.where(is_first, rows["unfinished"].to_numpy(), NEW)
    starts = [group.first for group in job.groups["candidates"]]
    group = np.searchsorted(starts, places, side="right") - 1
    verdicts = pa.table([places, before, unfinished], schema=_VERDICTS)
    buckets.write(draft, task, verdicts, group, len(starts))
    texts = kept["text"].to_numpy()
    lowest = np.argsort(texts)[: wanted.texts]
    keys = np.array([int(hash_, 16) for hash_ in wanted.hashes], np.uint64)
    new, changed, same = _changes(kept, job.read(draft, "before", "id", bucket))
    return IdsRecord(
        new=new,
        changed=changed,
        same=same,
        lost=len(lost),
        known=int(np.count_nonzero(before >= 0)),
        salvaged=int(np.count_nonzero(unfinished >= 0)),
        first=[(int(texts[at]), int(kept["place"][at].as_py())) for at in lowest.tolist()],
        present=[wanted.hashes[at] for at in np.flatnonzero(np.isin(keys, texts)).tolist()],
    )


def _verdicts(draft: Draft, task: str, number: int, job: _Job, rounds: int) -> GroupRecord:
    group = job.groups["candidates"][number]
    verdicts = np.full(group.rows, SAME_TEXT, np.int64)
    unfinished = np.full(group.rows, NEW, np.int64)
    for round_number in range(1, rounds + 1):  # what a later one says is right
        names = job.buckets("ids", round_number)
        rows = buckets.read(draft, names, number, _VERDICTS)
        at = rows["place"].to_numpy() - group.first
        verdicts[at] = rows["verdict"].to_numpy()
        unfinished[at] = rows["unfinished"].to_numpy()

    def write(part: tuple[str, int, int]) -> None:
        name, start, end = part
        draft.write_file(f"{_FOLDER}/{name}.npy", candidates.npy_file(verdicts[start:end]))
        if job.groups["unfinished"]:
            name = f"{_FOLDER}/{name}-unfinished.npy"
            draft.write_file(name, candidates.npy_file(unfinished[start:end]))

    ends = itertools.accumulate(rows for _, rows in group.files)
    parts = [(name, end - rows, end) for (name, rows), end in zip(group.files, ends, strict=True)]
    for _ in ahead(write, parts):
        pass
    samples, dropped = list[tuple[int, int]](), dict[str, int]()
    for verdict, reason in REASONS.items():
        places = np.flatnonzero(verdicts == verdict)
        samples += [(verdict, group.first + at) for at in places[: raw.MAX_SAMPLES].tolist()]
        if len(places):
            dropped[reason] = len(places)
    return GroupRecord(samples=samples, dropped=dropped, counts={"records": group.rows})


def _compare(draft: Draft, task: str, bucket: int, job: _Job) -> IdsRecord:
    rows, before = (job.read(draft, kind, "id", bucket) for kind in ("after", "before"))
    new, changed, same = _changes(rows, before)
    return IdsRecord(new=new, changed=changed, same=same)


def _changes(rows: pa.Table, before: pa.Table) -> tuple[int, int, int]:
    """How many ids are new, have another text, have the same one; each is in `before` once at most."""
    was = _find(before["id"].to_numpy(), rows["id"].to_numpy())
    known = was >= 0
    texts, texts_before = rows["text"].to_numpy()[known], before["text"].to_numpy()[was[known]]
    same = int(np.count_nonzero(texts == texts_before))
    return int(np.count_nonzero(~known)), len(texts) - same, same


def _places(rows: pa.Table, texts: Keys) -> Ints:
    """The place of the first row with each of these texts, or NEW."""
    at = _find(rows["text"].to_numpy(), texts)
    places: Ints = np.append(rows["place"].to_numpy(), NEW)[at]
    return places


def _find(keys: Keys, wanted: Keys) -> Ints:
    """Where each wanted key is for the first time, or -1."""
    if not len(keys):
        return np.full(len(wanted), -1, np.int64)
    order = np.argsort(keys, kind="stable")
    at = order[np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)]
    found: Ints = np.where(keys[at] == wanted, at, -1)
    return found


def _first(keys: Keys) -> Ints:
    """Where each key is for the first time."""
    return np.unique(keys, return_index=True)[1]
