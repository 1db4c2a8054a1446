"""What is new beside the version before."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.pools.changes import RowSet

_KEYS = st.integers(0, 2**64 - 1)
_ROWS = st.lists(st.tuples(_KEYS, _KEYS), max_size=8)


def row_set(rows: list[tuple[int, int]]) -> RowSet:
    ids, contents = (np.array([row[key] for row in rows], np.uint64) for key in (0, 1))
    return RowSet.of(ids, contents)


@settings(max_examples=20)
@given(_ROWS, st.randoms(), st.integers(0, 8))
def test_a_set_of_rows_is_the_same_in_any_order_and_in_parts(rows, random, cut):
    shuffled = random.sample(rows, len(rows))
    assert row_set(rows) == row_set(shuffled[:cut]) + row_set(shuffled[cut:])
    assert row_set([]) == RowSet()


def test_sets_of_other_rows_differ():
    keys = np.random.default_rng(0).integers(0, 2**64, 3, np.uint64, endpoint=False).tolist()
    rows = list(zip(keys, reversed(keys), strict=True))
    exchanged = [(keys[0], keys[1]), (keys[1], keys[2]), (keys[2], keys[0])]
    sets = [row_set(some) for n in range(4) for some in itertools.combinations(rows, n)]
    assert len({*sets, row_set(exchanged)}) == 9
