"""MinHash signatures, the pairs that LSH finds among them, and their true similarity.

The share of K random orderings in which two sets have the same smallest member estimates their
Jaccard similarity s = |A ∩ B| / |A ∪ B|, with standard error √(s(1 - s)/K) (Broder 1997). An ordering
is the bijection x → (a·x + b) mod p of [0, p), p = 2⁶¹ - 1, with a and b drawn at random: the universal
family of Carter and Wegman (1979).

Cut into b bands of r hashes, two signatures agree in a whole band, and are a pair, with probability
1 - (1 - sʳ)ᵇ (Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, section 3.4.2). 14 bands of 8,
as FineWeb has them (Penedo et al. 2024), find

    s             0.5    0.6    0.7    0.75   0.8    0.85   0.9    0.95
    probability   0.053  0.211  0.565  0.772  0.924  0.988  0.9996 1.0000

The curve is half way up near s = (1/b)^(1/r) = 0.72.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np

from pipeline.arrays import Floats, Ints, mix
from pipeline.corpora.dedup.hashing import Hashes, Tokens, random_hashes, row_hashes

PRIME = (1 << 61) - 1
_CHUNK = 1 << 15  # shingles at a time: arrays of `permute`, 256 KiB each, stay in a core's cache
_NEIGHBOURS = 32  # a larger group with the same band is compared in a window, not all with all
_PAIRS_COMPARED = 1 << 16  # at a time

_P = np.uint64(PRIME)
_LOW_30 = np.uint64((1 << 30) - 1)
_LOW_31 = np.uint64((1 << 31) - 1)


def signatures(shingles: Tokens, hashes: int) -> Hashes:
    """[N, hashes] The smallest value of each text's shingles in each ordering.

    Every text must have a shingle.
    """
    minima = np.empty((len(shingles.counts), hashes), np.uint64)
    a, b = orderings(hashes)
    step = np.searchsorted(shingles.offsets, np.arange(0, shingles.offsets[-1] + _CHUNK, _CHUNK))
    borders = np.unique(np.minimum(step, len(minima)))
    for start, end in itertools.pairwise(borders):
        offsets = shingles.offsets[start : end + 1]
        values = shingles.hashes[offsets[0] : offsets[-1]] >> np.uint64(3)  # to 61 bits
        for number in range(hashes):
            permutation = permute(values, a[number], b[number])
            minima[start:end, number] = np.minimum.reduceat(permutation, offsets[:-1] - offsets[0])
    return minima


@functools.cache
def orderings(count: int) -> tuple[Hashes, Hashes]:
    """`count` random a from 1 to p - 1, and b from 0 to p - 1."""
    a = random_hashes(count, stream=2) % np.uint64(PRIME - 1) + np.uint64(1)
    return a, random_hashes(count, stream=3) % _P


def permute(x: Hashes, a: np.uint64, b: np.uint64) -> Hashes:
    """(a·x + b) mod p for x, a and b up to p, without a number over 64 bits.

    With x = x₁·2³¹ + x₀ and a likewise, a·x = a₁x₁·2⁶² + (a₁x₀ + a₀x₁)·2³¹ + a₀x₀, and 2⁶¹ is 1 here. In
    place, as it is most of what near deduplication costs: 4 ns per shingle and ordering.
    """
    a1, a0 = a >> np.uint64(31), a & _LOW_31
    x1, x0 = x >> np.uint64(31), x & _LOW_31
    total = x1 * (a1 << np.uint64(1))  # a₁x₁·2⁶², below 2⁶¹
    middle = x0 * a1
    product = x1 * a0
    middle += product  # below 2⁶²
    np.multiply(x0, a0, out=product)  # below 2⁶²
    total += product
    total += b
    np.right_shift(middle, np.uint64(30), out=product)  # of middle·2³¹ what is above 2⁶¹
    total += product
    middle &= _LOW_30  # and what is below
    middle <<= np.uint64(31)
    total += middle  # in all below 2⁶⁴
    np.right_shift(total, np.uint64(61), out=product)
    total &= _P
    total += product  # below p + 8
    np.subtract(total, _P, out=product)  # wraps around for what is below p
    np.minimum(total, product, out=total)
    return total


def band_keys(signature: Hashes, bands: int) -> Hashes:
    """[N, bands] One hash of each band; the same values in two bands make different keys."""
    keys = row_hashes(signature.reshape(-1, signature.shape[1] // bands)).reshape(-1, bands)
    return mix(keys ^ random_hashes(bands, stream=4))


def candidate_pairs(keys: Hashes, ties: Hashes) -> tuple[Ints, Ints]:
    """(i, j) of all entries that share a key; ties[i] ≤ ties[j].

    Within a key, entries are in the order of `ties`, and each makes a pair with the next 32: groups of
    up to 33 are compared whole, and what is alike in larger ones is connected through neighbours.
    """
    order = np.lexsort((ties, keys))
    sorted_keys = keys[order]
    first, second = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for distance in range(1, _NEIGHBOURS + 1):
        matches = np.flatnonzero(sorted_keys[distance:] == sorted_keys[:-distance])
        if not len(matches):
            break
        first.append(order[matches])
        second.append(order[matches + distance])
    return np.concatenate(first), np.concatenate(second)


def similarities(sets: Tokens, first: Ints, second: Ints) -> Floats:
    """The Jaccard similarity of sets first[i] and second[i] (`distinct_tokens`); 1 if both are empty."""
    from scipy.sparse import csr_array

    size = sets.counts
    _, ranks = np.unique(sets.hashes, return_inverse=True)
    ones = np.ones(len(ranks), np.int32)
    members: Any = csr_array((ones, ranks, sets.offsets), shape=(len(size), len(ranks)))
    chunks = [np.zeros(0)]
    for start in range(0, len(first), _PAIRS_COMPARED):
        left, right = (side[start : start + _PAIRS_COMPARED] for side in (first, second))
        common = (members[left] * members[right]).sum(axis=1)
        union = size[left] + size[right] - common
        chunks.append(np.where(union > 0, common / np.maximum(union, 1), 1.0))
    return np.concatenate(chunks)


def components(first: Ints, second: Ints) -> tuple[Ints, Ints]:
    """(nodes, sorted; the number of the cluster of each): what the edges connect is one cluster."""
    nodes, places = np.unique(np.concatenate([first, second]), return_inverse=True)
    edges = (places[: len(first)], places[len(first) :])
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    graph: Any = coo_array((np.ones(len(first), bool), edges), shape=(len(nodes), len(nodes)))
    _, labels = connected_components(graph, directed=False)
    return nodes, labels.astype(np.int64)
