"""Search quality where a query has any number of right documents, of any grade; and BEIR's format.

A folder of BEIR (Thakur et al., 2021, arXiv 2104.08663) holds

    corpus.jsonl       {"_id": …, "title": …, "text": …}      a document reads as "title text"
    queries.jsonl      {"_id": …, "text": …}
    qrels/test.tsv     query-id, corpus-id, score             under that header; a score above 0 is right

Axes: N queries.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipeline import storage
from pipeline.arrays import Floats
from pipeline.config import BadInput, require

FIRST, DEPTH = 10, 100  # of nDCG and MRR; of MAP and recall
METRICS = (f"nDCG@{FIRST}", f"MAP@{DEPTH}", f"recall@{DEPTH}", f"MRR@{FIRST}", "R@1")


@dataclass(frozen=True)
class Collection:
    """Documents, and queries with the grades of their right documents."""

    documents: Mapping[str, str]
    queries: Mapping[str, str]
    """Those of the split that have a right document."""
    grades: Mapping[str, Mapping[str, int]]
    """By query and document, each above 0."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Counts by reason."""

    def first(self, queries: int) -> Collection:
        """The same documents with the first so many queries."""
        kept = dict(itertools.islice(self.queries.items(), queries))
        return replace(self, queries=kept, grades={query: self.grades[query] for query in kept})


def read_beir(folder: str, split: str) -> Collection:
    """Reads a folder of BEIR, here or in an object store. Raises BadInput for one that is none."""
    left_out = Counter[str]()
    documents = dict[str, str]()
    for line, row in _rows(storage.join(folder, "corpus.jsonl")):
        title, text = (str(row.get(name) or "").strip() for name in ("title", "text"))
        if not (title or text):
            left_out["documents without a text"] += 1
            continue
        _add(documents, _id(row, "corpus.jsonl", line, folder), f"{title} {text}".strip(), folder)
    texts = {
        _id(row, "queries.jsonl", line, folder): str(row.get("text") or "").strip()
        for line, row in _rows(storage.join(folder, "queries.jsonl"))
    }
    grades = dict[str, dict[str, int]]()
    for query, document, grade in _judgements(storage.join(folder, "qrels", f"{split}.tsv")):
        if grade <= 0:
            continue
        if document not in documents:
            left_out["right documents that are not in corpus.jsonl"] += 1
        elif not texts.get(query):
            left_out["right documents of queries that are not in queries.jsonl"] += 1
        else:
            grades.setdefault(query, {})[document] = grade
    if not grades:
        raise BadInput(
            f"{folder}: no query of qrels/{split}.tsv has a right document in corpus.jsonl"
        )
    queries = {query: texts[query] for query in grades}
    return Collection(documents, queries, grades, left_out)


def metrics(
    found: Mapping[str, Sequence[str]], grades: Mapping[str, Mapping[str, int]]
) -> dict[str, Floats]:
    """What each query adds to each of METRICS, [N], in the order of `grades`.

    `found`: ids of documents, best first, at least the first 100. A query without an answer has none right.
    nDCG has the grade as gain and log2(1 + rank) as discount, and MAP and recall divide by all right
    documents, as trec_eval has it (pytrec_eval's ndcg_cut_10, map_cut_100, recall_100), on which BEIR rests.
    """
    values = np.array([_of_query(found.get(query, ()), right) for query, right in grades.items()])
    return dict(zip(METRICS, values.T, strict=True))


def _of_query(found: Sequence[str], grades: Mapping[str, int]) -> list[float]:
    gains = [grades.get(document, 0) for document in found[:DEPTH]]
    right_ranks = [rank for rank, gain in enumerate(gains, 1) if gain]
    precisions = [count / rank for count, rank in enumerate(right_ranks, 1)]
    ideal = _discounted(sorted(grades.values(), reverse=True))
    first = right_ranks[0] if right_ranks else math.inf
    return [
        _discounted(gains) / ideal,
        sum(precisions) / len(grades),
        len(right_ranks) / len(grades),
        1 / first if first <= FIRST else 0.0,
        float(first == 1),
    ]


def _discounted(gains: Sequence[int]) -> float:
    return sum(gain / math.log2(1 + rank) for rank, gain in enumerate(gains[:FIRST], 1))


def _rows(uri: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, object) of each line that is not empty."""
    if not storage.exists(uri):
        raise BadInput(
            f"{uri}: missing; a folder of BEIR has corpus.jsonl, queries.jsonl and qrels/"
        )
    with io.TextIOWrapper(storage.open_input(uri), encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise BadInput(f"{uri}, line {number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise BadInput(
                    f"{uri}, line {number}: {type(row).__name__} is not allowed; allowed: an object"
                )
            yield number, row


def _id(row: Mapping[str, Any], file: str, line: int, folder: str) -> str:
    name, place = row.get("_id"), f"{storage.join(folder, file)}, line {line}: _id"
    require(isinstance(name, str | int) and name != "", place, name, "a text")
    return str(name)


def _add(documents: dict[str, str], document: str, text: str, folder: str) -> None:
    if documents.setdefault(document, text) != text:
        raise BadInput(f"{folder}: corpus.jsonl: _id {document!r} has two texts")


def _judgements(uri: str) -> Iterator[tuple[str, str, int]]:
    if not storage.exists(uri):
        raise BadInput(f"{uri}: missing; --split names a file of qrels/")
    with io.TextIOWrapper(storage.open_input(uri), encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE), 1):
            if not row or (number == 1 and row[0] == "query-id"):
                continue
            if len(row) != 3 or not row[2].lstrip("-").isdecimal():
                raise BadInput(
                    f"{uri}, line {number}: {row} is not allowed; allowed: query-id, corpus-id and a whole "
                    "number, with tabs"
                )
            yield row[0], row[1], int(row[2])
