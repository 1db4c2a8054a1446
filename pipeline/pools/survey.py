"""Surveys a pool: the lengths of its vectors, rows with equal vectors, and the nearest pairs."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipeline.arrays import Floats, Ints
from pipeline.pools.pool import Pool, PoolRow
from pipeline.pools.vector_format import LENGTH

_COMPARED_ROWS = 4096  # with each other: 0.3 GB for the moment
_TAKEN_ROWS = 16_384
_SHARES = (0.0, 0.05, 0.5, 0.95, 1.0)


class Pair(NamedTuple):
    """Two candidates of different vectors."""

    cosine: float
    first: PoolRow
    second: PoolRow


@dataclass(frozen=True)
class Survey:
    """The result of `survey`."""

    rows: int
    lengths: tuple[float, ...]
    """The least length of a vector, those at 5, 50 and 95 %, and the greatest; of all rows."""
    missed: float
    """The mean share of a vector's length that the sketch does not have; of all rows."""
    sampled: int
    equal: int
    """Rows of the sample whose vector another row of the sample has, too."""
    most_equal: tuple[PoolRow, int] | None
    """The first row of the vector that comes most often, and how often it does."""
    compared: int
    pairs: tuple[Pair, ...]
    """The nearest ones of the rows that were compared, nearest first."""


def survey(pool: Pool, sample_rows: int, pairs: int, seed: int) -> Survey:
    """`sample_rows`: rows that are compared for equal vectors; 0: all. `pairs`: number of nearest pairs."""
    sampled = _sample(len(pool), sample_rows or len(pool), seed)
    keys = []
    for start in range(0, len(sampled), _TAKEN_ROWS):
        part = pool.layer_at(sampled[start : start + _TAKEN_ROWS], "vectors")
        keys += [_digest(row, norms) for row, norms in zip(part.matrix, part.norms.T, strict=True)]
    counts = Counter(keys)
    key, highest_count = counts.most_common(1)[0] if counts else (b"", 0)
    norms = [shard.vectors.norms[LENGTH] for shard in pool.shards if len(shard)]
    missed_sums = [
        shard["missed_by_sketch"] * shard["rows"] for shard in pool.artifact.manifest["statistics"]
    ]
    compared = _sample(len(pool), _COMPARED_ROWS, seed)
    return Survey(
        rows=len(pool),
        lengths=tuple(np.quantile(np.concatenate(norms), _SHARES).tolist()) if norms else (),
        missed=sum(missed_sums) / max(1, len(pool)),
        sampled=len(sampled),
        equal=sum(count for count in counts.values() if count > 1),
        most_equal=(pool.row(int(sampled[keys.index(key)])), highest_count)
        if highest_count > 1
        else None,
        compared=len(compared),
        pairs=tuple(_nearest_pairs(pool, compared, pairs)),
    )


def _sample(rows: int, count: int, seed: int) -> Ints:
    """Ascending places."""
    if count >= rows:
        return np.arange(rows)
    return np.sort(np.random.default_rng(seed).choice(rows, count, replace=False))


def _digest(row: Floats, norms: Floats) -> bytes:
    return hashlib.blake2b(row.tobytes() + norms.tobytes(), digest_size=16).digest()


def _nearest_pairs(pool: Pool, places: Ints, count: int) -> list[Pair]:
    """The nearest pairs; of rows with equal vectors only the first is compared."""
    vectors_ND = pool.vectors_at(places)
    distinct = np.sort(np.unique(vectors_ND, axis=0, return_index=True)[1])
    places, vectors_ND = places[distinct], vectors_ND[distinct]
    lengths_N = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
    vectors_ND = vectors_ND / np.where(lengths_N > 0, lengths_N, 1)
    cosines_NN = vectors_ND @ vectors_ND.T
    cosines_NN[np.tril_indices(len(places))] = -np.inf  # each pair once
    count = min(count, len(places) * (len(places) - 1) // 2)
    nearest: list[int] = []
    if count:
        nearest = np.argpartition(-cosines_NN, count - 1, axis=None)[:count].tolist()
    place_pairs = [divmod(index, len(places)) for index in nearest]
    pairs = [
        Pair(float(cosines_NN[a, b]), pool.row(int(places[a])), pool.row(int(places[b])))
        for a, b in place_pairs
    ]
    return sorted(pairs, reverse=True)
