"""How sure a number is, and whether two models differ.

Intervals are percentiles of the bootstrap over questions. To draw N of N questions with replacement
is to draw from the histogram of their ranks: one multinomial draw per resample, exact, and 10,000 of
them take milliseconds. Questions of one dialogue are not independent, so true intervals are wider.

Where all questions are right, or all are wrong, every draw is the same. The bound is then the exact one of a
binomial share (Clopper and Pearson, 1934): 30 of 30 right mean 0.884 at least. So it is where two models
agree on all questions: on 300 their difference may be 0.012 on either side.
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
    """The interval of the difference: paired bootstrap, 95 %; without any difference, the exact bound."""
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
    low, high = _percentiles(np.stack(list(parts.values()), axis=1), counts_U, seed)
    unseen = _unseen_share(len(ranks))
    for at, values_U in enumerate(parts.values()):
        low[at] = 1 - unseen if values_U.min() == 1 else low[at]
        high[at] = unseen if values_U.max() == 0 else high[at]
    return {name: (float(low[at]), float(high[at])) for at, name in enumerate(parts)}


def compare(
    first: str, second: str, is_right_first_N: Bools, is_right_second_N: Bools, seed: int = 0
) -> Comparison:
    """`right_…`: whether the model ranked the right candidate first."""
    from scipy.stats import binomtest

    questions = len(is_right_first_N)
    wins = int((is_right_first_N & ~is_right_second_N).sum())
    losses = int((is_right_second_N & ~is_right_first_N).sum())
    counts_3 = np.array([wins, losses, questions - wins - losses])
    low, high = _percentiles(np.array([[1.0], [-1.0], [0.0]]), counts_3, seed)
    p = float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    unseen = _unseen_share(questions)
    interval = (float(low[0]), float(high[0])) if wins + losses else (-unseen, unseen)
    return Comparison(first, second, (wins - losses) / questions, interval, p)


def mean_interval(values_N: Floats, seed: int = 0) -> Interval:
    """The 95 % interval of a mean over questions."""
    distinct_U, counts_U = np.unique(values_N, return_counts=True)
    low, high = _percentiles(distinct_U[:, None], counts_U, seed)
    return float(low[0]), float(high[0])


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
    unseen = _unseen_share(len(difference_N))
    interval = mean_interval(difference_N, seed) if size_U.any() else (-unseen, unseen)
    return Comparison(first, second, float(difference_N.mean()), interval, p)


def _unseen_share(questions: int) -> float:
    """The largest share of questions that may have a property which none of these has: Clopper and Pearson's
    bound, which a larger share passes with 2.5 % at most."""
    return float(1 - _TAIL ** (1 / questions))


def _percentiles(values_UK: Floats, counts_U: Ints, seed: int) -> tuple[Floats, Floats]:
    """The bounds, [K] each, of the means of K quantities that U kinds of questions earn."""
    rng = np.random.default_rng(seed)
    questions = int(counts_U.sum())
    step = max(1, _DRAWN_AT_ONCE // len(counts_U))
    means = [
        rng.multinomial(questions, counts_U / questions, size=min(step, RESAMPLES - start))
        @ values_UK
        / questions
        for start in range(0, RESAMPLES, step)
    ]
    low, high = np.quantile(np.concatenate(means), [_TAIL, 1 - _TAIL], axis=0)
    return low, high
