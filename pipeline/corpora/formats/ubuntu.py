"""Ubuntu Dialogue Corpus V2 as its script writes it, CSV; and the text form that cross-encoders read.

    Context,Utterance,Label                                            train.csv
    "hi __eou__ help? __eou__ __eot__ with what? __eou__ __eot__ ",my screen __eou__,1.0

    Context,Ground Truth Utterance,Distractor_0,…,Distractor_8         valid.csv, test.csv

    1<TAB>first turn<TAB>second turn<TAB>right answer                  train.txt, valid.txt, test.txt
    0<TAB>first turn<TAB>second turn<TAB>wrong answer

`__eot__` ends a turn, which becomes one text of the context; `__eou__` ends an utterance within a turn.
Half of the rows that the script makes for train.csv hold a wrong answer, label 0: they are dropped. In
the text form the answers with label 0 after a right one are its candidates. Dialogues have no ids and
rows are shuffled, so a group is what begins with the same two turns.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipeline.config import require
from pipeline.corpora import file_tasks, raw
from pipeline.corpora.formats import tables
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.schema import EXAMPLE, split_by_name_or_group
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord

_TRAIN = ["Context", "Utterance", "Label"]
_RANKED = ["Context", "Ground Truth Utterance", *(f"Distractor_{n}" for n in range(9))]
_RIGHT, _WRONG = ("1", "1.0"), ("0", "0.0")
_MARK = "__eou__"
_SHOWN_CHARACTERS = 80  # of a first line that is no header


@dataclass(frozen=True, kw_only=True)
class Options:
    """What becomes of the marks."""

    end_of_utterance: Literal["dot", "none"] = "dot"
    """The replacement of `__eou__`: a full stop, as in ParlAI, or nothing."""


class _Question(NamedTuple):
    """Texts as they are in the file; the first of the answers is the right one."""

    line: int
    turns: list[str]
    answers: list[str]


def prepare(
    draft: Draft, uris: list[str], options: Options, reading: raw.Reading, privacy: Privacy
) -> Sequence[TaskRecord]:
    """Fills the draft and returns the records of its tasks."""
    file_tasks.require_distinct(map(raw.plain_name, uris))
    parse_file = functools.partial(parse, options=options)
    label = "ubuntu: files to examples"
    return file_tasks.prepare(draft, uris, parse_file, EXAMPLE, reading, privacy, label)


def parse(
    uri: str, reading: raw.Reading, report: file_tasks.ParseReport, options: Options
) -> Iterator[file_tasks.ParsedRow]:
    """The examples of a file: one per right answer.

    Raises BadInput for a file that begins with neither a header nor a line of the text form.
    """
    name = raw.plain_name(uri)
    for line, turns, answers in _questions(uri, reading, report):
        context = [_text_of(turn, options) for turn in turns if _has_words(turn)]
        if not context or not _has_words(answers[0]):
            reason = "empty answer" if context else "no turn before the answer"
            report.dropped.add(reason, uri, line, "\t".join([*turns, answers[0]]))
            continue
        texts = [_text_of(answer, options) for answer in answers]
        opening_hash = hashlib.blake2b("\t".join(context[:2]).encode(), digest_size=8).hexdigest()
        group = f"{name}/{opening_hash}"
        yield {
            "example_id": f"{name}/{line}",
            "group_id": group,
            "context": context,
            "response": texts[0],
            "candidates": texts if len(texts) > 1 else None,
            "label": 0 if len(texts) > 1 else None,
            "source": "ubuntu",
            "split": split_by_name_or_group(name, group),
        }


def _has_words(text: str) -> bool:
    return text.replace(_MARK, "").strip() != ""


def _text_of(text: str, options: Options) -> str:
    if options.end_of_utterance == "dot":
        return text.replace(_MARK, ".").strip()
    return " ".join(part.strip() for part in text.split(_MARK)).strip()


def _questions(
    uri: str, reading: raw.Reading, report: file_tasks.ParseReport
) -> Iterator[_Question]:
    lines = raw.read_lines(uri, reading, report.notes)
    first = next(((number, line) for number, line in lines if line.strip()), None)
    if first is None:
        return
    lines = itertools.chain([first], lines)
    if re.match(r"[01]\t", first[1]):
        yield from _text_questions(uri, lines, report)
    else:
        yield from _csv_questions(uri, lines, report)


def _csv_questions(
    uri: str, lines: tables.Lines, report: file_tasks.ParseReport
) -> Iterator[_Question]:
    records = tables.csv_records(uri, lines, report)
    _, columns = next(records, (1, []))
    require(columns in (_TRAIN, _RANKED), f"{uri}, header", ",".join(columns)[:_SHOWN_CHARACTERS],
            f"{','.join(_TRAIN)}; {','.join(_RANKED[:3])}, … to {_RANKED[-1]}; or lines that begin with "
            "1 or 0 and a tab")  # fmt: skip
    for number, fields in records:
        report.records += 1
        record_text = ",".join(fields)
        if columns == _RANKED:
            yield _Question(number, fields[0].split("__eot__"), fields[1:])
        elif fields[2] in _RIGHT:
            yield _Question(number, fields[0].split("__eot__"), fields[1:2])
        elif fields[2] in _WRONG:
            report.dropped.add("label 0", uri, number, record_text)
        else:
            report.malformed.add("label is neither 1 nor 0", uri, number, record_text)


def _text_questions(
    uri: str, lines: tables.Lines, report: file_tasks.ParseReport
) -> Iterator[_Question]:
    question: _Question | None = None
    for number, line in lines:
        if not line.strip():
            continue
        report.records += 1
        label, *turns = line.split("\t")
        if label not in _RIGHT + _WRONG or len(turns) < 2:
            report.malformed.add("not a label, turns and an answer", uri, number, line)
        elif label in _RIGHT:
            if question:
                yield question
            question = _Question(number, turns[:-1], turns[-1:])
        elif question and question.turns == turns[:-1]:
            question.answers.append(turns[-1])
            report.dropped.add("wrong answer (a candidate)", uri, number, line)
        else:
            report.malformed.add("wrong answer without the right one", uri, number, line)
    if question:
        yield question
