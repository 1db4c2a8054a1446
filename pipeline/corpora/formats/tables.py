"""Tables of named columns, row by row in bounded memory: Parquet, CSV, TSV, JSON lines or a JSON array.

The first bytes of a file tell whether it is Parquet. Its name tells CSV, TSV and JSON lines apart (`.csv`,
`.tsv`, `.jsonl`, before `.gz` and the like), or else its first line: an object or an array means JSON, a
tab means TSV, anything else CSV. JSON is objects, one in a line or otherwise, or an array of objects. CSV
and TSV begin with the names of their columns; fields in double quotes may hold line breaks. A field that is
NULL, \\N, nan, NaN, <NA>, #N/A or another of Excel's errors is empty: data bases, pandas and Excel write
empty cells so. None, N/A and null are texts, which people write as answers.
"""

from __future__ import annotations

import csv
import functools
import itertools
import json
import re
import textwrap
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.config import BadInput, require
from pipeline.corpora import file_kinds, file_tasks, raw
from pipeline.corpora.formats import encodings, json_array, parquet_fetches
from pipeline.storage.object_store import RangedInput
from pipeline.storage.prefetch import map_prefetched

Lines = Iterable[tuple[int, str]]
Rows = Iterator[tuple[int, dict[str, Any]]]
"""(line, of Parquet the row, from 1; the values by column)"""

_JSON_HEAD = 1000  # objects that are looked through for the names of columns
_CHECKED_FILES = 32
_BATCH_ROWS = 1024
_BUFFER_BYTES = 4 << 20  # for each column of a large row group of Parquet
_NO_ID = ", or '': a hash of the text is the id"
_FIRST_LINE = " (which its first line that is not blank names)"
_WHOLE_FLOAT = re.compile(r"-?(?:0|[1-9][0-9]*)\.0")  # as pandas writes integers with a gap
_EXCEL_DELIMITER = re.compile(r'"?sep=(.)"?', re.IGNORECASE)  # a first line that only Excel knows
_JSON_BEGINNING = re.compile(r"\s*(?:\{|\[\s*(?:\{|$))")
_SHOWN_NAMES, _SHOWN_CHARACTERS = 50, 60
_OTHER_DELIMITERS = ";\t|"
# As SQL, pandas and Excel write an empty cell. "None" and "N/A" may be the right answer of a FAQ.
_EXCEL_ERRORS = frozenset(["#N/A", "#REF!", "#NAME?", "#VALUE!", "#DIV/0!", "#NUM!", "#NULL!"])
_EMPTY_CELLS = _EXCEL_ERRORS | {"NULL", "\\N", "nan", "NaN", "<NA>"}


@dataclass(frozen=True, kw_only=True)
class TableFormat:
    """How CSV, TSV and JSON lines are written. Settings of jobs that read tables extend it."""

    GROUP = ""
    """The settings' name on the command line; "": there are no such options."""
    encoding: str = "utf-8"
    """The encoding of CSV, TSV and JSON lines: utf-8, cp1252 (Windows' Latin-1), utf-16, or another one
    that Python knows."""
    delimiter: str = ""
    """Delimiter between the fields of CSV and TSV, such as ";" or "\\t"; empty: a comma, in TSV a tab."""
    quotes: bool = True
    """False: double quotes in CSV and TSV are ordinary characters."""

    def __post_init__(self) -> None:
        require(encodings.is_known(self.encoding), self.option("encoding"), self.encoding,
                "utf-8, cp1252, utf-16, or another encoding that Python knows")  # fmt: skip
        require(len(self.delimiter) <= 1 or self.delimiter == "\\t", self.option("delimiter"),
                self.delimiter, 'one character, such as ";"')  # fmt: skip

    def option(self, name: str) -> str:
        """The name of a setting on the command line, for messages; "": it has none."""
        return f"{self.GROUP}.{name}" if self.GROUP else ""


_PLAIN = TableFormat()


def read(
    uri: str,
    option_columns: Mapping[str, str],
    reading: raw.Reading,
    report: file_tasks.ParseReport,
    takes_column: Callable[[str], object] = lambda name: False,
    form: TableFormat = _PLAIN,
    groups: RowGroups | None = None,
) -> Rows:
    """The rows of a file, with at least the columns `option_columns` and those that `takes_column` takes.

    `option_columns`: option → column. `groups`: only these row groups of Parquet. `report` has the broken
    rows: where they are and why, never their contents, since columns that nobody named may hold personal
    data. Raises BadInput for a file in another encoding, and, with the names of the file's columns, for a
    column that the file lacks.
    """
    stored = storage.open_ranges(uri)
    if stored.read(4) == b"PAR1":
        return _parquet_rows(uri, stored, option_columns, takes_column, report, groups)
    lines = encodings.lines(uri, form.encoding, form.option("encoding"), reading, report.notes)
    first = next(((number, line) for number, line in lines if line.strip()), None)
    if first is None:
        return iter(())
    lines = itertools.chain([first], lines)
    kind = _file_kind(raw.plain_name(uri), first[1])
    if kind == "json" and (opening := _opening(first[1])):
        objects = json_array.read_objects(
            uri, reading, report, form.encoding, opening, form.option("encoding")
        )
        return _json_table(uri, objects, option_columns, report)
    if kind == "json":
        return _json_table(uri, _json_objects(uri, lines, report), option_columns, report)
    delimiter = form.delimiter or ("\t" if kind == "tsv" else ",")
    delimiter = "\t" if delimiter == "\\t" else delimiter
    if excel := _EXCEL_DELIMITER.fullmatch(first[1].strip(" ")):
        delimiter = excel[1]
        next(lines)
    records = csv_records(uri, lines, report, delimiter, form.quotes)
    return _csv_rows(uri, records, option_columns, report, form)


class RowGroups(NamedTuple):
    """Some neighbouring row groups of a Parquet file."""

    first: int
    end: int
    rows_before: int
    """Number of rows in the groups before."""


def row_groups(uri: str, least_rows: int) -> list[RowGroups]:
    """A Parquet file in pieces of at least `least_rows` rows, but for the last. Empty for other files, and
    for broken ones, which `read` refuses."""
    stored = storage.open_ranges(uri)
    if stored.read(4) != b"PAR1":
        return []
    try:
        metadata = pq.read_metadata(stored)
    except (pa.ArrowException, OSError):
        if stored.error:
            raise stored.error from None
        return []
    pieces, first, start, rows = list[RowGroups](), 0, 0, 0
    for group in range(metadata.num_row_groups):
        rows += metadata.row_group(group).num_rows
        if rows - start >= least_rows:
            pieces.append(RowGroups(first, group + 1, start))
            first, start = group + 1, rows
    if rows > start:
        pieces.append(RowGroups(first, metadata.num_row_groups, start))
    return pieces


def cell_text(value: object) -> str | None:
    """The text of a cell that is an id, a label or a value to filter by; None: the cell is empty.

    The type that the writer chose does not count. pandas writes integers with a gap as 2015.0, and dates as
    timestamps at midnight: these are "2015" and "2015-03-01". A decimal loses the zeros at its end. True is
    "true", as in JSON. Raises TypeError for any other value, such as a list.
    """
    if value is None or value != value:  # NaN is the gap of a column of floats
        return None
    if raw.is_text(value):
        return value
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, int | float | UUID):
        return str(value)
    if isinstance(value, Decimal):
        digits, point, fraction = f"{value:f}".partition(".")
        return (digits + point + fraction.rstrip("0")).removesuffix(".")
    if isinstance(value, datetime):
        is_midnight = value.time() == time() and not getattr(value, "nanosecond", 0)  # of pandas
        return (value.date() if is_midnight and value.tzinfo is None else value).isoformat()
    if isinstance(value, date | time):
        return value.isoformat()
    raise TypeError("broken text" if isinstance(value, str) else type(value).__name__)


def filter_text(value: object) -> str | None:
    """The text of a cell to filter by, which does not tell CSV's 2015.0 and True from 2015 and true."""
    text = cell_text(value)
    if text is None:
        return None
    if text in ("True", "False", "TRUE", "FALSE"):
        return text.lower()
    return text.partition(".")[0] if _WHOLE_FLOAT.fullmatch(text) else text


def first_columns(
    uris: Sequence[str], reading: raw.Reading, form: TableFormat = _PLAIN
) -> list[str]:
    """The columns of the first row of the first file that has one; none: none of the first 32 has.

    Raises BadInput where no file has a row, or these hold broken rows alone: the names that they lack would
    seem to be the fault.
    """
    report = file_tasks.ParseReport()
    for uri in uris[:_CHECKED_FILES]:
        rows = read(uri, {}, reading, report, lambda name: True, form)
        if row := next(rows, None):
            return list(row[1])
    if report.malformed.counts:
        reasons = raw.reasons_text(report.malformed.counts)
        refusal = f"{uris[0]}: has no rows that can be read ({reasons})"
        raise BadInput("; ".join([refusal, *report.notes]))
    if uris and len(uris) <= _CHECKED_FILES:
        more = f", nor have {len(uris) - 1} other files" if len(uris) > 1 else ""
        raise BadInput(f"{uris[0]}: has no rows{more}")
    return []


def require_columns(
    uris: Sequence[str],
    option_columns: Mapping[str, str],
    reading: raw.Reading,
    form: TableFormat = _PLAIN,
) -> None:
    """Raises BadInput as `read`, for one of the first 32 files; of JSON lines it reads 1,000, of others one.

    A job can call it before it starts Ray. Its tasks check the other files.
    """

    def check(uri: str) -> None:
        next(read(uri, option_columns, reading, file_tasks.ParseReport(), form=form), None)

    for _ in map_prefetched(check, uris[:_CHECKED_FILES], threads=8):
        pass


def csv_records(
    uri: str,
    lines: Lines,
    report: file_tasks.ParseReport,
    delimiter: str = ",",
    quotes: bool = True,
) -> Iterator[tuple[int, list[str]]]:
    """(first line, fields) of each record of CSV that is not blank, the names of the columns first.

    Set aside are broken records, and those with more or fewer fields than columns. If stray quotes have
    joined lines that are records, only the first line is set aside, and the others are read again; the lines
    of a long text are none. Samples hold no content.
    """
    csv.field_size_limit(raw.MAX_LINE_BYTES)
    parse = functools.partial(
        csv.reader,
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE,
        strict=True,
    )
    unread, to_read_again = iter(lines), deque[tuple[int, str]]()
    record_lines, columns = list[tuple[int, str]](), 0

    def text() -> Iterator[str]:
        while line := to_read_again.popleft() if to_read_again else next(unread, None):
            record_lines.append(line)
            yield line[1] + "\n"

    records = parse(text())
    while True:
        record_lines.clear()
        fields, fault, detail, has_joined_lines = list[str](), "", "", False
        try:
            fields = next(records, [])
        except csv.Error as error:
            fault, detail = f"not CSV: {error}", _size_of_line(record_lines[0][1])
            has_joined_lines = True
        if not record_lines:
            return
        (number, _), *others = record_lines
        if not fault and (damaged := next((line for _, line in record_lines if _fault(line)), "")):
            fault, detail = _fault(damaged), _size_of_line(damaged)
        elif fields and columns and len(fields) != columns:
            fault = "more or fewer fields than columns"
            detail = f"{len(fields)} fields, {columns} columns"
            records_among = sum(_count_fields(parse, line) in (0, columns) for _, line in others)
            has_joined_lines = 2 * records_among > len(others)
        if has_joined_lines:  # the record is its first line alone
            to_read_again.extendleft(reversed(others))
            records = parse(text())
        if fault:
            report.records += 1
            report.malformed.add(fault, uri, number, detail)
        elif fields:
            columns = columns or len(fields)
            yield number, fields


def _count_fields(parse: Callable[[list[str]], Iterator[list[str]]], line: str) -> int:
    """The number of fields of a line that is a record; -1: it is none."""
    try:
        return len(next(parse([line]), []))
    except csv.Error:
        return -1


def _fault(line: str) -> str:
    if raw.is_overlong(line):
        return "line too long"
    return "not UTF-8" if encodings.is_damaged(line) else ""


def _size_of_line(line: str) -> str:
    return "over 10 MiB" if raw.is_overlong(line) else f"{len(line):,} characters"


def _file_kind(name: str, first_line: str) -> str:
    if kind := file_kinds.named_table(name):
        return kind
    if _JSON_BEGINNING.match(first_line):
        return "json"
    return "tsv" if "\t" in first_line else "csv"


def _csv_rows(
    uri: str,
    records: Iterator[tuple[int, list[str]]],
    option_columns: Mapping[str, str],
    report: file_tasks.ParseReport,
    form: TableFormat,
) -> Rows:
    _, columns = next(records, (0, []))
    has_one = not set(columns).isdisjoint(option_columns.values())
    hint = delimiter_hint(columns, form)
    _require_columns(uri, option_columns, columns, hint or ("" if has_one else _FIRST_LINE))
    emptied, row = Counter[str](), dict[str, str]()
    for number, fields in records:
        report.records += 1
        if fields == columns:  # of files that were joined
            report.dropped.add("the names of the columns again", uri, number, "")
            continue
        row = dict(zip(columns, fields, strict=True))
        if not _EMPTY_CELLS.isdisjoint(fields):
            for name, value in row.items():
                if value in _EMPTY_CELLS:
                    row[name] = ""
                    emptied[value] += 1
        yield number, row
    if hint and not row:
        report.notes.append(f"{uri}: no row fits the names of its columns{hint}")
    if emptied:
        counts = ", ".join(f"{count:,} {text}" for text, count in sorted(emptied.items()))
        report.notes.append(f"{uri}: cells that count as empty: {counts}")


def _opening(first_line: str) -> str:
    """How a JSON file begins that is an array, or has objects of several lines, several in a line or commas
    between them; "": one object in a line."""
    beginning = first_line.removeprefix(raw.OVERLONG.decode()).strip()
    if beginning[:1] == "[" or beginning == "{":
        return beginning[:1]
    with suppress(ValueError, RecursionError):
        end = json.JSONDecoder().raw_decode(beginning)[1]
        return "{" if beginning[end:].lstrip().startswith(("{", ",")) else ""
    return ""


def _json_table(
    uri: str, rows: Rows, option_columns: Mapping[str, str], report: file_tasks.ParseReport
) -> Rows:
    head = list(itertools.islice(rows, _JSON_HEAD))
    if len(head) == 1 and _is_whole_table(head[0][1]):
        name, value = next(iter(head[0][1].items()))
        kind = "objects" if isinstance(value, dict) else "lists"
        raise BadInput(f"{uri}: one object that holds {kind}, such as {name!r}; allowed: an object for each "
                       "row, as pandas writes by to_json(…, orient='records')")  # fmt: skip
    if head:
        columns = list(dict.fromkeys(name for _, row in head for name in row))
        _require_columns(uri, option_columns, columns, nested_hint(head))
    named_columns = frozenset(option_columns.values())
    for number, row in itertools.chain(head, rows):
        if isinstance(row, json_array.RepeatedNames) and (names := row.names & named_columns):
            report.malformed.add("a column twice", uri, number, ", ".join(sorted(names)))
        else:
            yield number, row


def _is_whole_table(row: Mapping[str, Any]) -> bool:
    """Whether an object holds only objects, or only lists of values: the columns or rows of a table."""
    values = list(row.values())
    are_lists = len(values) > 1 and all(isinstance(value, list) for value in values)
    has_objects = are_lists and any(isinstance(item, dict) for value in values for item in value)
    are_objects = bool(values) and all(isinstance(value, dict) for value in values)
    return are_objects or (are_lists and not has_objects)


def nested_hint(rows: Sequence[tuple[int, dict[str, Any]]]) -> str:
    """For one object with a list of objects, the list's name and its columns; for rows that hold objects, or
    dialogues as lists of objects, the names of the texts in them; "" for other files."""
    for name, value in rows[0][1].items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            columns = ", ".join(map(str, value[0]))
            if len(rows) == 1:
                return (f" ('{name}' is a list of objects with {columns}: save this list alone, as by "
                        f"jq -c '.{name}[]')")  # fmt: skip
            texts = {key: text for key, text in value[0].items() if isinstance(text, str)}
            if texts:
                text = max(texts, key=lambda key: len(texts[key]))
                return (f" ('{name}' holds lists of objects with {columns}; if these are turns: jq -c "
                        f"'{{context: [.{name}[:-1][].{text}], response: .{name}[-1].{text}}}')")  # fmt: skip
        if isinstance(value, dict) and any(isinstance(text, str) for text in value.values()):
            names = ", ".join(key for key, text in value.items() if isinstance(text, str))
            return (f" ('{name}' holds objects with the texts {names}, and only names in the row itself are "
                    f"columns: jq -c '. + .{name}' adds them to it)")  # fmt: skip
    return ""


def _json_objects(uri: str, lines: Lines, report: file_tasks.ParseReport) -> Rows:
    for number, line in lines:
        if not line.strip():
            continue
        report.records += 1
        if fault := _fault(line):
            report.malformed.add(fault, uri, number, _size_of_line(line))
            continue
        try:
            # RFC 7464 begins each line with a record separator.
            value = json_array.DECODER.decode(line.strip())
        except json.JSONDecodeError as error:
            place = f"{error.msg} at character {error.colno}"
            report.malformed.add("not JSON", uri, number, place)
            continue
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits, 100,000 brackets
            report.malformed.add("not JSON", uri, number, str(error))
            continue
        if isinstance(value, dict):
            yield number, value
        else:
            report.malformed.add("not a JSON object", uri, number, type(value).__name__)


def _parquet_rows(
    uri: str,
    stored: RangedInput,
    option_columns: Mapping[str, str],
    takes_column: Callable[[str], object],
    report: file_tasks.ParseReport,
    groups: RowGroups | None,
) -> Rows:
    number = groups.rows_before if groups else 0
    try:
        file = pq.ParquetFile(stored, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        names = file.schema_arrow.names
        _require_columns(uri, option_columns, names)
        columns = [n for n in names if n in option_columns.values() or takes_column(n)]
        first, end = groups[:2] if groups else (0, file.num_row_groups)
        for fetched_groups, starts, ends in parquet_fetches.plan(
            file.metadata, first, end, columns
        ):
            stored.hold(starts, ends)
            for batch in file.iter_batches(_BATCH_ROWS, fetched_groups, columns):
                for row in _as_written(batch).to_pylist():
                    number += 1
                    report.records += 1
                    yield number, row
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        if stored.error:  # the file may be whole: the task is tried again
            raise stored.error from None
        raise BadInput(f"{uri}: broken Parquet after {number:,} rows ({error})") from None


def _as_written(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Values as their writer had them. Floats of 32 bits: 0.1, which is 0.10000000149 in 64 bits. Texts and
    UUIDs whose writer left out what they are, as Hive and Impala do; bytes that are none stay."""
    for place, field in enumerate(batch.schema):
        values = batch.column(place)
        if pa.types.is_float32(field.type):
            values = values.cast(pa.string()).cast(pa.float64())
        elif field.type == pa.binary(16):
            values = values.cast(pa.uuid())
        elif (text_type := _text_type(field.type)) != field.type:
            with suppress(pa.ArrowInvalid):
                values = values.cast(text_type)
        batch = batch.set_column(place, field.name, values)
    return batch


def _text_type(kind: pa.DataType) -> pa.DataType:
    """The type with texts in place of bytes."""
    if pa.types.is_list(kind):
        return pa.list_(_text_type(kind.value_type))
    return pa.string() if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else kind


def delimiter_hint(columns: list[str], form: TableFormat) -> str:
    """The delimiter that a file seems to have whose names of columns hold it, "" for other files: in
    `Question, long;Answer` a semicolon is as frequent as the comma that divided it."""
    header = "".join(columns)
    delimiter = max(_OTHER_DELIMITERS, key=header.count)
    if header.count(delimiter) < max(1, len(columns) - 1):
        return ""
    delimiter_shown = "\\t" if delimiter == "\t" else delimiter
    option = f", which --{form.option('delimiter')} '{delimiter_shown}' reads" if form.GROUP else ""
    return f" (the fields seem to be separated by '{delimiter_shown}'{option})"


def _require_columns(
    uri: str, option_columns: Mapping[str, str], columns: list[str], hint: str = ""
) -> None:
    missing = {o: name for o, name in option_columns.items() if columns.count(name) != 1}
    if missing:
        id_hint = _NO_ID if "embed.id_column" in missing else ""
        named = " and ".join(f"{option}: {name!r}" for option, name in missing.items())
        verb = "is" if len(missing) == 1 else "are"
        raise BadInput(f"{named} {verb} not allowed; allowed: the columns of {uri}: "
                       f"{names_text(columns)}{hint or id_hint}")  # fmt: skip


def names_text(columns: Sequence[str]) -> str:
    """The names for a message: a table without names has texts there, and some tables have thousands."""
    shown = [textwrap.shorten(name, _SHOWN_CHARACTERS, placeholder="…") for name in columns]
    more = len(shown) - _SHOWN_NAMES
    return ", ".join(shown[:_SHOWN_NAMES]) + (f" and {more:,} more" if more > 0 else "")
