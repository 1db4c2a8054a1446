"""Ranks and what is made of them. Ties count against the model, so a constant scorer earns nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.arrays import Floats, Ints


def pessimistic_rank(scores: Floats, label: int) -> int:
    """The right candidate's rank from 1: behind all that are not scored strictly below it.

    scores [C]. A score that is not a number is never below another, and nothing is below it.
    """
    return 1 + int((~(np.delete(scores, label) < scores[label])).sum())


def recall_at(ranks: Ints, k: int) -> float:
    """R@k: the share of ranks that are at most k."""
    return float((ranks <= k).mean())


def mean_reciprocal_rank(ranks: Ints) -> float:
    """MRR: the mean of 1/rank; with one right candidate it is the mean average precision too."""
    return float((1.0 / ranks).mean())


def summarise(ranks: Ints, candidates: int, recall_ks: Sequence[int]) -> dict[str, float]:
    """{"R@1/20": …, "MRR": …}"""
    recalls = {f"R@{k}/{candidates}": recall_at(ranks, k) for k in recall_ks if k < candidates}
    return {**recalls, "MRR": mean_reciprocal_rank(ranks)}
