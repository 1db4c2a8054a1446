"""Search of a pool: exact with proofs, pruned by bounds, or approximate with exact re-scoring."""

from pipeline.pools.pool import Method, Pool
from pipeline.search.exact import Answer, TopRows, search, top_rows, weights_of_vectors

__all__ = ["Answer", "Method", "Pool", "TopRows", "search", "top_rows", "weights_of_vectors"]
