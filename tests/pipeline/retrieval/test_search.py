"""Exact search, against every score in float64."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.artifact import Artifact
from pipeline.config import BadInput
from pipeline.models.polyencoder import poly_scores
from pipeline.retrieval import search as module
from pipeline.retrieval.embed import ROWS
from pipeline.retrieval.pool import Pool
from pipeline.retrieval.search import search, top_rows


def pool_of(rows_ND, cuts=()) -> Pool:
    """A pool in memory, in shards that begin at `cuts`; the id of row 3 is "id3"."""
    rows_ND = np.asarray(rows_ND, np.float32)
    ids = pa.array(f"id{n}" for n in range(len(rows_ND)))
    whole = pa.table([ids, ids, ids], ROWS)
    edges = [0, *sorted(cuts), len(rows_ND)]
    spans = list(itertools.pairwise(edges))
    return Pool(
        Artifact("memory", {"dimensions": rows_ND.shape[1]}), "pool", "v", 
        tuple(rows_ND[a:b] for a, b in spans), tuple(whole[a:b] for a, b in spans), tuple(edges[1:]),
    )  # fmt: skip


def float64_scores(rows_ND, vectors_MD, mask_M, attention="dot"):
    """[N]: the formula of the paper, with the attended context written out."""
    rows, vectors = np.asarray(rows_ND, np.float64), np.asarray(vectors_MD, np.float64)[mask_M]
    logits_NM = rows @ vectors.T
    if attention == "scaled_dot":
        logits_NM = logits_NM / np.sqrt(rows.shape[1])
    weights_NM = np.exp(logits_NM - logits_NM.max(axis=1, keepdims=True))
    weights_NM /= weights_NM.sum(axis=1, keepdims=True)
    return ((weights_NM @ vectors) * rows).sum(axis=1)


@st.composite
def tasks(draw):
    """(rows, cuts into shards, vectors [Q, M, D], mask, top_k, rows per block, attention)"""
    n, d = draw(st.integers(1, 40)), draw(st.integers(1, 6))
    q, m = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.1, 1.0, 30.0]))
    rows, vectors = rng.normal(size=(n, d)) * spread, rng.normal(size=(q, m, d))
    if draw(st.booleans()):  # whole numbers: many rows and many scores are the same, and exact
        rows, vectors = rng.integers(-1, 2, (n, d)), rng.integers(-2, 3, (q, m, d))
    mask = rng.random((q, m)) < draw(st.sampled_from([0.3, 1.0]))
    mask[:, rng.integers(m)] = True
    cuts = draw(st.sets(st.integers(1, n - 1), max_size=3)) if n > 1 else ()
    top_k, block_rows = draw(st.integers(1, n + 3)), draw(st.integers(1, 9))
    attention = draw(st.sampled_from(["dot", "scaled_dot"]))
    as_float32 = (np.asarray(rows, np.float32), np.asarray(vectors, np.float32))
    return as_float32[0], cuts, as_float32[1], mask, top_k, block_rows, attention


@settings(max_examples=300)
@given(tasks())
def test_finds_what_float64_over_all_rows_finds(task):
    rows, cuts, vectors, mask, top_k, block_rows, attention = task
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK_ROWS", block_rows)
        found = top_rows(pool_of(rows, cuts), vectors, top_k, mask, attention)
    kept = min(top_k, len(rows))
    assert found.certified is True
    assert found.places.shape == found.scores.shape == (len(vectors), kept)
    assert found.scores.dtype == np.float32
    for query, (places, scores) in enumerate(zip(found.places, found.scores, strict=True)):
        wanted = float64_scores(rows, vectors[query], mask[query], attention)
        error = 1e-5 * max(1, np.abs(rows @ vectors[query].T).max())
        np.testing.assert_allclose(scores, wanted[places], rtol=0, atol=error)
        np.testing.assert_allclose(scores, np.sort(wanted)[::-1][:kept], rtol=0, atol=error)
        assert len(set(places)) == kept
        best_first = list(zip(-scores, places, strict=True))
        assert best_first == sorted(best_first)  # ties by place
        of_group = defaultdict(list)
        for place, row in enumerate(rows):
            of_group[row.tobytes()].append(place)
        for group in of_group.values():
            taken = [place for place in places if place in group]
            assert taken == group[: len(taken)]  # of the same vectors the first ones


@settings(max_examples=100)
@given(tasks())
def test_one_vector_that_counts_gives_inner_products_in_exact_order(task):
    """Whole numbers: float32 is exact, so the order is as well."""
    rows, cuts, vectors, _, top_k, block_rows, attention = task
    rows, vectors = np.rint(rows), np.rint(vectors)
    mask = np.zeros(vectors.shape[:2], bool)
    mask[:, -1] = True
    products = rows.astype(np.float64) @ vectors[:, -1].T.astype(np.float64)
    order = np.argsort(-products, axis=0, kind="stable")[:top_k].T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK_ROWS", block_rows)
        found = top_rows(pool_of(rows, cuts), vectors, top_k, mask, attention)
    np.testing.assert_array_equal(found.places, order)
    np.testing.assert_array_equal(found.scores, np.take_along_axis(products.T, order, axis=1))


@pytest.mark.parametrize("attention", ["dot", "scaled_dot"])
@pytest.mark.parametrize("m", [1, 7])
def test_scores_are_those_of_the_model(attention, m):
    rng = np.random.default_rng(0)
    rows, vectors = rng.normal(size=(50, 16)), rng.normal(size=(3, m, 16))
    mask = np.arange(m) < [[1], [max(1, m - 2)], [m]]
    wanted = poly_scores(
        torch.tensor(vectors, dtype=torch.float32), torch.tensor(mask),
        torch.tensor(rows, dtype=torch.float32), attention,
    ).numpy()  # fmt: skip
    answer = search(pool_of(rows, [20]), vectors, 50, mask, attention)
    for query in range(3):
        places = [int(name.removeprefix("id")) for name in answer.ids[query]]
        np.testing.assert_allclose(answer.scores[query], wanted[query][places], rtol=2e-5, atol=1e-5)


def test_one_context_and_a_batch_of_contexts_get_the_same_answers():
    rng = np.random.default_rng(1)
    pool = pool_of(rng.integers(-3, 4, (60, 8)), [7, 30])
    vectors, mask = rng.integers(-2, 3, (4, 3, 8)), rng.random((4, 3)) < 0.7
    mask[:, 0] = True
    together = search(pool, vectors, 5, mask)
    assert together.scores.shape == (4, 5)
    for query in range(4):
        alone = search(pool, vectors[query], 5, mask[query])
        assert alone.ids == together.ids[query]
        assert alone.scores.shape == (5,)
        np.testing.assert_allclose(alone.scores, together.scores[query], rtol=1e-6)
        assert alone.certified is True
    np.testing.assert_array_equal(search(pool, vectors[0], 5).scores,
                                  search(pool, vectors[:1], 5, np.ones((1, 3))).scores[0])  # fmt: skip


def test_ids_are_those_of_the_rows():
    pool = pool_of([[0.0], [9.0], [5.0], [7.0]], cuts=[2, 3])
    answer = search(pool, [[1.0]], 3)
    assert answer.ids == ["id1", "id3", "id2"]
    assert answer.scores.tolist() == [9.0, 7.0, 5.0]


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("block_rows", [1, 4, 7, 100, 1000])
def test_rows_of_the_same_vector_keep_their_order_wherever_they_lie_in_a_block(
    monkeypatch, block_rows, m
):
    """A matrix product rounds a row's last bits as its place in the block and the block's size say."""
    rng = np.random.default_rng(2)
    rows, vectors = rng.normal(size=(403, 100)), rng.normal(size=(1, m, 100))
    same = np.r_[5:403:7, 401, 402]
    rows[same] = vectors[0, 0]  # the best by far
    monkeypatch.setattr(module, "_BLOCK_ROWS", block_rows)
    for top_k in (1, 2, 30):
        found = top_rows(pool_of(rows, cuts=[6, 301]), vectors, top_k)
        assert found.places[0].tolist() == same[:top_k].tolist()
        assert len(set(found.scores[0])) == 1


# Pruning. Where the vectors are the unit vectors, the rows are the logits themselves.


@pytest.fixture
def softmaxed(monkeypatch):
    """How many rows each block paid the softmax for."""
    sizes = []
    exp = np.exp

    def counting(values):
        sizes.append(len(values))
        return exp(values)

    monkeypatch.setattr(module.np, "exp", counting)
    return sizes


def test_rows_that_cannot_reach_the_top_are_skipped(softmaxed, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_ROWS", 10)
    rng = np.random.default_rng(3)
    logits = rng.uniform(-1, 1, (1000, 4))
    logits[:10] += 5  # the first block fills the top
    logits[555, 2] = 9  # may, and does
    logits[777, 2] = 4.5  # may by its greatest logit only
    places = top_rows(pool_of(logits), np.eye(4)[None], 3).places[0]
    assert sum(softmaxed[:100]) <= 10 + 1 + 1
    scores = float64_scores(logits, np.eye(4), np.ones(4, bool))
    assert places.tolist() == np.argsort(-scores)[:3].tolist()
    assert 555 in places


def test_a_bi_encoder_pays_for_no_softmax(softmaxed):
    top_rows(pool_of(np.eye(5)), np.eye(5)[:, None], 3)
    assert softmaxed == []


@settings(max_examples=300)
@given(st.data())
def test_a_greatest_logit_just_below_or_above_the_threshold_changes_no_answer(data):
    m, n = data.draw(st.integers(2, 5)), data.draw(st.integers(2, 30))
    threshold = np.float32(data.draw(st.sampled_from([1.0, -1.0, 1e-3, 300.0, -300.0])))
    steps = data.draw(st.lists(st.integers(-40, 40), min_size=n, max_size=n))
    logits = np.full((n, m), threshold)
    for row, step in zip(logits, steps, strict=True):
        row += step * np.spacing(threshold)
    lower = data.draw(st.lists(st.integers(0, n * m - 1), max_size=n))
    logits.ravel()[lower] -= np.float32(2.0)  # greatest logit at the threshold, score below it
    top_k = data.draw(st.integers(1, n))
    vectors = np.eye(m)[None]
    at_once = top_rows(pool_of(logits), vectors, n)  # one block: nothing to skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK_ROWS", data.draw(st.integers(1, 4)))
        found = top_rows(pool_of(logits), vectors, top_k)
    np.testing.assert_array_equal(found.places[0], at_once.places[0, :top_k])
    np.testing.assert_array_equal(found.scores[0], at_once.scores[0, :top_k])


# Refusals

POOL = pool_of(np.eye(4))


@pytest.mark.parametrize(
    ("vectors", "top_k", "mask", "message"),
    [
        (np.ones((2, 4)), 0, None, "top_k: 0 is not allowed; allowed: >= 1"),
        (np.ones((2, 5)), 1, None, r"\(1, 2, 5\) is not allowed; .* d = 4"),
        (np.ones(4), 1, None, r"\(4,\) is not allowed"),
        (np.ones((1, 1, 2, 4)), 1, None, r"\(1, 1, 2, 4\) is not allowed"),
        (np.ones((2, 4)), 1, np.zeros(2, bool), "vector_mask: one true value at least"),
        (np.ones((2, 2, 4)), 1, np.array([[1, 0], [0, 0]]), "vector_mask: one true value"),
        (np.ones((2, 4)), 1, np.ones(3, bool), "vector_mask: .* shape"),
        (np.ones((0, 4)), 1, None, "vector_mask: one true value at least"),
        (np.full((2, 4), np.nan), 1, None, "vectors: not finite"),
        (np.array([[np.inf, 0, 0, 0]]), 1, None, "vectors: not finite"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(vectors, top_k, mask, message):
    with pytest.raises(BadInput, match=f"^.*{message}.*$"):
        search(POOL, vectors, top_k, mask)


def test_no_contexts_get_no_answers():
    answer = search(POOL, np.ones((0, 2, 4)), 3)
    assert answer.ids == []
    assert answer.scores.shape == (0, 3)
