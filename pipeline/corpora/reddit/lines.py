"""Parses lines of a Reddit dump into a table, and rejects other lines with a reason."""

from __future__ import annotations

import io
import json
import re
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as paj

from pipeline.corpora import raw
from pipeline.corpora.reddit.notices import is_notice

Kind = Literal["comments", "submissions"]

COMMENT = ("id", "link_id", "parent_id", "body", "author", "subreddit")
_SUBMISSION = ("id", "title", "author", "subreddit")


def kind_of(data: bytes) -> Kind | None:
    """The kind of the first object among the lines; None if there is no object: the file is no dump."""
    for line in data.split(b"\n", 200)[:200]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            return "submissions" if "title" in record and "body" not in record else "comments"
    return None


def parse_comments(data: bytes, uri: str, first_line: int, rejects: raw.Rejects) -> pa.Table:
    """JSON lines to the columns of `COMMENT` and `score`, which may be null."""
    return _parse(data, uri, first_line, rejects, COMMENT, {"score": pa.int64()})


def parse_submissions(data: bytes, uri: str, first_line: int, rejects: raw.Rejects) -> pa.Table:
    """The same columns: a submission is the root of its thread; its id keeps the prefix t3_."""
    optional = {"score": pa.int64(), "selftext": pa.string()}
    rows = _parse(data, uri, first_line, rejects, _SUBMISSION, optional)
    text = pc.fill_null(rows["selftext"].combine_chunks(), "")
    has_none = pc.or_(pc.equal(text, ""), is_notice(text))
    text = pc.if_else(has_none, "", pc.binary_join_element_wise("\n", text, ""))
    # Of a title such as "[deleted by user]" the text may be left.
    title = rows["title"].combine_chunks()
    title = pc.if_else(pc.and_not(is_notice(title), has_none), "", title)
    name = pc.binary_join_element_wise("t3_", rows["id"], "")
    no_parent = pa.array([""] * rows.num_rows, pa.string())
    return pa.table(
        {
            "id": name,
            "link_id": name,
            "parent_id": no_parent,
            "body": pc.utf8_ltrim(pc.binary_join_element_wise(title, text, ""), "\n"),
            "author": rows["author"],
            "subreddit": rows["subreddit"],
            "score": rows["score"],
        }
    ).combine_chunks()


def _parse(
    data: bytes,
    uri: str,
    first_line: int,
    rejects: raw.Rejects,
    needed: tuple[str, ...],
    optional: dict[str, pa.DataType],
) -> pa.Table:
    """JSON lines to a table of the strings `needed` and the fields `optional`; other lines to `rejects`.

    Arrow's parser reads a whole block at 300 MB/s and refuses it whole for one bad line; only then
    is each line looked at on its own. What it lets pass is caught here: no field, null for a record,
    two records on a line. A null right at the start would crash it (pyarrow 25).
    """
    schema = pa.schema([*((name, pa.string()) for name in needed), *optional.items()])
    try:
        if not re.match(rb"\s*\{", data):
            raise pa.ArrowInvalid
        table = paj.read_json(
            io.BytesIO(data),
            read_options=paj.ReadOptions(use_threads=False, block_size=len(data) + 1),
            parse_options=paj.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior="ignore"
            ),
        )
        table = table.select(schema.names)
        table.validate(full=True)  # UTF-8
        lines = data.count(b"\n") + (not data.endswith(b"\n"))
        if table.num_rows == lines and not any(table[name].null_count for name in needed):
            return table.combine_chunks()
    except (pa.ArrowInvalid, UnicodeDecodeError):
        pass
    rows = []
    for number, line in enumerate(data.split(b"\n"), start=first_line):
        if not line.strip():
            continue
        reason, row = _parse_line(line, needed, optional)
        if reason:
            rejects.add(reason, uri, number, line.decode("utf-8", errors="replace"))
        else:
            rows.append(row)
    return pa.Table.from_pylist(rows, schema=schema)


def _parse_line(
    line: bytes, needed: tuple[str, ...], optional: dict[str, pa.DataType]
) -> tuple[str, dict[str, str | int | None]]:
    """(reason for rejection or "", the fields)."""
    if line.startswith(raw.OVERLONG):
        return "line too long", {}
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return "not UTF-8", {}
    except (ValueError, RecursionError):
        return "not JSON", {}
    if not isinstance(record, dict):
        return "not a JSON object", {}
    if "author" in record and record["author"] is None:
        # As programs write that take comments from Reddit themselves.
        record["author"] = "[deleted]"
    for name in needed:
        if record.get(name) is None:
            return f"no field {name}", {}
        if not isinstance(record[name], str):
            return f"field {name} is no string", {}
        if not raw.is_text(record[name]):
            return f"field {name} is no text", {}
    row: dict[str, str | int | None] = {name: record[name] for name in needed}
    for name, kind in optional.items():  # a value of another type counts as absent
        value = record.get(name)
        if kind == pa.string():
            row[name] = value if raw.is_text(value) else None
        else:
            row[name] = _int64(value)
    return "", row


def _int64(value: object) -> int | None:
    """A whole number, also one that a program wrote as 5.0 or "5"."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and -(2**63) <= value < 2**63 else None
