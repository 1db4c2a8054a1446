"""Metrics of a classifier of intents. N texts, C intents, by their places in `labels`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from pipeline.arrays import Bools, Floats, Ints

_WORST, _PAIRS = 10, 10


class IntentResult(NamedTuple):
    """One intent."""

    intent: str
    examples: int
    recall: float
    precision: float
    f1: float
    taken_for: str
    """The wrong intent that is answered most often; "": none is."""


class Confusion(NamedTuple):
    """Texts of one intent that were answered with another."""

    intent: str
    answered: str
    examples: int


def by_intent(true_N: Ints, answered_N: Ints, labels: tuple[str, ...]) -> list[IntentResult]:
    """The intents that the texts have, worst F1 first. A precision without answers is 0."""
    wrong_counts_CC = _wrong_counts(true_N, answered_N, labels)
    scores = precision_recall_fscore_support(
        true_N, answered_N, labels=range(len(labels)), zero_division=0
    )
    results = []
    for place, (precision, recall, f1, examples) in enumerate(zip(*scores, strict=True)):
        wrong_counts_C = wrong_counts_CC[place]
        taken_for = labels[int(wrong_counts_C.argmax())] if wrong_counts_C.any() else ""
        numbers = (float(recall), float(precision), float(f1))
        if examples:
            results.append(IntentResult(labels[place], int(examples), *numbers, taken_for))
    return sorted(results, key=lambda result: (result.f1, result.intent))


def worst(results: list[IntentResult]) -> list[IntentResult]:
    """The ten worst that have an error."""
    return [result for result in results if result.f1 < 1][:_WORST]


def confusions(true_N: Ints, answered_N: Ints, labels: tuple[str, ...]) -> list[Confusion]:
    """The ten pairs that are confused most often."""
    wrong_counts_CC = _wrong_counts(true_N, answered_N, labels)
    order = np.argsort(-wrong_counts_CC, axis=None, kind="stable")[:_PAIRS]
    pairs = [divmod(int(place), len(labels)) for place in order]
    return [
        Confusion(labels[a], labels[b], int(wrong_counts_CC[a, b]))
        for a, b in pairs
        if wrong_counts_CC[a, b]
    ]


def _wrong_counts(true_N: Ints, answered_N: Ints, labels: tuple[str, ...]) -> Ints:
    """[C, C]: the confusion, with 0 for right answers."""
    counts_CC: Ints = confusion_matrix(true_N, answered_N, labels=range(len(labels)))
    np.fill_diagonal(counts_CC, 0)
    return counts_CC


# ---------------------------------------------------------------------------------------------------
# Out of scope: a text whose best probability is below a threshold has none of the intents.


class Scope(NamedTuple):
    """The effect of a threshold."""

    in_scope_accuracy: float
    """Share of the texts in scope whose intent is answered, and not answered "out of scope"."""
    oos_recall: float
    """Share of the texts out of scope that are answered so."""
    oos_precision: float
    """Share of the texts answered "out of scope" that are; 0 where there are none."""


def best_threshold(confidence_N: Floats, is_right_N: Bools, outside_M: Floats) -> float:
    """The threshold with the most right answers, "out of scope" being one (Larson et al. 2019).

    `confidence_N`, `is_right_N`: of texts in scope their best probability, and whether it is of the right
    intent; `outside_M`: the best probability of texts out of scope. Of several thresholds the lowest.
    """
    confidence = np.concatenate([confidence_N, outside_M])
    gain = np.concatenate([-is_right_N.astype(np.int64), np.ones(len(outside_M), np.int64)])
    order = np.argsort(confidence, kind="stable")
    confidence, gain = confidence[order], np.cumsum(gain[order])
    # A threshold stands between two values that differ: texts below it are rejected.
    ends = np.flatnonzero(np.append(confidence[:-1] < confidence[1:], True))
    best = int(ends[np.argmax(gain[ends])])
    if gain[best] <= 0:
        return 0.0
    below = confidence[best]
    above = confidence[best + 1] if best + 1 < len(confidence) else below
    return float(max((below + above) / 2, np.nextafter(below, 2)))


def scope(threshold: float, confidence_N: Floats, is_right_N: Bools, outside_M: Floats) -> Scope:
    """The effect of a threshold on texts in scope and out of scope."""
    accepted_N, rejected_M = confidence_N >= threshold, outside_M < threshold
    rejected_count = rejected_M.sum() + (~accepted_N).sum()
    return Scope(
        float((accepted_N & is_right_N).mean()),
        float(rejected_M.mean()),
        float(rejected_M.sum() / max(rejected_count, 1)),
    )
