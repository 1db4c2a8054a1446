"""Computes numbers of a corpus from a sample of its rows, spread evenly over all files."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from pipeline import storage
from pipeline.arrays import GOLDEN, Ints
from pipeline.artifact import Artifact
from pipeline.config import BadInput
from pipeline.corpora.dedup.hashing import Hashes, text_hashes
from pipeline.corpora.drawn_rows import open_parquet, read_places, read_rows
from pipeline.corpora.schema import EXAMPLE, SPLITS, example_files

_BLOCK_ROWS = 2048  # read at once: a row group of a corpus
_GROUP_ROWS = 10  # group ids are short: so many times the sample's rows are looked at
_TOP = 15
_REJECTS = 3  # shown for each reason
_REJECT_FILES = 100

Ranked = list[tuple[str, int]]


class Repeats(NamedTuple):
    """Number of rows whose text an earlier row of the sample has."""

    rows: int
    repeated: int

    @property
    def share(self) -> float:
        return self.repeated / max(1, self.rows)


@dataclass(frozen=True)
class CorpusSurvey:
    """The result of `survey_corpus`. Its texts are untrusted: show none as markup or with control codes."""

    uri: str
    fingerprint: str
    created_at: str
    rows: dict[str, int]
    """Number of rows of each split, of the whole corpus."""
    records: int
    """Lines or documents of the raw input."""
    dropped: dict[str, int]
    """Records that made no example, by reason."""
    rejected: dict[str, list[dict[str, Any]]]
    """Samples of these records (`reason`, `file`, `line`, `text`), by reason."""
    sampled: int
    """Number of rows in the sample; the fields below describe the sample."""
    lengths: dict[str, Ints]
    """Lengths of each sampled row; "examples per group" of each group of some whole files."""
    repeats: dict[str, Repeats]
    top_responses: Ranked
    """The most frequent responses, with their numbers of rows."""
    top_values: dict[str, Ranked]
    """The most frequent values of the corpus' own columns, such as `subreddit`."""
    examples: dict[str, list[dict[str, Any]]]
    """Rows of each split, drawn at random."""


def survey_corpus(corpus: Artifact, sample_rows: int, examples: int, seed: int) -> CorpusSurvey:
    """Looks at `sample_rows` rows at most (0: all), and `examples` of each split.

    Raises BadInput where a file of the corpus is missing or damaged.
    """
    files = {
        storage.join(corpus.uri, entry["path"]): entry["rows"]
        for entry in example_files(corpus)
        if entry["rows"]
    }
    if not files:
        raise BadInput(f"{corpus.uri}: the corpus has no rows")
    blocks = sample_blocks([*files.values()], sample_rows)
    names = [*files]
    own_columns = _text_columns(names[0])
    measures = list(_measure_blocks(names, blocks, ["context", "response", *own_columns]))
    response = np.concatenate([block.response for block in measures])
    pair = np.concatenate([block.pair for block in measures])
    lengths = {
        name: np.concatenate([block.lengths[name] for block in measures])
        for name in measures[0].lengths
    }
    group_files = _GROUP_ROWS * sample_rows * len(names) // sum(files.values())
    lengths["examples per group"] = _group_sizes(
        evenly_spaced(names, group_files) if sample_rows else names
    )
    splits = [split for split in SPLITS if corpus.rows(f"{split}/")]
    return CorpusSurvey(
        uri=corpus.uri,
        fingerprint=corpus.fingerprint,
        created_at=str(corpus.manifest["created_at"]),
        rows={split: corpus.rows(f"{split}/") for split in splits},
        records=corpus.counts.get("records", 0),
        dropped=dict(corpus.manifest["dropped"]),
        rejected=_rejected_samples(corpus),
        sampled=len(response),
        lengths=lengths,
        repeats={"responses": _repeats(response), "(context, response) pairs": _repeats(pair)},
        top_responses=_top_responses(names, blocks, response),
        top_values={
            name: _top_values([block.values[name] for block in measures]) for name in own_columns
        },
        examples={split: _examples(corpus, split, examples, seed) for split in splits},
    )


class Block(NamedTuple):
    """Neighbouring rows of a file."""

    file: int
    start: int
    rows: int


def sample_blocks(file_rows: Sequence[int], sample_rows: int) -> list[Block]:
    """Blocks that hold `sample_rows` rows of files with `file_rows` rows, in order; 0: all rows.

    Blocks of 2,048 rows lie evenly over all files, so that one read gives many rows; where they
    hold too many rows, each gives the same share of its own.
    """
    per_file = [-(-rows // _BLOCK_ROWS) for rows in file_rows]
    first = np.concatenate([[0], np.cumsum(per_file)])
    total, rows = int(first[-1]), sum(file_rows)
    row_count = min(sample_rows or rows, rows)
    places = np.arange(total)
    if row_count < rows:
        block_count = min(total, -(-row_count * total // rows))
        places = np.round(np.linspace(0, total - 1, block_count)).astype(np.int64)
    file = np.searchsorted(first, places, side="right") - 1
    starts = (places - first[file]) * _BLOCK_ROWS
    sizes = np.minimum(np.array(file_rows)[file] - starts, _BLOCK_ROWS)
    ends = np.cumsum(sizes) * min(1.0, row_count / sizes.sum())
    block_rows = np.diff(np.floor(ends + 1e-6).astype(np.int64), prepend=0)
    blocks = zip(file.tolist(), starts.tolist(), block_rows.tolist(), strict=True)
    return [Block(*block) for block in blocks if block[2]]


def evenly_spaced(names: Sequence[str], count: int) -> list[str]:
    """`count` names, at least one, evenly spaced."""
    places = np.linspace(0, len(names) - 1, min(max(count, 1), len(names)))
    return [names[place] for place in np.round(places).astype(int)]


def histogram(values: Ints, bins: int = 40) -> tuple[Ints, Ints]:
    """(counts, edges) of whole numbers >= 0, in at most so many bins of one width, from 0 on.

    A bin holds what is >= its left and < its right edge. They reach as far as 99 % of the values; the
    last one also holds what is above.
    """
    last = int(np.percentile(values, 99, method="higher"))
    width = last // bins + 1
    edges = width * np.arange(last // width + 2)
    counts = np.bincount(np.minimum(values, last) // width, minlength=len(edges) - 1)
    return counts.astype(np.int64), edges


class _BlockMeasures(NamedTuple):
    lengths: dict[str, Ints]
    response: Hashes
    pair: Hashes
    values: dict[str, pa.Array]


def _measure(rows: pa.Table) -> _BlockMeasures:
    # The context as a model sees it.
    context = pc.binary_join(rows["context"].combine_chunks(), "\n")
    response = rows["response"].combine_chunks()
    lengths = {
        "context characters": pc.utf8_length(context),
        "context words": pc.count_substring_regex(context, r"\S+"),
        "turns per context": pc.list_value_length(rows["context"].combine_chunks()),
        "response characters": pc.utf8_length(response),
        "response words": pc.count_substring_regex(response, r"\S+"),
    }
    response_hash = text_hashes(response)
    pair_hash = text_hashes(context) * GOLDEN ^ response_hash
    return _BlockMeasures(
        {name: values.to_numpy().astype(np.int64) for name, values in lengths.items()},
        response_hash,
        pair_hash,
        {
            name: rows[name].combine_chunks().value_counts()
            for name in rows.column_names
            if name not in ("context", "response")
        },
    )


def _measure_blocks(
    names: Sequence[str], blocks: Sequence[Block], columns: list[str]
) -> Iterator[_BlockMeasures]:
    """In the order of the blocks; files are read side by side."""
    by_file: dict[int, list[Block]] = defaultdict(list)
    for block in blocks:
        by_file[block.file].append(block)

    def read(place: int) -> list[_BlockMeasures]:
        with open_parquet(names[place]) as file:
            return [_measure(_read_block(file, block, columns)) for block in by_file[place]]

    rows = sum(block.rows for block in blocks)
    bar = tqdm(desc="corpus: rows", total=rows, unit="row", unit_scale=True)
    with bar, ThreadPoolExecutor(os.cpu_count()) as pool:
        for place, measures in zip(by_file, pool.map(read, by_file), strict=True):
            yield from measures
            bar.update(sum(block.rows for block in by_file[place]))


def _read_block(file: pq.ParquetFile, block: Block, columns: list[str]) -> pa.Table:
    return read_places(file, np.arange(block.start, block.start + block.rows), columns)


def _text_columns(uri: str) -> list[str]:
    """The columns of texts that only this corpus has, without those of people."""
    with open_parquet(uri) as file:
        return [
            field.name
            for field in file.schema_arrow
            if field.name not in EXAMPLE.names
            and pa.types.is_string(field.type)
            and not field.name.endswith("_author")
        ]


def _group_sizes(files: list[str]) -> Ints:
    """The number of rows of each group of the files. Most formats keep a group in one file."""
    sizes = []
    for uri in tqdm(files, desc="corpus: groups", unit="file"):
        with open_parquet(uri) as file:
            groups = file.read(columns=["group_id"])["group_id"]
        sizes.append(groups.value_counts().field("counts").to_numpy())
    return np.concatenate(sizes)


def _repeats(hashes: Hashes) -> Repeats:
    return Repeats(len(hashes), len(hashes) - len(np.unique(hashes)))


def _top_responses(names: list[str], blocks: list[Block], hashes: Hashes) -> Ranked:
    """The texts behind the most frequent hashes: their first rows are read once more."""
    _, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    top = np.lexsort([first, -counts])[:_TOP]
    ends = np.cumsum([block.rows for block in blocks])
    ranked = []
    for place in top[counts[top] > 1]:
        block = blocks[number := int(np.searchsorted(ends, first[place], side="right"))]
        row = int(first[place] - ends[number]) + block.rows
        with open_parquet(names[block.file]) as file:
            text = _read_block(file, block, ["response"])["response"][row].as_py()
        ranked.append((text, int(counts[place])))
    return ranked


def _top_values(parts: list[pa.StructArray]) -> Ranked:
    table = pa.concat_tables([pa.Table.from_struct_array(part) for part in parts])
    totals = table.group_by("values").aggregate([("counts", "sum")])
    totals = totals.sort_by([("counts_sum", "descending"), ("values", "ascending")])[:_TOP]
    values, counts = (totals[name].to_pylist() for name in ("values", "counts_sum"))
    return [
        ("" if value is None else value, count) for value, count in zip(values, counts, strict=True)
    ]


def _examples(corpus: Artifact, split: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of a split, drawn at random."""
    rows, rng = corpus.rows(f"{split}/"), np.random.default_rng(seed)
    places = np.sort(rng.choice(rows, size=min(count, rows), replace=False))
    return read_rows(corpus, split, places.tolist(), columns=None)


def _rejected_samples(corpus: Artifact) -> dict[str, list[dict[str, Any]]]:
    """A few samples of each reason."""
    samples_by_reason: dict[str, list[dict[str, Any]]] = defaultdict(list)
    files = storage.list_files(storage.join(corpus.uri, "rejected"))
    for uri in evenly_spaced(files, _REJECT_FILES) if files else []:
        for line in storage.read_bytes(uri).splitlines():
            sample = json.loads(line)
            if len(samples_by_reason[sample["reason"]]) < _REJECTS:
                samples_by_reason[sample["reason"]].append(sample)
    return dict(samples_by_reason)
