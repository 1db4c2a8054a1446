"""Metrics of search beside those of scikit-learn and sentence-transformers, and BEIR's files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import BadInput
from pipeline.evaluation.retrieval import METRICS, metrics, read_beir

DOCUMENTS = [f"d{number}" for number in range(130)]


@st.composite
def answers(draw: st.DrawFn) -> tuple[dict[str, list[str]], dict[str, dict[str, int]]]:
    """Rankings of some documents, and grades of at most 20 for each of three queries."""
    found, grades = {}, {}
    for query in ("a", "b", "c"):
        found[query] = draw(st.permutations(DOCUMENTS))[: draw(st.integers(0, 130))]
        rated = draw(st.lists(st.sampled_from(DOCUMENTS), min_size=1, max_size=20, unique=True))
        grades[query] = {document: draw(st.integers(1, 3)) for document in rated}
    return found, grades


@given(answers())
def test_ndcg_is_scikit_learns(case):
    from sklearn.metrics import ndcg_score

    found, grades = case
    for query, value in zip(grades, metrics(found, grades)["nDCG@10"], strict=True):
        order = found[query] + [each for each in DOCUMENTS if each not in found[query]]
        gains = [grades[query].get(document, 0) for document in order]
        scores = [1000.0 - rank if rank < len(found[query]) else 0.0 for rank in range(130)]
        if len(found[query]) >= 10:  # else scikit-learn gives the unranked documents equal parts
            assert value == pytest.approx(ndcg_score([gains], [scores], k=10))


@given(answers())
def test_the_other_metrics_are_sentence_transformers(case):
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    found, grades = case
    evaluator = InformationRetrievalEvaluator(
        dict.fromkeys(grades, "q"), dict.fromkeys(DOCUMENTS, "d"),
        {query: set(right) for query, right in grades.items()},
        mrr_at_k=[10], ndcg_at_k=[10], accuracy_at_k=[1], precision_recall_at_k=[100], map_at_k=[100],
    )  # fmt: skip
    ranked = [
        [{"corpus_id": each, "score": -rank} for rank, each in enumerate(found[query])]
        for query in grades
    ]
    theirs = evaluator.compute_metrics(ranked)
    ours = {name: values.mean() for name, values in metrics(found, grades).items()}
    assert ours["MAP@100"] == pytest.approx(theirs["map@k"][100])
    assert ours["recall@100"] == pytest.approx(theirs["recall@k"][100])
    assert ours["MRR@10"] == pytest.approx(theirs["mrr@k"][10])
    assert ours["R@1"] == pytest.approx(theirs["accuracy@k"][1])


def test_by_hand():
    grades = {"q": {"a": 2, "b": 1, "z": 1}}
    values = metrics({"q": ["x", "b", "a"]}, grades)
    ndcg = (1 / np.log2(3) + 2 / 2) / (2 + 1 / np.log2(3) + 1 / 2)
    assert [values[name][0] for name in METRICS] == pytest.approx(
        [ndcg, (1 / 2 + 2 / 3) / 3, 2 / 3, 1 / 2, 0]
    )
    assert all(values == 0 for values in metrics({}, grades).values())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "corpus.jsonl", [
        {"_id": "a", "title": "Tea", "text": "A drink."}, {"_id": "b", "text": "A boat."},
        {"_id": 3, "title": "Paint", "text": ""}, {"_id": "blank", "title": "", "text": " "},
    ])  # fmt: skip
    write(tmp_path / "queries.jsonl", [{"_id": str(n), "text": f"query {n}"} for n in range(4)])
    (tmp_path / "qrels").mkdir()
    rows = [
        "query-id\tcorpus-id\tscore",
        "0\ta\t2",
        "0\t3\t1.0",
        "1\tb\t0",
        "2\tgone\t1",
        "9\ta\t1",
        "3\tb\t1",
    ]
    (tmp_path / "qrels" / "test.tsv").write_text("\n".join(rows) + "\n")
    return tmp_path


def write(file: Path, rows: list[Any]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_beirs_files_are_read_and_what_is_left_out_is_counted(folder):
    found = read_beir(str(folder), "test")
    assert found.documents == {"a": "Tea A drink.", "b": "A boat.", "3": "Paint"}
    assert found.queries == {"0": "query 0", "3": "query 3"}
    assert found.grades == {"0": {"a": 2, "3": 1}, "3": {"b": 1}}
    assert found.left_out == {
        "documents without a text": 1,
        "right documents that are not in corpus.jsonl": 1,
        "right documents of queries that are not in queries.jsonl": 1,
        "queries without a right document": 3,
    }
    assert found.first(1).queries == {"0": "query 0"} and found.first(1).grades == {
        "0": {"a": 2, "3": 1}
    }


def test_beirs_files_may_be_compressed_and_begin_with_a_mark(folder):
    plain = read_beir(str(folder), "test")
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
        data = ("\ufeff" + (folder / name).read_text().replace("\n", "\r\n")).encode()
        (folder / name).unlink()
        (folder / f"{name}.gz").write_bytes(gzip.compress(data))
    assert read_beir(str(folder), "test") == plain


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("corpus.jsonl", '{"_id": "a"}\n[1]\n', "corpus.jsonl, line 2: list is not allowed"),
        (
            "corpus.jsonl",
            '{"id": "a", "text": "x"}\n',
            "corpus.jsonl, line 1: _id: None is not allowed",
        ),
        (
            "corpus.jsonl",
            '{"_id": "a", "text": "x"}\n{"_id": "a", "text": "y"}\n',
            "'a' has two texts",
        ),
        ("queries.jsonl", '{"_id": "0", "te\n', "queries.jsonl, line 1: not JSON"),
        (
            "queries.jsonl",
            '{"_id": "0", "text": "x"}\n{"_id": 0, "text": "y"}\n',
            "queries.jsonl, line 2: _id '0' has two texts",
        ),
        (
            "corpus.jsonl",
            '{"_id": "a", "text": ["x", "y"]}\n',
            "corpus.jsonl, line 1: text: 'list' is not allowed; allowed: a text",
        ),
        ("corpus.jsonl", '{"_id": true, "text": "x"}\n', "line 1: _id: True is not allowed"),
        ("corpus.jsonl", '{"_id": "a", "text": "\\ud800"}\n', "line 1: text: 'str' is not allowed"),
        ("qrels/test.tsv", "0\ta\t--1\n", "line 1: .* allowed: query-id, corpus-id"),
        (
            "qrels/test.tsv",
            "query-id\tcorpus-id\tscore\n0\ta\n",
            "line 2: .* allowed: query-id, corpus-id",
        ),
        ("qrels/test.tsv", "0 a 1\n", "line 1: .* allowed: query-id, corpus-id"),
        ("qrels/test.tsv", "0\ta\t0\n", "no query of qrels/test.tsv has a right document"),
    ],
)
def test_a_file_that_is_wrong_is_named(folder, file, text, message):
    (folder / file).write_text(text)
    with pytest.raises(BadInput, match=message):
        read_beir(str(folder), "test")


def test_a_file_that_is_not_utf8_is_named(folder):
    (folder / "queries.jsonl").write_bytes('{"_id": "0", "text": "café"}\n'.encode("cp1252"))
    with pytest.raises(BadInput, match=r"queries.jsonl, line 1: not UTF-8; a guess is Latin-1"):
        read_beir(str(folder), "test")


def test_a_missing_file_is_named(folder):
    with pytest.raises(BadInput, match=r"dev.tsv: missing; --split names a file of qrels/"):
        read_beir(str(folder), "dev")
    (folder / "queries.jsonl").unlink()
    with pytest.raises(BadInput, match=r"queries.jsonl: missing; a folder of BEIR has"):
        read_beir(str(folder), "test")
