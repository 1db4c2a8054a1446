"""Files of the user's own: a row is a context, a response and, where given, the texts to choose from.

    {"context": ["hi there", "how are you?"], "response": "fine, and you?"}
    question,answer,thread
    how are you?,"fine, and you?",17

Parquet, CSV, TSV or JSON lines (see `tables`). `Options` name the columns. A context that is a list is
turns, oldest first; a text is one turn. Rows of a group stay in one split. A group has one value of the
group column; without such a column its contexts begin with the same turn. A column gives the splits, or the
names of files (`train.csv`) or of their folders (`train/part-0.parquet`), or else the hash of the group.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os.path
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.config import BadInput, require
from pipeline.corpora import file_tasks, raw
from pipeline.corpora.dedup import hashing
from pipeline.corpora.dedup.hashing import Hashes
from pipeline.corpora.file_tasks import Malformed
from pipeline.corpora.formats import tables
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.schema import EXAMPLE, Split, hash_split, named_split
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord

_CONTEXT_NAMES = ("context", "question", "query", "anchor", "prompt", "instruction", "input", "utterance",
                  "message")  # fmt: skip
_RESPONSE_NAMES = ("response", "answer", "positive", "reply", "completion", "output", "passage")
_WHOLE_NUMBER = re.compile(r"(-?[0-9]{1,9})(?:\.0*)?")


@dataclass(frozen=True, kw_only=True)
class Options(tables.TableFormat):
    """What the columns are called, and how rows are shared out."""

    GROUP = "pairs"
    context_column: str = "context"
    """The turns before the response: a list of texts, or one text. Where the first file has no `context`,
    its only column that is called question, query, anchor, prompt, instruction, input, utterance or
    message."""
    response_column: str = "response"
    """The right answer. Where the first file has no `response`, its only column that is called answer,
    positive, reply, completion, output or passage."""
    group_column: str = ""
    """Rows with the same value (text or whole number) stay in one split; none: rows whose contexts begin
    with the same turn do. Groups and ids are stored as they are, so do not put personal data there, such
    as an address."""
    id_column: str = ""
    """A row's id, unique among all files (text or whole number); none: the file's name and the line."""
    candidates_column: str = ""
    """The texts to choose from, the response among them: a list, in CSV written as JSON. It may be
    null."""
    label_column: str = ""
    """The response's place in the candidates, from 0; none: the first that is the same text."""
    split_column: str = ""
    """train, valid (or dev, val, validation) or test."""
    split_by: Literal["names", "groups"] = "names"
    """Without a split column. `names`: files called train…, valid…, dev… or test…, and files of one of
    several folders called so, are that split, and the groups of other files are divided. `groups`: the
    groups of all files are divided."""
    shares: tuple[float, float, float] = (0.9, 0.05, 0.05)
    """The shares of train, valid and test by which groups are divided."""
    earlier_turns: Literal["off", "numbered"] = "off"
    """`numbered`: turns before the context stand in columns context/0 (the latest), context/1, … as in
    PolyAI's JSON."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("context_column", "response_column"):
            require(getattr(self, name) != "", f"pairs.{name}", getattr(self, name), "a column")
        require(not self.label_column or self.candidates_column != "", "pairs.label_column",
                self.label_column, "none without pairs.candidates_column")  # fmt: skip
        parts = self.parts_per_thousand
        are_thousandths = self.shares == tuple(part / 1000 for part in parts)
        require(are_thousandths and min(parts) >= 0 and sum(parts) == 1000, "pairs.shares", self.shares,
                "three shares, thousandths at the finest, that add up to 1")  # fmt: skip

    @property
    def parts_per_thousand(self) -> list[int]:
        return [round(1000 * share) for share in self.shares]

    @property
    def columns(self) -> dict[str, str]:
        """Option → column, of those that are named."""
        columns = {name: value for name, value in vars(self).items() if name.endswith("_column")}
        return {self.option(name): value for name, value in columns.items() if value}


def with_guessed_columns(
    uris: Sequence[str], options: Options, reading: raw.Reading
) -> tuple[Options, str]:
    """(options whose context and response are columns of the first file, a line that says which were taken)

    A default that the file lacks is replaced by its only column with a usual name, such as Question, or else
    by its only one whose last word is such a name, such as Customer question. Where there is none it stays
    as it is, and where one of the two fits more than one column both do; `require_columns` refuses them.
    """
    tables_given = [uri for uri in uris if not file_tasks.is_document(uri)]
    columns = tables.first_columns(tables_given, reading, options)
    found = {
        name: named
        for name, named in usual_columns(columns).items()
        if getattr(options, name) == getattr(Options, name)
    }
    has_both = {options.context_column, options.response_column} <= set(columns)
    if has_both or any(len(named) > 1 for named in found.values()):
        return options, ""
    names = {name: named[0] for name, named in found.items() if named}
    guessed = replace(options, **names)  # type: ignore[arg-type]
    if guessed == options or not {guessed.context_column, guessed.response_column} <= set(columns):
        return guessed, ""
    return guessed, (
        f"pairs: contexts are the column {guessed.context_column!r}, responses {guessed.response_column!r}; "
        "--pairs.context-column and --pairs.response-column name others"
    )


def text_column(uris: Sequence[str], form: tables.TableFormat, reading: raw.Reading) -> str:
    """The column of a pool's texts in the first file: `text`, or else the only one with a usual name of a
    response; "": there is neither."""
    columns = tables.first_columns(uris, reading, form)
    named = ["text"] if "text" in columns else _named(columns, _RESPONSE_NAMES)
    return named[0] if len(named) == 1 else ""


def usual_columns(columns: Sequence[str]) -> dict[str, list[str]]:
    """For the options context_column and response_column the columns with usual names."""
    return {
        "context_column": _named(columns, _CONTEXT_NAMES),
        "response_column": _named(columns, _RESPONSE_NAMES),
    }


def _named(columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The columns that are called so; where there are none, those whose last word is such a name."""
    words = {column: re.split(r"[\s_-]+", column.strip().lower()) for column in columns}
    exact = [column for column in columns if column.strip().lower() in names]
    return exact or [column for column in columns if words[column][-1] in names]


def require_columns(uris: list[str], options: Options, reading: raw.Reading) -> None:
    """Raises BadInput where one of the first files lacks a column that the options name."""
    tables_given = [uri for uri in uris if not file_tasks.is_document(uri)]
    tables.require_columns(tables_given, options.columns, reading, options)


def input_names(uris: Sequence[str], options: Options) -> Callable[[str], str]:
    """Maps each file to what its URI decides: its path below the common folder, which begins ids, and its
    split, where a folder names it. Both are part of the input's fingerprint."""
    root = _common_folder(uris)

    def input_name(uri: str) -> str:
        path = storage.without_query(uri).removeprefix(root)
        split = _split_of_file(path, options)
        return f"{split}: {path}" if split and not named_split(storage.name_of(path)) else path

    return input_name


def prepare(
    draft: Draft, uris: list[str], options: Options, reading: raw.Reading, privacy: Privacy
) -> Sequence[TaskRecord]:
    """Fills the draft and returns the records of its tasks.

    Raises BadInput where two rows have one id, or a group is in two splits: both are the user's.
    """
    root = _common_folder(uris)
    parse_file = functools.partial(parse, options=options, root=root)
    label = "pairs: files to examples"
    records = file_tasks.prepare(draft, uris, parse_file, EXAMPLE, reading, privacy, label)
    paths = [storage.without_query(uri).removeprefix(root) for uri in uris]
    split_counts = Counter(split for path in paths if (split := _split_of_file(path, options)))
    shards = [draft.path(file["path"]) for record in records for file in record.files]
    if options.id_column and (repeated := _repeated_value(shards, "example_id")):
        raise BadInput(f"pairs.id_column {options.id_column}: {repeated!r} is the id of several rows; "
                       "allowed: ids that differ")  # fmt: skip
    may_cross_splits = options.group_column and (options.split_column or split_counts)
    if may_cross_splits and (repeated := _repeated_value(shards, "group_id", in_two_splits=True)):
        raise BadInput(f"pairs.group_column {options.group_column}: {repeated!r} is in several splits; "
                       "allowed: groups that lie within one")  # fmt: skip
    notes = [
        f"pairs: {number:,} of {len(uris):,} files are {split} by their names (pairs.split_by)"
        for split, number in sorted(split_counts.items())
    ]
    return [*records, TaskRecord(notes=notes)]


def parse(
    uri: str, reading: raw.Reading, report: file_tasks.ParseReport, options: Options, root: str
) -> Iterator[file_tasks.ParsedRow]:
    """The examples of a file, one per row. Ids begin with its path below `root`, a folder's URI."""
    name = storage.without_query(uri).removeprefix(root)
    file_split = _split_of_file(name, options)
    is_turn = re.compile(re.escape(options.context_column) + r"/\d+").fullmatch
    named_columns = set(options.columns.values())

    def row_json(row: dict[str, Any]) -> str:
        """Only the columns that the options name: other columns may hold personal data."""
        named_values = {
            name: value for name, value in row.items() if name in named_columns or is_turn(name)
        }
        return json.dumps(named_values, ensure_ascii=False, default=str)

    rows = tables.read(uri, options.columns, reading, report, is_turn, options)
    for number, row in rows:
        row.pop("", None)  # pandas' index in CSV; "" is an option that names no column
        try:
            example = _example(row, options, f"{name}/{number}", file_split)
        except Malformed as reason:
            report.malformed.add(str(reason), uri, number, row_json(row))
            continue
        if empty_side := next(
            (side for side in ("context", "response") if _is_blank(example[side])), ""
        ):
            report.dropped.add(f"empty {empty_side}", uri, number, row_json(row))
        else:
            yield example


def _common_folder(uris: Sequence[str]) -> str:
    """The URI of the innermost folder that all files lie in, with a slash at its end."""
    folders = [f"{posixpath.dirname(storage.without_query(uri))}/" for uri in uris]
    # `commonpath` would make s3:/ of s3://.
    return os.path.commonprefix(folders).rpartition("/")[0] + "/"  # noqa: RUF071


def _split_of_file(path: str, options: Options) -> Split | None:
    """`path`: below the folder that holds all files. That folder's name says nothing: people work in a
    folder called dev or test."""
    if options.split_by != "names" or options.split_column:
        return None
    folder, _, name = path.rpartition("/")
    folder = folder.rpartition("/")[2].rpartition("=")[2]  # Hive's split=train
    # A folder test_run says nothing of its files.
    return named_split(name) or (named_split(folder) if folder.isalpha() else None)


def _is_blank(side: str | list[str]) -> bool:
    return not "".join(side).strip()


# ---------------------------------------------------------------------------------------------------
# A row to an example


def _example(
    row: dict[str, Any], options: Options, name: str, file_split: Split | None
) -> dict[str, Any]:
    context = _context(row, options)
    response = _text(row, options.response_column)
    candidates = _candidates(row, options)
    split = _split(row, options.split_column) if options.split_column else file_split
    if options.group_column:
        group = _key(row, options.group_column)
    else:
        first = hashlib.blake2b("".join(context[:1]).encode(), digest_size=8).hexdigest()
        group = f"{split}/{first}" if split else first
    return {
        "example_id": _key(row, options.id_column) if options.id_column else name,
        "group_id": group,
        "context": context,
        "response": response,
        "candidates": candidates,
        "label": _label(row, options, response, candidates),
        "source": "pairs",
        "split": split or hash_split(group, options.parts_per_thousand),
    }


def _context(row: dict[str, Any], options: Options) -> list[str]:
    if options.earlier_turns == "off" and isinstance(row.get(options.context_column), list):
        return _texts(row[options.context_column], options.context_column)
    newest = _text(row, options.context_column)
    earlier = list[str]()
    if options.earlier_turns == "numbered":
        columns = (f"{options.context_column}/{number}" for number in itertools.count())
        columns_present = itertools.takewhile(
            lambda column: row.get(column) not in (None, ""), columns
        )
        earlier = [_text(row, column) for column in columns_present]
    return [*reversed(earlier), newest]


def _candidates(row: dict[str, Any], options: Options) -> list[str] | None:
    value = row.get(options.candidates_column)
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    return _texts(value, options.candidates_column)


def _label(
    row: dict[str, Any], options: Options, response: str, candidates: list[str] | None
) -> int | None:
    """The response's place in the candidates."""
    column, value = options.label_column, row.get(options.label_column)
    if candidates is None:
        if value is None or value == "":
            return None
        raise Malformed(f"{column} without {options.candidates_column}")
    if not column:
        if response not in candidates:
            raise Malformed(f"{options.response_column} is not among {options.candidates_column}")
        return candidates.index(response)
    place = _whole_number(value, column)
    if not 0 <= place < len(candidates):
        raise Malformed(f"{column} is no place in {options.candidates_column}")
    if candidates[place] != response:
        raise Malformed(f"{options.response_column} is not the candidate that {column} names")
    return place


def _split(row: dict[str, Any], column: str) -> Split:
    split = named_split(_text(row, column))
    if split is None:
        raise Malformed(f"{column} is none of train, valid and test")
    return split


def _key(row: dict[str, Any], column: str) -> str:
    key = _cell(row.get(column), column)
    if not key:
        raise Malformed(f"no {column}")
    return key


def _text(row: dict[str, Any], column: str) -> str:
    """ "" for null, as Parquet and JSON have an empty cell."""
    if column not in row:
        raise Malformed(f"no {column}")
    return _cell(row[column], column)


def _cell(value: object, column: str) -> str:
    try:
        return tables.cell_text(value) or ""
    except TypeError as kind:
        raise Malformed(f"{column}: {kind}; allowed: text, numbers, dates") from None


def _texts(values: object, column: str) -> list[str]:
    if not isinstance(values, list) or not all(map(raw.is_text, values)):
        raise Malformed(f"{column} is no list of texts")
    return values


def _whole_number(value: object, column: str) -> int:
    """Accepts 3.0 for 3 (other programs write it in columns with gaps), decimals (data bases have no other
    numbers) and text (CSV has no numbers)."""
    try:
        match = _WHOLE_NUMBER.fullmatch(tables.cell_text(value) or "")
    except TypeError:
        match = None
    if not match:
        raise Malformed(f"{column} is no whole number")
    return int(match[1])


def _repeated_value(shards: list[str], column: str, in_two_splits: bool = False) -> str | None:
    """A value of the column that occurs twice, or in two splits. A row takes 8 bytes of memory."""
    hashes_of_split = defaultdict[str, list[Hashes]](list)
    for shard in shards:
        split = storage.name_of(storage.parent_of(shard))
        hashes_of_split[split].append(hashing.text_hashes(_column(shard, column)))
    hashes = [np.concatenate(parts) for parts in hashes_of_split.values()]
    hashes = list(map(np.unique, hashes)) if in_two_splits else hashes
    sorted_hashes = np.sort(np.concatenate([np.zeros(0, np.uint64), *hashes]))
    repeated_hashes = sorted_hashes[1:][sorted_hashes[1:] == sorted_hashes[:-1]]
    if not len(repeated_hashes):
        return None
    texts: Iterator[str] = (text for shard in shards for text in _column(shard, column).to_pylist())
    return next(t for t in texts if hashing.text_hashes(pa.array([t]))[0] == repeated_hashes[0])


def _column(shard: str, name: str) -> pa.Array:
    with storage.open_input(shard) as stream:
        return pq.read_table(stream, columns=[name])[name].combine_chunks()
