"""ConvAI2 and PersonaChat in ParlAI's text layout, with candidates or without; Xpersona's JSON.

    1 your persona: i like to remodel homes.
    2 hi , how are you doing ?<TAB>great , i am painting .<TAB><TAB>first|second|great , i am painting .

    [{"persona": ["i like to remodel homes."], "dialogue": [["hi , how are you doing ?", "great , …"], …]}, …]

Line numbers restart at 1 with each dialogue. A file has the persona lines of the side that answers
(*_self_*: "your persona: "), of the other side (*_other_*: "partner's persona: "), of both or of neither.
The beginning of its name is its split. ParlAI's folder has each split several times: for each set of persona
lines, original or revised, with candidates or without. Only one variant of a split can be read.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeGuard

from pipeline import storage
from pipeline.config import BadInput
from pipeline.corpora import file_tasks, raw
from pipeline.corpora.formats import json_array
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.schema import EXAMPLE, split_by_name_or_group
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord

CANDIDATES = 20
_SELF = "your persona: "
_VARIANT = re.compile(r"(?P<split>[a-z]+)_(self|other|both|none)_(original|revised)(?![a-z])")
_PERSONA = re.compile(rf"({_SELF}|partner's persona: )")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a context begins with."""

    persona: Literal["all", "self", "none"] = "all"
    """Whose persona lines begin a context: `all` of the file, those of the side that answers (`self`), or
    none."""


class _Turn(NamedTuple):
    """An answer with its context."""

    dialogue: int
    number: int
    persona: list[str]
    turns: list[str]
    response: str
    candidates: list[str] | None


def prepare(
    draft: Draft, uris: list[str], options: Options, reading: raw.Reading, privacy: Privacy
) -> Sequence[TaskRecord]:
    """Fills the draft and returns the records of its tasks.

    Raises BadInput for two variants of the same dialogues.
    """
    file_tasks.require_distinct(map(raw.plain_name, uris))
    _require_one_variant(uris)
    parse_file = functools.partial(parse, options=options)
    label = "convai2: files to examples"
    return file_tasks.prepare(draft, uris, parse_file, EXAMPLE, reading, privacy, label)


def _require_one_variant(uris: Sequence[str]) -> None:
    """Raises BadInput where two files of a split are different variants."""
    first_of_split: dict[str, tuple[tuple[str, ...], str]] = {}
    for uri in uris:
        name = raw.plain_name(uri)
        if match := _VARIANT.match(name):
            variant = (*match.groups(), str("_no_cands" in name))
            first_variant, first_uri = first_of_split.setdefault(match["split"], (variant, uri))
            if variant != first_variant:
                raise BadInput(f"--input: {first_uri} and {storage.name_of(uri)} are variants of the same "
                               f"dialogues; allowed: one file of the {match['split']} split, such as "
                               f"--input {match['split']}_self_original.txt")  # fmt: skip


def parse(
    uri: str, reading: raw.Reading, report: file_tasks.ParseReport, options: Options
) -> Iterator[file_tasks.ParsedRow]:
    """The examples of a file: one per answer."""
    name = raw.plain_name(uri)
    read = _json_turns if name.endswith(".json") else _text_turns
    unusual = 0
    for dialogue, number, persona, turns, response, candidates in read(uri, reading, report):
        group = f"{name}/{dialogue}"
        if options.persona == "self":
            persona = [text for text in persona if text.startswith(_SELF)]
        elif options.persona == "none":
            persona = []
        unusual += candidates is not None and len(candidates) != CANDIDATES
        yield {
            "example_id": f"{group}/{number}",
            "group_id": group,
            "context": persona + turns,
            "response": response,
            "candidates": candidates,
            # The right answer stands last in the genuine files.
            "label": candidates and len(candidates) - 1 - candidates[::-1].index(response),
            "source": "convai2",
            "split": split_by_name_or_group(name, group),
        }
    if unusual:
        report.notes.append(f"{uri}: {unusual:,} examples have not {CANDIDATES} candidates")


def _text_turns(uri: str, reading: raw.Reading, report: file_tasks.ParseReport) -> Iterator[_Turn]:
    dialogue, previous = 0, 0
    persona, turns = list[str](), list[str]()
    for line_number, line in raw.read_lines(uri, reading, report.notes):
        if not line.strip():
            continue
        report.records += 1
        number, _, text = line.partition(" ")
        if not number.isdecimal():  # unlike isdigit, only what int() reads
            report.malformed.add("no line number", uri, line_number, line)
            continue
        if int(number) <= previous or dialogue == 0:
            dialogue, persona, turns = dialogue + 1, [], []
            report.counts["dialogues"] += 1
        previous = int(number)
        text = text.replace("\\n", "\n")
        if _PERSONA.match(text) and "\t" not in text:
            persona.append(text)
            report.dropped.add("persona line (part of contexts)", uri, line_number, line)
            continue
        statement, *fields = text.split("\t")
        response = fields[0] if fields else ""
        if not response:
            report.malformed.add("no answer after a tab", uri, line_number, line)
            continue
        candidates = fields[2].split("|") if len(fields) > 2 and fields[2] else None
        context = [*turns, statement]
        turns += [statement, response]
        if candidates and response not in candidates:
            report.malformed.add("answer not among its candidates", uri, line_number, line)
            continue
        yield _Turn(dialogue, previous, persona, context, response, candidates)


def _json_turns(uri: str, reading: raw.Reading, report: file_tasks.ParseReport) -> Iterator[_Turn]:
    for dialogue, record in json_array.read_objects(uri, reading, report):
        persona, pairs = record.get("persona"), record.get("dialogue")
        if not _are_texts(persona) or not isinstance(pairs, list) or not pairs:
            report.malformed.add("no persona or no dialogue", uri, dialogue, str(record))
            continue
        report.records += len(pairs) - 1  # as of text, each answer is a record
        report.counts["dialogues"] += 1
        lines = [_SELF + text for text in persona]
        turns: list[str] = []
        for number, pair in enumerate(pairs, start=1):
            if not _are_texts(pair) or len(pair) != 2 or not pair[1]:
                report.malformed.add("not what was said and an answer", uri, dialogue, str(pair))
                continue
            yield _Turn(dialogue, number, lines, [*turns, pair[0]], pair[1], None)
            turns += pair


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(map(raw.is_text, value))
