"""Intervals beside scipy's bootstrap of the examples themselves, and tests by counting all swaps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, bootstrap, multinomial

from pipeline.evaluation.metrics import metric_values, summarise
from pipeline.evaluation.significance import (
    Comparison,
    compare,
    compare_means,
    intervals,
    mean_interval,
)

DRAWS = 0.07  # four standard deviations of a bound of what was never seen, from 10,000 draws
TAIL = pytest.approx(0.025, abs=4 * (0.025 * 0.975 / 10_000) ** 0.5)  # the share of draws beyond it


@pytest.mark.slow
@pytest.mark.parametrize(("count", "candidates"), [(60, 20), (1500, 20), (400, 10_001)])
def test_intervals_are_those_of_resampled_examples(count, candidates):
    ranks = np.minimum(np.random.default_rng(1).geometric(0.3, count) ** 2, candidates)
    found = intervals(ranks, candidates, [1, 5])
    parts = metric_values(ranks, candidates, [1, 5])
    assert list(found) == list(parts) == [f"R@1/{candidates}", f"R@5/{candidates}", "MRR"]
    for name, values in parts.items():
        peer = bootstrap((values,), np.mean, method="percentile", n_resamples=10_000, rng=2)
        spread = values.std() / np.sqrt(count)
        wanted = peer.confidence_interval
        # Percentiles of 10,000 draws: a twentieth of a standard error is three of theirs; and the
        # share of right answers moves by whole examples.
        assert found[name] == pytest.approx((wanted.low, wanted.high), abs=0.1 * spread + 1 / count)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(0, 1000))
def test_the_number_lies_in_its_interval_and_the_seed_decides(ranks, seed):
    found = intervals(np.array(ranks), 20, [1, 5], seed)
    for name, value in summarise(np.array(ranks), 20, [1, 5]).items():
        low, high = found[name]
        assert 0 <= low <= value + 1e-12
        assert value - 1e-12 <= high <= 1
    assert intervals(np.array(ranks), 20, [1, 5], seed) == found


@pytest.mark.parametrize("count", [3, 30, 2000])
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_the_bounds_of_a_share_are_those_of_clopper_and_pearson(count, wrong):
    """A draw of equal questions has no spread: 3 of 3 right once meant 1.000 to 1.000."""
    right = count - wrong
    low, high = intervals(np.repeat([1, 20], [right, wrong]), 20, [1])["R@1/20"]
    assert binom.sf(right - 1, count, low) == TAIL
    assert binom.cdf(right, count, high) == TAIL if wrong else high == 1
    turned = intervals(np.repeat([20, 1], [right, wrong]), 20, [1])["R@1/20"]
    assert turned == pytest.approx((1 - high, 1 - low), rel=0.25, abs=1e-12)


def test_the_question_that_was_not_seen_is_as_bad_or_as_good_as_the_metric_can_be():
    never = binomtest(0, 50).proportion_ci(0.95, method="exact").high
    worst = intervals(np.full(50, 20), 20, [1])["MRR"]
    assert worst == pytest.approx((0.05, 0.05 + 0.95 * never), rel=DRAWS)
    best = intervals(np.ones(50, int), 20, [1])["MRR"]
    assert best == pytest.approx((1 - 0.95 * never, 1), rel=DRAWS * never)


def test_each_metric_has_its_own_bound():
    found = intervals(np.array([1, 3] * 10), 20, [1, 5])
    low, high = found["R@5/20"]
    assert (low, high) == pytest.approx((0.025 ** (1 / 20), 1), rel=0.02)
    assert found["R@1/20"][0] < 0.5


outcomes = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=9)


@given(outcomes)
def test_p_is_the_share_of_all_swaps_that_differ_as_much(pairs):
    first, second = np.array(pairs).T
    differences = first.astype(int) - second
    swapped = [
        abs(np.dot(signs, differences))
        for signs in itertools.product([1, -1], repeat=len(differences))
    ]
    expected = np.mean(np.array(swapped) >= abs(differences.sum()))
    found = compare("a", "b", first, second)
    assert found.p == pytest.approx(expected)
    assert found.difference == pytest.approx(differences.mean())
    turned = compare("b", "a", second, first)
    assert turned.p == pytest.approx(found.p)
    assert turned.difference == pytest.approx(-found.difference)


def test_the_interval_of_a_difference_is_that_of_paired_examples():
    rng = np.random.default_rng(3)
    easy = rng.random(800)
    first, second = easy < 0.62, (easy + 0.05 * rng.standard_normal(800)) < 0.58
    differences = first.astype(float) - second
    peer = bootstrap((differences,), np.mean, method="percentile", n_resamples=10_000, rng=2)
    found = compare("a", "b", first, second)
    wanted = peer.confidence_interval
    assert found.interval == pytest.approx((wanted.low, wanted.high), abs=0.003)
    # The two are right about mostly the same examples: unpaired, the interval would be twice as wide.
    unpaired = 1.96 * np.sqrt((first.var() + second.var()) / 800)
    assert found.interval[1] - found.interval[0] < unpaired
    assert found.p < 0.05


@pytest.mark.parametrize(("questions", "bound"), [(3, 0.708), (300, 0.0122), (10_000, 0.00037)])
def test_models_that_agree_everywhere_may_differ_by_what_so_many_questions_do_not_show(
    questions, bound
):
    same = np.arange(questions) % 2 == 0
    exact = binomtest(0, questions).proportion_ci(0.95, method="exact").high
    for found in (compare("a", "b", same, same), compare_means("a", "b", 1.0 * same, 1.0 * same)):
        assert (found.difference, found.p) == (0.0, 1.0)
        assert found.interval == pytest.approx((-exact, exact), rel=DRAWS)
        assert found.interval == pytest.approx((-bound, bound), rel=DRAWS)


def disagreeing(wins: int, losses: int, questions: int) -> Comparison:
    """Two models that disagree on `wins` and `losses` of the questions."""
    first, second = np.zeros((2, questions), bool)
    first[:wins] = second[wins : wins + losses] = True
    return compare("a", "b", first, second)


@pytest.mark.parametrize("questions", [30, 300, 10_000])
def test_a_few_disagreements_leave_no_less_open_than_none(questions):
    """The bootstrap knows no losses if there are none: one win of 300 once meant 0.000 to 0.010."""

    def width(wins: int, losses: int) -> float:
        low, high = disagreeing(wins, losses, questions).interval
        return high - low

    counts = [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)]
    widths = [width(*pair) for pair in counts]
    assert widths == sorted(widths)
    assert width(0, 0) < min(width(0, 1), width(0, 2), width(3, 0))
    low, high = disagreeing(1, 0, questions).interval
    assert low * questions < -2.5 and high * questions > 5 - 40 / questions


def test_the_interval_leaves_out_0_where_the_sign_test_does():
    for wins, losses in itertools.combinations_with_replacement(range(0, 20, 2), 2):
        found = disagreeing(wins, losses, 300)
        low, high = found.interval
        if abs(found.p - 0.05) > 0.005:
            assert (low <= 0 <= high) == (found.p > 0.05), (wins, losses)


@pytest.mark.parametrize(("wins", "losses"), [(47, 29), (52, 33), (82, 58)])
def test_an_interval_that_leaves_out_0_is_never_without_significance(wins, losses):
    """jobs.promote promotes by the interval, and says that this is the sign test."""
    for sign in (1, -1):
        found = disagreeing(*(wins, losses)[::sign], 300)
        low, high = found.interval
        assert 0.05 < found.p < 0.052
        assert low <= 0 <= high


@pytest.mark.slow
def test_an_interval_of_rare_disagreements_misses_the_true_difference_on_each_side_once_in_40_times():
    counts = [(wins, losses) for wins in range(16) for losses in range(16 - wins)]
    bounds = np.array([disagreeing(*pair, 300).interval for pair in counts])
    kinds = np.array([(wins, losses, 300 - wins - losses) for wins, losses in counts])
    for win, loss in itertools.product(np.arange(0, 3.6, 0.5) / 300, repeat=2):
        chances = multinomial.pmf(kinds, 300, [win, loss, 1 - win - loss])
        assert chances.sum() > 0.997
        assert chances[bounds[:, 0] > win - loss].sum() < 0.03
        assert chances[bounds[:, 1] < win - loss].sum() < 0.03


shares = st.lists(
    st.tuples(st.sampled_from([0, 1 / 3, 2 / 3, 1]), st.sampled_from([0, 1 / 3, 2 / 3, 1])),
    min_size=1, max_size=8,
)  # fmt: skip


@given(shares)
def test_p_of_means_is_the_share_of_all_swaps_that_differ_as_much(pairs):
    first, second = np.array(pairs).T
    found = compare_means("a", "b", first, second)
    differences = first - second
    swaps = np.array(list(itertools.product([1, -1], repeat=len(pairs))))
    wanted = (np.abs(swaps @ differences) >= abs(differences.sum()) - 1e-9).mean()
    # Of 10,000 draws: four standard deviations are 0.02.
    assert found.p == pytest.approx(wanted, abs=0.021)
    assert found.difference == pytest.approx(first.mean() - second.mean())
    assert found.interval[0] - 1e-9 <= found.difference <= found.interval[1] + 1e-9


def test_one_run_of_each_is_compared_as_ever():
    rng = np.random.default_rng(0)
    first, second = rng.random(500) < 0.62, rng.random(500) < 0.55
    alone, means = (
        compare("a", "b", first, second),
        compare_means("a", "b", 1.0 * first, 1.0 * second),
    )
    assert means.difference == pytest.approx(alone.difference)
    assert means.p == pytest.approx(alone.p, abs=0.02)
    assert means.interval == pytest.approx(alone.interval, abs=0.01)
    assert means.interval == mean_interval(1.0 * first - second, limits=(-1, 1))
