"""Searches a pool for the best candidates for a context. `Pool.search` calls it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from pipeline.arrays import Floats, Ints
from pipeline.ranking import inputs
from pipeline.ranking.inputs import Context
from pipeline.ranking.results import Ranking, Result
from pipeline.retrieval.methods import Method
from pipeline.retrieval.search import filters, top_rows

if TYPE_CHECKING:
    from pipeline.ranking.ranker import Ranker
    from pipeline.retrieval.pools.pool import Pool

Where = Mapping[str, str | Collection[str]]


def search(
    pool: Pool,
    ranker: Ranker,
    context: Context,
    top_k: int,
    where: Where | None,
    allow: Collection[str] | None,
    deny: Collection[str],
    method: Method,
) -> Ranking:
    """See `Pool.search`."""
    inputs.require_top_k(top_k)
    inputs.context(context)
    pool.require_model(ranker)
    attention = ranker.config.search_attention
    among = None
    if where or allow is not None or deny:
        among = filters.select(pool, allow, deny, where)
        if not among.any():
            return Ranking(())
    vectors_1MD, mask_1M = ranker.encode_contexts([context])
    answers = top_rows(pool, vectors_1MD, top_k, mask_1M, attention, method, among)
    results = results_at(pool, answers.places[0], answers.scores[0])
    return Ranking(tuple(results), bool(answers.certified[0]))


def results_at(pool: Pool, places_K: Ints, scores_K: Floats) -> list[Result]:
    """The candidates at these places of a pool, in the order of the places."""
    names = filters.columns(pool)
    rows = pool.rows_at(places_K, names)
    return [
        Result(place, row["id"], row["text"], score, {name: row[name] for name in names})
        for place, score, row in zip(places_K.tolist(), scores_K.tolist(), rows, strict=True)
    ]
