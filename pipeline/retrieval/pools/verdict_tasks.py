"""The tasks that decide about the candidates of a pool; `verdicts` says what each of them holds."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pyarrow as pa

from pipeline.arrays import Bools, Ints, Keys
from pipeline.config import BadInput, digest
from pipeline.corpora import buckets, raw
from pipeline.drafts import Draft
from pipeline.retrieval.pools import candidates
from pipeline.retrieval.pools.changes import RowSet
from pipeline.tasks.records import TaskRecord

NEW, SAME_TEXT, SAME_ID = -1, -2, -3
REASONS = {SAME_TEXT: "the same text again", SAME_ID: "the same id again"}
FOLDER = "_plan"
_BUCKET_ROWS = 1 << 20
_READS_AT_ONCE = 16

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
Files = Sequence[tuple[str, int]]
"""(part, or URI of a file of rows; its rows) each"""

_KEYS = pa.schema(
    [
        ("text", pa.uint64()),
        ("content", pa.uint64()),
        ("id", pa.uint64()),
        ("place", pa.int64()),
    ]
)
_FIRST = pa.schema([*_KEYS, ("before", pa.int64()), ("unfinished", pa.int64())])
_LOST = pa.schema([("place", pa.int64())])
_VERDICTS = pa.schema([("place", pa.int64()), ("verdict", pa.int64()), ("unfinished", pa.int64())])


@dataclass(frozen=True)
class PlanInput:
    """The input of a plan; places count over all files of a kind."""

    candidates: Files
    """Parts."""
    before: Files = ()
    """Files of the version before."""
    unfinished: Files = ()
    """Files of builds that were never finished, for texts that are not copied from the version before."""
    copies: bool = True
    """Whether any text is copied from the version before."""
    same_columns: bool = True
    """Whether the version before has the same columns to filter by."""


@dataclass(frozen=True)
class TextQuery:
    """Further questions about the candidates that are kept."""

    texts: int = 0
    """How many texts with the lowest keys to return."""
    hashes: Sequence[str] = ()
    """Hashes of texts to look for, by their first 16 digits."""


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
    new_rows: RowSet = field(default_factory=RowSet)


@dataclass(frozen=True, kw_only=True)
class GroupRecord(TaskRecord):
    """The verdicts on a group of candidates."""

    samples: list[tuple[int, int]]
    """(verdict, place) of the first ones that are dropped"""


@dataclass(frozen=True)
class Group:
    """Files one after the other, a million rows or so."""

    files: tuple[tuple[str, int], ...]
    first: int
    """The place of its first row."""

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.files)


@dataclass(frozen=True)
class PlanJob:
    """The facts that every task needs."""

    name: str
    """Before the names of all tasks and verdicts: a job that is resumed after the version before or the query
    has changed, or another build was killed, takes none for done, and leaves those of an earlier plan."""
    bucket_count: int
    groups: dict[str, list[Group]]
    """By kind: "candidates", "before", "unfinished"."""
    copies: bool
    same_columns: bool

    @classmethod
    def of(cls, rows: PlanInput, query: TextQuery) -> PlanJob:
        kinds = {
            "candidates": rows.candidates,
            "before": rows.before,
            "unfinished": rows.unfinished,
        }
        count = bucket_count(*kinds.values())
        files_of_kinds = [list(map(list, files)) for files in kinds.values()]
        flags = [rows.copies, rows.same_columns]
        identity = digest([files_of_kinds, flags, count, query.texts, list(query.hashes)])
        groups = {kind: groups_of(files) for kind, files in kinds.items()}
        return cls(f"plan-{identity[:8]}", count, groups, *flags)

    def keys(self, kind: str) -> list[str]:
        return [f"{self.name}-keys-{kind}-{number:05d}" for number in range(len(self.groups[kind]))]

    def buckets(self, stage: str, round_number: int = 0) -> dict[str, int]:
        """A task per bucket."""
        name = f"{self.name}-{stage}-{round_number}"
        return {f"{name}-{bucket:05d}": bucket for bucket in range(self.bucket_count)}

    def file(self, draft: Draft, name: str, rows: pa.Table, key: str) -> None:
        """Files rows by the bucket of their `key`."""
        bucket = (rows[key].to_numpy() % np.uint64(self.bucket_count)).astype(np.int64)
        buckets.write(draft, f"{name}-by-{key}", rows, bucket, self.bucket_count)

    def read(self, draft: Draft, kind: str, key: str, bucket: int) -> pa.Table:
        """The keys in a bucket, in the order of places."""
        names = [f"{task}-by-{key}" for task in self.keys(kind)]
        return buckets.read(draft, names, bucket, _KEYS)


def ahead(read: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> Iterator[ResultT]:
    """`read(item)` of each item, in order, while the next ones are read: from an object store each takes
    20 ms or more, and a large pool has thousands."""
    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        futures: deque[Future[ResultT]] = deque()
        for item in items:
            futures.append(pool.submit(read, item))
            if len(futures) > 2 * _READS_AT_ONCE:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()


def bucket_count(*kinds: Files) -> int:
    max_rows = max(sum(rows for _, rows in files) for files in kinds)
    return max(1, -(-max_rows // _BUCKET_ROWS))


def groups_of(files: Files) -> list[Group]:
    groups = list[Group]()
    group_files = list[tuple[str, int]]()
    rows = start = 0
    for name, count in files:
        if group_files and rows + count > _BUCKET_ROWS:
            groups.append(Group(tuple(group_files), start))
            start += rows
            group_files, rows = [], 0
        group_files.append((name, count))
        rows += count
    return [*groups, Group(tuple(group_files), start)] if group_files else groups


def keys_task(
    draft: Draft, task: str, argument: str, job: PlanJob, keys_of_kind: dict[str, list[str]]
) -> TaskRecord:
    kind, _, number = argument.partition(" ")
    group = job.groups[kind][int(number)]

    def read_file_keys(name: str) -> Keys:
        if kind == "candidates":
            return candidates.read_keys(draft, name)[:, : candidates.BYTES]
        try:
            return candidates.read_published_keys(name)
        except FileNotFoundError:  # a dry run holds no lock
            raise BadInput(
                f"{name}: another job has published or removed this build meanwhile; the same command makes "
                "a new plan"
            ) from None

    keys = np.concatenate(list(ahead(read_file_keys, [name for name, _ in group.files])))
    rows = pa.table([*keys.T, group.first + np.arange(len(keys))], schema=_KEYS)
    for key in keys_of_kind[kind]:
        job.file(draft, task, rows, key)
    return TaskRecord(counts={"records": len(rows)})


def texts_task(draft: Draft, task: str, bucket: int, job: PlanJob, round_number: int) -> TaskRecord:
    """The first candidate with each content, of those that have not lost their id."""
    rows = job.read(draft, "candidates", "text", bucket)
    lost_names = [
        f"{name}-lost" for number in range(1, round_number) for name in job.buckets("ids", number)
    ]
    lost_places = buckets.read(draft, lost_names, bucket, _LOST)["place"].to_numpy()
    rows = rows.filter(pa.array(~np.isin(rows["place"].to_numpy(), lost_places)))
    rows = rows.take(pa.array(_first_occurrences(rows["content"].to_numpy())))
    texts = rows["text"].to_numpy()
    places_before = _places_of_texts(job.read(draft, "before", "text", bucket), texts)
    places_unfinished = _places_of_texts(job.read(draft, "unfinished", "text", bucket), texts)
    if job.copies:
        places_unfinished[places_before >= 0] = NEW
    columns = [*rows.columns, places_before, places_unfinished]
    job.file(draft, task, pa.table(columns, schema=_FIRST), "id")
    return TaskRecord()


def ids_task(
    draft: Draft, task: str, bucket: int, job: PlanJob, round_number: int, query: TextQuery
) -> IdsRecord:
    """The first candidate with each id, of those that are the first with their content."""
    names = [f"{name}-by-id" for name in job.buckets("texts", round_number)]
    rows = buckets.read(draft, names, bucket, _FIRST).sort_by("place").combine_chunks()
    is_first = np.zeros(len(rows), bool)
    is_first[_first_occurrences(rows["id"].to_numpy())] = True
    first_rows, lost_rows = rows.filter(pa.array(is_first)), rows.filter(pa.array(~is_first))
    text_bucket = (lost_rows["text"].to_numpy() % np.uint64(job.bucket_count)).astype(np.int64)
    buckets.write(draft, f"{task}-lost", lost_rows.select(["place"]), text_bucket, job.bucket_count)
    places = rows["place"].to_numpy()
    places_before = np.where(is_first, rows["before"].to_numpy(), SAME_ID)
    places_unfinished = np.where(is_first, rows["unfinished"].to_numpy(), NEW)
    starts = [group.first for group in job.groups["candidates"]]
    group = np.searchsorted(starts, places, side="right") - 1
    verdicts = pa.table([places, places_before, places_unfinished], schema=_VERDICTS)
    buckets.write(draft, task, verdicts, group, len(starts))
    texts = first_rows["text"].to_numpy()
    lowest = _first_occurrences(texts)[: query.texts]
    keys = np.array([int(hash_, 16) for hash_ in query.hashes], np.uint64)
    before = job.read(draft, "before", "id", bucket)
    is_known, is_same = _compare(first_rows, before, job.same_columns)
    new_ids, new_contents = (first_rows[key].to_numpy()[~is_known] for key in ("id", "content"))
    return IdsRecord(
        new=len(new_ids),
        changed=int(np.count_nonzero(is_known & ~is_same)),
        same=int(np.count_nonzero(is_same)),
        lost=len(lost_rows),
        known=int(np.count_nonzero(places_before >= 0)),
        salvaged=int(np.count_nonzero(places_unfinished >= 0)),
        first=[(int(texts[n]), int(first_rows["place"][n].as_py())) for n in lowest.tolist()],
        present=[query.hashes[index] for index in np.flatnonzero(np.isin(keys, texts)).tolist()],
        new_rows=RowSet.of(new_ids, new_contents),
    )


def verdicts_task(draft: Draft, task: str, number: int, job: PlanJob, rounds: int) -> GroupRecord:
    group = job.groups["candidates"][number]
    verdicts = np.full(group.rows, SAME_TEXT, np.int64)
    unfinished = np.full(group.rows, NEW, np.int64)
    for round_number in range(1, rounds + 1):  # what a later one says is right
        names = job.buckets("ids", round_number)
        rows = buckets.read(draft, names, number, _VERDICTS)
        index = rows["place"].to_numpy() - group.first
        verdicts[index] = rows["verdict"].to_numpy()
        unfinished[index] = rows["unfinished"].to_numpy()

    def write(part: tuple[str, int, int]) -> None:
        name, start, end = part
        file = f"{FOLDER}/{job.name}/{name}"
        draft.write_file(f"{file}.npy", candidates.npy_file(verdicts[start:end]))
        if job.groups["unfinished"]:
            data = candidates.npy_file(unfinished[start:end])
            draft.write_file(f"{file}-unfinished.npy", data)

    ends = itertools.accumulate(rows for _, rows in group.files)
    parts = [(name, end - rows, end) for (name, rows), end in zip(group.files, ends, strict=True)]
    for _ in ahead(write, parts):
        pass
    samples, dropped = list[tuple[int, int]](), dict[str, int]()
    for verdict, reason in REASONS.items():
        places = np.flatnonzero(verdicts == verdict)
        samples += [(verdict, group.first + index) for index in places[: raw.MAX_SAMPLES].tolist()]
        if len(places):
            dropped[reason] = len(places)
    return GroupRecord(samples=samples, dropped=dropped, counts={"records": group.rows})


def compare_task(draft: Draft, task: str, bucket: int, job: PlanJob) -> IdsRecord:
    rows, before = (job.read(draft, kind, "id", bucket) for kind in ("after", "before"))
    is_known, is_same = _compare(rows, before, job.same_columns)
    return IdsRecord(
        new=int(np.count_nonzero(~is_known)),
        changed=int(np.count_nonzero(is_known & ~is_same)),
        same=int(np.count_nonzero(is_same)),
    )


def _compare(rows: pa.Table, before: pa.Table, same_columns: bool) -> tuple[Bools, Bools]:
    """(whether `before` has each id, whether with the same content) [N]; each is there once at most.

    Where the columns to filter by are others, the texts alone are compared: else every id would have changed,
    and the gate would refuse what was asked for.
    """
    key = "content" if same_columns else "text"
    indices_before = _find(before["id"].to_numpy(), rows["id"].to_numpy())
    is_known = indices_before >= 0
    is_same = is_known.copy()
    keys_before = before[key].to_numpy()[indices_before[is_known]]
    is_same[is_known] = rows[key].to_numpy()[is_known] == keys_before
    return is_known, is_same


def _places_of_texts(rows: pa.Table, texts: Keys) -> Ints:
    """The place of the first row with each of these texts, or NEW."""
    indices = _find(rows["text"].to_numpy(), texts)
    places: Ints = np.append(rows["place"].to_numpy(), NEW)[indices]
    return places


def _find(keys: Keys, queries: Keys) -> Ints:
    """The index of the first occurrence of each query among the keys, or -1."""
    if not len(keys):
        return np.full(len(queries), -1, np.int64)
    order = np.argsort(keys, kind="stable")
    indices = order[np.minimum(np.searchsorted(keys[order], queries), len(keys) - 1)]
    first_indices: Ints = np.where(keys[indices] == queries, indices, -1)
    return first_indices


def _first_occurrences(keys: Keys) -> Ints:
    """The index of the first occurrence of each key."""
    return np.unique(keys, return_index=True)[1]
