"""The verdict on every candidate of a pool: a few queries of DuckDB over the keys of all rows, in one task.

A verdict is an int64: the place of the candidate's text in the version before, `NEW` where the text has none
there, `SAME_TEXT` or `SAME_ID` where an earlier candidate has taken the content (the text and its values to
filter by) or the id. Verdicts are those of candidates that come one by one, each of which takes its content
and its id if both are free. They do not depend on earlier builds.

    _plan/<plan>/file-00000-000.npy   [N] int64: the verdicts on that part of the candidates
                                      [N, 2] where vectors are copied from another version than the one
                                      before: also the place of each text there, or NEW

The task holds a quarter of the node's memory at most, and DuckDB writes the rest to the node's disk: 10
million candidates beside as many rows before take 18 to 25 s and 2.9 GB on 2 cores.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
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
REASONS = {SAME_TEXT: "the same text again", SAME_ID: "the same id again"}
_FOLDER = "_plan"
_SMALL_ROWS = 1 << 20
_MEMORY = "25%"  # of the machine's, or of the container's where that has a limit

Files = Sequence[tuple[str, int]]
"""(part, or URI of a file of rows; its rows) each"""
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
    """How many texts with the lowest keys to return."""
    hashes: Sequence[str] = ()
    """Hashes of texts to look for, by their first 16 digits."""


@dataclass(frozen=True, kw_only=True)
class CandidateDecisions(TaskRecord):
    """The summary; the verdicts themselves are in files."""

    plan: str
    """The plan's name, by which `read_verdicts` finds them."""
    changes: Changes
    known: int
    """Candidates whose text the version before has."""
    in_source: int
    """Candidates whose text the `source` has."""
    samples: list[tuple[int, int]]
    """(verdict, place) of the first candidates with each verdict of `REASONS`, some."""
    first: list[int]
    """The places of the texts with the lowest keys. A text with several values counts once."""
    present: list[str]
    new_rows: RowSet
    """The candidates whose ids the version before lacks."""


@dataclass(frozen=True, kw_only=True)
class _ChangesRecord(TaskRecord):
    changes: Changes = field(default_factory=lambda: Changes(0, 0, 0, 0))


def decide(draft: Draft, rows: PlanInput, query: TextQuery) -> CandidateDecisions:
    """Writes the verdicts on all candidates, of which there is at least one."""
    files = [list(map(list, kind)) for kind in (rows.candidates, rows.before, rows.source)]
    flags = [rows.same_columns, query.texts, list(query.hashes)]
    # A job that is resumed after the version before or the query has changed makes another plan.
    plan = f"plan-{digest([files, flags])[:8]}"
    work = functools.partial(_decide, rows=rows, query=query)
    with _executor(rows.candidates, rows.before, rows.source):
        (decided,) = run_tasks(draft, {plan: ""}, work, "plan", CandidateDecisions)
    return decided


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


def _decide(
    draft: Draft, plan: str, _: str, rows: PlanInput, query: TextQuery
) -> CandidateDecisions:
    with _database(is_small(rows.candidates, rows.before, rows.source)) as db:
        _read(db, "candidates", lambda part: _keys_of_part(draft, part), rows.candidates)
        _read(db, "before", _published_keys, rows.before)
        _read(db, "source", _published_keys, rows.source)
        _keep_first(db)
        db.execute(f"""
            CREATE TABLE verdicts AS
                SELECT kept.place, coalesce(b.place, {NEW}) AS verdict, coalesce(s.place, {NEW}) AS source
                FROM kept
                LEFT JOIN (SELECT text, min(place) AS place FROM before GROUP BY text) b USING (text)
                LEFT JOIN (SELECT text, min(place) AS place FROM source GROUP BY text) s USING (text)
            UNION ALL
                SELECT place, {SAME_ID}, {NEW} FROM lost
            UNION ALL
                SELECT place, {SAME_TEXT}, {NEW}
                FROM candidates ANTI JOIN kept USING (place) ANTI JOIN lost USING (place)
        """)
        _write(db, draft, plan, rows)
        dropped = _rows(
            db, "SELECT verdict, count(*) FROM verdicts WHERE verdict < -1 GROUP BY verdict"
        )
        samples = "SELECT verdict, place FROM verdicts WHERE verdict = ? ORDER BY place LIMIT ?"
        lowest = "SELECT min(place) FROM kept GROUP BY text ORDER BY text LIMIT ?"
        wanted = "SELECT DISTINCT text FROM kept SEMI JOIN (SELECT unnest(?::UBIGINT[]) AS text) USING (text)"
        new_rows = "SELECT id, content FROM kept ANTI JOIN before USING (id)"
        keys = [int(hash_, 16) for hash_ in query.hashes]
        present = {key for (key,) in _rows(db, wanted, keys)}
        return CandidateDecisions(
            plan=plan,
            changes=_count_changes(db, "kept", rows.same_columns, rows.before),
            known=_number(db, "SELECT count(*) FROM verdicts WHERE verdict >= 0"),
            in_source=_number(db, "SELECT count(*) FROM verdicts WHERE source >= 0"),
            dropped={REASONS[verdict]: count for verdict, count in dropped},
            counts={"records": sum(count for _, count in rows.candidates)},
            samples=[
                row for verdict in REASONS for row in _rows(db, samples, verdict, raw.MAX_SAMPLES)
            ],
            first=[place for (place,) in _rows(db, lowest, query.texts)],
            present=[
                hash_ for hash_, key in zip(query.hashes, keys, strict=True) if key in present
            ],
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


def _keys_of_part(draft: Draft, part: str) -> Keys:
    return candidates.read_keys(draft, part)[:, : candidates.BYTES]


def _published_keys(uri: str) -> Keys:
    try:
        return candidates.read_published_keys(uri)
    except FileNotFoundError:  # a dry run holds no lock
        raise BadInput(
            f"{uri}: another job has removed this version meanwhile; the same command makes a new plan"
        ) from None


def _read(db: Database, table: str, read: Callable[[str], Keys], files: Files) -> None:
    """Makes a table of the files' keys, with the place of each row."""
    db.execute(f"CREATE TABLE {table} (text UBIGINT, content UBIGINT, id UBIGINT, place BIGINT)")
    start = 0
    for keys in map_prefetched(read, [name for name, _ in files]):
        columns = [*keys.T, np.arange(start, start + len(keys))]
        rows = pa.table(dict(zip(("text", "content", "id", "place"), columns, strict=True)))
        db.from_arrow(rows).insert_into(table)
        start += len(keys)


def _keep_first(db: Database) -> None:
    """Makes the tables `kept`, of the candidates that stay, and `lost`, of those that lose their id.

    A candidate that loses its id leaves its content to a later one, so this comes again until none loses.
    Where no id has two contents that is one round.
    """
    db.execute("CREATE TABLE lost (place BIGINT)")
    while True:
        db.execute("""
            CREATE OR REPLACE TABLE first_with_content AS
                SELECT min(place) AS place, arg_min(text, place) AS text, content, arg_min(id, place) AS id
                FROM candidates ANTI JOIN lost USING (place) GROUP BY content
        """)
        db.execute("""
            CREATE OR REPLACE TABLE kept AS
                SELECT min(place) AS place, arg_min(text, place) AS text,
                       arg_min(content, place) AS content, id
                FROM first_with_content GROUP BY id
        """)
        lost = "INSERT INTO lost SELECT place FROM first_with_content ANTI JOIN kept USING (place)"
        if not _number(db, lost):
            return


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


def _write(db: Database, draft: Draft, plan: str, rows: PlanInput) -> None:
    """A file of verdicts for each part."""
    columns = "verdict, source" if rows.source else "verdict"
    batches = _columns(db, f"SELECT {columns} FROM verdicts ORDER BY place")

    def parts() -> Iterator[tuple[str, list[Ints]]]:
        verdicts = [np.empty(0, np.int64) for _ in columns.split()]
        for name, count in rows.candidates:
            while len(verdicts[0]) < count:
                pairs = zip(verdicts, next(batches), strict=True)
                verdicts = [np.concatenate(pair) for pair in pairs]
            yield name, [column[:count] for column in verdicts]
            verdicts = [column[count:] for column in verdicts]

    def write(part: tuple[str, list[Ints]]) -> None:
        name, verdicts = part
        data = npy.to_bytes(np.stack(verdicts, axis=1) if rows.source else verdicts[0])
        draft.write_file(f"{_FOLDER}/{plan}/{name}.npy", data)

    for _ in map_prefetched(write, parts()):
        pass


def _rows(db: Database, query: str, *values: Any) -> list[tuple[Any, ...]]:
    return db.execute(query, values).fetchall()


def _number(db: Database, query: str) -> int:
    return int(_rows(db, query)[0][0])


def _columns(db: Database, query: str) -> Iterator[list[Any]]:
    """The columns of the result as arrays, a million rows at a time."""
    reader: pa.RecordBatchReader = db.sql(query).to_arrow_reader(1 << 20)
    for batch in reader:
        yield [column.to_numpy() for column in batch.columns]
