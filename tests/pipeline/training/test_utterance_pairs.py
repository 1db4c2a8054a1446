"""Pairs of a window: whose response they have, how they are laid out and cut into micro-batches."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.training.pretraining_data import Texts, cut, example_keys, layout, make_pairs
from pipeline.training.tokenized_corpus import Vocabulary

VOCABULARY = Vocabulary(100, 0, 2, 3, 4, (0, 1, 2, 3, 4))
token_lists = st.lists(st.lists(st.integers(5, 8), min_size=1, max_size=5), min_size=1, max_size=30)


def texts(lists, keep=100, newest=False):
    """In several chunks, the first of which begins in the middle of a larger array."""
    kind = pa.list_(pa.uint16())
    before = pa.array([[9, 9, 9], *lists[:2]], kind)
    chunks = pa.chunked_array([before.slice(1), pa.array(lists[2:], kind)])
    return Texts.of(chunks, keep, newest)


def second_texts(pairs):
    texts = pairs.seconds
    spans = zip(texts.starts_R, texts.lengths_R, strict=True)
    return [texts.ids_F[start : start + length].tolist() for start, length in spans]


def made(contexts, responses, others, share=0.5, seed=0, keep=100):
    keys_R = example_keys(seed, 0, 0, np.arange(len(responses)))
    elsewhere = None if others is None else texts(others, keep)
    return make_pairs(texts(contexts), texts(responses, keep), elsewhere, keys_R, share)


@settings(max_examples=40)
@given(token_lists, token_lists, st.integers(0, 20), st.integers(1, 5))
def test_a_random_response_is_of_the_others_and_never_the_true_one(responses, others, seed, keep):
    """Also where two texts differ only beyond what is kept of them."""
    pairs = made(responses, responses, others, 0.7, seed, keep)
    kept = [other[:keep] for other in others]
    for text, own, is_next in zip(second_texts(pairs), responses, pairs.is_next_R, strict=True):
        assert (text == own[:keep]) == is_next
        assert is_next or text in kept


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_random_pairs_are_as_frequent_as_asked_and_come_from_everywhere(share):
    own = [[6, number % 90 + 5] for number in range(4000)]
    others = [[7, number + 5] for number in range(90)]
    pairs = made(own, own, others, share)
    other_seed = made(own, own, others, share, seed=1)
    assert (other_seed.is_next_R != pairs.is_next_R).any()
    assert 1 - pairs.is_next_R.mean() == pytest.approx(share, abs=0.032)  # four deviations
    swapped = [text[1] - 5 for text in second_texts(pairs) if text[0] == 7]
    assert set(swapped) == set(range(90))
    assert max(np.bincount(swapped)) < 3 * len(swapped) / 90


@pytest.mark.parametrize("others", [None, [], [[6, 7]], [[6, 7], [6, 7]]])
def test_without_another_response_pairs_stay_true(others):
    pairs = made([[5]] * 200, [[6, 7]] * 200, others)
    assert pairs.is_next_R.all()
    assert second_texts(pairs) == [[6, 7]] * 200


def test_texts_that_are_one_anothers_permutation_are_different():
    pairs = made([[5]] * 200, [[6, 7, 8]] * 200, [[8, 7, 6]], 0.5)
    assert {tuple(text) for text in second_texts(pairs)} == {(6, 7, 8), (8, 7, 6)}


@settings(max_examples=40)
@given(token_lists, token_lists, st.integers(1, 5), st.integers(0, 9), st.data())
def test_a_batch_is_laid_out_as_the_lists_say(contexts, responses, keep, seed, data):
    size = min(len(contexts), len(responses))
    contexts, responses = contexts[:size], responses[:size]
    keys_R = example_keys(seed, 0, 0, np.arange(size))
    others = texts([[50], [51, 52], [53]])
    pairs = make_pairs(
        texts(contexts, keep, newest=True), texts(responses, keep), others, keys_R, 0.5
    )
    seconds = second_texts(pairs)
    rows = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size))
    ids_BT, lengths_B, second_B = layout(pairs, np.array(rows), VOCABULARY)
    wanted = [[2, *contexts[row][-keep:], 3, *seconds[row], 3] for row in rows]
    width = max(map(len, wanted))
    assert ids_BT.tolist() == [row + [0] * (width - len(row)) for row in wanted]
    assert lengths_B.tolist() == [len(row) for row in wanted] == pairs.lengths[rows].tolist()
    assert second_B.tolist() == [len(contexts[row][-keep:]) + 2 for row in rows]


@settings(max_examples=40)
@given(st.lists(st.integers(4, 40), min_size=1, max_size=80), st.integers(40, 200))
def test_micro_batches_hold_each_row_once_within_their_tokens(lengths, tokens):
    lengths_R = np.array(lengths)
    batches = cut(lengths_R, tokens, np.random.default_rng(0))
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    wanted = [[]]
    for length in sorted(lengths):  # the longest of its batch so far
        if (len(wanted[-1]) + 1) * length > tokens:
            wanted.append([])
        wanted[-1].append(length)
    assert sorted(sorted(lengths_R[rows].tolist()) for rows in batches) == sorted(wanted)


def test_micro_batches_come_in_random_order_and_equal_lengths_are_mixed():
    batches = cut(np.repeat(np.arange(10, 20), 40), 200, np.random.default_rng(1))
    longest = [int(rows[0]) // 40 for rows in batches]
    assert longest != sorted(longest)
    assert any(np.ptp(rows) > len(rows) for rows in batches)
