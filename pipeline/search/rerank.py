"""The second of two stages: a cross-encoder scores the best candidates of a search again.

It reads context and candidate together and takes milliseconds for each, so it gets some hundred candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.artifact import Artifact
from pipeline.config import require
from pipeline.models import inference
from pipeline.models.ranker import Ranker, load_ranker


class Reranked(NamedTuple):
    """A candidate; `place` is where it stood."""

    place: int
    score: float


def load_cross_encoder(model: Artifact) -> Ranker:
    """Raises BadInput for a ranker of another architecture."""
    ranker = load_ranker(model.local())
    field, allowed = f"{model.uri}: architecture", "cross, for the second stage"
    require(not ranker.config.has_vectors, field, ranker.config.architecture, allowed)
    return ranker


def rerank(
    ranker: Ranker,
    context: Sequence[str],
    texts: Sequence[str],
    first: Sequence[float] | None = None,
) -> list[Reranked]:
    """The candidates by the cross-encoder's scores, best first; ties stay in their order.

    `first`: the search's scores times `Ranker.loss_scale`, without which a ConveRT model's cosines count for
    nothing; the order is then that of the mean of both. A cross-encoder trained on few examples makes other
    errors than the bi-encoder: pipeline/training/experiments.md.
    """
    if not texts:
        return []
    scores = inference.pair_scores(ranker, [context], [texts])[0].tolist()
    sums = scores if first is None else [sum(pair) for pair in zip(scores, first, strict=True)]
    order = sorted(range(len(texts)), key=lambda place: -sums[place])
    return [Reranked(place, scores[place]) for place in order]
