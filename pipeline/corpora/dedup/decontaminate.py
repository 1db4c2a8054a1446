"""Drops examples of train that share words with an evaluation set.

An example is contaminated if any run of 13 words stands in an evaluation set too (the rule of GPT-3:
Brown et al. 2020, appendix C). A shorter text counts as a whole: it is contaminated if a text of the set
is the same, word for word.

    collect   file of a set   the hashes of its n-grams                              → filed by hash
    index     bucket          each n-gram once, and a filter: which hashes there are
    look up   shard of train  the n-grams that the filter lets through               → filed by hash
    match     bucket          suspects that are in the index                         → filed by shard

A task holds a file or a bucket, some 1 GB, whatever the size of the sets. The filter, 6 to 12 bits for each
n-gram, is all that the driver and each node hold: 2 GiB for 2.6 billion n-grams, those of the 73 million
held-out ones of 730 million Reddit examples. One bucket holds some 6 million n-grams (0.2 million Reddit
examples); then the driver makes the index and the matches itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.arrays import Bools, Ints
from pipeline.config import BadInput, require
from pipeline.corpora import buckets
from pipeline.corpora.dedup import hashing
from pipeline.corpora.dedup.evaluation_sets import (
    ComparedText,
    EvaluationSet,
    compared_words,
    read_texts,
    set_names,
)
from pipeline.corpora.dedup.examples import (
    COMPARED,
    CONTAMINATED,
    DedupPlan,
    bucket_tasks,
    node_of,
    read_pieces,
    shard_and_row,
)
from pipeline.corpora.dedup.hashing import Hashes
from pipeline.engine import executors
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord
from pipeline.engine.run import run_tasks
from pipeline.storage.prefetch import map_prefetched

_GRAMS = pa.schema(
    [("gram", pa.uint64()), ("set", pa.int32()), ("group", pa.uint64()), ("id", pa.string())]
)
_SUSPECTS = pa.schema(
    [("gram", pa.uint64()), ("node", pa.int64()), ("place", pa.int32()), ("is_run", pa.bool_())]
)
"""N-grams of train that the filter lets through: the example, the n-gram's place in it, and whether it is
a run of words of a longer text, or all of a short one."""
NgramFilter = np.ndarray[Any, np.dtype[np.uint8]]
_FILTER = pa.schema([("bits", pa.large_binary())])

# Of a Parquet file of examples. Real Reddit has 0.2, made-up texts, which compress better, 0.4 to 1.
_NGRAMS_PER_BYTE = 0.4
_NGRAM_BYTES, _SUSPECT_BYTES = 40, 24
_BUCKET_BYTES = 256 << 20
_LEAST_FILTER_BITS = 22  # 512 KiB; with a small set it has no false positives


@dataclass(frozen=True, kw_only=True)
class Options:
    """What examples of train may share with an evaluation set."""

    own_splits: bool = True
    """The corpus's own valid and test splits are evaluation sets too."""
    text: ComparedText = "example"
    """The compared text, in train and in the evaluation sets: all turns and the response, or the
    response."""
    ngram_words: int = 13
    """Number of words in a run. A run of train must not be in an evaluation set."""
    min_words: int = 8
    """Shorter texts are compared as a whole, if they have at least this many words."""
    boilerplate_groups: int = 0
    """Runs that are in more groups (dialogues, threads, articles, lines) of the evaluation sets than this
    are boilerplate and do not count; 0: all runs count."""

    def __post_init__(self) -> None:
        require(self.ngram_words >= 1, "decontaminate.ngram_words", self.ngram_words, ">= 1")
        require(1 <= self.min_words <= self.ngram_words, "decontaminate.min_words", self.min_words,
                "1 to decontaminate.ngram_words")  # fmt: skip
        require(self.boilerplate_groups >= 0, "decontaminate.boilerplate_groups",
                self.boilerplate_groups, ">= 0")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NgramsRecord(TaskRecord):
    """A file of an evaluation set, or all of them."""

    ngrams: int
    """Number of distinct n-grams."""


@dataclass(frozen=True)
class Layout:
    """The layout of filed n-grams: by the first bits of their hashes, which are spread evenly."""

    filter_bits: int
    """The filter has 2 to this many places, of a bit each."""
    bucket_bits: int
    filed_bytes: int
    """Estimated bytes of the filed n-grams."""

    @classmethod
    def for_sizes(cls, evaluation_bytes: int, train_bytes: int) -> Layout:
        """The layout for stored files of these sizes."""
        ngrams = evaluation_bytes * _NGRAMS_PER_BYTE
        filter_bits = max(_LEAST_FILTER_BITS, math.ceil(math.log2(6 * ngrams + 1)))
        suspects = train_bytes * _NGRAMS_PER_BYTE * ngrams / (1 << filter_bits)
        filed = round(ngrams * _NGRAM_BYTES + suspects * _SUSPECT_BYTES)
        return cls(filter_bits, (max(1, -(-filed // _BUCKET_BYTES)) - 1).bit_length(), filed)

    @property
    def bucket_count(self) -> int:
        return 1 << self.bucket_bits

    def filter_places(self, hashes: Hashes) -> Ints:
        return (hashes >> np.uint64(64 - self.filter_bits)).astype(np.int64)

    def buckets(self, hashes: Hashes) -> Ints:
        return self.filter_places(hashes) >> (self.filter_bits - self.bucket_bits)

    def lets_through(self, ngram_filter: NgramFilter, hashes: Hashes) -> Bools:
        """Whether each n-gram is in the filter: all of the evaluation sets, and one of 6 to 12 others."""
        places = self.filter_places(hashes)
        is_set: Bools = (ngram_filter[places >> 3] >> (places & 7).astype(np.uint8)) & 1 == 1
        return is_set

    def file(self, draft: Draft, name: str, rows: pa.Table) -> None:
        """Files rows by the bucket of their n-gram."""
        buckets.write(draft, name, rows, self.buckets(rows["gram"].to_numpy()), self.bucket_count)

    def executor(self) -> AbstractContextManager[object]:
        """Runs a single bucket's task in this process: a cluster takes longer to start one."""
        return nullcontext() if self.bucket_bits else executors.in_this_process()


def build_index(
    draft: Draft, sets: Sequence[EvaluationSet], layout: Layout, options: Options
) -> bool:
    """Files the n-grams of all sets; returns whether there are any.

    Raises BadInput for a file without texts, and a set (other than the corpus's own) without n-grams.
    """
    files = [(uri, number) for number, evaluation in enumerate(sets) for uri in evaluation.files]
    file_tasks = {f"evaluation-ngrams-{number:05d}": number for number in range(len(files))}

    def collect(draft: Draft, task: str, number: int) -> NgramsRecord:
        uri, set_number = files[number]
        names, tables = list[pa.Array](), list[pa.Table]()
        start = 0
        schema = _GRAMS.set(3, pa.field("text", pa.int64()))
        for ids, groups, words in read_texts(uri, options.text):
            grams = hashing.ngrams(words, options.ngram_words, min_tokens=options.min_words)
            text = np.repeat(np.arange(len(ids)), grams.counts)
            columns = [
                grams.hashes,
                np.full(len(text), set_number, np.int32),
                groups[text],
                start + text,
            ]
            tables.append(pa.table(columns, schema=schema))
            names.append(ids)
            start += len(ids)
        rows = _first_of_group(pa.concat_tables([schema.empty_table(), *tables]).combine_chunks())
        ids = pa.chunked_array(names, pa.string()).take(rows["text"])
        layout.file(draft, task, pa.table([*rows.columns[:3], ids], schema=_GRAMS))
        return NgramsRecord(ngrams=rows.num_rows)

    def index(draft: Draft, task: str, bucket: int) -> NgramsRecord:
        rows = _first_of_group(buckets.read(draft, list(file_tasks), bucket, _GRAMS))
        grams = rows["gram"].to_numpy()
        _, starts, groups = np.unique(grams, return_index=True, return_counts=True)
        first = np.lexsort((rows["set"].to_numpy(), grams))[starts]
        if options.boilerplate_groups:
            first = first[groups <= options.boilerplate_groups]
        rows = rows.take(pa.array(first))
        buckets.write(draft, task, rows)
        has_ngram = np.zeros(1 << (layout.filter_bits - layout.bucket_bits), bool)
        has_ngram[layout.filter_places(grams[first]) & (len(has_ngram) - 1)] = True
        bits = np.packbits(has_ngram, bitorder="little").tobytes()
        buckets.write(draft, f"{task}-filter", pa.table([[bits]], schema=_FILTER))
        return NgramsRecord(ngrams=rows.num_rows)

    records = run_tasks(draft, file_tasks, collect, "evaluation sets: n-grams", NgramsRecord)
    ngrams_of_set = Counter[int]()
    for record, (_, number) in zip(records, files, strict=True):
        ngrams_of_set[number] += record.ngrams
    for number, evaluation in enumerate(sets):
        if evaluation.uri and not ngrams_of_set[number]:
            raise BadInput(
                f"--evaluation {evaluation.uri}: no text of decontaminate.min_words "
                f"{options.min_words} or more"
            )
    with layout.executor():
        tasks = bucket_tasks("evaluation-index", layout.bucket_count)
        index_records = run_tasks(draft, tasks, index, "evaluation sets: index", NgramsRecord)
    return any(record.ngrams for record in index_records)


def drop(
    draft: Draft, plan: DedupPlan, sets: Sequence[EvaluationSet], layout: Layout, options: Options
) -> list[TaskRecord]:
    """Files the drops of the tasks "match-…"; returns their records. Needs the index of the sets."""
    filter_ref = executors.put(_read_filter(draft, layout))
    suspect_tasks, names, n = plan.tasks("suspects", "train"), set_names(sets), options.ngram_words

    def look_up(draft: Draft, task: str, number: int) -> TaskRecord:
        ngram_filter = filter_ref.get()
        tables = [_SUSPECTS.empty_table()]
        for numbers, rows in read_pieces(plan.shards[number].uri, COMPARED):
            words = compared_words(rows, options.text)
            grams = hashing.ngrams(words, options.ngram_words, min_tokens=options.min_words)
            hits = np.flatnonzero(layout.lets_through(ngram_filter, grams.hashes))
            text = np.searchsorted(grams.offsets, hits, side="right") - 1
            columns = [
                grams.hashes[hits],
                node_of(number, numbers[text]),
                (hits - grams.offsets[text]).astype(np.int32),
                words.counts[text] >= options.ngram_words,
            ]
            tables.append(pa.table(columns, schema=_SUSPECTS))
        layout.file(draft, task, pa.concat_tables(tables).combine_chunks())
        return TaskRecord()

    def match(draft: Draft, task: str, bucket: int) -> TaskRecord:
        """Finds for each example its n-gram in the first set; of several, the first in the example."""
        index = buckets.read(draft, [f"evaluation-index-{bucket:05d}"], 0, _GRAMS)
        rows = buckets.read(draft, suspect_tasks, bucket, _SUSPECTS)
        grams, suspects = index["gram"].to_numpy(), rows["gram"].to_numpy()
        places = (
            np.minimum(np.searchsorted(grams, suspects), len(grams) - 1)
            if len(grams)
            else suspects[:0]
        )
        hits = np.flatnonzero(grams[places] == suspects[: len(places)])
        rows, index = rows.take(pa.array(hits)), index.take(pa.array(places[hits]))
        nodes, numbers = rows["node"].to_numpy(), index["set"].to_numpy()
        order = np.lexsort((rows["place"].to_numpy(), numbers, nodes))
        first = order[np.unique(nodes[order], return_index=True)[1]]
        rows, index = rows.take(pa.array(first)), index.take(pa.array(first))
        shard, row = shard_and_row(nodes[first])
        reasons = [
            f"{n} words of {names[number]}" if is_run else f"text of {names[number]}"
            for number, is_run in zip(numbers[first], rows["is_run"].to_pylist(), strict=True)
        ]
        columns = [row, pa.array(reasons, pa.string()), index["id"], index["set"], rows["place"]]
        buckets.write(
            draft, f"{task}-drops", pa.table(columns, schema=CONTAMINATED), shard, len(plan.shards)
        )
        return TaskRecord()

    look_up_records = run_tasks(draft, suspect_tasks, look_up, "contaminated: n-grams", TaskRecord)
    with layout.executor():
        tasks = bucket_tasks("match", layout.bucket_count)
        return look_up_records + run_tasks(draft, tasks, match, "contaminated", TaskRecord)


def _read_filter(draft: Draft, layout: Layout) -> NgramFilter:
    def read(task: str) -> bytes:
        part_bits: bytes = buckets.read(draft, [f"{task}-filter"], 0, _FILTER)["bits"][0].as_py()
        return part_bits

    bits = np.empty((1 << layout.filter_bits) // 8, np.uint8)
    parts = bits.reshape(layout.bucket_count, -1)
    tasks = bucket_tasks("evaluation-index", layout.bucket_count)
    for part, part_bits in zip(parts, map_prefetched(read, tasks), strict=True):
        part[:] = np.frombuffer(part_bits, np.uint8)
    return bits


def _first_of_group(rows: pa.Table) -> pa.Table:
    """The first row of each n-gram in each group, by n-gram."""
    places = hashing.first_of_each(rows["gram"].to_numpy(), rows["group"].to_numpy())
    return rows.take(pa.array(places)).combine_chunks()
