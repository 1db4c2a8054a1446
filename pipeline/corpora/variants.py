"""Finds files of an input with the same examples in a split: variants, versions or copies of one data set.

Each task keeps the smallest 1,024 hashes of its file's examples, which are a random sample of them. The
hashes of two files below the largest one that both samples reach are samples of the same examples.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from pipeline.corpora.dedup.hashing import Hashes

MOST_FILES = 2000  # that are compared
_SAMPLE = 1024
_LEAST_SHARED = 5  # examples
_LEAST_SHARE = 0.5  # of the smaller file


class Variants(NamedTuple):
    """Two files that hold the same examples."""

    first: str
    second: str
    share: float
    """Share of the smaller file's examples that are in both."""
    of_larger: float
    """The same of the larger one's; of two copies both are 1."""


def add_to_sample(sample: Hashes, rows: Iterable[Mapping[str, Any]]) -> Hashes:
    """The smallest hashes of the sample and of more examples, sorted."""
    hashes = (
        hashlib.blake2b(
            "\t".join([row["split"], *row["context"], row["response"]]).encode(), digest_size=8
        )
        for row in rows
    )
    numbers = np.array([int.from_bytes(h.digest(), "big") for h in hashes], np.uint64)
    return np.unique(np.concatenate([sample, numbers]))[:_SAMPLE]


def find(samples: Sequence[tuple[str, Sequence[int]]]) -> list[Variants]:
    """The pairs of files that share most examples of the smaller one.

    `samples`: a file's name and its smallest hashes, sorted.
    """
    files_of_hash = defaultdict[int, list[int]](list)
    for place, (_, sample) in enumerate(samples):
        for number in sample:
            files_of_hash[number].append(place)
    limits = [sample[-1] if len(sample) == _SAMPLE else math.inf for _, sample in samples]
    shared = Counter(pair for places in files_of_hash.values() for pair in combinations(places, 2))
    found = list[Variants]()
    for (one, other), count in sorted(shared.items()):
        limit = min(limits[one], limits[other])
        smaller, larger = sorted(sum(n <= limit for n in samples[at][1]) for at in (one, other))
        if count >= _LEAST_SHARED and count / smaller >= _LEAST_SHARE:
            names = samples[one][0], samples[other][0]
            found.append(Variants(*names, count / smaller, count / larger))
    return found
