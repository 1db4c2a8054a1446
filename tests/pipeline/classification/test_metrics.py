"""The worst intents and the confusions by hand; the threshold beside trying them all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.classification import metrics

CONFUSION = np.array([[9, 1, 0], [4, 5, 1], [0, 0, 10]])
PLACES = np.indices((3, 3)).reshape(2, 9)


def test_the_worst_come_first_and_say_what_they_are_taken_for():
    true, answered = np.repeat(PLACES, CONFUSION.ravel(), axis=1)
    results = metrics.by_intent(true, answered, ("a", "b", "c"))
    assert results[0] == ("b", 10, 0.5, pytest.approx(5 / 6), 0.625, "a")
    assert [one.intent for one in results] == ["b", "a", "c"]
    assert [one.taken_for for one in results] == ["a", "b", ""]
    assert metrics.confusions(true, answered, ("a", "b", "c")) == [
        ("b", "a", 4),
        ("a", "b", 1),
        ("b", "c", 1),
    ]
    assert metrics.worst(metrics.by_intent(true, true, ("a", "b", "c"))) == []


def test_an_intent_without_texts_has_no_row_and_one_without_answers_has_precision_0():
    results = metrics.by_intent(np.array([0, 2, 2]), np.array([1, 2, 2]), ("a", "b", "c"))
    assert results == [("a", 1, 0, 0, 0, "b"), ("c", 2, 1, 1, 1, "")]


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
