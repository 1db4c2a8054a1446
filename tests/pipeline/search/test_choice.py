"""What `auto` takes for the fastest form, and what it learns of a pool's searches."""

from __future__ import annotations

from collections import Counter, defaultdict

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
    """5,000 rows that nobody has searched, and a processor of known speed."""
    monkeypatch.setattr(choice, "_measure", lambda pool, contexts: SECONDS)
    monkeypatch.setattr(choice, "_tried", defaultdict(dict))
    return pool_of(np.random.default_rng(0).standard_normal((5_000, 16)))


def chosen_forms(pool, seconds: dict[str, float], searches: int) -> list[str]:
    """What is chosen for some searches in turn, which take so many seconds."""
    chosen = []
    for _ in range(searches):
        chosen.append(choice.fastest_form(pool, CONTEXT, FORMS))
        choice.learn(pool, CONTEXT, chosen[-1], seconds[chosen[-1]])
    return chosen


@pytest.mark.parametrize("fastest", FORMS)
def test_the_first_searches_try_each_form_the_likeliest_first_and_later_ones_take_the_fastest(
    pool, fastest
):
    seconds = {form: 1.0 if form == fastest else 1.1 for form in FORMS}
    chosen = chosen_forms(pool, seconds, 3 * choice._TRIES + 5)
    assert chosen[:3] == ["vectors", "sketch", "scores"]
    assert Counter(chosen[: 3 * choice._TRIES]) == dict.fromkeys(FORMS, choice._TRIES)
    assert {*chosen[3 * choice._TRIES :]} == {fastest}


def test_one_slow_search_does_not_decide(pool):
    """The first one reads the pool from the disk."""
    choice.learn(pool, CONTEXT, "vectors", 9.0)
    seconds = {"scores": 1.2, "vectors": 1.0, "sketch": 1.1}
    assert chosen_forms(pool, seconds, 12)[-1] == "vectors"


def test_a_form_that_would_take_far_longer_is_not_tried(pool, monkeypatch):
    monkeypatch.setattr(
        choice, "_measure", lambda *a: {**SECONDS, "sketch": choice._Seconds(1.0, 1e-7, 20)}
    )
    assert "sketch" not in chosen_forms(pool, dict.fromkeys(FORMS, 1.0), 12)


def test_searches_are_timed_and_only_those_of_the_whole_pool(pool):
    vectors = CONTEXT[0][None].astype(np.float32)
    top_rows(pool, vectors, 10, among=np.random.default_rng(2).random(len(pool)) < 0.5)
    assert not any(choice._tried.values())
    for _ in range(3 * choice._TRIES + 2):
        top_rows(pool, vectors, 10)
    (tried,) = choice._tried.values()
    assert {form: len(seconds) for form, seconds in tried.items()} == dict.fromkeys(
        FORMS, choice._TRIES
    )
    assert all(0 < second < 10 for seconds in tried.values() for second in seconds)
