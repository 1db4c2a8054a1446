"""Accuracy, F1 and confusions beside scikit-learn's; the threshold beside trying them all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, confusion_matrix, precision_recall_fscore_support

from pipeline.classification import metrics


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=40))
def test_numbers_are_scikit_learns(pairs):
    true, answered = (np.array(column) for column in zip(*pairs, strict=True))
    counts = metrics.confusion_counts(true, answered, 5)
    assert np.array_equal(counts, confusion_matrix(true, answered, labels=range(5)))
    assert metrics.accuracy(counts) == pytest.approx(accuracy_score(true, answered))
    results = metrics.by_intent(counts, tuple("abcde"))
    there = sorted(set(true.tolist()))
    expected = precision_recall_fscore_support(true, answered, labels=there, zero_division=0)
    found = sorted(results, key=lambda one: one.intent)
    assert [one.intent for one in found] == ["abcde"[place] for place in there]
    for name, values in zip(("precision", "recall", "f1", "examples"), expected, strict=True):
        assert [getattr(one, name) for one in found] == pytest.approx(values.tolist())
    assert metrics.macro_f1(results) == pytest.approx(expected[2].mean())


def test_the_worst_come_first_and_say_what_they_are_taken_for():
    counts = np.array([[9, 1, 0], [4, 5, 1], [0, 0, 10]])
    results = metrics.by_intent(counts, ("a", "b", "c"))
    assert [one.intent for one in results] == ["b", "a", "c"]
    assert [one.taken_for for one in results] == ["a", "b", ""]
    assert metrics.confusions(counts, ("a", "b", "c")) == [
        ("b", "a", 4),
        ("a", "b", 1),
        ("b", "c", 1),
    ]
    assert metrics.worst(metrics.by_intent(np.diag([1, 2, 3]), ("a", "b", "c"))) == []


shares = st.integers(0, 8).map(lambda eighths: eighths / 8)


@given(
    st.lists(st.tuples(shares, st.booleans()), min_size=1, max_size=25),
    st.lists(shares, max_size=25),
)
def test_the_threshold_is_the_best_of_all(inside, outside):
    confidence = np.array([value for value, _ in inside])
    right, beyond = np.array([one for _, one in inside]), np.array(outside, float)

    def score(threshold: float) -> int:
        return int((right & (confidence >= threshold)).sum() + (beyond < threshold).sum())

    threshold = metrics.best_threshold(confidence, right, beyond)
    assert score(threshold) == max(score(place / 16) for place in range(18))
    if not outside and right.all():
        assert threshold == 0.0


def test_what_a_threshold_does():
    found = metrics.scope(
        0.5,
        np.array([0.9, 0.4, 0.6, 0.5]),
        np.array([True, True, False, True]),
        np.array([0.1, 0.7, 0.3]),
    )
    assert found == pytest.approx((0.5, 2 / 3, 2 / 3))
