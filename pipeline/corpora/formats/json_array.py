"""Streams a JSON array of objects, so that a file of gigabytes is never in memory as a whole.

[{"example-id": 1, …}, {"example-id": 2, …}, …]

Also several arrays one after the other, and objects without an array, each on several lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pipeline.config import require
from pipeline.corpora import file_tasks, raw
from pipeline.corpora.formats import encodings

_VALUE = re.compile(
    r"[^\s,]"
)  # white space and commas stand between values; a comma may be missing
_MAX_OBJECT_CHARACTERS = 10 << 20
_SHOWN_CHARACTERS = 80  # of a file that is no array


class RepeatedNames(dict[str, Any]):
    """An object in which names stand twice, with different values: which one is meant cannot be told."""

    names: frozenset[str]


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these names and values, for `json`'s `object_pairs_hook`."""
    values = dict(pairs)
    if len(values) == len(pairs) or all(values[name] == value for name, value in pairs):
        return values
    repeated = RepeatedNames(values)
    repeated.names = frozenset(name for name, value in pairs if values[name] != value)
    return repeated


DECODER = json.JSONDecoder(object_pairs_hook=object_of)


def read_objects(
    uri: str,
    reading: raw.Reading,
    report: file_tasks.ParseReport,
    encoding: str = "utf-8",
    opening: str = "[",
    option: str = "",
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 1, object) for each object of the array; other values, and objects with bytes that are not
    UTF-8, are set aside.

    `opening`: "[", or "{" for objects without an array. `option` sets the encoding; "": nothing does. An
    array without an end, or with broken JSON from some place on, is truncated: it ends in BadInput or in a
    note, as `reading` says. Raises BadInput for a file without an array, and for one in another encoding.
    """
    number = 0
    try:
        for number, (value, damage) in enumerate(_values(uri, encoding, opening, option), start=1):
            report.records += 1
            if damage:
                report.malformed.add("not UTF-8", uri, number, damage)
            elif isinstance(value, dict):
                yield number, value
            else:
                value_json = json.dumps(value, ensure_ascii=False)
                report.malformed.add("not a JSON object", uri, number, value_json)
    except raw.Truncated as error:
        raw.accept_truncated(error, reading, report.notes, number, "objects")


def _values(uri: str, encoding: str, opening: str, option: str) -> Iterator[tuple[Any, str]]:
    """(value, the size of one that is not UTF-8) of the array, or of the objects. Raises Truncated after the
    last whole one where the end is missing.

    (ijson, which parses event by event, is as fast, 150 MB/s, but 100,000 brackets inside one another
    make it take all memory there is.)
    """
    text, depth, is_begun, fault = "", 0, False, ""
    for piece in encodings.pieces(uri, encoding, option):
        text += piece
        is_whole = not encodings.is_damaged(text)
        if not is_begun:
            text = text.lstrip("\ufeff").lstrip()
            require(text[:1] in ("", opening), f"{uri}, beginning", text[:_SHOWN_CHARACTERS],
                    "a JSON array, [{…}, …]")  # fmt: skip
            is_begun = text != ""
        position, fault = 0, ""
        while found := _VALUE.search(text, position):
            start = position = found.start()
            if text[start] == "[]"[depth]:
                position, depth = start + 1, 1 - depth
                continue
            try:
                value, position = DECODER.raw_decode(text, start)
            except json.JSONDecodeError as error:  # half a value, whose rest may come
                fault = f" ({error.msg.removesuffix(' at').removesuffix(' starting')})"
                break
            except ValueError as error:  # a number of 5,000 digits
                fault = f" ({error})"
                break
            except RecursionError:
                raise raw.Truncated(f"{uri}: an object of the JSON array nests too deep") from None
            is_object_whole = is_whole or not encodings.is_damaged(text[start:position])
            yield value, "" if is_object_whole else f"{position - start:,} characters"
        else:
            position = len(text)
        text = text[position:]
        if len(text) > _MAX_OBJECT_CHARACTERS:
            raise raw.Truncated(f"{uri}: the JSON array is broken, or an object is over 10 MiB")
    if depth or text.strip():
        raise raw.Truncated(f"{uri}: the JSON array is cut off or broken{fault}")
