"""AmazonQA (McAuley, UCSD): questions about products and their answers, by PolyAI's rules.

    {'asin': 'B00004U9JO', 'question': 'Does it come with a cord?', 'answer': 'No, it does not.', …}
    {'asin': 'B00004U9JO', 'questions': [{'questionText': 'Does …?', 'answers': [{'answerText': 'No, …'}]}]}

A line is one Python dictionary in one of these two forms; in some copies of the files it is JSON. The rules
(amazon_qa/create_data.py of conversational-datasets): a pair is used if both texts have 4 to 59 words; of
pairs with the same question and answer, in whichever files, the one of the smallest product id stays;
products are split by the MD5 of their id, 90 : 10.

Two phases over storage, so that memory is bounded by one bucket of pairs: files to pairs, filed by a
hash of their texts; then each bucket without its duplicates.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline import storage
from pipeline.artifact import FileEntry
from pipeline.config import require
from pipeline.corpora import buckets, file_tasks, raw
from pipeline.corpora.file_tasks import Malformed
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.reddit.partition import thread_hashes
from pipeline.corpora.reddit.threads import split_of
from pipeline.corpora.schema import schema_with
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord
from pipeline.engine.run import run_tasks

_SCHEMA = schema_with(("product_id", pa.string()))
_PAIRS = pa.schema([(name, pa.string()) for name in ("key", "product", "question", "answer")])
_BUCKET_BYTES = 32 << 20  # of input, 4 times that when unpacked
_PAIRS_PER_PART = 250_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which pairs make an example. The defaults are PolyAI's."""

    min_words: int = 4
    """Questions and answers with fewer words make no example. Words are separated by spaces."""
    max_words: int = 59
    """Questions and answers with more words make no example."""
    train_share: float = 0.9
    """Share of the products in `train`; the rest is `test`."""

    def __post_init__(self) -> None:
        require(self.min_words >= 1, "amazonqa.min_words", self.min_words, ">= 1")
        require(self.max_words >= self.min_words, "amazonqa.max_words", self.max_words,
                ">= amazonqa.min_words")  # fmt: skip
        require(
            0 < self.train_share <= 1, "amazonqa.train_share", self.train_share, "above 0, to 1"
        )


class Pair(NamedTuple):
    product: str
    question: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class PairsRecord(file_tasks.FileRecord):
    """The first phase on one file."""

    parts: list[str]
    """Names of the files of pairs, in buckets."""


def prepare(
    draft: Draft, uris: list[str], options: Options, reading: raw.Reading, privacy: Privacy
) -> Sequence[TaskRecord]:
    """Fills the draft and returns the records of its tasks."""
    bucket_count = -(-sum(map(storage.size_of, uris)) // _BUCKET_BYTES) or 1

    def read_file(draft: Draft, task: str, uri: str) -> PairsRecord:
        report = file_tasks.ParseReport()
        pairs = parse(uri, reading, report, options)
        part_names = list[str]()
        while part := list(itertools.islice(pairs, _PAIRS_PER_PART)):
            keys = [_key(pair) for pair in part]
            bucket = np.array([int(key, 16) % bucket_count for key in keys], np.int64)
            rows = pa.table([keys, *map(list, zip(*part, strict=True))], schema=_PAIRS)
            part_names.append(f"{task}-{len(part_names):03d}")
            buckets.write(draft, part_names[-1], rows, bucket, bucket_count)
        return report.close(draft, task, privacy, PairsRecord, input=uri, parts=part_names)

    tasks = {f"file-{i:05d}": uri for i, uri in enumerate(sorted(uris, key=storage.name_of))}
    records = run_tasks(draft, tasks, read_file, "amazonqa: files to pairs", PairsRecord)
    raw.check_share(draft, records, reading)
    parts = [part for record in records for part in record.parts]

    def build_bucket(draft: Draft, task: str, bucket: int) -> TaskRecord:
        """Writes a bucket's shards; rows in random order."""
        pairs = buckets.read(draft, parts, bucket, _PAIRS)
        unique = pairs.group_by(["key", "question", "answer"], use_threads=False)
        unique = unique.aggregate([("product", "min"), ("product", "count")]).sort_by("key")
        duplicates = _duplicates(unique, pairs.num_rows)
        duplicates.save(draft, task, privacy)
        order = np.random.default_rng(bucket).permutation(unique.num_rows)
        examples = _examples(unique.take(pa.array(order)), options)
        rows, redacted = file_tasks.redact_rows(examples, privacy)
        files, counts = list[FileEntry](), {"examples": rows.num_rows, **redacted}
        for split in ("train", "test"):
            split_rows = rows.filter(pc.equal(rows["split"], split))
            counts[f"examples.{split}"] = split_rows.num_rows
            if split_rows.num_rows:
                files.append(draft.write_table(f"{split}/part-{bucket:05d}.parquet", split_rows))
        return TaskRecord(files=files, counts=counts, dropped=dict(duplicates.counts))

    bucket_tasks = {f"bucket-{bucket:05d}": bucket for bucket in range(bucket_count)}
    label = "amazonqa: pairs to examples"
    return [*records, *run_tasks(draft, bucket_tasks, build_bucket, label, TaskRecord)]


# ---------------------------------------------------------------------------------------------------
# Phase 1: files to pairs


def _key(pair: Pair) -> str:
    """16 hex digits that stand for the two texts."""
    texts = f"{pair.question}\0{pair.answer}".encode()
    return hashlib.blake2b(texts, digest_size=8).hexdigest()


def parse(
    uri: str, reading: raw.Reading, report: file_tasks.ParseReport, options: Options
) -> Iterator[Pair]:
    """The pairs of a file, duplicates among them. A record is a pair, or a line without any."""

    def length_fault(text: str) -> str:
        return file_tasks.length_fault(text.count(" ") + 1, options.min_words, options.max_words)

    for number, line in raw.read_lines(uri, reading, report.notes):
        if not line.strip():
            continue
        try:
            pairs = pairs_of(line)
        except Malformed as reason:
            report.records += 1
            report.malformed.add(str(reason), uri, number, line)
            continue
        report.records += len(pairs) or 1
        report.counts["dictionaries"] += 1
        if not pairs:
            report.dropped.add("no answer", uri, number, line)
        for pair in pairs:
            if fault := length_fault(pair.question):
                report.dropped.add(f"question {fault}", uri, number, pair.question)
            elif fault := length_fault(pair.answer):
                report.dropped.add(f"answer {fault}", uri, number, pair.answer)
            else:
                yield pair


def pairs_of(line: str) -> list[Pair]:
    """The pairs of a line. Raises Malformed."""
    if raw.is_overlong(line):
        raise Malformed("line too long")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = _literal(line)
    product = _text(record, "asin")
    if "question" in record or "questions" not in record:
        return [Pair(product, _text(record, "question"), _text(record, "answer"))]
    return [
        Pair(product, _text(question, "questionText"), _text(answer, "answerText"))
        for question in _list(record, "questions")
        for answer in _list(question, "answers")
    ]


def _literal(line: str) -> object:
    try:  # only constants and containers of them: nothing is executed
        return ast.literal_eval(line)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise Malformed("not a Python literal") from None


def _text(record: object, field: str) -> str:
    value = _value(record, field)
    if not raw.is_text(value):
        raise Malformed(f"field {field} is no text")
    return value


def _list(record: object, field: str) -> list[object]:
    value = _value(record, field)
    if not isinstance(value, list):
        raise Malformed(f"field {field} is no list")
    return value


def _value(record: object, field: str) -> object:
    if not isinstance(record, dict):
        raise Malformed("not a dictionary")
    if field not in record:
        raise Malformed(f"no field {field}")
    return record[field]


# ---------------------------------------------------------------------------------------------------
# Phase 2: pairs to examples


def _duplicates(unique: pa.Table, pairs: int) -> raw.Rejects:
    """The number of dropped pairs among all `pairs`, and samples of the repeated ones."""
    rejects = raw.Rejects()
    if pairs > unique.num_rows:
        repeated = unique.filter(pc.greater(unique["product_count"], 1))
        for row in repeated.slice(0, raw.MAX_SAMPLES).to_pylist():
            rejects.add("duplicate", row["product_min"], 0, f"{row['question']}\n{row['answer']}")
        rejects.counts["duplicate"] = pairs - unique.num_rows
    return rejects


def _examples(pairs: pa.Table, options: Options) -> pa.Table:
    number = pairs.num_rows
    product = pairs["product_min"].combine_chunks()
    offsets = pa.array(np.arange(number + 1, dtype=np.int32))
    return pa.table(
        {
            "example_id": pc.binary_join_element_wise(product, pairs["key"], "/"),
            "group_id": product,
            "context": pa.ListArray.from_arrays(offsets, pairs["question"].combine_chunks()),
            "response": pairs["answer"],
            "candidates": pa.nulls(number, pa.list_(pa.string())),
            "label": pa.nulls(number, pa.int32()),
            "source": pa.array(["amazonqa"] * number, pa.string()),
            "split": pa.array(split_of(thread_hashes(product), options.train_share), pa.string()),
            "product_id": product,
        },
        schema=_SCHEMA,
    )
