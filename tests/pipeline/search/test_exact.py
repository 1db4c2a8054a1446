"""Search, against every score in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.artifact import Artifact
from pipeline.config import BadInput
from pipeline.pools.pool import Pool
from pipeline.pools.shard import ROWS, Shard
from pipeline.pools.sketch import fit_rotation, sketch
from pipeline.pools.vector_format import FILE_DTYPES, decode, encode
from pipeline.search import bounds, search, top_rows, weights_of_vectors
from pipeline.search import exact as module

METHODS = ["exact", "pruned"]
FORMS = [("exact", "scores"), ("exact", "vectors"), ("pruned", "sketch")]
DTYPES = list(FILE_DTYPES)


def pool_of(rows_ND, cuts=(), dtype="float32", **columns) -> Pool:
    """A pool in memory, in shards that begin at `cuts`; the id of row 3 is "id3". `columns`: to filter by."""
    rows_ND = np.asarray(rows_ND, np.float32)
    rotation = fit_rotation(rows_ND)
    shards, edges = [], [0, *sorted(cuts), len(rows_ND)]
    for start, end in itertools.pairwise(edges):
        ids = [f"id{n}" for n in range(start, end)]
        layer = encode(rows_ND[start:end], dtype)
        about = sketch(decode(layer, np.float64), rotation)
        table = pa.table([ids, ids, ids], ROWS)
        for name, values in columns.items():
            table = table.append_column(name, pa.array(values[start:end], pa.string()))
        shards.append(Shard(table, layer, about))
    facts = {"dimensions": rows_ND.shape[1], "dtype": dtype}
    return Pool(Artifact("memory", facts), "pool", "v", tuple(shards), rotation, tuple(edges[1:]))


def float64_scores(pool, vectors_MD, mask_M, attention="dot"):
    """[N]: the formula of the paper, with the attended context written out."""
    rows = np.concatenate([decode(shard.vectors, np.float64) for shard in pool.shards])
    vectors = np.asarray(vectors_MD, np.float32).astype(np.float64)[mask_M]
    logits_NM = rows @ vectors.T
    if attention == "scaled_dot":
        logits_NM = logits_NM / np.sqrt(rows.shape[1])
    weights_NM = np.exp(logits_NM - logits_NM.max(axis=1, keepdims=True))
    weights_NM /= weights_NM.sum(axis=1, keepdims=True)
    return ((weights_NM @ vectors) * rows).sum(axis=1)


def check(pool, vectors, mask, found, top_k, attention="dot", among=None):
    """The answers of `found` are the top k of all scores in float64, but for their rounding."""
    allowed = np.arange(len(pool)) if among is None else np.flatnonzero(among)
    kept = min(top_k, len(allowed))
    assert found.certified.tolist() == [True] * len(vectors)
    assert found.places.shape == found.scores.shape == (len(vectors), kept)
    assert found.scores.dtype == np.float32
    longest = max((s.vectors.norms[1].max(initial=0) for s in pool.shards), default=0)
    for query, (places, scores) in enumerate(zip(found.places, found.scores, strict=True)):
        wanted = float64_scores(pool, vectors[query], mask[query], attention)
        # float64 adds products of up to |c| |y| and takes their exponentials.
        size = longest * np.linalg.norm(vectors[query].astype(np.float64), axis=1).max()
        error = 1e-13 * size * (1 + size) + 1e-7 * np.abs(wanted[places]) + 1e-44
        assert set(places) <= set(allowed)
        assert len(set(places)) == kept
        assert (np.abs(scores - wanted[places]) <= error).all()
        best = np.sort(wanted[allowed])[::-1][:kept]
        assert (np.abs(scores - best) <= error + 1e-7 * np.abs(best)).all()
        best_first = [(-score, f"id{place}") for score, place in zip(scores, places, strict=True)]
        assert best_first == sorted(best_first)  # ties by id


@st.composite
def tasks(draw):
    """(pool, vectors [Q, M, D], mask, top_k, attention, among)"""
    n, d = draw(st.integers(1, 60)), draw(st.integers(1, 70))
    q, m = draw(st.integers(1, 9)), draw(st.integers(1, 70))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, vectors = rng.normal(size=(n, d)), rng.normal(size=(q, m, d))
    match draw(st.sampled_from(["plain", "whole", "sizes", "tight", "zeros"])):
        case "whole":  # many rows and many scores are the same, and exact
            rows, vectors = rng.integers(-1, 2, (n, d)), rng.integers(-2, 3, (q, m, d))
        case "sizes":  # from the smallest to the largest rows that a type holds
            rows *= 10.0 ** rng.choice([-44, -38, -20, 0, 3], (n, 1))
            vectors *= 10.0 ** rng.choice([-38, -3, 0, 3, 20])
        case "tight":  # vectors near one, rows near one
            vectors = vectors[:, :1] + 1e-3 * vectors
            rows = rows[:1] + 1e-4 * rows
        case "zeros":
            rows[rng.random(n) < 0.5] = 0
            vectors[rng.random((q, m)) < 0.5] = 0
    rows = np.asarray(rows, np.float32)
    if draw(st.booleans()):
        rows = rows[rng.integers(n, size=n)]  # duplicates
    mask = rng.random((q, m)) < draw(st.sampled_from([0.3, 1.0]))
    mask[:, rng.integers(m)] = True
    cuts = draw(st.sets(st.integers(1, n - 1), max_size=3)) if n > 1 else ()
    pool = pool_of(rows, cuts, draw(st.sampled_from(DTYPES)))
    among = rng.random(n) < 0.5 if draw(st.booleans()) else None
    attention = draw(st.sampled_from(["dot", "scaled_dot"]))
    vectors = np.asarray(vectors, np.float32)
    return pool, vectors, mask, draw(st.integers(1, n + 3)), attention, among


@pytest.mark.slow
@pytest.mark.parametrize(("method", "form"), FORMS)
@settings(max_examples=50)
@given(tasks(), st.data())
def test_finds_what_float64_over_all_rows_finds(method, form, task, data):
    pool, vectors, mask, top_k, attention, among = task
    with pytest.MonkeyPatch.context() as patch:
        names = ("_BLOCK_ROWS", "_SECTION_ROWS", "_SEEDS", "_SCORED_ROWS", "_OPEN_ROWS")
        for name in names:
            patch.setattr(module, name, data.draw(st.integers(1, 30)))
        # A pool of 60 rows is one block, or several.
        patch.setattr(module, "_MOST_SCORED", data.draw(st.integers(1, 120)))
        patch.setattr(bounds, "_CENTRES", (data.draw(st.integers(1, 64)),))
        patch.setattr(module, "FORMS", {method: (form,)})
        patch.setattr(module, "_CONTEXTS", data.draw(st.integers(1, 9)))
        found = top_rows(pool, vectors, top_k, mask, attention, method, among)
    check(pool, vectors, mask, found, top_k, attention, among)


@pytest.mark.slow
@settings(max_examples=25)
@given(tasks())
def test_both_methods_and_the_plain_order_agree_to_the_last_tie(task):
    """Whole numbers: float32 is exact, so the order is as well."""
    pool, vectors, mask, top_k, _, among = task
    rows = np.rint(pool.vectors_at(np.arange(len(pool))).clip(-99, 99))
    pool, vectors = pool_of(rows), np.rint(vectors.clip(-99, 99))
    mask[:] = False
    mask[:, -1] = True
    ids = np.array([f"id{n}" for n in range(len(rows))])
    allowed = np.arange(len(rows)) if among is None else np.flatnonzero(among)
    for query, products in enumerate(vectors[:, -1].astype(np.float64) @ rows[allowed].T):
        order = allowed[np.lexsort((ids[allowed], -products))][:top_k]
        for method in METHODS:
            found = top_rows(pool, vectors, top_k, mask, method=method, among=among)
            assert found.places[query].tolist() == order.tolist()
            assert found.scores[query].tolist() == sorted(products, reverse=True)[: len(order)]


@pytest.mark.parametrize(("dtype", "q"), [*((dtype, 16) for dtype in DTYPES), ("float32", 1)])
@pytest.mark.parametrize(("method", "form"), FORMS)
def test_thousands_of_rows_of_many_dimensions(monkeypatch, method, form, dtype, q):
    """As vectors of texts are: most of the energy in some directions, context vectors alike."""
    monkeypatch.setattr(module, "FORMS", {method: (form,)})
    rng = np.random.default_rng(5)
    scale = 1 / np.sqrt(1 + np.arange(200))
    rows = rng.normal(size=(4500, 200)) * scale
    vectors = (rng.normal(size=(q, 1, 200)) * 3 + rng.normal(size=(q, 64, 200))) * scale
    pool, vectors = pool_of(rows, [2000, 2100], dtype), vectors.astype(np.float32)
    mask = np.ones((q, 64), bool)
    check(pool, vectors, mask, top_rows(pool, vectors, 10, method=method), 10)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_rows_whose_numbers_leave_float32_are_found_by_their_scores(method, m):
    rng = np.random.default_rng(6)
    rows = rng.normal(size=(50, 8)).astype(np.float32)
    rows[[7, 31]] *= np.float32(1e37)
    vectors = np.full((1, m, 8), 1e3, np.float32)  # a product goes beyond 3e38
    best = [7, 31] if rows[7].sum() > rows[31].sum() else [31, 7]
    assert top_rows(pool_of(rows), vectors, 50, method=method).scores.shape == (1, 50)
    for n in (7, 31):
        rows[n] = np.abs(rows[n])
    found = top_rows(pool_of(rows), vectors, 2, method=method)
    assert sorted(found.places[0].tolist()) == sorted(best)
    assert np.isinf(found.scores).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_row_whose_bound_is_no_number_is_looked_at(monkeypatch, method):
    """0 times infinity: beyond float32 nothing is bounded."""
    monkeypatch.setattr(module, "_SEEDS", 4)
    rows = -np.random.default_rng(7).uniform(1e29, 1e30, (600, 8))
    rows[[123, 500]] = 0
    found = top_rows(pool_of(rows), np.full((1, 2, 8), 1e20), 2, method=method)
    assert sorted(found.places[0].tolist()) == [123, 500]
    assert found.scores[0].tolist() == [0, 0]


def test_the_vectors_weights_give_the_score():
    rng = np.random.default_rng(0)
    rows, vectors = rng.normal(size=(5, 16)), rng.normal(size=(4, 16))
    pool, mask = pool_of(rows), np.array([True, False, True, True])
    weights = weights_of_vectors(pool, 3, vectors, mask, "scaled_dot")
    assert weights.sum() == pytest.approx(1)
    assert weights[1] == 0
    (place,) = np.flatnonzero(
        top_rows(pool, vectors[None], 5, mask[None], "scaled_dot").places[0] == 3
    )
    score = top_rows(pool, vectors[None], 5, mask[None], "scaled_dot").scores[0, place]
    assert weights @ vectors @ rows[3] == pytest.approx(score, rel=1e-5)


def test_one_context_and_a_batch_of_contexts_get_the_same_answers():
    rng = np.random.default_rng(1)
    pool = pool_of(rng.integers(-3, 4, (60, 8)), [7, 30])
    vectors, mask = rng.integers(-2, 3, (20, 3, 8)), rng.random((20, 3)) < 0.7
    mask[:, 0] = True
    together = search(pool, vectors, 5, mask)
    assert together.scores.shape == (20, 5)
    for query in range(20):
        alone = search(pool, vectors[query], 5, mask[query])
        assert alone.ids == together.ids[query]
        assert alone.scores.shape == (5,)
        np.testing.assert_allclose(alone.scores, together.scores[query], rtol=1e-6)
        assert alone.certified is True
    np.testing.assert_array_equal(search(pool, vectors[0], 5).scores,
                                  search(pool, vectors[:1], 5, np.ones((1, 3))).scores[0])  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("block_rows", [7, 1000])
def test_rows_of_the_same_vector_stand_in_the_order_of_their_ids_wherever_they_lie(
    monkeypatch, block_rows, method
):
    """A matrix product rounds a row's last bits as its place in the block and the block's size say."""
    rng = np.random.default_rng(2)
    rows, vectors = rng.normal(size=(403, 100)), rng.normal(size=(1, 5, 100))
    same = np.r_[5:403:7, 401, 402]
    rows[same] = vectors[0, 0]  # the best by far
    ids = sorted(f"id{n}" for n in same)
    monkeypatch.setattr(module, "_BLOCK_ROWS", block_rows)
    for top_k in (1, 2, 30):
        answer = search(pool_of(rows, cuts=[6, 301]), vectors[0], top_k, method=method)
        assert answer.ids == ids[:top_k]
        assert len(set(answer.scores)) == 1


# Pruning. Where the vectors are the unit vectors, the rows are the logits themselves.


@pytest.fixture
def scored(monkeypatch):
    """How many rows were scored in full, call by call."""
    sizes: list[int] = []
    take = module._TopK.take
    monkeypatch.setattr(module._TopK, "take",
                        lambda self, places: sizes.append(len(places)) or take(self, places))  # fmt: skip
    return sizes


@pytest.mark.parametrize(("method", "form"), FORMS[1:])
def test_rows_that_cannot_reach_the_top_are_not_scored(scored, monkeypatch, method, form):
    monkeypatch.setattr(module, "_SEEDS", 10)
    monkeypatch.setattr(module, "FORMS", {method: (form,)})
    rng = np.random.default_rng(3)
    logits = rng.uniform(-1, 1, (1000, 4))
    logits[:10] += 5
    logits[555, 2] = 9  # may, and does
    logits[777, 2] = 4.9  # may by its greatest logit only
    pool = pool_of(logits)
    places = top_rows(pool, np.eye(4)[None], 3, method=method).places[0]
    assert sum(scored) <= 12 + 12  # the first guesses, one of each stretch, and those that may
    scores = float64_scores(pool, np.eye(4), np.ones(4, bool))
    assert places.tolist() == np.argsort(-scores)[:3].tolist()
    assert 555 in places


@st.composite
def tight_pools(draw):
    """(pool, vectors, top_k, all rows by their scores); some scores are just below or above the k-th one. The
    vectors are the unit vectors, so the rows are the logits themselves."""
    m, n = draw(st.integers(2, 5)), draw(st.integers(2, 30))
    threshold = np.float32(draw(st.sampled_from([1.0, -1.0, 1e-3, 300.0, -300.0])))
    steps = draw(st.lists(st.integers(-40, 40), min_size=n, max_size=n))
    logits = np.full((n, m), threshold)
    for row, step in zip(logits, steps, strict=True):
        row += step * np.spacing(threshold)
    lower = draw(st.lists(st.integers(0, n * m - 1), max_size=n))
    logits.ravel()[lower] -= np.float32(2.0)  # greatest logit at the threshold, score below it
    pool, vectors = pool_of(logits), np.eye(m)[None]
    return pool, vectors, draw(st.integers(1, n)), top_rows(pool, vectors, n, method="exact")


@pytest.mark.parametrize(("method", "form"), FORMS)
@settings(max_examples=30)
@given(tight_pools(), st.data())
def test_scores_just_below_or_above_the_kth_change_no_answer(method, form, task, data):
    pool, vectors, top_k, at_once = task
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_BLOCK_ROWS", "_SECTION_ROWS", "_SEEDS"):
            patch.setattr(module, name, data.draw(st.integers(1, 4)))
        patch.setattr(module, "FORMS", {method: (form,)})
        found = top_rows(pool, vectors, top_k, method=method)
    np.testing.assert_array_equal(found.places[0], at_once.places[0, :top_k])
    np.testing.assert_array_equal(found.scores[0], at_once.scores[0, :top_k])


# Refusals

POOL = pool_of(np.eye(4))


@pytest.mark.parametrize(
    ("vectors", "top_k", "options", "message"),
    [
        (np.ones((2, 4)), 0, {}, "top_k: 0 is not allowed; allowed: a whole"),
        (np.ones((2, 5)), 1, {}, r"\(1, 2, 5\) is not allowed; .* d = 4"),
        (np.ones(4), 1, {}, r"\(4,\) is not allowed"),
        (np.ones((1, 1, 2, 4)), 1, {}, r"\(1, 1, 2, 4\) is not allowed"),
        (np.ones((2, 4)), 1, {"vector_mask": np.zeros(2, bool)}, "vector_mask: one true value"),
        (np.ones((2, 2, 4)), 1, {"vector_mask": np.array([[1, 0], [0, 0]])}, "vector_mask: one true"),
        (np.ones((2, 4)), 1, {"vector_mask": np.ones(3, bool)}, "vector_mask: .* shape"),
        (np.ones((0, 4)), 1, {}, "vector_mask: one true value at least"),
        (np.full((2, 4), np.nan), 1, {}, "vectors: not finite"),
        (np.array([[np.inf, 0, 0, 0]]), 1, {}, "vectors: not finite"),
        (np.ones((2, 4)), 1, {"method": "fast"}, "method: 'fast' is not allowed; allowed: auto, "),
        (np.ones((2, 4)), 1, {"attention": "sum"}, "attention: 'sum' is not allowed"),
        (np.ones((2, 4)), 1, {"among": np.ones(3, bool)}, r"among: shape \(3,\) .* \(4,\)"),
        (np.ones((2, 4)), 1, {"among": np.array([1, 0, 1, 0])}, "among: .* int64 is not allowed"),
        ([np.ones((2, 4)), np.ones((3, 4))], 1, {}, "vectors: no array of numbers; .* vector_mask"),
        (np.ones((2, 4)), 2.0, {}, "top_k: 2.0 is not allowed; allowed: a whole number >= 1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(vectors, top_k, options, message):
    with pytest.raises(BadInput, match=f"^.*{message}.*$"):
        search(POOL, vectors, top_k, **options)


def test_no_contexts_get_no_answers():
    answer = search(POOL, np.ones((0, 2, 4)), 3)
    assert answer.ids == []
    assert answer.scores.shape == (0, 3)


def test_an_empty_pool_has_no_answers():
    answer = search(pool_of(np.empty((0, 4))), np.ones((2, 4)), 3)
    assert answer.ids == []
    assert answer.certified
