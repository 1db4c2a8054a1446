"""What `auto` takes for the fastest form, and what it learns of a pool's searches."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.search import choice, top_rows
from tests.pipeline.search.test_exact import pool_of

FORMS = ("scores", "vectors", "sketch")
CONTEXT = [np.random.default_rng(1).standard_normal((4, 16))]
SECONDS = {
    "scores": choice._Seconds(0.0, 1e-6, 100),
    "vectors": choice._Seconds(0.0, 2.0e-7, 100),
    "sketch": choice._Seconds(0.0, 1.5e-7, 20),
}


@pytest.fixture
def pool(monkeypatch):
    """5,000 rows, of which nothing has been learnt, and a processor of known speed."""
    monkeypatch.setattr(choice, "_measure", lambda pool, contexts: SECONDS)
    monkeypatch.setattr(choice, "_open_shares", {})
    return pool_of(np.random.default_rng(0).standard_normal((5_000, 16)))


def test_before_the_first_search_shares_are_those_of_other_pools(pool):
    assert choice.fastest_form(pool, CONTEXT, FORMS) == "vectors"


@pytest.mark.parametrize(
    ("lowest", "form"), [(1e9, "sketch"), (-1e9, "scores")], ids=["none is open", "all are open"]
)
def test_the_share_of_rows_that_bounds_leave_open_decides(pool, lowest, form):
    choice.learn(pool, CONTEXT, [lowest])
    assert choice.fastest_form(pool, CONTEXT, FORMS) == form


def test_the_first_searches_tell_the_share_and_later_ones_do_not(pool):
    vectors = CONTEXT[0][None].astype(np.float32)
    for _ in range(choice._LEARNT_SEARCHES + 3):
        top_rows(pool, vectors, 10)
    (learnt,) = choice._open_shares.values()
    assert {form: len(shares) for form, shares in learnt.items()} == {
        "vectors": choice._LEARNT_SEARCHES,
        "sketch": choice._LEARNT_SEARCHES,
    }
    assert 0 < np.mean(learnt["vectors"]) <= np.mean(learnt["sketch"]) < 1


def test_a_search_among_some_rows_tells_nothing(pool):
    among = np.random.default_rng(2).random(len(pool)) < 0.5
    top_rows(pool, CONTEXT[0][None].astype(np.float32), 10, among=among)
    assert not choice._open_shares
