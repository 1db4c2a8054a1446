"""Confidence intervals of metrics, and tests of whether two models differ.

Intervals are percentiles of means in which each question has a random weight (the Bayesian bootstrap: Rubin,
1981), the same exponential distribution for all. One more question has the least possible value for the
lower bound, the greatest for the upper bound: it stands for what N questions do not show. These are the
bounds of Gaffke (2005) for the mean of a bounded value (Learned-Miller and Thomas, arXiv 1905.06208). The
weights of equal questions sum up to a gamma draw, so 10,000 draws take milliseconds.

For shares, such as R@1, they are the bounds of Clopper and Pearson (1934) but for the noise of the draws:
30 of 30 right mean 0.884 at least. The interval of two models' difference leaves out 0 only where the sign
test has p below 0.05. Two models that agree on all of 300 questions may differ by 0.012 on either side.

Questions of one dialogue are not independent, so true intervals are wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.arrays import Bools, Floats, Ints
from pipeline.evaluation.metrics import metric_values

RESAMPLES = 10_000
_TAIL = (1 - 0.95) / 2
_DRAWN_AT_ONCE = 1 << 22  # 32 MB of counts

Interval = tuple[float, float]


@dataclass(frozen=True)
class Comparison:
    """Two models on the same questions, by R@1."""

    first: str
    second: str
    difference: float
    """R@1 of the first less that of the second."""
    interval: Interval
    """The 95 % interval of the difference."""
    p: float
    """Two-sided sign test on the questions that one of them gets right; not corrected for the number
    of comparisons. It is the exact form of the permutation test: to swap the two models' answers to
    a question changes the difference only where they disagree, and there by a coin's toss."""


def intervals(
    ranks: Ints, candidates: int, recall_ks: Sequence[int], seed: int = 0
) -> dict[str, Interval]:
    """The 95 % interval of each metric of `summarise`."""
    distinct_U, counts_U = np.unique(ranks, return_counts=True)
    parts = metric_values(distinct_U, candidates, recall_ks)
    limits = metric_values(np.array([candidates, 1]), candidates, recall_ks)
    values_UK, limits_2K = (np.stack(list(p.values()), axis=1) for p in (parts, limits))
    low_K, high_K = _bounds(values_UK, counts_U, limits_2K, seed)
    return {name: (float(low_K[at]), float(high_K[at])) for at, name in enumerate(parts)}


def compare(
    first: str, second: str, is_right_first_N: Bools, is_right_second_N: Bools, seed: int = 0
) -> Comparison:
    """`right_…`: whether the model ranked the right candidate first."""
    from scipy.stats import binomtest

    questions = len(is_right_first_N)
    wins = int((is_right_first_N & ~is_right_second_N).sum())
    losses = int((is_right_second_N & ~is_right_first_N).sum())
    counts_3 = np.array([wins, losses, questions - wins - losses])
    low, high = _interval(np.array([1.0, -1.0, 0.0]), counts_3, (-1.0, 1.0), seed)
    p = float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    if p >= 2 * _TAIL:  # which is exact; a bound that is drawn may pass 0 up to a p of 0.054
        low, high = min(low, 0.0), max(high, 0.0)
    return Comparison(first, second, (wins - losses) / questions, (low, high), p)


def mean_interval(
    values_N: Floats, seed: int = 0, limits: tuple[float, float] = (0.0, 1.0)
) -> Interval:
    """The 95 % interval of a mean over questions. `limits`: the least and the greatest possible value."""
    return _interval(*np.unique(values_N, return_counts=True), limits, seed)


def compare_means(
    first: str, second: str, hits_first_N: Floats, hits_second_N: Floats, seed: int = 0
) -> Comparison:
    """As `compare`, for the share of several runs (0 to 1) that got each question right.

    p: the permutation test, whose 10,000 draws swap the two models' shares question by question. The
    sum of n equal differences d becomes d · (2 · Binomial(n, ½) - n).
    """
    difference_N = hits_first_N - hits_second_N
    # 1 less two thirds is not a third, in its last bits.
    size_U, counts_U = np.unique(np.abs(difference_N).round(9), return_counts=True)
    swapped_RU = 2 * np.random.default_rng(seed).binomial(counts_U, 0.5, (RESAMPLES, len(size_U)))
    sums_R = (swapped_RU - counts_U) @ size_U
    observed = abs(float(difference_N.sum())) - 1e-6
    p = (1 + int((np.abs(sums_R) >= observed).sum())) / (1 + RESAMPLES)
    interval = mean_interval(difference_N, seed, (-1.0, 1.0))
    return Comparison(first, second, float(difference_N.mean()), interval, p)


def _interval(values_U: Floats, counts_U: Ints, limits: tuple[float, float], seed: int) -> Interval:
    low_1, high_1 = _bounds(values_U[:, None], counts_U, np.array(limits)[:, None], seed)
    return float(low_1[0]), float(high_1[0])


def _bounds(
    values_UK: Floats, counts_U: Ints, limits_2K: Floats, seed: int
) -> tuple[Floats, Floats]:
    """The bounds, [K] each, of the means of K quantities that U kinds of questions earn.

    `limits_2K`: the least and the greatest possible value of each quantity.
    """
    rng = np.random.default_rng(seed)
    shapes = np.append(counts_U, 1)  # the last weight is that of the question that was not seen
    step = max(1, _DRAWN_AT_ONCE // len(shapes))
    means = []
    for start in range(0, RESAMPLES, step):
        weights_RU = rng.standard_gamma(shapes, (min(step, RESAMPLES - start), len(shapes)))
        weights_RU /= weights_RU.sum(axis=1, keepdims=True)
        unseen_2RK = weights_RU[:, -1:] * limits_2K[:, None]
        means.append(weights_RU[:, :-1] @ values_UK + unseen_2RK)
    low_RK, high_RK = np.concatenate(means, axis=1)
    low_K, high_K = np.quantile(low_RK, _TAIL, axis=0), np.quantile(high_RK, 1 - _TAIL, axis=0)
    least_K, most_K = limits_2K  # which sums of weights may pass in their last bits
    return np.maximum(low_K, least_K), np.minimum(high_K, most_K)
