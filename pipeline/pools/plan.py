"""Plans a pool: the content of each shard, and which texts the version before already has.

The plan is a query of DuckDB over the keys of all rows, in one task. The first row with an id stands for the
id; of rows with the same content (the text and its values to filter by) the first one is kept. Each candidate
has a verdict, an int64: the place of its text in the version before, `NEW` where the text has none there,
`SAME_TEXT` or `SAME_ID` where an earlier candidate has the content or the id. Verdicts do not depend on
earlier builds.

    _plan/<plan>/file-00000-000.npy   [N] int64: the verdicts on that part of the candidates
                                      [N, 2] where vectors are copied from another version than the one
                                      before: also the place of each text there, or NEW

The task holds a quarter of the node's memory at most, and DuckDB writes the rest to the node's disk: 10
million candidates beside as many rows before take 18 to 25 s and 2.9 GB on 2 cores.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from pipeline import storage
from pipeline.arrays import Ints, Keys
from pipeline.config import BadInput, digest
from pipeline.corpora import raw
from pipeline.engine import executors
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord
from pipeline.engine.run import run_tasks
from pipeline.pools import candidates
from pipeline.pools.changes import Changes, RowSet
from pipeline.storage import npy
from pipeline.storage.prefetch import map_prefetched

NEW, SAME_TEXT, SAME_ID = -1, -2, -3
_REASONS = {SAME_TEXT: "the same text again", SAME_ID: "the same id again"}
SHARD_PREFIX = "part-"
_SHARD_BYTES = 64 << 20  # of text in a shard; an actor holds all of it in memory
# A small pool is cut finer, so that all actors have work and a kill loses little.
_LEAST_SHARDS, _LEAST_ROWS = 16, 512
_FOLDER = "_plan"
_SMALL_ROWS = 1 << 20
_MEMORY = "25%"  # of the machine's, or of the container's where that has a limit

Files = Sequence[tuple[str, int]]
"""(part, or URI of a file of rows; its rows) each"""
Slices = list[tuple[str, int, int]]
"""(part, first row, behind the last row) each"""
Database = duckdb.DuckDBPyConnection


@dataclass(frozen=True)
class PlanInput:
    """The input of a plan; places count over all files of a kind."""

    candidates: Files
    """Parts."""
    before: Files = ()
    """Files of the version before."""
    source: Files = ()
    """Files of the version to copy vectors from, if that is not the one before."""
    same_columns: bool = True
    """Whether the version before has the same columns to filter by."""


@dataclass(frozen=True)
class TextQuery:
    """Further questions about the candidates that are kept."""

    texts: int = 0
    """How many texts with the lowest keys to return. A text with several values counts once."""
    hashes: Sequence[str] = ()
    """Hashes of texts to look for, by their first 16 digits."""


@dataclass(frozen=True, kw_only=True)
class Plan(TaskRecord):
    """The result of `make`; `dropped` counts candidates by reason."""

    shards: dict[str, Slices]
    """The candidates of each shard of the pool, by its name; those with a verdict from NEW on count."""
    changes: Changes
    known: int
    """Candidates whose text the version before has."""
    first: tuple[str, ...]
    """The texts with the lowest hashes."""
    present: tuple[str, ...]
    """The `hashes` of the query that are in the pool."""
    repeated_id: str = ""
    """An id that rows with different texts have; "": there is none."""
    name: str = ""  # of earlier builds, whose verdicts are in no folder of their own
    """The name by which `read_verdicts` finds its verdicts."""
    salvaged: int = 0  # the name in the records of earlier code
    """Candidates whose text is in the version to copy from, if that is not the one before."""
    new_rows: RowSet = field(default_factory=RowSet)
    """The candidates whose ids the version before lacks."""

    @property
    def rows(self) -> int:
        return self.changes.new + self.changes.changed + self.changes.same


@dataclass(frozen=True, kw_only=True)
class _ChangesRecord(TaskRecord):
    changes: Changes


def make(draft: Draft, rows: PlanInput, rows_per_shard: int, query: TextQuery) -> Plan:
    """Writes the verdicts on all candidates, and samples of those that are dropped.

    `rows` has a candidate at least. `query`: further questions about the candidates.
    """
    # A job that is resumed after the version before or the query has changed makes another plan.
    name = f"plan-{digest([asdict(rows), rows_per_shard, asdict(query)])[:8]}"
    work = functools.partial(_plan, rows=rows, rows_per_shard=rows_per_shard, query=query)
    with _executor(rows.candidates, rows.before, rows.source):
        (plan,) = run_tasks(draft, {name: ""}, work, "plan", Plan)
    return plan


def compare(draft: Draft, rows: Files, before: Files, same_columns: bool = True) -> Changes:
    """The ids of a published version beside those of another one; `draft` is for the mark of the task.

    `same_columns`: whether both have the same columns to filter by.
    """
    work = functools.partial(_compare, rows=rows, before=before, same_columns=same_columns)
    with _executor(rows, before):
        (record,) = run_tasks(draft, {"compare": ""}, work, "versions", _ChangesRecord)
    return record.changes


def is_small(*kinds: Files) -> bool:
    """Whether the plan takes a second or so. A cluster then gains nothing, and takes seconds to start."""
    return max(sum(rows for _, rows in files) for files in kinds) <= _SMALL_ROWS


def read_verdicts(draft: Draft, plan: str, part: str) -> tuple[Ints, Ints]:
    """(verdicts [N], the place of each text [N] in the version to copy from, or below 0)"""
    data = storage.read_bytes(draft.path(_FOLDER, plan, f"{part}.npy"))
    columns = np.atleast_2d(npy.from_bytes(data).T)
    return columns[0], columns[-1]


# -------------------------------------------------------------------------------------------------
# The tasks


def _executor(*kinds: Files) -> AbstractContextManager[object]:
    return executors.in_this_process() if is_small(*kinds) else nullcontext()


def _plan(
    draft: Draft, name: str, _: str, rows: PlanInput, rows_per_shard: int, query: TextQuery
) -> Plan:
    parts = rows.candidates
    with _database(is_small(parts, rows.before, rows.source)) as db:
        _read(db, "candidates", lambda part: candidates.read_keys(draft, part), parts)
        _read(db, "before", _published_keys, rows.before)
        _read(db, "source", _published_keys, rows.source)
        db.execute(f"""
            CREATE TABLE kept AS
                WITH first_of_id AS (
                    SELECT min(place) AS place, arg_min(text, place) AS text,
                           arg_min(content, place) AS content, id
                    FROM candidates GROUP BY id
                )
                SELECT min(place) AS place, arg_min(text, place) AS text, content,
                       arg_min(id, place) AS id
                FROM first_of_id GROUP BY content;
            CREATE TABLE verdicts AS
                SELECT c.place, size, CASE
                    WHEN kept.place = c.place THEN coalesce(b.place, {NEW})
                    WHEN kept.place < c.place THEN {SAME_TEXT}
                    ELSE {SAME_ID} END AS verdict,
                    CASE WHEN kept.place = c.place THEN coalesce(s.place, {NEW}) ELSE {NEW} END AS source
                FROM candidates c
                LEFT JOIN kept USING (content)
                LEFT JOIN (SELECT text, min(place) AS place FROM before GROUP BY text) b ON b.text = c.text
                LEFT JOIN (SELECT text, min(place) AS place FROM source GROUP BY text) s ON s.text = c.text
        """)
        ((kept, known, in_source),) = _rows(db, f"""
            SELECT count(*) FILTER (verdict >= {NEW}), count(*) FILTER (verdict >= 0),
                   count(*) FILTER (source >= 0) FROM verdicts
        """)  # fmt: skip
        size = min(rows_per_shard, max(_LEAST_ROWS, -(-kept // _LEAST_SHARDS)))
        shards = list(_cut_shards(_write_verdicts(db, draft, name, rows), size))
        dropped, repeated_id = _count_dropped(db, draft, parts)
        lowest = "SELECT min(place) FROM kept GROUP BY text ORDER BY text LIMIT ?"
        first = [place for (place,) in _rows(db, lowest, query.texts)]
        wanted = "SELECT DISTINCT text FROM kept SEMI JOIN (SELECT unnest(?::UBIGINT[]) AS text) USING (text)"
        keys = [int(hash_, 16) for hash_ in query.hashes]
        present = {key for (key,) in _rows(db, wanted, keys)}
        new_rows = "SELECT id, content FROM kept ANTI JOIN before USING (id)"
        return Plan(
            counts={"records": sum(count for _, count in parts)},
            shards={f"{SHARD_PREFIX}{number:05d}": slices for number, slices in enumerate(shards)},
            changes=_count_changes(db, "kept", rows.same_columns, rows.before),
            known=known,
            dropped=dropped,
            first=tuple(text for _, text in _rows_at(draft, parts, first)),
            present=tuple(h for h, key in zip(query.hashes, keys, strict=True) if key in present),
            repeated_id=repeated_id,
            name=name,
            salvaged=in_source,
            new_rows=sum((RowSet.of(*columns) for columns in _columns(db, new_rows)), RowSet()),
        )


def _compare(
    draft: Draft, task: str, _: str, rows: Files, before: Files, same_columns: bool
) -> _ChangesRecord:
    with _database(is_small(rows, before)) as db:
        _read(db, "after", _published_keys, rows)
        _read(db, "before", _published_keys, before)
        return _ChangesRecord(changes=_count_changes(db, "after", same_columns, before))


@contextmanager
def _database(in_memory: bool) -> Iterator[Database]:
    """A database in memory, or in a file: that one waits for the disk after each statement.

    Its folder is removed at the end. It downloads nothing.
    """
    with tempfile.TemporaryDirectory(prefix="polyrank-plan-") as folder:
        settings: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": _MEMORY,
            "temp_directory": folder,
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        file = ":memory:" if in_memory else f"{folder}/plan.duckdb"
        with duckdb.connect(file, config=settings) as db:
            db.execute("SET enable_progress_bar = false")  # the task has a bar
            yield db


def _published_keys(uri: str) -> Keys:
    try:
        return candidates.read_published_keys(uri)
    except FileNotFoundError:  # a dry run holds no lock
        raise BadInput(
            f"{uri}: another job has removed this version meanwhile; the same command makes a new plan"
        ) from None


def _read(db: Database, table: str, read: Callable[[str], Keys], files: Files) -> None:
    """Makes a table of the files' keys, with the place of each row."""
    names = candidates.KEYS if table == "candidates" else candidates.KEYS[:-1]
    db.execute(f"CREATE TABLE {table} ({' UBIGINT, '.join(names)} UBIGINT, place BIGINT)")
    start = 0
    for keys in map_prefetched(read, [name for name, _ in files]):
        columns = dict(zip(names, keys.T, strict=True))
        rows = pa.table({**columns, "place": np.arange(start, start + len(keys))})
        db.from_arrow(rows).insert_into(table)
        start += len(keys)


def _count_changes(db: Database, table: str, same_columns: bool, before: Files) -> Changes:
    """The ids of a table beside those before; each is there once at most.

    Where the columns to filter by are others, the texts alone are compared: else every id would have changed,
    and the gate would refuse what was asked for.
    """
    key = "content" if same_columns else "text"
    counts = f"""
        SELECT count(*) FILTER (before.id IS NULL), count(*) FILTER (now.{key} != before.{key}),
               count(*) FILTER (now.{key} = before.{key})
        FROM {table} now LEFT JOIN before USING (id)
    """
    ((new, changed, same),) = _rows(db, counts)
    return Changes(new, changed, same, sum(rows for _, rows in before) - same - changed)


def _write_verdicts(
    db: Database, draft: Draft, name: str, rows: PlanInput
) -> Iterator[tuple[str, Ints, Ints]]:
    """Writes a file of verdicts for each part; (part, rows that are kept, the bytes up to each of them)"""
    query = "SELECT verdict, source, size::BIGINT FROM verdicts ORDER BY place"
    batches = map(np.stack, _columns(db, query))
    verdicts = np.empty((3, 0), np.int64)

    def parts() -> Iterator[tuple[str, Ints]]:
        nonlocal verdicts
        for part, count in rows.candidates:
            while verdicts.shape[1] < count:
                verdicts = np.concatenate([verdicts, next(batches)], axis=1)
            yield part, verdicts[:, :count]
            verdicts = verdicts[:, count:]

    def write(part_verdicts: tuple[str, Ints]) -> tuple[str, Ints, Ints]:
        part, (verdict, source, sizes) = part_verdicts
        data = np.stack([verdict, source], axis=1) if rows.source else verdict
        draft.write_file(f"{_FOLDER}/{name}/{part}.npy", npy.to_bytes(data))
        kept = np.flatnonzero(verdict >= NEW)
        return part, kept, np.cumsum(sizes[kept])

    return map_prefetched(write, parts())


def _cut_shards(parts: Iterable[tuple[str, Ints, Ints]], rows_per_shard: int) -> Iterator[Slices]:
    """Shards of `rows_per_shard` kept rows, or of fewer rows with much text."""
    slices: Slices = []
    rows = size = 0
    for part, kept_rows, ends in parts:
        start = 0
        while start < len(kept_rows):
            if rows >= rows_per_shard or size >= _SHARD_BYTES:
                yield slices
                slices, rows, size = [], 0, 0
            bytes_before = int(ends[start - 1]) if start else 0
            fitting_end = int(np.searchsorted(ends, bytes_before + _SHARD_BYTES - size)) + 1
            end = min(len(kept_rows), start + rows_per_shard - rows, fitting_end)
            slices.append((part, int(kept_rows[start]), int(kept_rows[end - 1]) + 1))
            rows += end - start
            size += int(ends[end - 1]) - bytes_before
            start = end
    if slices:
        yield slices


def _count_dropped(db: Database, draft: Draft, parts: Files) -> tuple[dict[str, int], str]:
    """(dropped candidates by reason, the first id that comes again); saves some of them as samples."""
    rejects, repeated_id = raw.Rejects(), ""
    counts = f"SELECT verdict, count(*) FROM verdicts WHERE verdict < {NEW} GROUP BY verdict"
    samples = "SELECT place FROM verdicts WHERE verdict = ? ORDER BY place LIMIT ?"
    for verdict, count in sorted(_rows(db, counts), reverse=True):
        places = [place for (place,) in _rows(db, samples, verdict, raw.MAX_SAMPLES)]
        sampled = _rows_at(draft, parts, places)
        for place, (name, text) in zip(places, sampled, strict=True):
            rejects.add(_REASONS[verdict], "all candidates", place + 1, f"id {name!r}: {text!r}")
        rejects.counts[_REASONS[verdict]] = count
        repeated_id = sampled[0][0] if verdict == SAME_ID else ""
    rejects.save(draft, "plan")
    return dict(rejects.counts), repeated_id


def _rows_at(draft: Draft, parts: Files, places: Sequence[int]) -> list[tuple[str, str]]:
    """(id, text) of each place among all candidates. A part is read once, and one is held at a time."""
    row_at_place: dict[int, tuple[str, str]] = {}
    starts = [0, *itertools.accumulate(rows for _, rows in parts)]
    for number, group in itertools.groupby(
        sorted(set(places)), lambda place: bisect_right(starts, place) - 1
    ):
        part_places = list(group)
        rows = candidates.read_rows(draft, parts[number][0]).select(["id", "text"])
        rows = rows.take([place - starts[number] for place in part_places])
        texts = zip(*(column.to_pylist() for column in rows.columns), strict=True)
        row_at_place |= zip(part_places, texts, strict=True)
    return [row_at_place[place] for place in places]


def _rows(db: Database, query: str, *values: Any) -> list[tuple[Any, ...]]:
    return db.execute(query, values).fetchall()


def _columns(db: Database, query: str) -> Iterator[list[Any]]:
    """The columns of the result as arrays, a million rows at a time."""
    reader: pa.RecordBatchReader = db.sql(query).to_arrow_reader(1 << 20)
    for batch in reader:
        yield [column.to_numpy() for column in batch.columns]
