"""Rows that are likely among the best, from indices of FAISS that a pool may have.

    neighbours/part-00000.faiss    product quantizer of 16 shards, 4 bits for every three numbers or so

Each index is gone through whole, at a twelfth of bfloat16's bytes, and finds rows by their product with
the one vector that all of the context's are nearest to: with 2,000 of a million rows scored exactly,
99 % of the top 10 of a poly-encoder with 64 vectors are among them. Lists of an inverted file that are
not looked at lose more than they save, while all of them fit in memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.arrays import Floats, Ints
from pipeline.retrieval.bounds import centres_of, in_parallel
from pipeline.retrieval.pool import Pool

_FOUND = 2000  # of which `search` scores those that can reach the top


def neighbours(pool: Pool, vectors_MD: Floats, top_k: int) -> Ints:
    """Ascending places of rows that are likely among the best for a context's vectors.

    Raises BadInput where the pool has no index.
    """
    query_1D = centres_of(vectors_MD, 1)[0].astype(np.float32)
    count = max(_FOUND, 4 * top_k)

    def search(index: Any) -> tuple[Floats, Ints]:
        products_1N, rows_1N = index.search(query_1D, min(count, index.ntotal))
        found_N = rows_1N[0] >= 0  # there may be fewer
        return products_1N[0, found_N], rows_1N[0, found_N]

    indices = pool.neighbours
    found = in_parallel(search, indices)
    starts = np.cumsum([0, *(index.ntotal for index in indices)])
    products = np.concatenate([np.empty(0, np.float32), *(products for products, _ in found)])
    places = [rows + start for start, (_, rows) in zip(starts, found, strict=False)]
    best = np.argsort(-products)[:count]
    return np.sort(np.concatenate([np.empty(0, np.int64), *places])[best])
