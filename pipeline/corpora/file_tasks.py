"""Prepares any corpus whose files can be read one by one, with one task per input file."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline import storage
from pipeline.artifact import FileEntry
from pipeline.config import BadInput
from pipeline.corpora import raw, variants
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.schema import SPLITS
from pipeline.engine.draft import Draft
from pipeline.engine.records import RecordT, TaskRecord
from pipeline.engine.run import run_tasks

# jobs.score_candidates and others take a shard as one task. Articles of some 4,000 characters need 0.2 GB.
_ROWS_PER_SHARD = 50_000
# An Arrow column of text holds 2 GiB, and a character has up to 4 bytes.
_CHARACTERS_PER_SHARD = 1 << 28

_DOCUMENT = re.compile(r"(README|LICEN[CS]E).*|.*\.md|dataset_(dict|infos?)\.json", re.IGNORECASE)

ParsedRow = dict[str, Any]
"""The columns of an example; those that are not there, such as `candidates`, are null."""


class Malformed(Exception):
    """A unit that is not what the format says; the message is the reason."""


@dataclass
class ParseReport:
    """The report of a parser: counts and samples of the records that became no row."""

    records: int = 0
    """Units of the format that were read: lines, documents."""
    malformed: raw.Rejects = field(default_factory=raw.Rejects)
    """Units that are not what the format says."""
    dropped: raw.Rejects = field(default_factory=raw.Rejects)
    """Units that are well formed and make no example, by reason."""
    counts: Counter[str] = field(default_factory=Counter)
    """Other counts, such as dialogues."""
    notes: list[str] = field(default_factory=list)
    """Remarks on the file for a person."""

    def close(
        self, draft: Draft, task: str, privacy: Privacy, kind: type[RecordT], **fields: Any
    ) -> RecordT:
        """Saves samples of the rejected records; returns a record with the report and more `fields`.

        A file (`input`) without records is noted."""
        if not self.records and (uri := fields.get("input")):
            self.notes.append(f"{uri}: holds no records")
        counts = self.malformed.counts + self.dropped.counts
        rejects = raw.Rejects(counts, self.malformed.samples + self.dropped.samples)
        rejects.save(draft, task, privacy)
        reported = {
            "counts": {"records": self.records, **self.counts},
            "malformed": dict(self.malformed.counts),
            "dropped": dict(counts),
            "notes": self.notes,
        }
        return kind(**{**reported, **fields})


@dataclass(frozen=True, kw_only=True)
class FileRecord(TaskRecord):
    """The task of one input file."""

    input: str
    """The file's URI."""
    sample: list[int] = field(default_factory=list)
    """Hashes of some of its examples, see `variants`."""


_COPY = 0.9
"""Of two copies so large a share of the examples is in both."""
_OVERLAPS_NOTED = 10

Parser = Callable[[str, raw.Reading, ParseReport], Iterator[ParsedRow]]


def prepare(
    draft: Draft,
    files: list[str],
    parse: Parser,
    schema: pa.Schema,
    reading: raw.Reading,
    privacy: Privacy,
    label: str,
    rows_per_shard: int = _ROWS_PER_SHARD,
) -> list[FileRecord]:
    """Fills the draft and returns the records of its tasks.

    A task holds up to `rows_per_shard` rows of each split in memory.
    `parse(uri, reading, report)` yields a file's rows; each names its `split`. Their texts are
    redacted here, and names in columns that end in `_author` hashed. Documents are set aside and noted, and
    files that share examples noted. Raises BadInput for too many malformed records, and for two copies.
    """
    documents = [
        FileRecord(input=uri, notes=[f"{uri}: set aside, its name is that of a document"])
        for uri in files
        if is_document(uri)
    ]
    files = sorted((uri for uri in files if not is_document(uri)), key=storage.name_of)
    keeps_sample = len(files) <= variants.MOST_FILES

    def convert(draft: Draft, task: str, uri: str) -> FileRecord:
        report, sample = ParseReport(), np.zeros(0, np.uint64)
        shards, counts = list[FileEntry](), Counter[str]()
        for split, rows in _shards(parse(uri, reading, report), rows_per_shard):
            number = sum(shard["path"].startswith(split) for shard in shards)
            name = f"{split}/{task}-{number:03d}.parquet"
            if keeps_sample:
                sample = variants.add_to_sample(sample, rows)
            if split == "train":  # neighbours in a file are neighbours in a dialogue or an article
                random.Random(name).shuffle(rows)
            table, redacted = redact_rows(pa.Table.from_pylist(rows, schema=schema), privacy)
            shards.append(draft.write_table(name, table))
            counts.update({**redacted, "examples": len(rows), f"examples.{split}": len(rows)})
        record = report.close(
            draft, task, privacy, FileRecord, input=uri, sample=sample.tolist(), files=shards
        )
        return replace(record, counts={**counts, **record.counts})

    tasks = {f"file-{index:05d}": uri for index, uri in enumerate(files)}
    records = [*run_tasks(draft, tasks, convert, label, FileRecord), *documents]
    raw.check_share(draft, records, reading)
    return [*records, *_overlaps(draft, records)]


def _shards(
    rows: Iterable[ParsedRow], rows_per_shard: int
) -> Iterator[tuple[str, list[ParsedRow]]]:
    """(split, rows) of each shard; of few rows where their texts are long."""
    pending_rows: dict[str, list[ParsedRow]] = {split: [] for split in SPLITS}
    characters = Counter[str]()
    for row in rows:
        split = row["split"]
        pending_rows[split].append(row)
        texts = (*row["context"], row["response"], *(row.get("candidates") or ()))
        characters[split] += sum(map(len, texts))
        is_full = len(pending_rows[split]) == rows_per_shard
        if is_full or characters[split] >= _CHARACTERS_PER_SHARD:
            yield split, pending_rows[split]
            pending_rows[split], characters[split] = [], 0
    yield from ((split, left) for split, left in pending_rows.items() if left)


def _overlaps(draft: Draft, records: Sequence[FileRecord]) -> list[FileRecord]:
    """Notes on files that share examples. Raises BadInput for copies; then the draft is deleted."""
    noted = list[FileRecord]()
    for found in variants.find([(record.input, record.sample) for record in records]):
        if found.of_larger >= _COPY:
            storage.delete(draft.staging)
            files = f"{found.first} and {found.second}"
            raise BadInput(f"--input: {files} are copies of the same texts, {found.of_larger:.0%} of the "
                           "examples are in both; allowed: one of them")  # fmt: skip
        note = (
            f"{found.first} and {found.second}: {found.share:.0%} of the smaller file's examples are in both "
            "and count twice; clean_corpus removes them"
        )
        noted.append(FileRecord(input=found.first, notes=[note]))
    return noted[:_OVERLAPS_NOTED]


def is_document(uri: str) -> bool:
    """Whether a file describes the files beside it, by its name: README, LICENSE, *.md, dataset_info.json."""
    return _DOCUMENT.fullmatch(storage.name_of(uri)) is not None


def require_distinct(names: Iterable[str]) -> None:
    """Raises BadInput if two files have the same name, because ids of examples begin with it."""
    for name, count in Counter(names).items():
        if count > 1:
            raise BadInput(f"--input: {count} files are named {name}; allowed: names that differ, "
                           "since they begin the ids of examples")  # fmt: skip


def length_fault(size: int, min_size: int, max_size: int) -> str:
    """ "too short" or "too long", or "" for a size within the bounds."""
    return "too short" if size < min_size else "too long" if size > max_size else ""


def redact_rows(rows: pa.Table, privacy: Privacy) -> tuple[pa.Table, dict[str, int]]:
    """(the rows with redacted texts and hashed authors, `redacted_count`)"""
    total = 0
    for place, column in enumerate(rows.schema):
        values = rows.column(place).combine_chunks()
        if column.name in ("context", "candidates"):
            turns, redacted = privacy.redacted_and_counted(values.flatten())
            total += redacted
            values = pa.ListArray.from_arrays(
                _offsets(values), turns, type=column.type, mask=values.is_null()
            )
        elif column.name == "response":
            values, redacted = privacy.redacted_and_counted(values)
            total += redacted
        elif column.name.endswith("_author"):
            values = privacy.hashed(values)
        rows = rows.set_column(place, column, values)
    return rows, redacted_count(total)


def redacted_count(texts: int) -> dict[str, int]:
    """The manifest's count of redacted texts; empty without any."""
    return {"texts.redacted": texts} if texts else {}


def _offsets(lists: pa.ListArray) -> pa.Array:
    """Offsets of the lists in `lists.flatten()`; a null list is empty."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
