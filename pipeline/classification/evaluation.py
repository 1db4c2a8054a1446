"""A classifier's answers to texts whose intents are known: numbers, and the confusion as a picture.

A text whose best probability is below a threshold is answered "out of scope": it has none of the intents.
N texts in scope, M out of scope, C intents, by their places in `labels`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from sklearn.metrics import confusion_matrix, f1_score, precision_recall_fscore_support
from torch import Tensor

from pipeline.arrays import Bools, Floats, Ints
from pipeline.classification.texts import Labelled
from pipeline.evaluation.significance import mean_interval

_WHOLE = 40  # intents that a picture can name
_SHOWN = 30  # of more intents the worst
_WORST, _PAIRS = 10, 10


@dataclass(frozen=True)
class Answers:
    """Answers to N texts in scope and M out of scope."""

    true_N: Ints
    answered_N: Ints
    confidence_N: Floats
    """The best probability."""
    outside_M: Floats
    """The best probabilities of texts out of scope."""

    @property
    def is_right(self) -> Bools:
        """[N]"""
        return np.asarray(self.true_N == self.answered_N)


def answers(texts: Sequence[Labelled], probabilities: Tensor, labels: tuple[str, ...]) -> Answers:
    """Probabilities [texts, C] beside the intents that are right."""
    place_of_label = {label: place for place, label in enumerate(labels)}
    inside = [place for place, row in enumerate(texts) if not row.out_of_scope]
    outside = [place for place, row in enumerate(texts) if row.out_of_scope]
    probabilities_NC = probabilities.double().numpy()
    return Answers(
        np.array([place_of_label[texts[place].intent] for place in inside], np.int64),
        probabilities_NC[inside].argmax(axis=1).astype(np.int64),
        probabilities_NC[inside].max(axis=1, initial=0.0),
        probabilities_NC[outside].max(axis=1, initial=0.0),
    )


def numbers(answers: Answers, threshold: float) -> dict[str, float]:
    """`accuracy` and `macro_f1` are of the texts in scope, whatever the threshold.

    With texts out of scope, `in_scope_accuracy`: the share of the texts in scope whose intent is answered,
    and not "out of scope"; `oos_recall`: of the texts out of scope that are answered so; `oos_precision`: of
    the texts answered "out of scope" that are, 0 where there are none.
    """
    pair = answers.true_N, answers.answered_N
    values = {
        "accuracy": float(answers.is_right.mean()),
        # Of the intents that the texts have: those without a text have no F1.
        "macro_f1": float(f1_score(*pair, labels=np.unique(answers.true_N), average="macro")),
    }
    if len(answers.outside_M):
        accepted_N, rejected_M = answers.confidence_N >= threshold, answers.outside_M < threshold
        rejected_count = rejected_M.sum() + (~accepted_N).sum()
        values |= {
            "in_scope_accuracy": float((accepted_N & answers.is_right).mean()),
            "oos_recall": float(rejected_M.mean()),
            "oos_precision": float(rejected_M.sum() / max(rejected_count, 1)),
        }
    return values


def best_threshold(answers: Answers) -> float:
    """The threshold with the most right answers, "out of scope" being one (Larson et al. 2019). Of several
    thresholds the lowest."""
    confidence = np.concatenate([answers.confidence_N, answers.outside_M])
    lost_N, gained_M = -answers.is_right.astype(np.int64), np.ones_like(answers.outside_M, np.int64)
    order = np.argsort(confidence, kind="stable")
    confidence, gain = confidence[order], np.cumsum(np.concatenate([lost_N, gained_M])[order])
    # A threshold stands between two values that differ: texts below it are rejected.
    ends = np.flatnonzero(np.append(confidence[:-1] < confidence[1:], True))
    best = int(ends[np.argmax(gain[ends])])
    if gain[best] <= 0:
        return 0.0
    below = confidence[best]
    above = confidence[best + 1] if best + 1 < len(confidence) else below
    return float(max((below + above) / 2, np.nextafter(below, 2)))


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


def report(answers: Answers, labels: tuple[str, ...]) -> dict[str, Any]:
    """The 95 % interval of the accuracy, the ten worst intents, the ten pairs that are confused most often,
    and every intent."""
    results = by_intent(answers, labels)
    worst = [result for result in results if result.f1 < 1][:_WORST]
    return {
        "accuracy_interval": mean_interval(answers.is_right.astype(np.float64)),
        "worst": [result._asdict() for result in worst],
        "confusions": [confusion._asdict() for confusion in confusions(answers, labels)],
        "by_intent": [result._asdict() for result in results],
    }


def by_intent(answers: Answers, labels: tuple[str, ...]) -> list[IntentResult]:
    """The intents that the texts have, worst F1 first. A precision without answers is 0."""
    wrong_counts_CC = _wrong_counts(answers, labels)
    scores = precision_recall_fscore_support(
        answers.true_N, answers.answered_N, labels=range(len(labels)), zero_division=0
    )
    results = []
    for place, (precision, recall, f1, examples) in enumerate(zip(*scores, strict=True)):
        wrong_counts_C = wrong_counts_CC[place]
        taken_for = labels[int(wrong_counts_C.argmax())] if wrong_counts_C.any() else ""
        numbers = (float(recall), float(precision), float(f1))
        if examples:
            results.append(IntentResult(labels[place], int(examples), *numbers, taken_for))
    return sorted(results, key=lambda result: (result.f1, result.intent))


def confusions(answers: Answers, labels: tuple[str, ...]) -> list[Confusion]:
    """The ten pairs that are confused most often."""
    wrong_counts_CC = _wrong_counts(answers, labels)
    order = np.argsort(-wrong_counts_CC, axis=None, kind="stable")[:_PAIRS]
    pairs = [divmod(int(place), len(labels)) for place in order]
    return [
        Confusion(labels[a], labels[b], int(wrong_counts_CC[a, b]))
        for a, b in pairs
        if wrong_counts_CC[a, b]
    ]


def _wrong_counts(answers: Answers, labels: tuple[str, ...]) -> Ints:
    """[C, C]: the confusion, with 0 for right answers."""
    counts_CC: Ints = confusion_matrix(
        answers.true_N, answers.answered_N, labels=range(len(labels))
    )
    np.fill_diagonal(counts_CC, 0)
    return counts_CC


def plot(answers: Answers, labels: tuple[str, ...]) -> bytes:
    """A PNG of the confusion: a row is an intent, a column what its texts were answered with, as shares of
    the row. Of more than 40 intents the 30 worst, and the others' answers together."""
    results = by_intent(answers, labels)
    shown_intents = sorted(
        result.intent for result in (results if len(results) <= _WHOLE else results[:_SHOWN])
    )
    places = [labels.index(name) for name in shown_intents]
    shares_CC = confusion_matrix(
        answers.true_N, answers.answered_N, labels=range(len(labels)), normalize="true"
    )
    shares_RR = shares_CC[np.ix_(places, places)]
    columns = list(shown_intents)
    if len(shown_intents) < len(labels):
        shares_RR = np.column_stack([shares_RR, 1 - shares_RR.sum(1)])
        columns.append("(another)")
    inches = 3 + 0.22 * len(shown_intents)
    figure = Figure(figsize=(inches + 1, inches), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares_RR, cmap="Blues", vmin=0, vmax=1)
    column_names, row_names = (
        [name.replace("$", r"\$") for name in names] for names in (columns, shown_intents)
    )  # no formulas
    axes.set_xticks(range(len(columns)), column_names, rotation=90, fontsize=7)
    axes.set_yticks(range(len(shown_intents)), row_names, fontsize=7)
    axes.set_xlabel("answered")
    axes.set_ylabel("intent")
    title = (
        f"{len(shown_intents)} of {len(labels)} intents, the worst"
        if len(columns) > len(shown_intents)
        else ""
    )
    axes.set_title(title, fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.6, label="share of the intent's texts")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
