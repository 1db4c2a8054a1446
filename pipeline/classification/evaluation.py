"""A classifier's answers to texts whose intents are known: numbers, and the confusion as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from sklearn.metrics import confusion_matrix, f1_score
from torch import Tensor

from pipeline.arrays import Bools, Floats, Ints
from pipeline.classification import metrics
from pipeline.classification.texts import Labelled
from pipeline.evaluation.significance import mean_interval

_WHOLE = 40  # intents that a picture can name
_SHOWN = 30  # of more intents the worst


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
    """`accuracy` and `macro_f1` are of the texts in scope, whatever the threshold; with texts out of scope
    `in_scope_accuracy`, `oos_recall` and `oos_precision` say what the threshold does."""
    pair = answers.true_N, answers.answered_N
    values = {
        "accuracy": float(answers.is_right.mean()),
        # Of the intents that the texts have: those without a text have no F1.
        "macro_f1": float(f1_score(*pair, labels=np.unique(answers.true_N), average="macro")),
    }
    if len(answers.outside_M):
        scope = metrics.scope(threshold, answers.confidence_N, answers.is_right, answers.outside_M)
        values.update(scope._asdict())
    return values


def report(answers: Answers, labels: tuple[str, ...]) -> dict[str, Any]:
    """The 95 % interval of the accuracy, the worst intents, the pairs that are confused, and every intent."""
    pair = answers.true_N, answers.answered_N
    results = metrics.by_intent(*pair, labels)
    return {
        "accuracy_interval": mean_interval(answers.is_right.astype(np.float64)),
        "worst": [result._asdict() for result in metrics.worst(results)],
        "confusions": [confusion._asdict() for confusion in metrics.confusions(*pair, labels)],
        "by_intent": [result._asdict() for result in results],
    }


def plot(answers: Answers, labels: tuple[str, ...]) -> bytes:
    """A PNG of the confusion: a row is an intent, a column what its texts were answered with, as shares of
    the row. Of more than 40 intents the 30 worst, and the others' answers together."""
    results = metrics.by_intent(answers.true_N, answers.answered_N, labels)
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
