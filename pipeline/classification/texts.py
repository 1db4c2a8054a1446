"""Reads labelled texts, splits them and draws from them.

The files decide which texts train the head, which test it, and which set the threshold:

    files            train           test            threshold (only with texts out of scope)
    train and test   train           test            valid; without one, a tenth of train
    train and valid  train           valid           a tenth of train, which is not trained on
    any others       eight tenths    one tenth       one tenth

Each intent gives a tenth of its texts, chosen by a hash of the text. The choice is the same in every run,
and equal texts of an intent stay together. Texts out of scope that are not test texts help to set the
threshold. The head is never trained on them.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, cast

import numpy as np

from pipeline import storage
from pipeline.config import BadInput, require
from pipeline.corpora import file_tasks, raw
from pipeline.corpora.formats import intents, tables
from pipeline.corpora.schema import Split, named_split

Dataset = Literal["banking77", "clinc150", "hwu64", "snips", "csv"]

_SHOWN = 5  # labels in a message


class Labelled(NamedTuple):
    """A text and its intent."""

    text: str
    intent: str
    out_of_scope: bool = False


@dataclass(frozen=True, kw_only=True)
class ReadConfig(tables.TableFormat):
    """The files."""

    GROUP = "read"
    dataset: Dataset = "csv"
    """csv: your own tables (CSV, TSV, JSON lines or Parquet) with a column for the text and one for the
    intent. The others are the public sets, as they are published."""
    text_column: str = "text"
    """csv: the column of the text."""
    label_column: str = "label"
    """csv: the column of the intent."""
    out_of_scope_label: str = ""
    """csv: the intent of texts that belong to no intent, such as "oos"; empty: there are no such
    texts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in fields(self) if self.dataset != "csv" else ():
            value = getattr(self, option.name)
            require(option.name == "dataset" or value == option.default, f"read.{option.name}", value,
                    f"{option.default!r}, with read.dataset {self.dataset!r}")  # fmt: skip


@dataclass(frozen=True)
class Texts:
    """The texts that train the head, test it, and set the threshold."""

    train: list[Labelled]
    tested: list[Labelled]
    threshold: list[Labelled]
    asked_split: str
    """test or valid, or "tenth": held out here."""
    dropped: Mapping[str, int]
    """Rows that are no text with an intent, by reason."""
    notes: tuple[str, ...] = ()


def read_texts(uris: Sequence[str], config: ReadConfig, reading: raw.Reading) -> Texts:
    """The texts of files and folders, split as above.

    Raises BadInput for fewer than two intents, for an intent with one text if a tenth is to be held out, for
    test intents that train lacks, and for a label of texts out of scope that no text has.
    """
    report = file_tasks.ParseReport()
    rows_by_split: dict[Split | None, list[Labelled]] = {}
    for split, row in _rows(storage.expand(uris), config, reading, report):
        rows_by_split.setdefault(split, []).append(row)
    _check_share(report, reading)
    inputs = " ".join(uris)
    rows = [row for rows in rows_by_split.values() for row in rows]
    if not rows:
        raise BadInput(f"--input {inputs}: no text with an intent")
    if (name := config.out_of_scope_label) and not any(row.out_of_scope for row in rows):
        labels = sorted(labels_of(rows), key=lambda label: _key(label) != _key(name))
        raise BadInput(f"read.out_of_scope_label: {name!r} is not allowed; allowed: an intent of the input, "
                       f"such as {_shown(list(map(repr, labels)))}")  # fmt: skip
    if len(rows_by_split) == 1 or rows_by_split.keys() <= {"train", None}:
        train, valid, tested = _split_tenths(rows, inputs, "test")
        asked_split = "tenth"
    else:
        train = [*rows_by_split.get(None, []), *rows_by_split.get("train", [])]
        asked_split = "test" if "test" in rows_by_split else "valid"
        tested = rows_by_split[cast(Split, asked_split)]
        valid = rows_by_split["valid"] if asked_split == "test" and "valid" in rows_by_split else []
    outside = [row for row in (*train, *valid) if row.out_of_scope]
    inside = [row for row in valid if not row.out_of_scope]
    train = [row for row in train if not row.out_of_scope]
    if outside and not inside:
        eight, ninth, tenth = _split_tenths(train, inputs, "valid")
        train, inside = [*eight, *ninth], tenth
    threshold = [*inside, *outside] if outside else []
    notes = [*report.notes, *_notes(rows, train, tested, threshold)]
    if not outside:
        notes.append("no text out of scope sets a threshold: it is 0, so every text gets an intent")
    dropped = {**report.dropped.counts, **report.malformed.counts}
    texts = Texts(train, tested, threshold, asked_split, dropped, tuple(notes))
    _check(texts, inputs)
    return texts


def labels_of(texts: Sequence[Labelled]) -> tuple[str, ...]:
    """The intents of the texts, sorted."""
    return tuple(sorted({row.intent for row in texts}))


def draw(texts: Sequence[Labelled], shots: int, seed: int) -> list[Labelled]:
    """`shots` texts of every intent, all where it has fewer; more shots of a seed hold the fewer ones."""
    rows_by_intent: dict[str, list[Labelled]] = {}
    for row in texts:
        rows_by_intent.setdefault(row.intent, []).append(row)
    random = np.random.default_rng(seed)
    drawn = list[Labelled]()
    for intent in sorted(rows_by_intent):
        rows = rows_by_intent[intent]
        drawn += [rows[place] for place in random.permutation(len(rows))[:shots].tolist()]
    return drawn


def _rows(
    files: list[str], config: ReadConfig, reading: raw.Reading, report: file_tasks.ParseReport
) -> Iterator[tuple[Split | None, Labelled]]:
    """Rows with the split that their file's name, or the set, gives them."""
    if config.dataset in ("banking77", "csv"):
        yield from _table_rows(files, config, reading, report)
        return
    corpus = cast(intents.Corpus, config.dataset)
    for uri in intents.files_of(files, corpus)[0]:
        for row in intents.parse(uri, reading, report, corpus):
            yield row["split"], Labelled(row["context"][0], row["intent"], row["out_of_scope"])


def _table_rows(
    files: list[str], config: ReadConfig, reading: raw.Reading, report: file_tasks.ParseReport
) -> Iterator[tuple[Split | None, Labelled]]:
    columns = {"read.text_column": config.text_column, "read.label_column": config.label_column}
    if config.dataset == "banking77":
        columns = {"column text": "text", "column category": "category"}
        files, _ = intents.files_of(files, "banking77")
    text_column, label_column = columns.values()
    form = config if config.dataset == "csv" else tables.TableFormat()
    for uri in files:
        split = named_split(raw.plain_name(uri))
        for line, row in tables.read(uri, columns, reading, report, form=form):
            text, intent = row.get(text_column), row.get(label_column)
            with suppress(TypeError):  # then one is not a text
                text, intent = tables.cell_text(text) or "", tables.cell_text(intent) or ""
            if not raw.is_text(text) or not raw.is_text(intent):
                sample = json.dumps([str(text), str(intent)], ensure_ascii=False)
                report.malformed.add("not a text and an intent", uri, line, sample)
            elif not text.strip():
                report.dropped.add("empty text", uri, line, intent)
            elif not intent.strip():
                report.dropped.add("no intent", uri, line, text)
            else:
                intent = intent.strip()
                outside = config.dataset == "csv" and intent == config.out_of_scope_label
                yield split, Labelled(text.strip(), intent, outside)


def _check_share(report: file_tasks.ParseReport, reading: raw.Reading) -> None:
    """Raises BadInput where too much is malformed."""
    malformed = sum(report.malformed.counts.values())
    if malformed > report.records * reading.max_malformed_share:
        first = report.malformed.samples[0]
        raise BadInput(f"{malformed:,} of {report.records:,} rows are malformed, the first is "
                       f"{first['file']}, line {first['line']}: {first['reason']}; more than "
                       f"reading.max_malformed_share {reading.max_malformed_share:g}")  # fmt: skip


def _split_tenths(
    texts: Sequence[Labelled], inputs: str, missing: Split
) -> tuple[list[Labelled], list[Labelled], list[Labelled]]:
    """Eight tenths, one, and one of every intent; an intent of few texts has at least one in the first
    part and one in the last. `missing`: the split that the last part stands for."""
    parts: tuple[list[Labelled], list[Labelled], list[Labelled]] = ([], [], [])
    groups_by_intent: dict[str, dict[str, list[Labelled]]] = {}
    for row in texts:
        groups_by_intent.setdefault(row.intent, {}).setdefault(_key(row.text), []).append(row)
    for intent in sorted(groups_by_intent):
        groups = groups_by_intent[intent]
        if len(groups) < 2:
            raise BadInput(f"--input {inputs}: intent {intent!r} has 1 text (equal ones count once), and a "
                           f"tenth of each is to be held out; allowed: 2 at least, or a file {missing}.csv "
                           "beside it")  # fmt: skip
        keys = sorted(groups, key=lambda key: hashlib.sha256(key.encode()).digest())
        tenth = round(len(keys) / 10)
        ends = (len(keys) - max(1, tenth) - tenth, len(keys) - max(1, tenth), len(keys))
        start = 0
        for part, end in zip(parts, ends, strict=True):
            part += [row for key in keys[start:end] for row in groups[key]]
            start = end
    return parts


def _key(text: str) -> str:
    """The same for texts that count as equal."""
    return " ".join(text.casefold().split())


def _notes(
    rows: Sequence[Labelled],
    train: Sequence[Labelled],
    tested: Sequence[Labelled],
    threshold: Sequence[Labelled],
) -> list[str]:
    """Names intents that are probably one, and says how many texts stand where they should not."""
    spellings: dict[str, list[str]] = {}
    for label in labels_of(rows):
        spellings.setdefault(_key(label), []).append(label)
    alike = [" and ".join(map(repr, names)) for names in spellings.values() if len(names) > 1]
    intents_by_text: dict[str, set[str]] = {}
    for row in rows:
        intents_by_text.setdefault(_key(row.text), set()).add(row.intent)
    counts = {
        "texts with more than one intent": sum(len(each) > 1 for each in intents_by_text.values()),
        # As those of a file's copy, or of a smaller variant of it.
        f"of {len(train):,} texts to train on, repeats of others":
            len(train) - len({(_key(row.text), row.intent) for row in train}),
        f"of {len(tested):,} asked texts, trained on too": _count_known(tested, train),
        f"of {len(threshold):,} texts for the threshold, trained on or asked too":
            _count_known(threshold, [*train, *tested]),
    }  # fmt: skip
    notes = [f"different intents, but for case and white space: {_shown(alike)}"] if alike else []
    return notes + [f"{kind}: {count:,}" for kind, count in counts.items() if count]


def _count_known(texts: Sequence[Labelled], others: Sequence[Labelled]) -> int:
    """How many of the texts are also among the others, so that their answers are known."""
    keys = {_key(row.text) for row in others}
    return sum(_key(row.text) in keys for row in texts)


def _shown(names: Sequence[str]) -> str:
    """The first five names."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _check(texts: Texts, inputs: str) -> None:
    train_intents = labels_of(texts.train)
    if len(train_intents) < 2:
        names = ", ".join(train_intents) or "none"
        raise BadInput(f"--input {inputs}: the texts to train on have {len(train_intents)} intents "
                       f"({names}); allowed: 2 at least")  # fmt: skip
    inside = [row for row in texts.tested if not row.out_of_scope]
    if not inside:
        raise BadInput(f"--input {inputs}: no text with an intent is left to ask")
    for rows, name in ((inside, texts.asked_split), (texts.threshold, "valid")):
        unknown = Counter(row.intent for row in rows if not row.out_of_scope)
        for intent in train_intents:
            del unknown[intent]
        if unknown:
            shown_intents = _shown([repr(intent) for intent in sorted(unknown)])
            raise BadInput(f"--input {inputs}: {name} has {len(unknown):,} intents that train lacks "
                           f"({shown_intents}), of {sum(unknown.values()):,} texts; allowed: "
                           "intents of train, or read.out_of_scope_label")  # fmt: skip


def parse_shots(text: str) -> int:
    """Texts of every intent; 0: all.

    Raises BadInput for what is neither a number from 1 nor "full".
    """
    require(text == "full" or (text.isdecimal() and int(text) >= 1), "shots", text,
            "full, or texts of every intent (10, 30, …)")  # fmt: skip
    return 0 if text == "full" else int(text)
