"""Rows that a search may answer with."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.config import BadInput
from pipeline.pools.pool import Pool
from pipeline.pools.settings import EmbedConfig
from pipeline.search import search
from pipeline.search.filters import select
from tests.pipeline.search.test_exact import pool_of

KINDS = ["shoe", "shoe", "hat", None, "hat", "coat"]


@pytest.fixture(scope="module")
def pool() -> Pool:
    """Rows id0 to id5, of one number each, 0 to 5, in two shards."""
    return pool_of(np.arange(6)[:, None], [4], kind=KINDS, size=["1", "2"] * 3)


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"allow": ["id4", "id1", "gone"]}, [1, 4]),
        ({"allow": []}, []),
        ({"deny": ["id5", "gone", "id0"]}, [1, 2, 3, 4]),
        ({"where": {"kind": ["hat"]}}, [2, 4]),
        ({"where": {"kind": ["hat", "coat"], "size": ["1"]}}, [2, 4]),
        ({"where": {"kind": ["boat"]}}, []),
        ({"where": {"kind": ""}}, [3]),
        ({"where": {"size": ["1.0"]}}, [0, 2, 4]),  # as pandas writes it
        ({"allow": ["id2", "id5"], "deny": ["id2"], "where": {"size": ["2"]}}, [5]),
    ],
)
def test_what_is_selected_is_what_is_found(pool, options, rows):
    among = select(pool, **options)
    assert np.flatnonzero(among).tolist() == rows
    for method in ("auto", "exact", "pruned"):
        answer = search(pool, [[1.0]], 4, method=method, among=among)
        assert answer.ids == [f"id{n}" for n in sorted(rows, reverse=True)[:4]]
        assert answer.certified


@pytest.mark.parametrize(
    ("column", "value", "rows"),
    [
        (["9.5", "10", "-0.25", "5"], "9.50", [0]),
        (["9.5", "10", "-0.25", "5"], "10.00", [1]),
        (["9.5", "10", "-0.25", "5"], "-0.250", [2]),
        (["9.5", "10", "-0.25", "5"], "50", []),
        (["3.1", "3.10", "3", "2.20"], "3.10", [1]),
        (["3.1", "3.11", "3", "2.20"], "3.10", []),  # versions are no numbers
    ],
)
def test_a_number_is_found_however_many_zeros_end_it(column, value, rows):
    pool = pool_of(np.arange(4)[:, None], [2], size=column)
    assert np.flatnonzero(select(pool, where={"size": [value]})).tolist() == rows


def test_a_few_rows_of_many_are_picked_out(monkeypatch):
    matrix = np.random.default_rng(0).normal(size=(5000, 3)).astype(np.float32)
    pool = pool_of(matrix)
    monkeypatch.setattr("pipeline.search.exact._scan_pool", None)
    allowed = ["id7", "id2000", "id4999", *(f"id{n}" for n in range(100, 110))]
    answer = search(pool, [[1.0, 2.0, 3.0]], 20, among=select(pool, allow=allowed))
    scores = {name: matrix[int(name[2:])] @ [1, 2, 3] for name in allowed}
    assert answer.ids == sorted(allowed, key=lambda name: -scores[name])
    assert answer.certified


def test_a_column_that_is_not_kept_is_refused(pool):
    assert pool.filter_columns == ["kind", "size"]
    with pytest.raises(BadInput, match=r"where: 'colour' is not allowed; .* \(kind, size\)"):
        select(pool, where={"colour": ["red"]})
    with pytest.raises(BadInput, match="where: 'text' is not allowed"):
        select(pool, where={"text": ["id1"]})


@pytest.mark.parametrize("name", ["id", "text", "content_hash", ""])
def test_names_that_a_pool_has_already_are_refused(name):
    with pytest.raises(BadInput, match=r"embed.filter_columns: .* names of columns, but id, text"):
        EmbedConfig(filter_columns=(name,))


def test_a_column_that_is_kept_twice_is_refused():
    with pytest.raises(BadInput, match=r"embed.filter_columns: .* allowed: each column once"):
        EmbedConfig(filter_columns=("kind", "size", "kind"))


def test_a_text_stands_for_itself_and_is_not_taken_apart(pool):
    assert select(pool, deny="id1").tolist() == [True, False, True, True, True, True]
    assert select(pool, allow="id1").tolist() == [False, True, False, False, False, False]
    assert select(pool, where={"kind": "hat"}).tolist() == [False, False, True, False, True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": {"size": 2}}, r"where\['size'\]: 2 is not allowed; allowed: texts"),
        ({"where": {"size": [1]}}, r"where\['size'\]: 1 is not allowed"),
        ({"allow": [1]}, "allow: 1 is not allowed"),
        ({"deny": ["\ud800"]}, "deny: '.ud800' is not allowed"),
    ],
)
def test_what_is_no_text_is_refused_in_one_line(pool, options, message):
    with pytest.raises(BadInput, match=message):
        select(pool, **options)
