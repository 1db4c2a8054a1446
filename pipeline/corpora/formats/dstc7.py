"""DSTC7 track 1, Ubuntu: dialogues whose next turn is to be chosen from 100 texts.

    [{"data-split": "train", "example-id": 1100001, "scenario": 1,
      "messages-so-far": [{"speaker": "participant_1", "utterance": "hey guys"}, …],
      "options-for-correct-answers": [{"candidate-id": "TLSHF16Y4J4L", "utterance": "sure"}],
      "options-for-next": [{"candidate-id": "YWOA49156J9P", "utterance": "brb"}, … 100 of them]}, …]

Sub-tasks (`scenario`) 1 and 5, whose files are the same, 3 and 4 are read. The answers of a test file
are another input, `ubuntu_responses_subtask_1.tsv` (the number says to which), without quotes:

    example-id<TAB>candidate-id[,candidate-id …]<TAB>utterance

In sub-task 4 the right answer may be absent: there each example has a 101st candidate, the text
NONE, which is the response where no other one is. Of several right answers the first among the
candidates is the response; the others leave them, where they would count as wrong, so such an example
has fewer than 100. ParlAI's augmented training file, which has no use for candidates, may have none.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.config import BadInput
from pipeline.corpora import file_tasks, raw
from pipeline.corpora.file_tasks import Malformed
from pipeline.corpora.formats import json_array
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.schema import EXAMPLE, Split, named_split, split_by_name_or_group
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord

CANDIDATES = 100
NONE = "NONE"
_ROWS_PER_SHARD = 5_000  # of 20 kB each, some 15 of them candidates
_SUBTASK = re.compile(r"subtask_(\d)")

Answers = Mapping[int, Mapping[str, list[str]]]
"""Ids of the right candidates, by sub-task and by example id."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What becomes of a dialogue."""

    speakers: Literal["named", "none"] = "named"
    """`named`: each turn of a context begins with "participant 1: " or "participant 2: ", as in ParlAI.
    `none`: it begins with its first word."""
    augment: bool = False
    """Also make an example of each earlier turn of participant 2 in training files, without candidates.
    The published results come from such a set."""


def prepare(
    draft: Draft, uris: list[str], options: Options, reading: raw.Reading, privacy: Privacy
) -> Sequence[TaskRecord]:
    """Fills the draft and returns the records of its tasks."""
    answers = [uri for uri in uris if raw.plain_name(uri).endswith(".tsv")]
    dialogues = [uri for uri in uris if uri not in answers]
    file_tasks.require_distinct(map(raw.plain_name, dialogues))
    parse_file = functools.partial(parse, options=options, answers=read_answers(answers, reading))
    label = "dstc7: files to examples"
    return file_tasks.prepare(
        draft, dialogues, parse_file, EXAMPLE, reading, privacy, label, _ROWS_PER_SHARD
    )


def parse(
    uri: str,
    reading: raw.Reading,
    report: file_tasks.ParseReport,
    options: Options,
    answers: Answers,
) -> Iterator[file_tasks.ParsedRow]:
    """The examples of a file: one per dialogue, and those that `augment` adds.

    Raises BadInput for a test file without its answers.
    """
    name = raw.plain_name(uri)
    for number, record in json_array.read_objects(uri, reading, report):
        try:
            group = f"{name}/{_example_id(record)}"
            split = _split(record, name, group)
            messages = _pairs(record, "messages-so-far", "speaker")
            if not messages:
                raise Malformed("messages-so-far is empty")
            choice = _choice(uri, record, split, answers)
        except Malformed as fault:
            record_json = json.dumps(record, ensure_ascii=False)
            report.malformed.add(str(fault), uri, number, record_json)
            continue
        report.counts["dialogues"] += 1
        turns = [
            text if options.speakers == "none" else f"{speaker.replace('_', ' ')}: {text}"
            for speaker, text in messages
        ]
        augmented = [
            (f"{name}/{number}/{place}", turns[:place], text, None, None)
            for place, (speaker, text) in enumerate(messages)
            if options.augment and split == "train" and place and speaker == "participant_2"
        ]
        report.records += len(augmented)
        for row, context, response, candidates, label in [
            *augmented,
            (f"{name}/{number}", turns, *choice),
        ]:
            if not response.strip():
                report.dropped.add("empty answer", uri, number, row)
                continue
            yield {
                "example_id": row,
                "group_id": group,
                "context": context,
                "response": response,
                "candidates": candidates,
                "label": label,
                "source": "dstc7",
                "split": split,
            }


def read_answers(uris: list[str], reading: raw.Reading) -> Answers:
    """The answers to the test files. Raises BadInput for any other file."""
    answers: dict[int, dict[str, list[str]]] = {}
    for uri in uris:
        subtask = _SUBTASK.search(raw.plain_name(uri))
        if not subtask or int(subtask[1]) in answers:
            raise BadInput(f"{uri}: allowed: one file of answers for each sub-task, with subtask_1 or "
                           "another number in its name")  # fmt: skip
        candidate_ids = answers[int(subtask[1])] = {}
        for number, line in raw.read_lines(uri, reading):
            fields = line.split("\t", 2)
            if len(fields) == 3 and fields[0].isdecimal() and fields[1]:
                candidate_ids[fields[0]] = fields[1].split(",")
            elif line.strip():
                raise BadInput(f"{uri}, line {number}: {line[:80]!r} is not allowed; allowed: "
                               "example-id<TAB>candidate-id[,candidate-id …]<TAB>utterance")  # fmt: skip
    return answers


def _example_id(record: dict[str, Any]) -> int:
    value = record.get("example-id")
    if type(value) is not int:
        raise Malformed("example-id is no integer")
    return value


def _split(record: dict[str, Any], name: str, group: str) -> Split:
    """The split in `data-split`, or without that field in the file's name, ubuntu_dev_subtask_1.json."""
    split_name = record.get("data-split")
    if split_name is None:
        return split_by_name_or_group(name.removeprefix("ubuntu_"), group)
    split = named_split(split_name) if isinstance(split_name, str) else None
    if not split:
        raise Malformed("data-split names no split")
    return split


def _pairs(record: dict[str, Any], field: str, key: str) -> list[tuple[str, str]]:
    """(value of `key`, utterance) of each object in the list `field`."""
    values = record.get(field)
    try:
        pairs = [(value[key], value["utterance"]) for value in values or []]
    except (KeyError, TypeError):
        raise Malformed(f"{field} is no list of {key} and utterance") from None
    if not all(raw.is_text(text) for pair in pairs for text in pair):
        raise Malformed(f"{field} holds what is no text")
    return pairs


def _choice(
    uri: str, record: dict[str, Any], split: Split, answers: Answers
) -> tuple[str, list[str] | None, int | None]:
    """(response, candidates, the response's place in them)"""
    subtask = record.get("scenario", 1)
    if subtask not in (1, 3, 4, 5):
        raise Malformed("scenario is not 1, 3, 4 or 5")
    right_answers: list[tuple[str, str]] = []
    if "options-for-correct-answers" in record:
        right_answers = _pairs(record, "options-for-correct-answers", "candidate-id")
        ids = [name for name, _ in right_answers] or [NONE]
    elif subtask in answers or split != "test":
        ids = answers.get(subtask, {}).get(str(record["example-id"]), [])
    else:
        raise BadInput(f"{uri}: no options-for-correct-answers; give the file with its answers, "
                       f"ubuntu_responses_subtask_{subtask}.tsv, as another --input")  # fmt: skip
    options = _pairs(record, "options-for-next", "candidate-id")
    if split == "train" and not options and right_answers:
        return right_answers[0][1], None, None
    if len(options) != CANDIDATES:
        raise Malformed(f"not {CANDIDATES} candidates")
    if subtask == 4:
        options.append((NONE, NONE))
    places = [place for place, (name, _) in enumerate(options) if name in ids]
    if not places:
        raise Malformed("no right answer among the candidates")
    label, *other_places = places
    texts = [text for place, (_, text) in enumerate(options) if place not in other_places]
    return texts[label], texts, label
