"""Search quality where a query has any number of right documents, of any grade; and BEIR's format.

A folder of BEIR (Thakur et al., 2021, arXiv 2104.08663) holds

    corpus.jsonl       {"_id": …, "title": …, "text": …}      a document reads as "title text"
    queries.jsonl      {"_id": …, "text": …}
    qrels/test.tsv     query-id, corpus-id, score             under that header; a score above 0 is right

as they are, or compressed: corpus.jsonl.gz and so on.

Axes: N queries.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipeline import storage
from pipeline.arrays import Floats
from pipeline.config import BadInput, require
from pipeline.corpora import raw

FIRST, DEPTH = 10, 100  # of nDCG and MRR; of MAP and recall
_STRICT = raw.Reading(max_malformed_share=0)  # a line that is not UTF-8 is refused
_SUFFIXES = ("", ".gz", ".zst", ".bz2", ".xz")
_GRADE = re.compile(r"(-?[0-9]+)(?:\.0*)?")
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
    for place, row in _rows(folder, "corpus.jsonl"):
        text = f"{_text(row, 'title', place)} {_text(row, 'text', place)}".strip()
        if text:
            _add(documents, _id(row, place), text, place)
        else:
            left_out["documents without a text"] += 1
    texts = dict[str, str]()
    for place, row in _rows(folder, "queries.jsonl"):
        _add(texts, _id(row, place), _text(row, "text", place), place)
    judged = dict[str, dict[str, int]]()
    for query, document, grade in _judgements(storage.join(folder, "qrels", f"{split}.tsv")):
        right_documents = judged.setdefault(query, {})
        if grade <= 0:
            continue
        if document not in documents:
            left_out["right documents that are not in corpus.jsonl"] += 1
        elif not texts.get(query):
            left_out["right documents of queries that are not in queries.jsonl"] += 1
        else:
            right_documents[document] = grade
    grades = {query: right for query, right in judged.items() if right}
    if len(grades) < len(judged):
        left_out["queries without a right document"] = len(judged) - len(grades)
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


def _rows(folder: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of each line that is not empty; a place is "file, line number"."""
    uri = _stored(
        storage.join(folder, name), "a folder of BEIR has corpus.jsonl, queries.jsonl and qrels/"
    )
    for number, line in raw.read_lines(uri, _STRICT):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{uri}, line {number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise BadInput(
                f"{uri}, line {number}: {type(row).__name__} is not allowed; allowed: an object"
            )
        yield f"{uri}, line {number}", row


def _stored(uri: str, advice: str) -> str:
    """The file, or a compressed one of its name."""
    found = next((uri + suffix for suffix in _SUFFIXES if storage.exists(uri + suffix)), None)
    if found is None:
        raise BadInput(f"{uri}: missing; {advice}")
    return found


def _id(row: Mapping[str, Any], place: str) -> str:
    name = row.get("_id")
    is_number = isinstance(name, int) and not isinstance(name, bool)
    require(is_number or (raw.is_text(name) and name != ""), f"{place}: _id", name, "a text")
    return str(name)


def _text(row: Mapping[str, Any], name: str, place: str) -> str:
    value = row.get(name)
    require(value is None or isinstance(value, int | float) or raw.is_text(value), f"{place}: {name}",
            type(value).__name__, "a text")  # fmt: skip
    return "" if value is None else str(value).strip()


def _add(texts: dict[str, str], name: str, text: str, place: str) -> None:
    if texts.setdefault(name, text) != text:
        raise BadInput(f"{place}: _id {name!r} has two texts")


def _judgements(uri: str) -> Iterator[tuple[str, str, int]]:
    uri = _stored(uri, "--split names a file of qrels/")
    for number, line in raw.read_lines(uri, _STRICT):
        row = line.split("\t")
        if not line.strip() or (number == 1 and row[0] == "query-id"):
            continue
        grade = _GRADE.fullmatch(row[2].strip()) if len(row) == 3 else None
        if grade is None:
            raise BadInput(
                f"{uri}, line {number}: {row} is not allowed; allowed: query-id, corpus-id and a whole "
                "number, with tabs"
            )
        yield row[0], row[1], int(grade[1])
