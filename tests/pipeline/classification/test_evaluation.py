"""The worst intents and the confusions by hand; the threshold beside trying them all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.classification import evaluation
from pipeline.classification.evaluation import Answers
from pipeline.classification.texts import Labelled

CONFUSION = np.array([[9, 1, 0], [4, 5, 1], [0, 0, 10]])
PLACES = np.indices((3, 3)).reshape(2, 9)
LABELS = ("a", "b", "c")


def answers(true, answered, confidence=(), outside=()) -> Answers:
    return Answers(*map(np.asarray, (true, answered)), np.array(confidence), np.array(outside))


def test_the_worst_come_first_and_say_what_they_are_taken_for():
    found = answers(*np.repeat(PLACES, CONFUSION.ravel(), axis=1))
    results = evaluation.by_intent(found, LABELS)
    assert results[0] == ("b", 10, 0.5, pytest.approx(5 / 6), 0.625, "a")
    assert [one.intent for one in results] == ["b", "a", "c"]
    assert [one.taken_for for one in results] == ["a", "b", ""]
    confusions = [("b", "a", 4), ("a", "b", 1), ("b", "c", 1)]
    assert evaluation.confusions(found, LABELS) == confusions
    assert [one["intent"] for one in evaluation.report(found, LABELS)["worst"]] == ["b", "a", "c"]
    assert evaluation.report(answers(found.true_N, found.true_N), LABELS)["worst"] == []


def test_an_intent_without_texts_has_no_row_and_one_without_answers_has_precision_0():
    results = evaluation.by_intent(answers([0, 2, 2], [1, 2, 2]), LABELS)
    assert results == [("a", 1, 0, 0, 0, "b"), ("c", 2, 1, 1, 1, "")]


shares = st.integers(0, 8).map(lambda eighths: eighths / 8)


@given(
    st.lists(st.tuples(shares, st.booleans()), min_size=1, max_size=25),
    st.lists(shares, max_size=25),
)
def test_the_threshold_is_the_best_of_all(inside, outside):
    confidence, right = map(np.array, zip(*inside, strict=True))
    beyond = np.array(outside, float)

    def score(threshold: float) -> int:
        return int((right & (confidence >= threshold)).sum() + (beyond < threshold).sum())

    threshold = evaluation.best_threshold(answers(np.ones_like(right), right, confidence, beyond))
    assert score(threshold) == max(score(place / 16) for place in range(18))
    if not outside and right.all():
        assert threshold == 0.0


def test_what_a_threshold_does():
    found = answers([1, 1, 1, 0], [1, 1, 0, 0], [0.9, 0.4, 0.6, 0.5], [0.1, 0.7, 0.3])
    assert evaluation.numbers(found, 0.5) == pytest.approx({
        "accuracy": 0.75, "macro_f1": (4 / 5 + 2 / 3) / 2,
        "in_scope_accuracy": 0.5, "oos_recall": 2 / 3, "oos_precision": 2 / 3,
    })  # fmt: skip


def test_names_of_intents_are_no_formulas():
    labels = ("top_up_$_#_$", r"a\$b", "plain")
    texts = [Labelled("text", label) for label in labels]
    given = evaluation.answers(texts, torch.eye(3), labels)
    assert evaluation.plot(given, labels).startswith(b"\x89PNG")
