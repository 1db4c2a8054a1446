"""Against whole numbers without a bound, sets, and datasketch."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from datasketch import MinHash, MinHashLSH
from hypothesis import given
from hypothesis import strategies as st

from pipeline.corpora.dedup import hashing, minhash
from pipeline.corpora.dedup.hashing import Tokens
from pipeline.corpora.dedup.minhash import PRIME

NUMBERS = st.integers(0, PRIME) | st.sampled_from([0, 1, 2**31 - 1, 2**31, PRIME - 1, PRIME])
SETS = st.lists(st.sets(st.integers(0, 12), max_size=8), min_size=1, max_size=8)


def tokens(sets: list[list[int]]) -> Tokens:
    values = np.array([x for one in sets for x in one], np.uint64)
    return Tokens(values, np.cumsum([0, *map(len, sets)]))


def pair_of_sets(similarity: float, size: int, start: int) -> tuple[list[int], list[int]]:
    """Two sets of `size` random numbers, of about that Jaccard similarity."""
    common = round(2 * size * similarity / (1 + similarity))
    numbers = hashing.random_hashes(2 * size - common, stream=start).tolist()
    return numbers[:size], numbers[size - common :]


def jaccard(a: set[int], b: set[int]) -> float:
    return len(a & b) / len(a | b) if a | b else 1.0


# Signatures


@given(st.lists(NUMBERS, min_size=1, max_size=5), NUMBERS, NUMBERS)
def test_an_ordering_is_exact_modulo_the_prime(x, a, b):
    found = minhash.permute(np.array(x, np.uint64), np.uint64(a), np.uint64(b))
    assert found.tolist() == [(a * value + b) % PRIME for value in x]


def test_orderings_are_random_and_within_the_family():
    a, b = (values.tolist() for values in minhash.orderings(1000))
    assert len(set(a)) == len(set(b)) == 1000
    assert min(a) >= 1 and max(a) < PRIME and max(b) < PRIME
    assert abs(sum(a) / 1000 / PRIME - 0.5) < 5 / math.sqrt(12 * 1000)
    longer = minhash.orderings(1200)
    assert longer[0][:1000].tolist() == a


@pytest.mark.parametrize("chunk", [7, 1 << 15])
def test_a_signature_is_the_smallest_value_in_each_ordering(monkeypatch, chunk):
    monkeypatch.setattr(minhash, "_CHUNK", chunk)
    values = hashing.random_hashes(30, stream=77).tolist()
    sets = [values[:1], values[1:4], values[4:20], values[20:]]
    a, b = (side.tolist() for side in minhash.orderings(6))
    expected = [
        [min((a[k] * (x >> 3) + b[k]) % PRIME for x in one) for k in range(6)] for one in sets
    ]
    assert minhash.signatures(tokens(sets), 6).tolist() == expected


def test_signatures_are_not_biased():
    pairs = [pair_of_sets(0.6, 40, start=1000 + number) for number in range(300)]
    true = jaccard(*map(set, pairs[0]))
    signature = minhash.signatures(tokens([one for pair in pairs for one in pair]), 112)
    estimates = (signature[::2] == signature[1::2]).mean(axis=1)
    error = math.sqrt(true * (1 - true) / 112)
    assert abs(estimates.mean() - true) < 4 * error / math.sqrt(300)
    assert abs(estimates.std() / error - 1) < 4 / math.sqrt(2 * 300)


# Pairs


@pytest.mark.parametrize(("bands", "rows"), [(20, 3), (8, 2)])
def test_lsh_finds_the_pairs_that_datasketch_finds(bands, rows):
    rng = np.random.default_rng(bands)
    sets = [rng.choice(60, size=12, replace=False).tolist() for _ in range(150)]
    sets += [sorted({*one[1:], int(rng.integers(60))}) for one in sets[:50]]
    spread = hashing.random_hashes(60, stream=6)
    signature = minhash.signatures(tokens([spread[one].tolist() for one in sets]), bands * rows)

    lsh = MinHashLSH(num_perm=bands * rows, params=(bands, rows))
    theirs = set()
    for number, row in enumerate(signature):
        sketch = MinHash(hashvalues=row, scheme="affine64")
        theirs |= {(other, number) for other in lsh.query(sketch)}
        lsh.insert(number, sketch)

    keys = minhash.band_keys(signature, bands)
    entry = np.repeat(np.arange(len(sets)), bands)
    first, second = minhash.candidate_pairs(keys.ravel(), entry.astype(np.uint64))
    ours = set(zip(entry[first].tolist(), entry[second].tolist(), strict=True))
    assert len(theirs) > 20
    assert np.unique(keys, return_counts=True)[1].max() <= 33  # else not all pairs are made
    assert ours == theirs


@pytest.mark.parametrize("similarity", [0.55, 0.8])
def test_pairs_are_found_with_the_probability_of_the_formula(similarity):
    count, bands, rows = 400, 14, 8
    pairs = [pair_of_sets(similarity, 60, start=5000 + number) for number in range(count)]
    s = jaccard(*map(set, pairs[0]))
    signature = minhash.signatures(tokens([one for pair in pairs for one in pair]), bands * rows)
    keys = minhash.band_keys(signature, bands)
    found = (keys[::2] == keys[1::2]).any(axis=1).mean()
    expected = 1 - (1 - s**rows) ** bands
    assert abs(found - expected) < 4 * math.sqrt(expected * (1 - expected) / count) + 1 / count


def test_equal_bands_in_different_places_are_no_pair():
    signature = np.array([[1, 2, 3, 4], [3, 4, 1, 2]], np.uint64)
    assert len(set(minhash.band_keys(signature, 2).ravel().tolist())) == 4


@given(st.lists(st.integers(0, 4), max_size=40), st.randoms(use_true_random=False))
def test_all_entries_with_one_key_are_pairs_in_the_order_of_ties(keys, random):
    ties = list(range(len(keys)))
    random.shuffle(ties)
    first, second = minhash.candidate_pairs(np.array(keys, np.uint64), np.array(ties, np.uint64))
    expected = {
        (i, j)
        for i, j in itertools.permutations(range(len(keys)), 2)
        if keys[i] == keys[j] and ties[i] < ties[j]
    }
    found = list(zip(first.tolist(), second.tolist(), strict=True))
    if max((keys.count(key) for key in keys), default=0) <= 33:
        assert set(found) == expected
    assert len(found) == len(set(found)) and set(found) <= expected


# Similarities and clusters


@given(SETS, st.data())
def test_similarities_are_those_of_sets(sets, data):
    places = st.integers(0, len(sets) - 1)
    pairs = data.draw(st.lists(st.tuples(places, places), max_size=10))
    first, second = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minhash, "_PAIRS_COMPARED", 3)
        found = minhash.similarities(tokens([sorted(one) for one in sets]), first, second)
    assert found.tolist() == [jaccard(sets[i], sets[j]) for i, j in pairs]
