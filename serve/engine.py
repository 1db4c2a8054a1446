"""A loaded model with the pools that it embedded, and their computations in batches.

An engine never changes: another model, or another version of a pool, is another engine. No HTTP, no Ray.
M vectors a context, D dimensions, C candidates.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline import storage
from pipeline.arrays import Bools, Floats
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import BadInput
from pipeline.engine.resources import best_device
from pipeline.models import explanation, inference
from pipeline.models.explanation import Explained
from pipeline.models.precision import Precision
from pipeline.models.ranker import Ranker
from pipeline.models.settings import Attention
from pipeline.pools.lock import lease
from pipeline.pools.pool import Canary, Pool, describe
from pipeline.ranking.ranker import Ranker as LoadedRanker
from pipeline.ranking.results import Result, results_at
from pipeline.search import device, top_rows
from pipeline.storage import node_cache
from serve.batcher import Stage
from serve.intents import Intents
from serve.known_contexts import KnownContexts
from serve.masks import Masks
from serve.versions import RefusedPool, require_search

if TYPE_CHECKING:
    from serve.shards import ShardedPool

# Tokens in a batch for each thread; `inference` splits it further, by length. Larger batches are no faster,
# and delay small requests: of 10,470 tokens, a model of the size of all-MiniLM on two threads took 0.34 s in
# batches of 1,308 or 2,617, and 0.44 s in one batch.
_TOKENS_A_THREAD, _TOKENS_A_GPU = 1_024, 65_536
_SEARCHES = 16  # searches in one pass over a pool
_ROWS_OF_A_SEARCH = 200  # whose texts are read in the time of a search of a small pool
_PRODUCTS = 2.0e8  # multiplications in a batch of scores, some 10 ms of a core
CANARIES = 8  # rows of a pool that are embedded again to check its vectors
_NEAR = 0.05  # tolerated distance of such a vector, relative to its length: bf16 against float32


class PoolQuery(NamedTuple):
    """A search of a pool."""

    vectors_MD: Tensor
    mask_M: Tensor
    top_k: int
    among: Bools | None = None
    """[rows of the pool] true for the rows to search; None: all."""


class PoolAnswer(NamedTuple):
    """The best rows of a pool, best first; ties by id."""

    results: list[Result]
    certified: bool
    """Whether this is provably the exact top k."""
    vectors: Mapping[int, Floats] = {}
    """[D] by the place of a result; only of shards, which send them where a query asks for them."""
    missing_shards: Sequence[int] = ()
    """Shards that did not answer, whose rows are not among the results."""


class SecondStage(NamedTuple):
    """A cross-encoder that scores the best rows of a pool again."""

    model: Artifact
    ranker: Ranker
    pairs: Stage
    candidates: int
    """Rows that it scores, at least; more where a query asks for more."""
    together: bool
    """Whether the mean of both stages' scores counts, not its own alone."""


class ExplainableRanking(NamedTuple):
    """A ranking by vectors that can be explained."""

    row: Sequence[int]
    """The context, of `Ranker.context_rows`."""
    vectors_MD: Tensor
    mask_M: Tensor
    candidates: Callable[[], Tensor]
    """[K, D] of the results; those of a pool are read from its files."""


class Engine:
    """A model with its pools. Any thread may call its methods; a `Stage` runs on one thread at a time."""

    def __init__(
        self,
        model: str,
        pools: Sequence[str] = (),
        precision: Precision = "auto",
        second_stage: str = "",
        classifier: str = "",
        sharded: Sequence[ShardedPool] = (),
        second_stage_candidates: int = 50,
        together: bool = False,
    ) -> None:
        """Loads and checks a model and versions of pools (a pool's own URI means its CURRENT version).

        `second_stage`: a cross-encoder that scores the best `second_stage_candidates` rows of a pool again;
        `together`: the mean of its score and the search's counts. `classifier`: of intents.
        `sharded`: pools that other deployments search. Raises BadInput for a model or pool that cannot be
        served, and for a pool whose vectors this model does not make.
        """
        self.model = open_artifact(model, "ranker")
        require_search(self.model, pools)
        self.pools: dict[str, Pool] = {}
        self.sharded = {pool.name: pool for pool in sharded}
        self._closing = ExitStack()
        try:
            for uri in pools:
                self._open_pool(uri)
            with node_cache.collect_uses() as copies:
                self._closing.callback(_release, copies)
                self._load_models(precision, classifier)
                if second_stage:
                    self._load_second_stage(
                        second_stage, precision, second_stage_candidates, together
                    )
            self._load_pools()
        except BaseException:
            self.close()
            raise

    def _open_pool(self, uri: str) -> None:
        try:
            pool = Pool.open(uri, device=search_device())
            self._closing.callback(pool.close)
            pool.require_model(self.model)
        except BadInput as error:
            raise RefusedPool(uri, error) from error
        if (lease_file := lease(pool.artifact.uri)) is not None:
            self._closing.callback(lease_file.stop)
        if pool.name in self.pools or pool.name in self.sharded:
            raise BadInput(f"pools: two are named {pool.name!r}")
        self.pools[pool.name] = pool

    def _load_models(self, precision: Precision, classifier: str) -> None:
        self.ranker = LoadedRanker.load(self.model.uri, precision).module
        gpu = self.ranker.device.type == "cuda"
        tokens = _TOKENS_A_GPU if gpu else _TOKENS_A_THREAD * torch.get_num_threads()
        self.contexts = Stage("contexts", self._encode_contexts, tokens)
        self.candidates = Stage("candidates", self._encode_candidates, tokens)
        self.pairs = Stage("pairs", functools.partial(_score_pairs, self.ranker), tokens)
        self.second_stage: SecondStage | None = None
        self.intents: Intents | None = None
        if classifier:
            self.intents = Intents(classifier, self.model, self.ranker, precision, tokens)
        self.scores = Stage("scores", self._score, _PRODUCTS)
        self.explanations = Stage("explanations", self._explain, tokens)

    def _load_second_stage(
        self, uri: str, precision: Precision, candidates: int, together: bool
    ) -> None:
        artifact = open_artifact(uri, "ranker")
        ranker = LoadedRanker.load(uri, precision).module
        ranker.config.require_pairs()
        pairs = Stage(
            "second_stage", functools.partial(_score_pairs, ranker), self.pairs.batch_cost
        )
        self.second_stage = SecondStage(artifact, ranker, pairs, candidates, together)

    def _load_pools(self) -> None:
        self.pool_rows = {name: len(pool) for name, pool in self.pools.items()}
        self.pool_rows |= {
            name: pool.description["candidates"] for name, pool in self.sharded.items()
        }
        self.searches: Mapping[str, Stage] = {}
        if self.pools:
            attention = self.ranker.config.search_attention
            self.searches = {
                name: search_stage(pool, attention) for name, pool in self.pools.items()
            }
        self.masks = Masks()
        self._warm_up()
        for pool in self.pools.values():
            if pool.on_device is not None:
                device.warm_up(pool.on_device, self.ranker.config.vectors_per_context)
        for pool in self.pools.values():
            self._check(pool)
        known = {name: KnownContexts.of(pool, self.ranker) for name, pool in self.pools.items()}
        self.known_contexts = {name: contexts for name, contexts in known.items() if contexts}
        """By the pool's name; of pools whose candidates have some, and not too many."""
        for contexts in self.known_contexts.values():
            self._closing.callback(contexts.close)
        for pool_of_shards in self.sharded.values():
            self._check_vectors(pool_of_shards.uri, pool_of_shards.canaries)

    @property
    def has_vectors(self) -> bool:
        return self.ranker.config.has_vectors

    def close(self) -> None:
        """Releases the pool versions and models, so that old ones and their copies on this node may be
        removed."""
        self._closing.close()

    # Stages

    def _encode_contexts(self, rows: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        """Rows of `Ranker.context_rows` → ([M, D], [M]) each."""
        vectors_NMD, mask_NM = inference.context_row_vectors(self.ranker, rows)
        return list(zip(vectors_NMD, mask_NM, strict=True))

    def _encode_candidates(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Rows of `Ranker.candidate_rows` → [D] each."""
        return list(inference.row_vectors(self.ranker, rows))

    def _score(self, rankings: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[list[float]]:
        """([M, D], [M], candidates [C, D]) → C scores each."""
        return [inference.vector_scores(self.ranker, *ranking).tolist() for ranking in rankings]

    def _explain(self, rankings: Sequence[ExplainableRanking]) -> list[Explained]:
        return [
            explanation.explain(
                self.ranker, ranking.row, ranking.vectors_MD, ranking.mask_M, ranking.candidates()
            )
            for ranking in rankings
        ]

    # Pools

    def sample_texts(self) -> list[str]:
        """Some texts of a pool, or made-up ones without a pool."""
        for pool in self.pools.values():
            if len(pool):
                return [canary.text for canary in pool.canaries(CANARIES)]
        return [f"text number {number}" for number in range(CANARIES)]

    def info(self) -> dict[str, Any]:
        """The description for /info. Of a path it contains the last name."""
        config = self.ranker.config
        return {
            "model": {
                "name": storage.name_of(self.model.uri),
                "fingerprint": self.model.fingerprint,
                "architecture": config.architecture,
                "created_at": self.model.manifest["created_at"],
            },
            "limits": {
                "max_context_tokens": config.max_context_tokens,
                "max_candidate_tokens": config.max_candidate_tokens,
            },
            "second_stage": self.second_stage and self.second_stage.model.fingerprint,
            "classifier": self.intents
            and {
                "fingerprint": self.intents.artifact.fingerprint,
                "intents": list(self.intents.classifier.labels),
                "threshold": self.intents.classifier.threshold,
            },
            "device": str(self.ranker.device),
            "precision": self.ranker.precision,
            "pools": [
                {**describe(pool), "columns": pool.filter_columns} for pool in self.pools.values()
            ]
            + [{**pool.description, "columns": pool.columns} for pool in self.sharded.values()],
        }

    # Before it answers

    def _warm_up(self) -> None:
        """Runs the model once: the first pass allocates and compiles."""
        contexts = self.ranker.context_rows([["warm up"], ["a longer text to warm up"]])
        candidates = self.ranker.candidate_rows(["one", "two"])
        if self.has_vectors:
            self._encode_contexts(contexts)
            self._encode_candidates(candidates)
        else:
            self.pairs.run(list(zip(contexts, candidates, strict=True)))

    def _check(self, pool: Pool) -> None:
        """Embeds some of the pool's texts and searches for them.

        Raises BadInput if the vectors are not the pool's, or a score is not a number.
        """
        if not len(pool):
            return
        canaries = pool.canaries(CANARIES)
        self._check_vectors(pool.artifact.uri, canaries)
        contexts = self.ranker.context_rows([[canary.text] for canary in canaries])
        queries = [
            PoolQuery(*context_vectors, 10) for context_vectors in self._encode_contexts(contexts)
        ]
        for answer in self.searches[pool.name].run(queries):
            if not all(math.isfinite(result.score) for result in answer.results):
                problem = f"{pool.artifact.uri}: a search has scores that are no numbers"
                raise RefusedPool(pool.artifact.uri, problem)

    def _check_vectors(self, uri: str, canaries: Sequence[Canary]) -> None:
        """`canaries`: of a pool. Raises BadInput for another model's vectors."""
        if not canaries:
            return
        ids, texts, known_contexts, vectors = zip(*canaries, strict=True)
        text_vectors_ND = inference.candidate_vectors(self.ranker, texts)
        expected_ND = inference.toward_contexts(
            self.ranker, text_vectors_ND, known_contexts
        ).numpy()
        distances_N = np.linalg.norm(expected_ND - np.stack(vectors), axis=1)
        if not (distances_N <= _NEAR * np.linalg.norm(expected_ND, axis=1) + 1e-6).all():
            worst = ids[int(np.argmax(distances_N))]
            problem = f"the vector of {worst!r} is not what the model makes of its text"
            raise RefusedPool(uri, f"{uri}: {problem}; embed the pool again")


def _release(copies: Sequence[Path]) -> None:
    for folder in copies:
        node_cache.release(folder)


def search_stage(pool: Pool, attention: Attention) -> Stage:
    """Searches of a pool; one pass over the pool answers several. They cost `search_cost`."""
    return Stage("search", functools.partial(_search_batch, pool, attention), _SEARCHES)


def search_cost(top_k: int) -> float:
    """The cost of a search in searches: the texts of its results are read, too."""
    return 1 + top_k / _ROWS_OF_A_SEARCH


def search_share(top_k: int) -> float:
    """The cost of a search in batches."""
    return search_cost(top_k) / _SEARCHES


def vectors_at(pool: Pool, places: Sequence[int]) -> Floats:
    """[K, D] at places in any order."""
    places_K = np.array(places, np.int64)
    order_K = np.argsort(places_K)
    vectors_KD = np.empty((len(places_K), pool.dimensions), np.float32)
    vectors_KD[order_K] = pool.vectors_at(places_K[order_K])
    return vectors_KD


def _search_batch(
    pool: Pool, attention: Attention, queries: Sequence[PoolQuery]
) -> list[PoolAnswer]:
    """Queries with the same filter share their passes over the pool."""
    answers: dict[int, PoolAnswer] = {}
    by_filter: dict[int, list[int]] = {}
    for place, query in enumerate(queries):
        by_filter.setdefault(id(query.among), []).append(place)
    for places in by_filter.values():
        group = [queries[place] for place in places]
        answer = top_rows(
            pool,
            torch.stack([query.vectors_MD for query in group]).numpy(),
            max(query.top_k for query in group),
            torch.stack([query.mask_M for query in group]).numpy(),
            attention,
            among=group[0].among,
        )
        for row, (place, query) in enumerate(zip(places, group, strict=True)):
            answers[place] = PoolAnswer(
                results_at(
                    pool, answer.places[row, : query.top_k], answer.scores[row, : query.top_k]
                ),
                bool(answer.certified[row]),
            )
    return [answers[place] for place in range(len(queries))]


def _score_pairs(
    ranker: Ranker, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[float]:
    """Pairs of a context's and a candidate's row → their scores."""
    scores: list[float] = inference.pair_row_scores(ranker, pairs).tolist()
    return scores


def search_device() -> str:
    """The GPU that this replica asked for (`num_gpus`), which then searches the pools; "": its cores do."""
    place = best_device()
    return "" if place.type == "cpu" else str(place)
