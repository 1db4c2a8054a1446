"""Turns tables of (id, text) into candidates of a pool, by a task for each file, or for each 131,072 rows of
a Parquet file.

    _candidates/file-00000-000.arrow   id, text, content_hash of up to 16,384 rows, in the file's order, the
                                       columns kept to filter by, as text, and known contexts
    _candidates/file-00000-000.npy     their keys, [rows, 4] uint64: 64 bits of the hashes of the text, of
                                       the content and of the id; bytes of the text and known contexts

The content is the text, its values to filter by and its known contexts: candidates with the same content are
the same. Text and known contexts decide the vector; "text" in the plan means both. One task reads all files
where there are known contexts, because the rows of a text may stand in several. The plan of a pool needs only
the keys. They have 64 bits: among 10⁸ rows 0.0003 pairs collide, and the texts themselves are compared before
a vector is copied.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline import storage
from pipeline.arrays import Keys
from pipeline.corpora import raw
from pipeline.corpora.file_tasks import ParseReport, redacted_count
from pipeline.corpora.formats import tables
from pipeline.corpora.privacy import Privacy
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord
from pipeline.engine.run import run_tasks
from pipeline.pools.changes import RowSet
from pipeline.pools.settings import CONTEXT, FILTER, ID, TEXT, EmbedConfig
from pipeline.pools.shard import KNOWN_CONTEXTS, ROWS
from pipeline.storage import npy
from pipeline.storage.prefetch import map_prefetched

KEYS = ("text", "content", "id", "size")
_FOLDER = "_candidates"
_PART_ROWS = 16_384
# A core reads some 50,000 rows a second, and a task costs some 10 ms.
_LEAST_TASK_ROWS = 131_072
_PART_BYTES = 32 << 20  # of text; all that a task holds in memory

Piece = tuple[str, tuple[int, ...] | None]
"""(a file's URI, which `tables.RowGroups` of it; None: all)"""
Turns = tuple[str, ...]
"""A context, the oldest turn first."""


class CandidateRow(NamedTuple):
    """A row that can be a candidate."""

    name: str
    """"": the content's hash is the id."""
    text: str
    values: list[str | None]
    """Values of the columns that are kept to filter by."""
    contexts: list[Turns]
    """Known contexts."""


@dataclass(frozen=True, kw_only=True)
class PartsRecord(TaskRecord):
    """The candidates of one input file."""

    parts: list[tuple[str, int]]
    """(name, rows) each"""


def stage(
    draft: Draft,
    files: list[str],
    config: EmbedConfig,
    reading: raw.Reading,
    privacy: Privacy,
) -> list[PartsRecord]:
    """Reads every file's table and writes its candidates.

    A Parquet file of many row groups is several tasks. With a column of contexts, one task reads all files.
    """
    work = functools.partial(_stage_pieces, config=config, reading=reading, privacy=privacy)
    tasks: dict[str, list[Piece]] = {}
    if config.context_column:
        tasks["file-00000"] = [(uri, None) for uri in files]
        return run_tasks(draft, tasks, work, "read candidates", PartsRecord)
    groups_of_files = map_prefetched(lambda uri: tables.row_groups(uri, _LEAST_TASK_ROWS), files)
    for number, (uri, groups) in enumerate(zip(files, groups_of_files, strict=True)):
        if len(groups) < 2:
            tasks[f"file-{number:05d}"] = [(uri, None)]
        for index, group in enumerate(groups if len(groups) > 1 else ()):
            tasks[f"file-{number:05d}-{index:04d}"] = [(uri, tuple(group))]
    return run_tasks(draft, tasks, work, "read candidates", PartsRecord)


def read_rows(draft: Draft, part: str) -> pa.Table:
    data = storage.read_bytes(draft.path(_FOLDER, f"{part}.arrow"))
    return pa.ipc.open_file(pa.BufferReader(data)).read_all()


def read_keys(draft: Draft, part: str) -> Keys:
    """[rows, 4]: `KEYS`"""
    keys: Keys = npy.from_bytes(storage.read_bytes(draft.path(_FOLDER, f"{part}.npy")))
    return keys


def read_published_keys(uri: str) -> Keys:
    """[rows, 3]: the keys of a file of a pool's rows, without sizes.

    Texts are read only in a pool with columns to filter by: in all others the content is the text.
    """
    with storage.open_input(uri) as stream:
        schema = pa.ipc.open_file(stream).schema
        has_values = len(schema) > len(ROWS)
        fields = ["id", "content_hash", *(["text", KNOWN_CONTEXTS] if has_values else [])]
        places = [place for name in fields if (place := schema.get_field_index(name)) >= 0]
        options = pa.ipc.IpcReadOptions(included_fields=places)
        rows = pa.ipc.open_file(stream, options=options).read_all()
    return _keys(rows, has_values)


def _keys(rows: pa.Table, has_values: bool) -> Keys:
    """[rows, 3]: the keys of texts, contents and ids. `has_values`: contents are more than texts."""
    contents = _content_keys(rows)
    texts = _text_keys(rows) if has_values else contents
    return np.stack([texts, contents, _id_keys(rows)], axis=1)


def _text_keys(rows: pa.Table) -> Keys:
    """[rows]: the keys of what decides their vectors."""
    names = [name for name in ("text", KNOWN_CONTEXTS) if name in rows.column_names]
    sources = (
        zip(*batch.select(names).to_pydict().values(), strict=True) for batch in rows.to_batches()
    )
    hashes = (content_hash(text, known) for batch in sources for text, *known in batch)
    return np.fromiter((int(hash_[:16], 16) for hash_ in hashes), np.uint64, len(rows))


def _content_keys(rows: pa.Table) -> Keys:
    hashes = bytes.fromhex("".join(rows["content_hash"].to_pylist()))
    return np.frombuffer(hashes, ">u8")[::2].astype(np.uint64)


def _id_keys(rows: pa.Table) -> Keys:
    return np.array([id_key(name) for name in rows["id"].to_pylist()], np.uint64)


def id_key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def row_set(rows: pa.Table) -> RowSet:
    """These candidates: rows with `id` and `content_hash`."""
    return RowSet.of(_id_keys(rows), _content_keys(rows))


def content_hash(text: str, values: Sequence[str | None] = ()) -> str:
    """32 hex digits that name a text and further values."""
    content = json.dumps([text, *values]) if values else text
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _stage_pieces(
    draft: Draft,
    task: str,
    pieces: list[Piece],
    config: EmbedConfig,
    reading: raw.Reading,
    privacy: Privacy,
) -> PartsRecord:
    report = ParseReport()
    names = [*config.filter_columns, *([KNOWN_CONTEXTS] if config.context_column else [])]
    schema = pa.schema([*ROWS, *(pa.field(name, pa.string()) for name in names)])
    parts = list[tuple[str, int]]()
    redacted = 0
    rows_of_pieces = (
        _rows(uri, config, reading, report, tables.RowGroups(*groups) if groups else None)
        for uri, groups in pieces
    )
    all_rows: Iterator[CandidateRow] = itertools.chain.from_iterable(rows_of_pieces)
    if config.context_column:
        all_rows = _grouped(all_rows)
    for number, rows in enumerate(_parts(all_rows)):
        part = f"{task}-{number:03d}"
        part_table, changed = _table(rows, schema, privacy)
        redacted += changed
        texts = [name for name in ("text", KNOWN_CONTEXTS) if name in part_table.column_names]
        sizes = sum(pc.binary_length(part_table[name]).to_numpy() for name in texts)
        keys = np.column_stack([_keys(part_table, bool(names)), sizes.astype(np.uint64)])
        draft.write_file(f"{_FOLDER}/{part}.arrow", arrow_file(part_table))
        draft.write_file(f"{_FOLDER}/{part}.npy", npy.to_bytes(keys))
        parts.append((part, len(rows)))
    report.counts.update(redacted_count(redacted))
    return report.close(draft, task, privacy, PartsRecord, parts=parts)


def _table(rows: list[CandidateRow], schema: pa.Schema, privacy: Privacy) -> tuple[pa.Table, int]:
    """(the candidates, how many of their texts were redacted); hashes are those of redacted texts."""
    texts, redacted = privacy.redacted_and_counted(
        pa.array([row.text for row in rows], pa.string())
    )
    values: list[list[str | None]] = [row.values for row in rows]
    # Without an id of its own a candidate keeps its id when a context is added.
    ids = [
        row.name or content_hash(text, row.values)
        for text, row in zip(texts.to_pylist(), rows, strict=True)
    ]
    if KNOWN_CONTEXTS in schema.names:
        all_turns = pa.array(
            (turn for row in rows for turns in row.contexts for turn in turns), pa.string()
        )
        redacted_turns = iter(privacy.redacted_and_counted(all_turns)[0].to_pylist())
        for number, row in enumerate(rows):
            known = [list(itertools.islice(redacted_turns, len(turns))) for turns in row.contexts]
            values[number] = [*row.values, json.dumps(known, ensure_ascii=False)]
    hashes = [content_hash(text, row) for text, row in zip(texts.to_pylist(), values, strict=True)]
    columns = [ids, texts, hashes, *zip(*values, strict=True)]
    return pa.table([pa.array(column, pa.string()) for column in columns], schema=schema), redacted


def _rows(
    uri: str,
    config: EmbedConfig,
    reading: raw.Reading,
    report: ParseReport,
    groups: tables.RowGroups | None,
) -> Iterator[CandidateRow]:
    """The rows that can be candidates; all other rows are counted in `report`."""
    columns, most_bytes = config.columns_by_option, config.max_text_bytes
    records_before = report.records
    for line, row in tables.read(uri, columns, reading, report, form=config, groups=groups):
        sample = f"id {row.get(config.id_column)!r}: {row.get(config.text_column)!r}"
        try:
            context = _turns(row, config.context_column) if config.context_column else ()
            cells = {
                option: _cell(row, option, column)
                for option, column in columns.items()
                if option != CONTEXT
            }
        except ValueError as reason:
            report.malformed.add(str(reason), uri, line, sample)
            continue
        text, name = cells.pop(TEXT) or "", cells.pop(ID, None) or ""
        if not text.strip():
            report.dropped.add("text is empty", uri, line, sample)
        elif _is_longer(text, most_bytes):
            report.dropped.add("text is too long", uri, line, sample)
        elif _is_longer("".join(context), most_bytes):
            report.dropped.add("context is too long", uri, line, sample)
        else:
            yield CandidateRow(name, text, list(cells.values()), [context] if context else [])
    if report.records == records_before:
        report.notes.append(f"{uri}: holds no records")


def _is_longer(text: str, most_bytes: int) -> bool:
    return len(text) * 4 > most_bytes and len(text.encode()) > most_bytes


def _grouped(rows: Iterator[CandidateRow]) -> Iterator[CandidateRow]:
    """Rows with the same text and values as one, with all their contexts, each once."""
    groups = dict[tuple[str | None, ...], list[CandidateRow]]()
    for row in rows:
        groups.setdefault((row.text, *row.values), []).append(row)
    for group in groups.values():
        contexts = dict.fromkeys(context for row in group for context in row.contexts)
        yield group[0]._replace(contexts=list(contexts))


def _cell(row: dict[str, Any], option: str, column: str) -> str | None:
    """The text of a row's cell; raises ValueError with the option's name for what it cannot be."""
    is_filter_column = option.startswith(FILTER)
    if column not in row and not is_filter_column:  # JSON lines leave out empty cells
        raise ValueError(f"no column {column}")
    value = row.get(column)
    try:
        cell = tables.filter_text(value) if is_filter_column else tables.cell_text(value)
    except TypeError as kind:
        raise ValueError(f"{option} {column}: {kind}; allowed: text, numbers, dates") from None
    if option == ID and not cell:
        raise ValueError(f"{option} {column}: empty; allowed: text, numbers, dates")
    return cell


def _turns(row: dict[str, Any], column: str) -> Turns:
    """A row's context; () for an empty one. Raises ValueError for what it cannot be."""
    if column not in row:
        raise ValueError(f"no column {column}")
    value = turns = row[column]
    if not isinstance(value, list):
        with suppress(TypeError):
            turns = [tables.cell_text(value) or ""]
    if not isinstance(turns, list) or not all(map(raw.is_text, turns)):
        raise ValueError(
            f"{CONTEXT} {column}: {type(value).__name__}; allowed: text, list of texts"
        )
    return tuple(turns) if any(turn.strip() for turn in turns) else ()


def _parts(rows: Iterator[CandidateRow]) -> Iterator[list[CandidateRow]]:
    part: list[CandidateRow] = []
    size = 0
    for row in rows:
        part.append(row)
        size += len(row.text) + sum(len(turn) for turns in row.contexts for turn in turns)
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
