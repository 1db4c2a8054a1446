"""Ranks that no constant, tied or broken score can gain from, and the metrics made of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import label_ranking_average_precision_score, top_k_accuracy_score

from pipeline.evaluation.metrics import pessimistic_ranks, recall_at, summarise

NAN, INF = math.nan, math.inf
# Few different values, so that there are ties.
score = st.sampled_from([-INF, -1.0, 0.0, 0.5, 2.0, INF, NAN])
tasks = st.lists(score, min_size=1, max_size=8).flatmap(
    lambda scores: st.tuples(st.just(scores), st.integers(0, len(scores) - 1))
)


@given(tasks)
def test_rank_is_the_place_behind_everything_not_surely_worse(task):
    scores, label = task
    rank = 1
    for place, other in enumerate(scores):
        unknown = math.isnan(other) or math.isnan(scores[label])
        surely_worse = not unknown and other < scores[label]
        rank += place != label and not surely_worse
    assert pessimistic_ranks(np.array([scores]), np.array([label])).tolist() == [rank]


@pytest.mark.parametrize(
    ("constant", "candidates"), [(0.0, 2), (-3.5, 20), (NAN, 20), (INF, 20), (-INF, 20)]
)
def test_a_constant_scorer_earns_nothing(constant, candidates):
    """Always the last rank: R@k is 0 for every k below C, and only 1/C remains as MRR."""
    ranks = pessimistic_ranks(np.full((candidates, candidates), constant), np.arange(candidates))
    assert [recall_at(ranks, k) for k in range(1, candidates)] == [0] * (candidates - 1)
    assert recall_at(ranks, candidates) == 1
    assert summarise(ranks, candidates, [])["MRR"] == pytest.approx(1 / candidates)


@given(st.integers(2, 6), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_mrr_is_sklearns_average_precision_which_is_pessimistic_too(candidates, count, seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 4, (count, candidates)).astype(float)
    labels = rng.integers(0, candidates, count)
    ranks = pessimistic_ranks(scores, labels)
    expected = label_ranking_average_precision_score(np.eye(candidates)[labels], scores)
    assert summarise(ranks, candidates, [])["MRR"] == pytest.approx(expected)


@given(st.integers(3, 6), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_recall_is_sklearns_top_k_accuracy_where_nothing_ties(candidates, count, seed):
    rng = np.random.default_rng(seed)
    scores = rng.permuted(np.tile(np.arange(candidates), (count, 1)), axis=1).astype(float)
    labels = rng.integers(0, candidates, count)
    ranks = pessimistic_ranks(scores, labels)
    for k in range(1, candidates):
        expected = top_k_accuracy_score(labels, scores, k=k, labels=range(candidates))
        assert recall_at(ranks, k) == pytest.approx(expected)


def test_summary_names_k_and_c_and_leaves_out_what_is_always_1():
    found = summarise(np.array([1, 2, 4, 10]), 10, [1, 2, 5, 10, 50])
    assert found == {
        "R@1/10": 0.25,
        "R@2/10": 0.5,
        "R@5/10": 0.75,
        "MRR": pytest.approx((1 + 1 / 2 + 1 / 4 + 1 / 10) / 4),
    }
