"""Metrics of a classifier of intents. N texts, C intents; counts[true, answered] is the confusion."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

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


def confusion_counts(true_N: Ints, answered_N: Ints, intents: int) -> Ints:
    """[C, C]"""
    counts = np.zeros((intents, intents), np.int64)
    np.add.at(counts, (true_N, answered_N), 1)
    return counts


def accuracy(counts_CC: Ints) -> float:
    """Share of the texts whose intent is answered."""
    return float(np.trace(counts_CC) / counts_CC.sum())


def by_intent(counts_CC: Ints, labels: tuple[str, ...]) -> list[IntentResult]:
    """The intents that the texts have, worst F1 first. A precision without answers is 0."""
    right_counts_C = np.diag(counts_CC)
    texts_C, answers_C = counts_CC.sum(1), counts_CC.sum(0)
    results = []
    for place in np.flatnonzero(texts_C).tolist():
        wrong_counts_C = counts_CC[place].copy()
        wrong_counts_C[place] = 0
        most_confused = int(wrong_counts_C.argmax())
        results.append(
            IntentResult(
                labels[place],
                int(texts_C[place]),
                float(right_counts_C[place] / texts_C[place]),
                float(right_counts_C[place] / max(answers_C[place], 1)),
                float(2 * right_counts_C[place] / (texts_C[place] + answers_C[place])),
                labels[most_confused] if wrong_counts_C[most_confused] else "",
            )
        )
    return sorted(results, key=lambda result: (result.f1, result.intent))


def macro_f1(results: list[IntentResult]) -> float:
    """The mean of the F1 of the intents that the texts have."""
    return float(np.mean([result.f1 for result in results]))


def worst(results: list[IntentResult]) -> list[IntentResult]:
    """The ten worst that have an error."""
    return [result for result in results if result.f1 < 1][:_WORST]


def confusions(counts_CC: Ints, labels: tuple[str, ...]) -> list[Confusion]:
    """The ten pairs that are confused most often."""
    wrong_counts_CC = counts_CC.copy()
    np.fill_diagonal(wrong_counts_CC, 0)
    order = np.argsort(-wrong_counts_CC, axis=None, kind="stable")[:_PAIRS]
    pairs = [divmod(int(place), len(labels)) for place in order]
    return [
        Confusion(labels[a], labels[b], int(wrong_counts_CC[a, b]))
        for a, b in pairs
        if wrong_counts_CC[a, b]
    ]


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
