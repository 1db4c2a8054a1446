"""Tables of (id, text) to candidates on their way into a pool; a task for each file.

    _candidates/file-00000-000.arrow   id, text, content_hash of up to 16,384 rows, in the file's order, and
                                       the columns kept to filter by, as text
    _candidates/file-00000-000.npy     their keys, [rows, 3] uint64: 64 bits of the content's hash, 64 of
                                       the id's, bytes of the text

The keys are all that the plan of a pool needs. 64 bits: among 10⁸ rows 0.0003 pairs collide, and what is
copied from an earlier version is compared by all 128.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline import shards, storage
from pipeline.arrays import Keys
from pipeline.artifact import Draft
from pipeline.corpora import raw
from pipeline.corpora.file_tasks import Account
from pipeline.corpora.formats import tables
from pipeline.records import TaskRecord

ROWS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("content_hash", pa.string(), nullable=False),
    ]
)
TEXT_KEY, ID_KEY, BYTES = range(3)
_FOLDER = "_candidates"
_PART_ROWS = 16_384
_PART_BYTES = 32 << 20  # of text; all that a task holds in memory

Row = tuple[Any, ...]
"""id, text, content hash, values of the columns kept"""


@dataclass(frozen=True, kw_only=True)
class PartsRecord(TaskRecord):
    """The candidates of one input file."""

    parts: list[tuple[str, int]]
    """(name, rows) each"""


def stage(
    draft: Draft,
    files: list[str],
    columns: tuple[str, ...],
    max_text_bytes: int,
    reading: raw.Reading,
    form: tables.TableFormat,
) -> list[PartsRecord]:
    """Reads every file's `columns` (the id's, the text's, those to filter by) and writes its candidates.

    Without an id column, "", the text's content hash is the id.
    """
    work = functools.partial(
        _stage, columns=columns, max_text_bytes=max_text_bytes, reading=reading, form=form
    )
    tasks = {f"file-{number:05d}": uri for number, uri in enumerate(files)}
    return shards.run_tasks(draft, tasks, work, "read candidates", PartsRecord)


def read_rows(draft: Draft, part: str) -> pa.Table:
    with storage.open_input(draft.path(_FOLDER, f"{part}.arrow")) as stream:
        return pa.ipc.open_file(stream).read_all()


def read_keys(draft: Draft, part: str) -> Keys:
    """[rows, 3]"""
    keys: Keys = np.load(io.BytesIO(storage.read_bytes(draft.path(_FOLDER, f"{part}.npy"))))
    return keys


def content_hash(text: str, values: Sequence[str | None] = ()) -> str:
    """32 hex digits that name a text, with what it is filtered by."""
    content = json.dumps([text, *values]) if values else text
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def text_key(hash_of_content: str) -> int:
    return int(hash_of_content[:16], 16)


def id_key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def _stage(
    draft: Draft,
    task: str,
    uri: str,
    columns: tuple[str, ...],
    max_text_bytes: int,
    reading: raw.Reading,
    form: tables.TableFormat,
) -> PartsRecord:
    account = Account()
    schema = pa.schema([*ROWS, *(pa.field(name, pa.string()) for name in columns[2:])])
    parts = list[tuple[str, int]]()
    found = _rows(uri, columns, max_text_bytes, reading, account, form)
    for number, rows in enumerate(_parts(found)):
        part = f"{task}-{number:03d}"
        table = pa.table([pa.array(c, pa.string()) for c in zip(*rows, strict=True)], schema=schema)
        keys = [(text_key(row[2]), id_key(row[0]), len(row[1].encode())) for row in rows]
        draft.write_file(f"{_FOLDER}/{part}.arrow", arrow_file(table))
        draft.write_file(f"{_FOLDER}/{part}.npy", npy_file(np.array(keys, np.uint64)))
        parts.append((part, len(rows)))
    rejects = raw.Rejects.joined(account.malformed, account.dropped)
    rejects.save(draft, task)
    return PartsRecord(
        parts=parts,
        counts={"records": account.records},
        dropped=dict(rejects.counts),
        malformed=dict(account.malformed.counts),
    )


def require_columns(
    files: list[str], columns: tuple[str, ...], reading: raw.Reading, form: tables.TableFormat
) -> None:
    """Raises BadInput where the first file lacks one of the `columns` (see `stage`)."""
    tables.require_columns(files, _by_option(columns), reading, form)


def _by_option(columns: tuple[str, ...]) -> dict[str, str]:
    """The columns to read by the option that names each."""
    id_column, text_column, *kept = columns
    wanted = {"embed.text_column": text_column, "embed.id_column": id_column}
    wanted |= {f"embed.filter_columns[{at}]": name for at, name in enumerate(kept)}
    return {option: column for option, column in wanted.items() if column}


def _rows(
    uri: str,
    columns: tuple[str, ...],
    max_text_bytes: int,
    reading: raw.Reading,
    account: Account,
    form: tables.TableFormat,
) -> Iterator[Row]:
    """What can be a candidate; everything else is in `account`."""
    id_column, text_column, *kept = columns
    wanted = _by_option(columns)
    for at, row in tables.read(uri, wanted, reading, account, form=form):
        text, name = row.get(text_column), row.get(id_column)
        name = str(name) if isinstance(name, int) and not isinstance(name, bool) else name
        values = [row.get(column) for column in kept]
        if missing := [column for column in wanted.values() if column not in row]:
            reason = f"no column {missing[0]}"
            account.malformed.add(reason, uri, at, json.dumps(row))
            continue
        if not raw.is_text(text):
            reason = "text is not a string"
        elif not text.strip():
            reason = "text is empty"
        elif len(text) * 4 > max_text_bytes and len(text.encode()) > max_text_bytes:
            reason = "text is too long"
        elif id_column and not (raw.is_text(name) and name):
            reason = "id is neither a string nor an integer"
        elif not all(
            value is None or isinstance(value, (int, float)) or raw.is_text(value)
            for value in values
        ):
            reason = "a column to filter by has neither text nor a number"
        else:
            known = [value if value is None else str(value) for value in values]
            hash_ = content_hash(text, known)
            yield (str(name) if id_column else hash_), text, hash_, *known
            continue
        account.dropped.add(reason, uri, at, f"id {name!r}: {text!r}")


def _parts(rows: Iterator[Row]) -> Iterator[list[Row]]:
    part: list[Row] = []
    size = 0
    for row in rows:
        part.append(row)
        size += len(row[1])
        if len(part) == _PART_ROWS or size >= _PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def arrow_file(table: pa.Table) -> pa.Buffer:
    """A memory-mappable Arrow IPC file."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def npy_file(array: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
