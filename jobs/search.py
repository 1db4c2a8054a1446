"""A look at a pool: the best candidates for a context."""

from __future__ import annotations

import time
from dataclasses import dataclass

from jobs import program
from pipeline.artifact import open_artifact
from pipeline.config import require
from pipeline.models import inference
from pipeline.models.ranker import load_ranker
from pipeline.retrieval.pool import Pool, describe
from pipeline.retrieval.search import top_rows


@dataclass(frozen=True, kw_only=True)
class Config:
    """Searches a pool exactly and prints a table."""

    pool: str
    """<pools>/<name>, or one of its versions."""
    model: str
    """The ranker that embedded it."""
    context: tuple[str, ...]
    """The turns, oldest first."""
    top_k: int = 10
    """Candidates to show."""

    def __post_init__(self) -> None:
        require(any(turn.strip() for turn in self.context), "context", self.context, "some text")
        require(self.top_k >= 1, "top_k", self.top_k, ">= 1")


def run(config: Config) -> program.Summary:
    model = open_artifact(config.model, "ranker")
    pool = Pool.open(config.pool)
    pool.require_model(model)
    ranker = load_ranker(model.local())
    began = time.perf_counter()
    vectors, mask = inference.context_vectors(ranker, [config.context])
    encoded = time.perf_counter()
    attention = ranker.config.search_attention
    found = top_rows(pool, vectors.numpy(), config.top_k, mask.numpy(), attention)
    searched = time.perf_counter()
    results = []
    for place, score in zip(found.places[0].tolist(), found.scores[0].tolist(), strict=True):
        row = pool.row(place)
        results.append({"id": row.id, "score": score, "text": row.text})
        print(f"{score:9.3f}  {row.id:<24}  {row.text[:100]}")
    milliseconds = {
        "encode": round((encoded - began) * 1e3, 2),
        "search": round((searched - encoded) * 1e3, 2),
    }
    return {
        "pool": describe(pool),
        "results": results,
        "certified": bool(found.certified[0]),
        "milliseconds": milliseconds,
    }


if __name__ == "__main__":
    program.main(Config, run, "search")
