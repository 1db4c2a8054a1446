"""Ranks, and the metrics made of them. Ties count against the model, so a constant scorer earns nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.arrays import Floats, Ints


def pessimistic_ranks(scores_NC: Floats, labels_N: Ints) -> Ints:
    """The right candidates' ranks from 1: behind all that are not scored strictly below them.

    A score that is not a number is never below another, and nothing is below it.
    """
    right_scores_N1 = np.take_along_axis(scores_NC, labels_N[:, None], axis=1)
    return np.asarray(scores_NC.shape[1] - (scores_NC < right_scores_N1).sum(axis=1), np.int64)


def cross_entropies(scores_NC: Floats, labels_N: Ints) -> Floats:
    """Cross-entropies of the right candidates under a softmax, in nats; a score of -inf is no candidate."""
    right_scores_N1 = np.take_along_axis(scores_NC, labels_N[:, None], axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        shifted_NC = np.asarray(scores_NC - right_scores_N1, np.float64)
        entropies_N: Floats = np.logaddexp.reduce(shifted_NC, axis=1)
    return entropies_N


def recall_at(ranks: Ints, k: int) -> float:
    """R@k: the share of ranks that are at most k."""
    return float((ranks <= k).mean())


def metric_values(ranks: Ints, candidates: int, recall_ks: Sequence[int]) -> dict[str, Floats]:
    """What each question adds to each metric, [N] each: {"R@1/20": 0 or 1, …, "MRR": 1/rank}.

    With one right candidate MRR is the mean average precision, too.
    """
    recalls = {f"R@{k}/{candidates}": 1.0 * (ranks <= k) for k in recall_ks if k < candidates}
    return {**recalls, "MRR": 1.0 / ranks}


def summarise(ranks: Ints, candidates: int, recall_ks: Sequence[int]) -> dict[str, float]:
    """{"R@1/20": …, "MRR": …}; an R@k that is always 1 is left out."""
    parts = metric_values(ranks, candidates, recall_ks)
    return {name: float(values.mean()) for name, values in parts.items()}
