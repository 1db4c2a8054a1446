"""ConvAI2 and PersonaChat in ParlAI's text layout, with candidates or without.

    1 your persona: i like to remodel homes.
    2 hi , how are you doing ?<TAB>great , i am painting .<TAB><TAB>first|second|great , i am painting .

Line numbers restart at 1 with each dialogue. A file is the split that its name begins with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pipeline import storage
from pipeline.artifact import Draft
from pipeline.corpora import files, raw
from pipeline.corpora.filters import Privacy
from pipeline.corpora.schema import EXAMPLE, split_of

_PERSONA = re.compile(r"(your|partner's) persona: ")


def prepare(
    draft: Draft, uris: list[str], options: None, reading: raw.Reading, privacy: Privacy
) -> list[dict[str, Any]]:
    """Fills the draft and returns the records of its tasks."""
    files.require_distinct(map(storage.name_of, uris))
    return files.prepare(
        draft, uris, parse, EXAMPLE, reading, privacy, "convai2: files to examples"
    )


def parse(uri: str, reading: raw.Reading, account: files.Account) -> Iterator[files.Row]:
    """The examples of a file: one per line that holds an answer."""
    name = storage.name_of(uri)
    dialogue, previous, turns = 0, 0, list[str]()

    for at, line in raw.read_lines(uri, reading, account.notes):
        if not line.strip():
            continue
        account.records += 1
        number, _, text = line.partition(" ")
        if not number.isdecimal():  # unlike isdigit, only what int() reads
            account.malformed.add("no line number", uri, at, line)
            continue
        if int(number) <= previous or dialogue == 0:
            dialogue, turns = dialogue + 1, []
        previous = int(number)
        text = text.replace("\\n", "\n")
        if _PERSONA.match(text) and "\t" not in text:
            turns.append(text)
            account.dropped.add("persona line (part of contexts)", uri, at, line)
            continue
        said, *rest = text.split("\t")
        response = rest[0] if rest else ""
        if not response:
            account.malformed.add("no answer after a tab", uri, at, line)
            continue
        candidates = rest[2].split("|") if len(rest) > 2 and rest[2] else None
        context = [*turns, said]
        turns += [said, response]
        if candidates and response not in candidates:
            account.malformed.add("answer not among its candidates", uri, at, line)
            continue
        group = f"{name}/{dialogue}"
        yield {
            "example_id": f"{group}/{number}",
            "group_id": group,
            "context": context,
            "response": response,
            "candidates": candidates,
            # The right answer stands last in the genuine files.
            "label": candidates and len(candidates) - 1 - candidates[::-1].index(response),
            "source": "convai2",
            "split": split_of(name, group),
        }
