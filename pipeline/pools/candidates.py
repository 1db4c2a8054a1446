"""Turns tables of (id, text) into candidates of a pool, by a task for each file, or for each 131,072 rows of
a Parquet file.

    _candidates/file-00000-000.arrow   id, text, content_hash of up to 16,384 rows, in the file's order, and
                                       the columns kept to filter by, as text
    _candidates/file-00000-000.npy     their keys, [rows, 4] uint64: 64 bits of the hashes of the text, of
                                       the content and of the id; bytes of the text

The content is the text and its values to filter by: candidates with the same content are the same. The text
alone decides the vector. The plan of a pool needs only the keys. They have 64 bits: among 10⁸ rows 0.0003
pairs collide, and the texts themselves are compared before a vector is copied.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipeline import storage
from pipeline.arrays import Keys
from pipeline.config import BadInput
from pipeline.corpora import raw
from pipeline.corpora.file_tasks import ParseReport, redacted_count
from pipeline.corpora.formats import tables
from pipeline.corpora.privacy import Privacy
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord
from pipeline.engine.run import run_tasks
from pipeline.pools.changes import RowSet
from pipeline.pools.shard import ROWS
from pipeline.storage import npy

TEXT_KEY, CONTENT_KEY, ID_KEY, BYTES = range(4)
_FOLDER = "_candidates"
_PART_ROWS = 16_384
# A core reads some 50,000 rows a second, and a task costs some 10 ms.
_LEAST_TASK_ROWS = 131_072
_PART_BYTES = 32 << 20  # of text; all that a task holds in memory

Piece = tuple[str, tuple[int, int, int] | None]
"""(a file's URI, which `tables.RowGroups` of it; None: all)"""


class CandidateRow(NamedTuple):
    """A row that can be a candidate."""

    name: str
    """"": the content's hash is the id."""
    text: str
    values: list[str | None]
    """Values of the columns that are kept to filter by."""


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
    privacy: Privacy,
    form: tables.TableFormat,
) -> list[PartsRecord]:
    """Reads every file's `columns` (the id's, the text's, those to filter by) and writes its candidates.

    Without an id column, "", the text's content hash is the id. A Parquet file of many row groups is
    several tasks.
    """
    work = functools.partial(
        _stage_piece,
        columns=columns,
        max_text_bytes=max_text_bytes,
        reading=reading,
        privacy=privacy,
        form=form,
    )
    with ThreadPoolExecutor(16) as pool:
        pieces = pool.map(lambda uri: tables.row_groups(uri, _LEAST_TASK_ROWS), files)
        tasks: dict[str, Piece] = {}
        for number, (uri, groups) in enumerate(zip(files, pieces, strict=True)):
            if len(groups) < 2:
                tasks[f"file-{number:05d}"] = (uri, None)
            for index, group in enumerate(groups if len(groups) > 1 else ()):
                tasks[f"file-{number:05d}-{index:04d}"] = (
                    uri,
                    (group.first, group.end, group.rows_before),
                )
    return run_tasks(draft, tasks, work, "read candidates", PartsRecord)


def read_rows(draft: Draft, part: str) -> pa.Table:
    data = storage.read_bytes(draft.path(_FOLDER, f"{part}.arrow"))
    return pa.ipc.open_file(pa.BufferReader(data)).read_all()


def read_keys(draft: Draft, part: str) -> Keys:
    """[rows, 4]

    Raises BadInput where an earlier version of polyrank wrote them.
    """
    keys: Keys = npy.from_bytes(storage.read_bytes(draft.path(_FOLDER, f"{part}.npy")))
    if keys.shape[1] <= BYTES:
        raise BadInput(
            f"{draft.staging}: holds an unfinished job of another version of polyrank; remove it"
        )
    return keys


def read_published_keys(uri: str) -> Keys:
    """[rows, 3]: the keys of a file of a pool's rows.

    Texts are read only in a pool with columns to filter by: in all others the content is the text.
    """
    with storage.open_input(uri) as stream:
        has_values = len(pa.ipc.open_file(stream).schema) > len(ROWS)
        fields = ["id", "content_hash", *(["text"] if has_values else [])]
        options = pa.ipc.IpcReadOptions(included_fields=[ROWS.get_field_index(f) for f in fields])
        rows = pa.ipc.open_file(stream, options=options).read_all()
    hashes = bytes.fromhex("".join(rows["content_hash"].to_pylist()))
    contents = np.frombuffer(hashes, ">u8")[::2].astype(np.uint64)
    ids = np.array([id_key(value) for value in rows["id"].to_pylist()], np.uint64)
    return np.stack([text_keys(rows["text"]) if has_values else contents, contents, ids], axis=1)


def row_set(rows: pa.Table) -> RowSet:
    """These candidates: rows with `id` and `content_hash`."""
    contents = [hash_key(hash_of_content) for hash_of_content in rows["content_hash"].to_pylist()]
    ids = [id_key(name) for name in rows["id"].to_pylist()]
    return RowSet.of(np.array(ids, np.uint64), np.array(contents, np.uint64))


def content_hash(text: str, values: Sequence[str | None] = ()) -> str:
    """32 hex digits that name a text and its filter values."""
    content = json.dumps([text, *values]) if values else text
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def text_keys(texts: pa.ChunkedArray) -> Keys:
    """[rows]: the keys of the texts alone."""
    hashes = (content_hash(text) for chunk in texts.iterchunks() for text in chunk.to_pylist())
    return np.fromiter(map(hash_key, hashes), np.uint64, len(texts))


def hash_key(hash_of_content: str) -> int:
    return int(hash_of_content[:16], 16)


def id_key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def _stage_piece(
    draft: Draft,
    task: str,
    piece: Piece,
    columns: tuple[str, ...],
    max_text_bytes: int,
    reading: raw.Reading,
    privacy: Privacy,
    form: tables.TableFormat,
) -> PartsRecord:
    uri, groups = piece
    report = ParseReport()
    schema = pa.schema([*ROWS, *(pa.field(name, pa.string()) for name in columns[2:])])
    parts = list[tuple[str, int]]()
    redacted = 0
    row_groups = tables.RowGroups(*groups) if groups else None
    for number, rows in enumerate(
        _parts(_rows(uri, columns, max_text_bytes, reading, report, form, row_groups))
    ):
        part = f"{task}-{number:03d}"
        table, changed = _table(rows, schema, privacy)
        redacted += changed
        keys = [
            (hash_key(content_hash(text)), hash_key(hash_), id_key(name), len(text.encode()))
            for name, text, hash_ in zip(*(table[n].to_pylist() for n in range(3)), strict=True)
        ]
        draft.write_file(f"{_FOLDER}/{part}.arrow", arrow_file(table))
        draft.write_file(f"{_FOLDER}/{part}.npy", npy.to_bytes(np.array(keys, np.uint64)))
        parts.append((part, len(rows)))
    rejects = raw.Rejects.joined(report.malformed, report.dropped)
    rejects.save(draft, task, privacy)
    return PartsRecord(
        parts=parts,
        counts={"records": report.records, **redacted_count(redacted)},
        dropped=dict(rejects.counts),
        malformed=dict(report.malformed.counts),
    )


def _table(rows: list[CandidateRow], schema: pa.Schema, privacy: Privacy) -> tuple[pa.Table, int]:
    """(the candidates, how many of their texts were redacted); hashes are those of redacted texts."""
    texts, redacted = privacy.redacted_and_counted(
        pa.array([row.text for row in rows], pa.string())
    )
    hashes = [
        content_hash(text, row.values) for text, row in zip(texts.to_pylist(), rows, strict=True)
    ]
    names = [row.name or hash_ for row, hash_ in zip(rows, hashes, strict=True)]
    values = [[row.values[number] for row in rows] for number in range(len(schema) - len(ROWS))]
    columns = [pa.array(column, pa.string()) for column in (names, texts, hashes, *values)]
    return pa.table(columns, schema=schema), redacted


def require_columns(
    files: list[str], columns: tuple[str, ...], reading: raw.Reading, form: tables.TableFormat
) -> None:
    """Raises BadInput where one of the first files lacks one of the `columns` (see `stage`)."""
    tables.require_columns(files, _columns_by_option(columns), reading, form)


def _columns_by_option(columns: tuple[str, ...]) -> dict[str, str]:
    """The columns to read by the option that names each."""
    id_column, text_column, *filter_columns = columns
    columns_by_option = {"embed.text_column": text_column, "embed.id_column": id_column}
    columns_by_option |= {
        f"embed.filter_columns[{number}]": name for number, name in enumerate(filter_columns)
    }
    return {option: column for option, column in columns_by_option.items() if column}


def _rows(
    uri: str,
    columns: tuple[str, ...],
    max_text_bytes: int,
    reading: raw.Reading,
    report: ParseReport,
    form: tables.TableFormat,
    groups: tables.RowGroups | None,
) -> Iterator[CandidateRow]:
    """The rows that can be candidates; all other rows are counted in `report`."""
    id_column, text_column, *_ = columns
    columns_by_option = _columns_by_option(columns)
    for line, row in tables.read(uri, columns_by_option, reading, report, form=form, groups=groups):
        sample = f"id {row.get(id_column)!r}: {row.get(text_column)!r}"
        try:
            cells = [_cell(row, *named_column) for named_column in columns_by_option.items()]
        except ValueError as reason:
            report.malformed.add(str(reason), uri, line, sample)
            continue
        text, name = cells[0] or "", cells[1] or "" if id_column else ""
        if not text.strip():
            report.dropped.add("text is empty", uri, line, sample)
        elif len(text) * 4 > max_text_bytes and len(text.encode()) > max_text_bytes:
            report.dropped.add("text is too long", uri, line, sample)
        else:
            yield CandidateRow(name, text, cells[2 if id_column else 1 :])


def _cell(row: dict[str, Any], option: str, column: str) -> str | None:
    """The text of a row's cell; raises ValueError with the option's name for what it cannot be."""
    is_filter_column = option.startswith("embed.filter_columns")
    if column not in row and not is_filter_column:  # JSON lines leave out empty cells
        raise ValueError(f"no column {column}")
    value = row.get(column)
    is_text_column = option == "embed.text_column"
    try:
        if is_text_column and not isinstance(value, str | None):
            raise TypeError(type(value).__name__)
        cell = tables.filter_text(value) if is_filter_column else tables.cell_text(value)
    except TypeError as kind:
        allowed = "text" if is_text_column else "text, numbers, dates"
        raise ValueError(f"{option} {column}: {kind}; allowed: {allowed}") from None
    if option == "embed.id_column" and not cell:
        raise ValueError(f"{option} {column}: empty; allowed: text, numbers, dates")
    return cell


def _parts(rows: Iterator[CandidateRow]) -> Iterator[list[CandidateRow]]:
    part: list[CandidateRow] = []
    size = 0
    for row in rows:
        part.append(row)
        size += len(row.text)
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
