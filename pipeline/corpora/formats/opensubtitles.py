"""OpenSubtitles (OPUS, raw text): a line of a film and the lines before it, by PolyAI's rules.

    [DOOR OPENS]
    - Gideon?
    PALMER: You still there?

The rules (opensubtitles/create_data.py of conversational-datasets): speakers' names, what stands in
brackets, and hyphens round a line are taken out, lines without anything else left out. A line with the
one before it is an example if both have 9 to 127 characters; up to 10 earlier lines follow, of any
length. Files are split by the MD5 of their name, 90 : 10.

The published files are the parts of 100,000 lines that `split -a 3 -l 100000 en.txt lines-` makes:
`lines-aaa`, `lines-aab`, … `lines_per_part` makes the same of one file `lines.gz`.

Subtitles with time codes (.srt, .vtt, .ass, .sub), XML, JSON and tables are refused. Tags such as `<i>` are
taken out.
"""

from __future__ import annotations

import functools
import html
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pipeline.config import BadInput, require
from pipeline.corpora import file_kinds, file_tasks, raw
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.reddit.partition import thread_hashes
from pipeline.corpora.reddit.threads import split_of
from pipeline.corpora.schema import EXAMPLE
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord

# One word and a colon, where the line or a sentence of it begins; that sentence's end goes with it.
_SPEAKER = re.compile(r"(?:^|[.!?]\s)\w+:")
_SOUND = re.compile(r"[\[(].*?[\])]")
_BREAK = re.compile(r"<br\s*/?>|\\N", re.IGNORECASE)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>|\{(?:\\|[a-zA-Z]:)[^{}]*\}")
_TIME = re.compile(
    r"^\W*\d+:\d\d:\d\d\b|\d\s*-->\s*\d|^[{\[]\d+[}\]][{\[]\d*[}\]]|^\[\d+:\d\d[.:]\d+\]"
)
_TIME_ALONE = re.compile(r"^\W*\d+:\d\d\W*$")  # as transcripts have it; raw text may, too
# Time codes, markup but for italics and the like, tables and JSON.
_OTHER_LAYOUT = re.compile(
    rf"{_TIME.pattern}|^\s*(?:WEBVTT|\[Script Info\]|Dialogue:|<(?!/?(?:i|b|u|font)\b)[a-z?!]"
    r"|[{\[]\s*$|\[?\s*\{\s*[\"']\w|\".*\"[,;]\".*\"$)",
    re.IGNORECASE,
)
# Numbers of subtitles, lines that begin with a time, a date or frames or end with a time, pairs of seconds,
# names of fields, numbers or marks between fields, and tabs: raw text has few of them.
_NUMBERED = re.compile(
    r"^[\s-]*\d{1,3}(?:[:.;h'-]\d\d){1,3}\s*\W?\s*[^\W\d]|^\s*\d+(?:\.\d+)?\s*(?:[,;|]|[.)]\s|$)|\S\t+\S"
    r"|^\W?\d{1,4}[./-]\d{1,2}[./-]\d{2,4}\b|\d+:\d\d:\d\d|\s\d{1,3}:\d\d\s*$|\d\.\d+ +\d+\.\d"
    r"|^\s*\w+(?: \[\d+\])? = \S|^\s*(?:msgid|msgstr|- \w+:) ?\S|^\(\W?\w+\W?\)[=>]"
    r"|\|\|\||\+\+\+|\({|={4}|[,;|]\d+(?:\.\d+)?\s*$|^\s*\|.*\|\s*$"
)
_LEAST_NUMBERED, _MANY_NUMBERED = 4, 0.3  # lines, and their share of the first ones
_ALLOWED = "allowed: raw text, one subtitle in a line, as OPUS has it"
_LAYOUT_LINES = 20  # with text, which tell the layout
# No subtitle is longer, and `_SOUND` takes the square of the time on a line of opening brackets.
_MAX_CHARACTERS = 2_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which lines make an example. The defaults are PolyAI's."""

    min_characters: int = 9
    """Lines that have fewer characters, once cleaned, make no example."""
    max_characters: int = 127
    """Lines that have more characters, once cleaned, make no example."""
    earlier_lines: int = 10
    """Lines in a context before the immediate one, at most."""
    lines_per_part: int = 0
    """Divide a file into parts of this many lines, each with a split of its own; 0: a file is one
    part."""
    train_share: float = 0.9
    """Share of the files in `train`; the rest is `test`."""

    def __post_init__(self) -> None:
        for name in ("min_characters", "earlier_lines", "lines_per_part"):
            require(getattr(self, name) >= 0, f"opensubtitles.{name}", getattr(self, name), ">= 0")
        require(self.max_characters >= self.min_characters, "opensubtitles.max_characters",
                self.max_characters, ">= opensubtitles.min_characters")  # fmt: skip
        require(0 < self.train_share <= 1, "opensubtitles.train_share", self.train_share,
                "above 0, to 1")  # fmt: skip


def prepare(
    draft: Draft, uris: list[str], options: Options, reading: raw.Reading, privacy: Privacy
) -> Sequence[TaskRecord]:
    """Fills the draft and returns the records of its tasks."""
    file_tasks.require_distinct(map(raw.plain_name, uris))
    parse_file = functools.partial(parse, options=options)
    label = "opensubtitles: files to examples"
    return file_tasks.prepare(draft, uris, parse_file, EXAMPLE, reading, privacy, label)


def parse(
    uri: str, reading: raw.Reading, report: file_tasks.ParseReport, options: Options
) -> Iterator[file_tasks.ParsedRow]:
    """The examples of a file: at most one per line, whose cleaned text is the response.

    Raises BadInput for subtitles in another layout.
    """
    name = raw.plain_name(uri)
    if file_kinds.named_table(name):
        raise BadInput(f"{uri}: has the name of a table; {_ALLOWED}")
    earlier = deque[str](maxlen=options.earlier_lines + 1)
    part, split = "", ""
    bounds = (options.min_characters, options.max_characters)
    for number, line in _raw_text(uri, raw.read_lines(uri, reading, report.notes)):
        index, place = divmod(number - 1, options.lines_per_part or sys.maxsize)
        if place == 0:
            part = f"{name}-{_letters(index)}" if options.lines_per_part else name
            earlier.clear()
            split = split_of(thread_hashes(pa.array([part])), options.train_share)[0]
        report.records += 1
        if raw.is_overlong(line) or len(line) > _MAX_CHARACTERS:
            report.malformed.add("line too long", uri, number, line)
            continue
        if _TIME.search(line) or _TIME_ALONE.search(line):
            report.dropped.add("time code", uri, number, line)
            continue
        text = clean(line)
        if not text:
            report.dropped.add("no text", uri, number, line)
            continue
        if not earlier:
            report.dropped.add("first line of a file", uri, number, line)
        elif fault := file_tasks.length_fault(len(text), *bounds):
            report.dropped.add(f"response {fault}", uri, number, line)
        elif fault := file_tasks.length_fault(len(earlier[-1]), *bounds):
            report.dropped.add(f"context {fault}", uri, number, earlier[-1])
        else:
            yield {
                "example_id": f"{part}/{place + 1}",
                "group_id": part,
                "context": list(earlier),
                "response": text,
                "source": "opensubtitles",
                "split": split,
            }
        earlier.append(text)


def _raw_text(uri: str, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """The lines. Raises BadInput for subtitles in another layout, by the first lines that have text."""

    def refusal(number: int, line: str) -> BadInput:
        layout = "subtitles with time codes, XML or a table"
        return BadInput(f"{uri}, line {number}: {line.strip()[:40]!r} is of {layout}; {_ALLOWED}")

    text_lines, numbered = 0, list[tuple[int, str]]()
    for number, line in lines:
        if text_lines < _LAYOUT_LINES and line.strip():
            text_lines += 1
            is_tsv = text_lines == 1 and "\t" in line.strip()
            if is_tsv or _OTHER_LAYOUT.search(line):
                raise refusal(number, line)
            if _NUMBERED.search(line):
                numbered.append((number, line))
        if len(numbered) >= max(_LEAST_NUMBERED, _MANY_NUMBERED * _LAYOUT_LINES):
            break
        yield number, line
    if len(numbered) >= max(_LEAST_NUMBERED, _MANY_NUMBERED * text_lines):
        raise refusal(*numbered[0])


def clean(line: str) -> str:
    """The line without tags, speakers' names, sounds and hyphens; "" where nothing is left."""
    text = _TAG.sub("", _BREAK.sub(" ", html.unescape(line)))
    return _SOUND.sub("", _SPEAKER.sub("", text)).strip(" -")


def _letters(number: int) -> str:
    """aaa, aab, … zzz, then more letters: how `split -a 3` names its files."""
    letters = ""
    while number or len(letters) < 3:
        number, letter = divmod(number, 26)
        letters = chr(ord("a") + letter) + letters
    return letters
