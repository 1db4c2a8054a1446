"""What a pool will hold, and what of it the version before has already.

Every candidate gets a verdict, an int64: its text's place in the version before, `NEW` where it has none
there, `SAME_TEXT` or `SAME_ID` where a candidate before it has taken its text or its id.

    _plan/file-00000-000.npy              the verdicts on that part of the candidates
    _plan/file-00000-000-unfinished.npy   the places of those texts in unfinished builds, or NEW, for those
                                          that are to be copied from there

All keys, verdicts and places by bucket lie in unnamed files that are mapped, 64 bytes a row at most, and are
gone through in buckets of a million rows or so: memory does not grow with the pool, and no text is held here.
"""

from __future__ import annotations

import functools
import io
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from pipeline import storage
from pipeline.arrays import Ints, Keys
from pipeline.artifact import Draft
from pipeline.corpora import raw
from pipeline.retrieval.pools import candidates
from pipeline.retrieval.pools.changes import Changes as Changes

NEW, SAME_TEXT, SAME_ID = -1, -2, -3
_REASONS = {SAME_TEXT: "the same text again", SAME_ID: "the same id again"}
_FOLDER = "_plan"
_BUCKET_ROWS = 1 << 20
_SHARD_BYTES = 64 << 20  # of text in a shard; an actor holds all of it in memory
# A small pool is cut finer, so that all actors have work and a kill loses little.
_LEAST_SHARDS, _LEAST_ROWS = 16, 512

_READS_AT_ONCE = 16

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
Slices = list[tuple[str, int, int]]
"""(part, first row, behind the last row) each"""


@dataclass(frozen=True)
class Plan:
    """What `make` found."""

    shards: dict[str, Slices]
    """The candidates of each shard of the pool, by its name; those with a verdict from NEW on count."""
    changes: Changes
    known: int
    """Candidates whose text the version before has."""
    dropped: dict[str, int]
    first: tuple[str, ...]
    """Some texts, those with the lowest hashes."""
    present: tuple[str, ...]
    """Which of the `hashes` that were asked about are in the pool."""
    repeated_id: str = ""
    """An id that rows with different texts have; "": there is none."""
    salvaged: int = 0
    """Candidates whose vectors come from builds that were never finished."""

    @property
    def rows(self) -> int:
        return self.changes.new + self.changes.changed + self.changes.same


@dataclass(frozen=True)
class _Columns:
    """Keys of rows, by place."""

    texts: Keys
    ids: Keys


def make(
    draft: Draft,
    parts: Sequence[tuple[str, int]],
    before: Sequence[str],
    rows_per_shard: int,
    texts: int,
    hashes: Sequence[str],
    unfinished: Sequence[str] = (),
    copies: bool = True,
) -> Plan:
    """Writes the verdicts on all candidates, and samples of those that are dropped.

    `parts`: (name, rows) of the candidates, a row at least. `before`: the files with the rows of the
    version before. `texts`: how many first ones to tell. `hashes`: texts to look for, the first 16 digits
    of their content hashes. `unfinished`: the files of rows of builds that were never finished, for texts
    that are not copied from the version before; `copies`: whether any are.
    """
    total = sum(rows for _, rows in parts)
    columns = _Columns(_mapped(total, np.uint64), _mapped(total, np.uint64))
    sizes = _mapped(total, np.int64)
    read_keys = functools.partial(candidates.read_keys, draft)
    names = [name for name, _ in parts]
    for (_, place), keys in zip(_places(parts), _ahead(read_keys, names), strict=True):
        columns.texts[place] = keys[:, candidates.TEXT_KEY]
        columns.ids[place] = keys[:, candidates.ID_KEY]
        sizes[place] = keys[:, candidates.BYTES]
    verdicts, changes = _verdicts(columns, _columns_of(before))

    def write(at: tuple[str, slice]) -> None:
        draft.write_file(f"{_FOLDER}/{at[0]}.npy", candidates.npy_file(verdicts[at[1]]))

    for _ in _ahead(write, list(_places(parts))):
        pass
    salvaged = (
        _salvage(draft, parts, columns.texts, verdicts, unfinished, copies) if unfinished else 0
    )
    kept = changes.new + changes.changed + changes.same
    size = min(rows_per_shard, max(_LEAST_ROWS, -(-kept // _LEAST_SHARDS)))
    shards = _cut(parts, verdicts, sizes, size)
    first, present = _noted(columns.texts, verdicts, texts, hashes)
    return Plan(
        shards={f"part-{number:05d}": slices for number, slices in enumerate(shards)},
        changes=changes,
        known=sum(int(np.count_nonzero(verdicts[at] >= 0)) for at in _chunks(total)),
        dropped=_drop(draft, parts, verdicts),
        first=tuple(_row(draft, parts, place)[1] for place in first),
        repeated_id=_repeated_id(draft, parts, verdicts),
        present=tuple(present),
        salvaged=salvaged,
    )


def compare(rows: Sequence[str], before: Sequence[str]) -> Changes:
    """The ids of a published version beside those of another one; each is given by its files of rows."""
    return _verdicts(_columns_of(rows), _columns_of(before))[1]


def read_verdicts(draft: Draft, part: str) -> Ints:
    data = storage.read_bytes(draft.path(_FOLDER, f"{part}.npy"))
    verdicts: Ints = np.load(io.BytesIO(data), allow_pickle=False)
    return verdicts


def _verdicts(columns: _Columns, before: _Columns) -> tuple[Ints, Changes]:
    """What each row is, as if they came one by one and each took a text and an id if both are free.

    First texts, then ids. A row that has lost its id frees its text for a later one, so that texts
    and ids are looked at again until no id is lost.
    """
    buckets = len(columns.texts) // _BUCKET_ROWS + 1
    texts, texts_before = _Buckets(columns.texts, buckets), _Buckets(before.texts, buckets)
    ids, ids_before = _Buckets(columns.ids, buckets), _Buckets(before.ids, buckets)
    verdicts = _mapped(len(columns.texts), np.int64)
    verdicts[:] = NEW
    lost = 1
    while lost:
        for bucket in range(buckets):
            at = texts.places(bucket)
            at = at[verdicts[at] != SAME_ID]
            verdicts[at] = SAME_TEXT
            at = at[_first(columns.texts[at])]
            verdicts[at] = texts_before.find(columns.texts[at], bucket)
        lost = changed = same = new = 0
        for bucket in range(buckets):
            at = ids.places(bucket)
            at = at[verdicts[at] >= NEW]
            first = _first(columns.ids[at])
            verdicts[np.delete(at, first)] = SAME_ID
            lost += len(at) - len(first)
            at = at[first]
            was = ids_before.find(columns.ids[at], bucket)
            known = was >= 0
            alike = int((columns.texts[at[known]] == before.texts[was[known]]).sum())
            same += alike
            changed += int(known.sum()) - alike
            new += int((~known).sum())
    return verdicts, Changes(new, changed, same, len(before.ids) - same - changed)


def read_salvaged(draft: Draft, part: str) -> Ints:
    """Places in unfinished builds; all NEW where there are none."""
    uri = draft.path(_FOLDER, f"{part}-unfinished.npy")
    if not storage.exists(uri):
        return np.full(len(read_verdicts(draft, part)), NEW, np.int64)
    places: Ints = np.load(io.BytesIO(storage.read_bytes(uri)), allow_pickle=False)
    return places


def _salvage(
    draft: Draft,
    parts: Sequence[tuple[str, int]],
    texts: Keys,
    verdicts: Ints,
    unfinished: Sequence[str],
    copies: bool,
) -> int:
    """Writes where unfinished builds have the texts; returns how many they have."""
    buckets = len(texts) // _BUCKET_ROWS + 1
    ours, theirs = _Buckets(texts, buckets), _Buckets(_columns_of(unfinished).texts, buckets)
    found = _mapped(len(texts), np.int64)
    found[:] = NEW
    count = 0
    for bucket in range(buckets):
        at = ours.places(bucket)
        at = at[(verdicts[at] == NEW) | ((verdicts[at] >= 0) & (not copies))]
        found[at] = theirs.find(texts[at], bucket)
        count += int(np.count_nonzero(found[at] >= 0))
    for part, place in _places(parts):
        draft.write_file(f"{_FOLDER}/{part}-unfinished.npy", candidates.npy_file(found[place]))
    return count


class _Buckets:
    """The places of keys, ascending in each bucket; a key is in the bucket that it leaves as remainder."""

    def __init__(self, keys: Keys, buckets: int) -> None:
        self._keys = keys
        self._places = _mapped(len(keys), np.int64) if len(keys) else np.empty(0, np.int64)
        counts = np.zeros(buckets, np.int64)
        for chunk in _chunks(len(keys)):
            counts += np.bincount((keys[chunk] % buckets).astype(np.int64), minlength=buckets)
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        filled = self._starts[:-1].copy()
        for chunk in _chunks(len(keys)):
            bucket = (keys[chunk] % buckets).astype(np.uint16)
            order = np.argsort(bucket, kind="stable")
            ends = np.searchsorted(bucket[order], np.arange(buckets), side="right")
            start = 0
            for number, end in enumerate(ends.tolist()):
                at = filled[number]
                self._places[at : at + end - start] = order[start:end] + chunk.start
                filled[number] += end - start
                start = end

    def places(self, bucket: int) -> Ints:
        found: Ints = np.array(self._places[self._starts[bucket] : self._starts[bucket + 1]])
        return found

    def find(self, wanted: Keys, bucket: int) -> Ints:
        """The place of each wanted key, all of them of this bucket, or NEW."""
        there = self.places(bucket)
        if not len(there):
            return np.full(len(wanted), NEW, np.int64)
        there = there[np.argsort(self._keys[there], kind="stable")]
        at = np.searchsorted(self._keys[there], wanted)
        found = there[np.minimum(at, len(there) - 1)]
        return np.where(self._keys[found] == wanted, found, NEW)


def _first(keys: Keys) -> Ints:
    """Where each key is for the first time."""
    return np.unique(keys, return_index=True)[1]


def _cut(
    parts: Sequence[tuple[str, int]], verdicts: Ints, sizes: Ints, rows_per_shard: int
) -> Iterator[Slices]:
    """Shards of so many rows that are kept, or of fewer that hold much text."""
    slices: Slices = []
    rows = size = 0
    for part, place in _places(parts):
        kept = np.flatnonzero(verdicts[place] >= NEW)
        ends = np.cumsum(sizes[place][kept])
        done = 0
        while done < len(kept):
            if rows >= rows_per_shard or size >= _SHARD_BYTES:
                yield slices
                slices, rows, size = [], 0, 0
            before = int(ends[done - 1]) if done else 0
            fits = int(np.searchsorted(ends, before + _SHARD_BYTES - size)) + 1
            end = min(len(kept), done + rows_per_shard - rows, fits)
            slices.append((part, int(kept[done]), int(kept[end - 1]) + 1))
            rows += end - done
            size += int(ends[end - 1]) - before
            done = end
    if slices:
        yield slices


def _noted(
    texts: Keys, verdicts: Ints, count: int, hashes: Sequence[str]
) -> tuple[list[int], list[str]]:
    """Places of the rows with the lowest keys; which of `hashes` are there."""
    first: list[tuple[int, int]] = []
    wanted = np.array([int(hash_, 16) for hash_ in hashes], np.uint64)
    present = np.zeros(len(wanted), bool)
    for chunk in _chunks(len(texts)):
        kept = np.flatnonzero(verdicts[chunk] >= NEW)
        keys = texts[chunk][kept]
        lowest = np.argsort(keys)[:count]
        found = zip(keys[lowest].tolist(), (kept[lowest] + chunk.start).tolist(), strict=True)
        first = sorted([*first, *found])[:count]
        present |= np.isin(wanted, keys)
    return [place for _, place in first], [hashes[at] for at in np.flatnonzero(present).tolist()]


def _drop(draft: Draft, parts: Sequence[tuple[str, int]], verdicts: Ints) -> dict[str, int]:
    """Counts what is dropped by reason, and names the first ones."""
    rejects = raw.Rejects()
    for verdict, reason in _REASONS.items():
        count = 0
        for chunk in _chunks(len(verdicts)):
            places = np.flatnonzero(verdicts[chunk] == verdict) + chunk.start
            for place in places[: max(0, raw.MAX_SAMPLES - count)].tolist():
                name, text = _row(draft, parts, place)
                rejects.add(reason, "all candidates", place + 1, f"id {name!r}: {text!r}")
            count += len(places)
        if count:
            rejects.counts[reason] = count
    rejects.save(draft, "plan")
    return dict(rejects.counts)


def _repeated_id(draft: Draft, parts: Sequence[tuple[str, int]], verdicts: Ints) -> str:
    for chunk in _chunks(len(verdicts)):
        places = np.flatnonzero(verdicts[chunk] == SAME_ID)
        if len(places):
            return _row(draft, parts, int(places[0]) + chunk.start)[0]
    return ""


def _row(draft: Draft, parts: Sequence[tuple[str, int]], place: int) -> tuple[str, str]:
    """(id, text)"""
    part, rows = next((part, rows) for part, rows in _places(parts) if place < rows.stop)
    row = candidates.read_rows(draft, part).slice(place - rows.start, 1)
    return row["id"][0].as_py(), row["text"][0].as_py()


def _columns_of(files: Sequence[str]) -> _Columns:
    """The keys of a published version's rows. Of its files only ids and hashes are read."""
    with tempfile.TemporaryFile() as texts, tempfile.TemporaryFile() as ids:
        for text_keys, id_keys in _ahead(candidates.read_published_keys, files):
            texts.write(text_keys.tobytes())
            ids.write(id_keys.tobytes())
        rows = texts.tell() // 8
        if not rows:
            return _Columns(np.empty(0, np.uint64), np.empty(0, np.uint64))
        texts.flush()
        ids.flush()
        return _Columns(*(np.memmap(file, np.uint64, "r", shape=(rows,)) for file in (texts, ids)))


def _ahead(read: Callable[[ItemT], ResultT], items: Sequence[ItemT]) -> Iterator[ResultT]:
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


def _places(parts: Sequence[tuple[str, int]]) -> Iterator[tuple[str, slice]]:
    """Where each part's rows are among all."""
    end = 0
    for part, rows in parts:
        yield part, slice(end, end + rows)
        end += rows


def _chunks(rows: int) -> Iterator[slice]:
    for start in range(0, rows, _BUCKET_ROWS):
        yield slice(start, min(start + _BUCKET_ROWS, rows))


def _mapped(rows: int, dtype: type[np.generic]) -> Any:
    """A column in a file without a name, which goes with the process."""
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, dtype, "w+", shape=(rows,))
