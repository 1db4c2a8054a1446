"""Masks: the share, the tokens that are never predicted, whole words, the same wherever a pair comes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from pipeline.models.tokens import Tokenizer
from pipeline.training.pretraining_data import (
    Masker,
    derive_keys,
    example_keys,
    prediction_probabilities,
    word_starts,
)
from pipeline.training.settings import PretrainConfig
from pipeline.training.tokenized_corpus import Vocabulary

PAD, UNK, CLS, SEP, MASK = range(5)
SIZE = 60
VOCABULARY = Vocabulary(SIZE, PAD, CLS, SEP, MASK, (PAD, UNK, CLS, SEP, MASK))

texts = st.lists(st.integers(5, SIZE - 1), min_size=1, max_size=9)
rows = st.lists(st.tuples(texts, texts), min_size=1, max_size=6)


def masker(starts_V=None, shares_V=None, **config):
    probability_V = prediction_probabilities(VOCABULARY, PretrainConfig(**config), shares_V)
    return Masker(probability_V, MASK, starts_V)


def padded(pairs):
    """(ids_BT, lengths_B, second_B) of lists of tokens."""
    lists = [[CLS, *a, SEP, *b, SEP] for a, b in pairs]
    width = max(map(len, lists))
    ids_BT = np.array([row + [PAD] * (width - len(row)) for row in lists])
    return ids_BT, np.array([len(row) for row in lists]), np.array([len(a) + 2 for a, _ in pairs])


def mask(which, pairs, keys_B):
    """Per pair: (its ids with masks, its predicted places), and all labels."""
    ids_BT, lengths_B, second_B = padded(pairs)
    before = ids_BT.copy()
    masked_BT, predicted_N, labels_N = which.mask_pairs(ids_BT, lengths_B, second_B, keys_B)
    assert (ids_BT == before).all()  # what it was given stays
    assert predicted_N.tolist() == sorted(set(predicted_N.tolist()))
    assert (before.ravel()[predicted_N] == labels_N).all()
    untouched = np.ones(before.size, bool)
    untouched[predicted_N] = False
    assert (masked_BT.ravel() == before.ravel())[untouched].all()
    width = ids_BT.shape[1]
    places = [[] for _ in pairs]
    for place in predicted_N.tolist():
        places[place // width].append(place % width)
    ids = [row[:length].tolist() for row, length in zip(masked_BT, lengths_B, strict=True)]
    return list(zip(ids, places, strict=True))


def keys(count, seed=0, epoch=0):
    return example_keys(seed, 0, epoch, np.arange(count))


def test_keys_are_the_outputs_of_splitmix64():
    """The first outputs for the seed 0, as Vigna's reference implementation prints them."""
    assert [hex(value) for value in derive_keys(np.zeros(1, np.uint64), np.arange(3))] == [
        "0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"
    ]  # fmt: skip


@settings(max_examples=25)
@given(rows, st.integers(0, 9), st.sampled_from([0.15, 0.5, 0.9]))
def test_by_berts_rule_special_tokens_are_never_predicted(pairs, seed, share):
    pairs = [(a, [UNK, *b]) for a, b in pairs]
    which = masker(masked_share=share)
    for (_, places), (a, b) in zip(mask(which, pairs, keys(len(pairs), seed)), pairs, strict=True):
        row = [CLS, *a, SEP, *b, SEP]
        assert not {row[place] for place in places} & set(VOCABULARY.special)


def test_by_xlms_rule_separators_are_predicted_but_no_padding_and_no_first_position():
    pairs = [([7] * (1 + n % 5), [8] * (1 + n % 3)) for n in range(4000)]
    lengths = [len(a) + len(b) + 3 for a, b in pairs]
    found = mask(masker(masking="xlm"), pairs, keys(4000))
    for (_, places), length in zip(found, lengths, strict=True):
        assert all(0 < place < length for place in places)
    closing = sum(length - 1 in places for (_, places), length in zip(found, lengths, strict=True))
    assert closing / 4000 == pytest.approx(0.15, abs=0.023)  # four standard deviations


def test_shares_are_those_of_the_settings():
    """200,000 tokens: five standard deviations of each share."""
    pairs = [([6] * 50, [7] * 50)] * 2000
    ids_BT, lengths_B, second_B = padded(pairs)
    which = masker(masked_share=0.15)
    masked_BT, predicted_N, _ = which.mask_pairs(ids_BT, lengths_B, second_B, keys(2000))
    count = len(predicted_N)
    assert count / 200_000 == pytest.approx(0.15, abs=0.006)
    there = masked_BT.ravel()[predicted_N]
    other = there[(there != MASK) & (there != ids_BT.ravel()[predicted_N])]
    assert (there == MASK).sum() / count == pytest.approx(0.8 + 0.1 / SIZE, abs=0.012)
    assert len(other) / count == pytest.approx(0.1 * (SIZE - 2) / SIZE, abs=0.009)
    # Random tokens are uniform over the whole vocabulary, special ones among them.
    assert set(other.tolist()) | {MASK, 6, 7} == set(range(SIZE))
    assert np.bincount(other).max() < 3 * len(other) / SIZE


def test_seeds_corpora_epochs_and_places_mask_in_different_ways():
    settings = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    pairs = [([6] * 40, [7] * 40)]
    found = {
        str(mask(masker(), pairs, example_keys(*numbers, np.array([place]))))
        for numbers in settings
        for place in (0, 1, 16_384)
    }
    assert len(found) == 12


@settings(max_examples=25)
@given(rows, st.integers(0, 9))
def test_of_whole_words_all_pieces_are_predicted_or_none(pairs, seed):
    """Even ids continue a word; a text's first token begins one, whatever it is."""
    starts_V = np.arange(SIZE) % 2 == 1
    starts_V[list(VOCABULARY.special)] = True
    which = masker(starts_V, masked_share=0.5)
    found = mask(which, pairs, keys(len(pairs), seed))
    for (_, places), (a, b) in zip(found, pairs, strict=True):
        place = 1
        for text in (a, b):
            words = []
            for number, token in enumerate(text):
                if number == 0 or token % 2:
                    words.append([])
                words[-1].append(place)
                place += 1
            place += 1
            for word in words:
                assert len(set(word) & set(places)) in (0, len(word))
        assert not {0, len(a) + 1, len(a) + len(b) + 2} & set(places)


def test_whole_words_are_predicted_as_often_as_asked():
    starts_V = np.arange(SIZE) % 2 == 1
    pairs = [([7, 8, 10, 9, 11, 12] * 5, [13] * 5)] * 4000
    found = mask(masker(starts_V, masked_share=0.2), pairs, keys(4000))
    share = sum(len(places) for _, places in found) / (35 * 4000)
    assert share == pytest.approx(0.2, abs=0.01)


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 10_000), min_size=SIZE - 5, max_size=SIZE - 5).filter(any),
    st.sampled_from([0.1, 0.5, 1.0]),
    st.sampled_from([0.05, 0.15, 0.4]),
    st.sampled_from(["bert", "xlm"]),
)
def test_rare_tokens_are_predicted_more_often_and_all_as_often_as_asked(counts, alpha, share, rule):
    counts_V = np.array([0] * 5 + counts)
    shares_V = counts_V / counts_V.sum()
    config = PretrainConfig(masking=rule, masked_share=share, rare_token_alpha=alpha)
    probability_V = prediction_probabilities(VOCABULARY, config, shares_V)
    assert (shares_V * probability_V).sum() == pytest.approx(share, rel=1e-3)
    assert (probability_V[counts_V == 0] == 0).all()
    below = (counts_V > 0) & (probability_V < 1)
    scaled = probability_V[below] * counts_V[below] ** alpha  # the same number for all of them
    assert len(scaled) == 0 or np.ptp(scaled) < 1e-6 * scaled.max()
    always = (counts_V > 0) & ~below
    if always.any() and below.any():
        assert counts_V[always].max() < counts_V[below].min()


@pytest.mark.parametrize(
    ("tokens", "begin"),
    [
        (["un", "##happy", "##ly", "so", "#"], [True, False, False, True, True]),
        (["Ġun", "happy", "Ġso", "!"], [True, False, True, False]),
        (["▁un", "happy", "▁so"], [True, False, True]),
    ],
)
def test_words_begin_where_their_tokenizer_marks_it(tokens, begin):
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    special = {name: f"[{name[:-6].upper()}]" for name in names}
    entries = [*special.values(), *tokens]
    vocabulary = {token: place for place, token in enumerate(entries)}
    fast = FastTokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, **special))
    assert word_starts(tokenizer).tolist() == [True] * 5 + begin
