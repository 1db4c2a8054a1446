"""Finds rows that are likely among the best, by the FAISS indices that a pool may have.

    neighbours/part-00000.faiss    product quantizer of 16 shards, 4 bits for every three numbers or so

A search reads all indices, a twelfth of bfloat16's bytes, and finds rows by their product with the mean of
the context's vectors. If 3,000 of a million rows are scored exactly, they hold 99 % of the top 10 of a
poly-encoder with 64 vectors; 1,000 hold 98 %. An inverted file, whose search skips lists, loses more than it
saves while all lists fit in memory.
"""

from __future__ import annotations

import numpy as np

from pipeline.arrays import Floats, Ints
from pipeline.pools.pool import Pool
from pipeline.search.threads import in_parallel

_NEIGHBOURS = 3000  # of which `search` scores those that can reach the top


def neighbours(pool: Pool, vectors_MD: Floats, top_k: int) -> Ints:
    """Places of rows that are likely among the best for a context's vectors, the likeliest first.

    Raises BadInput if the pool has no index.
    """
    if not len(pool):
        return np.empty(0, np.int64)
    query_1D = vectors_MD.mean(axis=0, keepdims=True).astype(np.float32)
    count = min(len(pool), max(_NEIGHBOURS, 4 * top_k))
    index = pool.neighbours
    # Its parts have a thread each. More, which this thread's OpenMP would start, wait for work busily.
    ((_, places_1N),) = in_parallel(lambda query: index.search(query, count), [query_1D])
    places: Ints = places_1N[0][places_1N[0] >= 0]  # there may be fewer
    return places
