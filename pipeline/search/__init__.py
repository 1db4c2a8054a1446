"""Search of a pool: exact with proofs, pruned by bounds, or approximate with exact re-scoring.

exact                  the search; `choice` of its fastest form, on `threads`
scores                 in float32 with a proved error, and in float64
bounds, products       upper bounds of scores, by cheap products
approximate            rows that are likely among the best, by FAISS
device, device_scores  in a GPU's memory; `triton_scores` is the kernel
filters, rerank        the rows that count; a cross-encoder as a second stage
"""

from pipeline.pools.pool import Method, Pool
from pipeline.search.exact import Answer, TopRows, search, top_rows, weights_of_vectors

__all__ = ["Answer", "Method", "Pool", "TopRows", "search", "top_rows", "weights_of_vectors"]
