"""Sets for intent classification: the context is a text, and the response is the name of its intent.

    BANKING77   train.csv, test.csv        text,category
                                           I am still waiting on my card?,card_arrival
    CLINC150    data_full.json             {"train": [["how would you say fly in italian", "translate"], …],
                                           "val": …, "test": …, "oos_train": …, "oos_val": …, "oos_test": …}
    HWU64,      train/seq.in               what alarms do i have set right now
    SNIPS       train/label                alarm_query            (line by line; valid/ and test/ alike)

Splits come from these names; a file of BANKING77 that names none is cut 90 : 5 : 5. The published
BANKING77 has no valid split: `Options.valid_share` takes one from train. The column `intent` is
the name as it stands in the file, `response` the same in words: "alarm query".
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Literal, NamedTuple, get_args

import pyarrow as pa

from pipeline import storage
from pipeline.config import BadInput, require
from pipeline.corpora import file_tasks, raw
from pipeline.corpora.formats import json_array, tables
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.schema import (
    Split,
    hash_split,
    named_split,
    schema_with,
    split_by_name_or_group,
)
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord, sum_counts

Corpus = Literal["banking77", "clinc150", "hwu64", "snips"]
CORPORA: tuple[Corpus, ...] = get_args(Corpus)
_IN_FOLDERS = ("hwu64", "snips")

_SCHEMA = schema_with(("intent", pa.string()), ("out_of_scope", pa.bool_()))
_PARTS = ("train", "val", "test", "oos_train", "oos_val", "oos_test")
_VALID_HASH = "valid "  # before an id: another draw than for a file that names no split
# CLINC150 comes in four sizes in one folder, all sets of DialoGLUE with 5 and 10 texts of each intent, too.
_VARIANT = re.compile(
    r"(?P<texts>data|train)(?:[_-](?:full|small|imbalanced|oos_plus|\d+(?:_?shots?)?))?(?:\.json|\.csv)?"
)
_WORD_BORDER = re.compile(r"_+|(?<=[a-z])(?=[A-Z])")  # alarm_query, AddToPlaylist


@dataclass(frozen=True, kw_only=True)
class Options:
    """What BANKING77 is cut into."""

    valid_share: float = 0.0
    """Share of train's texts that become the valid split, which the published files lack; 0: none."""

    def __post_init__(self) -> None:
        parts = round(1000 * self.valid_share)
        require(0 <= parts < 1000 and self.valid_share == parts / 1000, "banking77.valid_share",
                self.valid_share, "0 to below 1, in thousandths")  # fmt: skip

    def split_of_text(self, file_split: Split, text_id: str) -> Split:
        """The split of a text whose file is in the split `file_split`."""
        valid = round(1000 * self.valid_share)
        if file_split != "train" or not valid:
            return file_split
        return hash_split(f"{_VALID_HASH}{text_id}", (1000 - valid, valid, 0))


_AS_PUBLISHED = Options()


class Labelled(NamedTuple):
    """A text and its intent, as they stand in the file."""

    line: int
    id: str
    text: str
    intent: str
    split: Split
    out_of_scope: bool = False


Layout = Callable[[str, raw.Reading, file_tasks.ParseReport], Iterator[Labelled]]


def prepare(
    draft: Draft,
    uris: list[str],
    options: Options | None,
    reading: raw.Reading,
    privacy: Privacy,
    corpus: Corpus,
) -> Sequence[TaskRecord]:
    """Fills the draft and returns the records of its tasks. Other files in the folders are set aside."""
    files, other_files = files_of(uris, corpus)
    file_tasks.require_distinct(map(_id_of_file, files))
    parse_file = functools.partial(parse, corpus=corpus, options=options or Options())
    label = f"{corpus}: files to examples"
    records = file_tasks.prepare(draft, files, parse_file, _SCHEMA, reading, privacy, label)
    notes = [f"{uri}: set aside, not a file of {corpus}" for uri in other_files]
    if corpus == "banking77" and not sum_counts(r.counts for r in records).get("examples.valid"):
        notes.append("banking77: no valid split, so training validates nothing; "
                     "--banking77.valid-share 0.1 takes one from train")  # fmt: skip
    return [*records, TaskRecord(notes=notes)]


def input_name(uri: str, corpus: str) -> str:
    """What a file's URI decides: its name, and of HWU64 and SNIPS also the folder, which is the split."""
    name = storage.name_of(uri)
    return f"{storage.name_of(storage.parent_of(uri))}/{name}" if corpus in _IN_FOLDERS else name


def files_of(uris: Sequence[str], corpus: Corpus) -> tuple[list[str], list[str]]:
    """(the files to parse, those that are not of the set).

    Raises BadInput where there is none to parse, where two are variants of the same texts, or where the file
    that is read with one is missing.
    """
    pattern, companion, _ = _LAYOUTS[corpus]
    files = [uri for uri in uris if fnmatch(raw.plain_name(uri), pattern)]
    if not files:
        raise BadInput(f"--input: {uris[0]}: not a file of {corpus}; allowed: {pattern}")
    first_variants = dict[str, str]()
    for uri in files:
        if match := _VARIANT.fullmatch(_id_of_file(uri)):
            named = storage.parent_of(uri) if companion else uri
            first = first_variants.setdefault(match["texts"], named)
            if first != named:
                raise BadInput(f"--input: {first} and {named} are variants of the same texts; "
                               f"allowed: one of them, such as --input {first}")  # fmt: skip
    companions = [storage.join(storage.parent_of(uri), companion) for uri in files if companion]
    for uri in companions:
        if uri not in uris:
            raise BadInput(
                f"--input: {uri} is missing; allowed: {pattern} and {companion} in a folder"
            )
    return files, [uri for uri in uris if uri not in (*files, *companions)]


def parse(
    uri: str,
    reading: raw.Reading,
    report: file_tasks.ParseReport,
    corpus: Corpus,
    options: Options = _AS_PUBLISHED,
) -> Iterator[file_tasks.ParsedRow]:
    """The examples of a file, one per text."""
    layout = _LAYOUTS[corpus][2]
    for labelled in layout(uri, reading, report):
        text, intent = labelled.text.strip(), labelled.intent.strip()
        if not intent:
            report.malformed.add("no intent", uri, labelled.line, text)
        elif not text:
            report.dropped.add("empty text", uri, labelled.line, intent)
        else:
            yield {
                "example_id": labelled.id,
                "group_id": labelled.id,
                "context": [text],
                "response": "out of scope" if labelled.out_of_scope else intent_words(intent),
                "source": corpus,
                "split": options.split_of_text(labelled.split, labelled.id),
                "intent": intent,
                "out_of_scope": labelled.out_of_scope,
            }


def intent_words(intent: str) -> str:
    """An intent's name for a reader: "alarm query", "Add To Playlist"."""
    return " ".join(_WORD_BORDER.sub(" ", intent).split())


def _id_of_file(uri: str) -> str:
    """The prefix of the examples' ids: `train` for train/seq.in, else the file's name."""
    name = raw.plain_name(uri)
    return storage.name_of(storage.parent_of(uri)) if name == "seq.in" else name


# ---------------------------------------------------------------------------------------------------
# Layouts


def _read_banking(
    uri: str, reading: raw.Reading, report: file_tasks.ParseReport
) -> Iterator[Labelled]:
    name = _id_of_file(uri)
    columns = {"column text": "text", "column category": "category"}
    for line, row in tables.read(uri, columns, reading, report):
        id_ = f"{name}/{line}"
        yield Labelled(line, id_, row["text"], row["category"], split_by_name_or_group(name, id_))


def _read_clinc(
    uri: str, reading: raw.Reading, report: file_tasks.ParseReport
) -> Iterator[Labelled]:
    try:
        data = b"".join(raw.read_decompressed(uri))
        parts = json.loads(data, object_pairs_hook=json_array.object_of)
    except (raw.Truncated, ValueError, RecursionError) as error:
        raise BadInput(f"{uri}: not a whole JSON file ({error})") from None
    if not isinstance(parts, dict) or not all(isinstance(part, list) for part in parts.values()):
        raise BadInput(f"{uri}: not an object of lists; allowed: {', '.join(_PARTS)}")
    if isinstance(parts, json_array.RepeatedNames):
        raise BadInput(f"{uri}: several lists are called {min(parts.names)}; allowed: one")
    text_number = 0
    for name, part in parts.items():
        require(name in _PARTS, uri, name, ", ".join(_PARTS))
        split = named_split(name.removeprefix("oos_"))
        assert split is not None
        for number, pair in enumerate(part, start=1):
            text_number += 1
            report.records += 1
            if isinstance(pair, list) and len(pair) == 2 and all(map(raw.is_text, pair)):
                id_ = f"{_id_of_file(uri)}/{name}/{number}"
                text, intent = pair
                yield Labelled(text_number, id_, text, intent, split, name.startswith("oos_"))
            else:
                pair_json = json.dumps(pair, ensure_ascii=False)
                report.malformed.add("not a text and an intent", uri, text_number, pair_json)


def _read_seq_in(
    uri: str, reading: raw.Reading, report: file_tasks.ParseReport
) -> Iterator[Labelled]:
    folder, name = storage.parent_of(uri), _id_of_file(uri)
    split = named_split(name)
    if split is None:
        raise BadInput(f"{uri}: the folder names no split; allowed: train, valid, test")
    lines = (
        raw.read_lines(file, reading, report.notes) for file in (uri, storage.join(folder, "label"))
    )
    for line, (text, intent) in enumerate(itertools.zip_longest(*lines), start=1):
        if text is None or intent is None:
            longer = "seq.in" if intent is None else "label"
            raise BadInput(f"{folder}: {longer} has more than the {line - 1:,} lines of the other; "
                           "allowed: seq.in and label with as many lines")  # fmt: skip
        report.records += 1
        yield Labelled(line, f"{name}/{line}", text[1], intent[1], split)


_LAYOUTS: dict[Corpus, tuple[str, str, Layout]] = {
    # (names of its files, the file that is read with each of them, how they are read)
    "banking77": ("*.csv", "", _read_banking),
    "clinc150": ("data*.json", "", _read_clinc),
    "hwu64": ("seq.in", "label", _read_seq_in),
    "snips": ("seq.in", "label", _read_seq_in),
}
