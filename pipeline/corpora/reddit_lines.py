"""Lines of a Reddit dump to a table of comments, and what each line that is none lacks."""

from __future__ import annotations

import io
import json
import re

import pyarrow as pa
import pyarrow.json as paj

from pipeline.corpora import raw

_FIELDS = ("id", "link_id", "parent_id", "body", "author", "subreddit")
_SCHEMA = pa.schema([(name, pa.string()) for name in _FIELDS])


def parse_lines(data: bytes, uri: str, first_line: int, rejects: raw.Rejects) -> pa.Table:
    """JSON lines to a table of `_FIELDS`, all strings; lines that are no comment go to `rejects`.

    Arrow's parser reads a whole block at 100 MB/s and refuses it whole for one bad line; only then
    is each line looked at on its own. What it lets pass is caught here: no field, null for a record,
    two records on a line. A null right at the start would crash it (pyarrow 25).
    """
    try:
        if not re.match(rb"\s*\{", data):
            raise pa.ArrowInvalid
        table = paj.read_json(
            io.BytesIO(data),
            read_options=paj.ReadOptions(use_threads=False, block_size=len(data) + 1),
            parse_options=paj.ParseOptions(
                explicit_schema=_SCHEMA, unexpected_field_behavior="ignore"
            ),
        )
        table = table.select(_FIELDS)
        table.validate(full=True)  # UTF-8
        lines = data.count(b"\n") + (not data.endswith(b"\n"))
        if table.num_rows == lines and not any(column.null_count for column in table.columns):
            return table.combine_chunks()
    except (pa.ArrowInvalid, UnicodeDecodeError):
        pass
    rows = []
    for number, line in enumerate(data.split(b"\n"), start=first_line):
        if not line.strip():
            continue
        reason, comment = _parse_line(line)
        if reason:
            rejects.add(reason, uri, number, line.decode("utf-8", errors="replace"))
        else:
            rows.append(comment)
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


def _parse_line(line: bytes) -> tuple[str, dict[str, str]]:
    """(reason for rejection or "", the fields)."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return "not UTF-8", {}
    except (ValueError, RecursionError):
        return "not JSON", {}
    if not isinstance(record, dict):
        return "not a JSON object", {}
    for name in _FIELDS:
        if record.get(name) is None:
            return f"no field {name}", {}
        if not isinstance(record[name], str):
            return f"field {name} is no string", {}
        try:
            record[name].encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            return f"field {name} is no text", {}
    return "", {name: record[name] for name in _FIELDS}
