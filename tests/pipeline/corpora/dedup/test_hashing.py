"""Against plain Python: `unicodedata`, lists and whole numbers without a bound."""

from __future__ import annotations

import unicodedata

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.arrays import GOLDEN, mix
from pipeline.corpora.dedup import hashing
from pipeline.corpora.dedup.hashing import Tokens

TEXT = st.text("aAbBzZ09 \t\n.,_-'!<+$“…»\u00a0\u3000éÉßﬁ①Ωω漢字ー😀\u00ad\u200bİ", max_size=30)
TEXTS = st.lists(TEXT, max_size=8)
NUMBERS = st.lists(st.integers(0, 2**64 - 1), max_size=20)


def array(texts: list[str]) -> pa.Array:
    return pa.array(texts, pa.string())


def hashes(numbers: list[int]) -> hashing.Hashes:
    return np.array(numbers, np.uint64)


def tokens(lists: list[list[int]]) -> Tokens:
    offsets = np.cumsum([0, *map(len, lists)])
    return Tokens(hashes([number for numbers in lists for number in numbers]), offsets)


def lists(found: Tokens) -> list[list[int]]:
    parts = np.split(found.hashes, found.offsets[1:-1])
    return [part.tolist() for part in parts] if len(found.counts) else []


def python_words(text: str) -> list[str]:
    """NFKC, lower case, apart at what Unicode calls separators, punctuation and control characters."""
    text = unicodedata.normalize("NFKC", text)
    text = unicodedata.normalize("NFKC", "".join(letter.lower() for letter in text))
    text = "".join(letter for letter in text if unicodedata.category(letter) != "Cf")
    kinds = [unicodedata.category(letter)[0] for letter in text]
    return "".join(
        " " if kind in "ZPC" else letter for letter, kind in zip(text, kinds, strict=True)
    ).split()


def same_partition(ours: list[int], theirs: list[object]) -> bool:
    """Whether two lists of names call the same things the same."""
    pairs = set(zip(ours, theirs, strict=True))
    return len(pairs) == len(set(ours)) == len({theirs for _, theirs in pairs})


# Words and characters


@given(TEXTS)
def test_words_are_pythons_words(texts):
    found = hashing.words(array(texts))
    expected = [python_words(text) for text in texts]
    assert found.counts.tolist() == [len(words) for words in expected]
    assert same_partition(found.hashes.tolist(), [word for words in expected for word in words])
    assert same_partition(found.sequence_hashes().tolist(), [tuple(words) for words in expected])


@given(TEXTS)
def test_characters_are_those_of_the_words_each_after_a_space(texts):
    found = hashing.characters(array(texts))
    spaced = ["".join(f" {word}" for word in python_words(text)) for text in texts]
    expected = [unicodedata.normalize("NFKD", text) for text in spaced]
    assert found.counts.tolist() == [len(text) for text in expected]
    assert same_partition(found.hashes.tolist(), list("".join(expected)))


@settings(max_examples=20)
@given(TEXTS, st.data())
def test_a_text_has_its_words_wherever_it_stands(texts, data):
    start = data.draw(st.integers(0, len(texts)))
    end = data.draw(st.integers(start, len(texts)))
    for split in (hashing.words, hashing.characters):
        all_tokens = lists(split(array(texts)))
        assert lists(split(array(texts).slice(start, end - start))) == all_tokens[start:end]
        assert [hashed for text in texts for hashed in lists(split(array([text])))] == all_tokens


@given(TEXTS)
def test_strings_are_the_same_only_letter_for_letter(texts):
    assert same_partition(hashing.text_hashes(array(texts)).tolist(), texts)


def test_an_absent_text_has_no_words():
    assert hashing.words(pa.array([None, "a b", None], pa.string())).counts.tolist() == [0, 2, 0]


def test_different_words_have_different_hashes():
    words = [f"{a}{b}{n}" for a in "abcdefghij" for b in "xyz" for n in range(1_000)]
    found = hashing.words(array([" ".join(words)]))
    assert len(set(found.hashes.tolist())) == len(words) == 30_000


def test_every_bit_of_a_hash_takes_part():
    found = hashing.words(array([" ".join(map(str, range(20_000)))])).hashes
    for bit in range(64):
        ones = int(((found >> np.uint64(bit)) & np.uint64(1)).sum())
        assert abs(ones - 10_000) < 5 * 71, bit  # standard deviation 71


# Sequences


def test_mixing_gives_the_published_numbers():
    # SplitMix64 seeded with 0 begins with these.
    found = mix(np.arange(1, 4, dtype=np.uint64) * GOLDEN).tolist()
    assert found == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(st.lists(NUMBERS, max_size=6), st.integers(1, 5), st.integers(1, 5))
def test_ngrams_are_all_runs_and_a_short_text_is_one(values, n, shortest):
    expected = [
        [tuple(row[start : start + n]) for start in range(len(row) - n + 1)]
        or [tuple(row)] * (len(row) >= shortest and len(row) > 0)
        for row in values
    ]
    found = hashing.ngrams(tokens(values), n, shortest)
    assert found.counts.tolist() == [len(grams) for grams in expected]
    assert same_partition(found.hashes.tolist(), [gram for grams in expected for gram in grams])


def test_hashes_are_the_same_on_every_machine():
    found = hashing.words(array(["One word", "ein Wort"]))
    assert [f"{value:016x}" for value in found.hashes.tolist()] == [
        "7939dc3245630256", "966aa138249b1eb9", "bbe39777b82aab0d", "3f525ed64aa93fcd"
    ]  # fmt: skip
