"""What a replica does: a ranker, the pools that it embedded, and rankings. No HTTP, no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline import storage
from pipeline.artifact import open_artifact
from pipeline.config import BadInput
from pipeline.evaluation.ranking import own_scores
from pipeline.models import inference
from pipeline.models.precision import Precision
from pipeline.models.ranker import load_ranker
from pipeline.models.settings import SETTINGS, parse_settings
from pipeline.resources import best_device
from pipeline.retrieval.pools.lock import lease
from pipeline.retrieval.pools.pool import Pool, describe
from pipeline.retrieval.search import top_rows


class UnknownPool(BadInput):
    """No pool of that name is served."""


class Ranked(NamedTuple):
    """A candidate with its score; `place` is where it stands in the request, or in the pool."""

    place: int
    text: str
    score: float
    id: str


class Engine:
    """A loaded ranker with its pools. Calls may come from any thread; one runs at a time per thread."""

    def __init__(
        self, model: str, pools: Sequence[str] = (), precision: Precision = "auto"
    ) -> None:
        """Raises BadInput for a model or a pool that cannot be served."""
        self.model = open_artifact(model, "ranker")
        self.pools = open_pools(model, pools)
        self._leases = [lease(pool.artifact.uri) for pool in self.pools.values()]  # none is removed
        self._ranker = inference.place(load_ranker(self.model.local()), best_device(), precision)
        self.rank(["warm up"], ["one", "two"], 1)  # the first pass allocates and compiles

    def rank(self, context: Sequence[str], candidates: Sequence[str], top_k: int) -> list[Ranked]:
        """The best of the given candidates, best first; ties in the order given."""
        (scores_C,) = own_scores(self._ranker, [context], [candidates])
        order = np.argsort(-scores_C, kind="stable")[:top_k].tolist()
        return [Ranked(at, candidates[at], float(scores_C[at]), str(at)) for at in order]

    def rank_pool(self, context: Sequence[str], pool: str, top_k: int) -> list[Ranked]:
        """The best candidates of a pool, exactly.

        Raises UnknownPool.
        """
        opened = self.pool(pool)
        vectors_NMD, mask_NM = inference.context_vectors(self._ranker, [context])
        attention = self._ranker.config.search_attention
        found = top_rows(opened, vectors_NMD.numpy(), top_k, mask_NM.numpy(), attention)
        results = []
        for place, score in zip(found.places[0].tolist(), found.scores[0].tolist(), strict=True):
            row = opened.row(place)
            results.append(Ranked(place, row.text, score, row.id))
        return results

    def pool(self, name: str) -> Pool:
        """Raises UnknownPool."""
        if name not in self.pools:
            there = ", ".join(sorted(self.pools)) or "none"
            raise UnknownPool(f"pool: {name!r} is not served here; there are: {there}")
        return self.pools[name]

    def info(self) -> dict[str, Any]:
        """What is served, for people and for checks."""
        return {
            "model": {
                "fingerprint": self.model.fingerprint,
                "architecture": self._ranker.config.architecture,
                "uri": self.model.uri,
                "created_at": self.model.manifest["created_at"],
                "run_id": self.model.manifest["run_id"],
            },
            "limits": {
                "max_context_tokens": self._ranker.config.max_context_tokens,
                "max_candidate_tokens": self._ranker.config.max_candidate_tokens,
            },
            "device": str(self._ranker.device),
            "precision": self._ranker.precision,
            "pools": [describe(pool) for pool in self.pools.values()],
        }


def open_pools(model: str, pools: Sequence[str]) -> Mapping[str, Pool]:
    """Opens pools by name.

    Raises BadInput for a pool of another model, for two of one name, and for any pool where the
    model is a cross-encoder.
    """
    artifact = open_artifact(model, "ranker")
    settings = storage.join(artifact.uri, SETTINGS)
    config = parse_settings(storage.read_bytes(settings), settings)
    if pools and not config.has_vectors:
        raise BadInput(
            "pools: a cross-encoder cannot use one; allowed: none, or a bi or poly model"
        )
    if pools:
        _ = config.search_attention  # refuses what cannot search
    opened: dict[str, Pool] = {}
    for uri in pools:
        pool = Pool.open(uri)
        pool.require_model(artifact)
        if pool.name in opened:
            raise BadInput(f"pools: two are named {pool.name!r}")
        opened[pool.name] = pool
    return opened
