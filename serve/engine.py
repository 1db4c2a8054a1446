"""A loaded model with the pools that it embedded, and their computations in batches.

An engine never changes: another model, or another version of a pool, is another engine. No HTTP, no Ray.
M vectors a context, D dimensions, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline import storage
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import BadInput
from pipeline.models import inference
from pipeline.models.inference import Explained
from pipeline.models.precision import Precision
from pipeline.models.ranker import Ranker
from pipeline.ranking.ranker import Ranker as LoadedRanker
from pipeline.storage import node_cache
from serve.batcher import Stage
from serve.intents import Intents
from serve.known_contexts import KnownContexts
from serve.pools import ALL_ROWS, Masks, OpenPool, PoolQuery, RowFilter
from serve.shards import ShardedPool
from serve.versions import RefusedPool, require_search

# Tokens in a batch for each thread; `inference` splits it further, by length. Larger batches are no faster,
# and delay small requests: of 10,470 tokens, a model of the size of all-MiniLM on two threads took 0.34 s in
# batches of 1,308 or 2,617, and 0.44 s in one batch.
_TOKENS_A_THREAD, _TOKENS_A_GPU = 1_024, 65_536
_PRODUCTS = 2.0e8  # multiplications in a batch of scores, some 10 ms of a core
_NEAR = 0.05
"""Tolerated distance of a vector that is embedded again, relative to its length: bf16 against float32."""


Row = Sequence[int]
"""Token ids of a context or of a candidate."""
Pair = tuple[Row, Row]
"""A context's row and a candidate's."""


class SecondStage(NamedTuple):
    """A cross-encoder that scores the best rows of a pool again."""

    model: Artifact
    ranker: Ranker
    pairs: Stage[Pair, float]
    candidates: int
    """Rows that it scores, at least; more where a query asks for more."""
    together: bool
    """Whether the mean of both stages' scores counts, not its own alone."""


class ExplainableRanking(NamedTuple):
    """A ranking by vectors that can be explained."""

    row: Row
    """The context, of `Ranker.context_rows`."""
    vectors_MD: Tensor
    mask_M: Tensor
    candidates_KD: Tensor
    """Of the results."""


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
        self._closing = ExitStack()
        try:
            masks = Masks()
            self.local_pools = [self._open_pool(uri, masks) for uri in pools]
            self.pools: dict[str, OpenPool | ShardedPool] = {}
            served: list[OpenPool | ShardedPool] = [*self.local_pools, *sharded]
            for pool in served:
                if pool.name in self.pools:
                    raise BadInput(f"pools: two are named {pool.name!r}")
                self.pools[pool.name] = pool
            with node_cache.collect_uses() as copies:
                self._closing.callback(_release, copies)
                self._load_models(precision, classifier)
                if second_stage:
                    self._load_second_stage(
                        second_stage, precision, second_stage_candidates, together
                    )
            self._warm_up()
            self._check_pools()
            self._load_known_contexts()
        except BaseException:
            self.close()
            raise

    def _open_pool(self, uri: str, masks: Masks) -> OpenPool:
        try:
            open_pool = OpenPool(uri, masks)
            self._closing.callback(open_pool.close)
            open_pool.pool.require_model(self.model)
        except BadInput as error:
            raise RefusedPool(uri, error) from error
        return open_pool

    def _load_models(self, precision: Precision, classifier: str) -> None:
        self.ranker = LoadedRanker.load(self.model.uri, precision).module
        gpu = self.ranker.device.type == "cuda"
        tokens = _TOKENS_A_GPU if gpu else _TOKENS_A_THREAD * torch.get_num_threads()
        self.contexts = Stage("contexts", self._encode_contexts, tokens)
        self.candidates = Stage("candidates", self._encode_candidates, tokens)
        self.pairs = _pair_stage("pairs", self.ranker, tokens)
        self.second_stage: SecondStage | None = None
        self.intents: Intents | None = None
        if classifier:
            self.intents = Intents(classifier, self.model, self.ranker, precision, tokens)
        self.scores = Stage("scores", self._score, _PRODUCTS, _products)
        self.explanations = Stage(
            "explanations", self._explain, tokens, lambda ranking: len(ranking.row)
        )

    def _load_second_stage(
        self, uri: str, precision: Precision, candidates: int, together: bool
    ) -> None:
        artifact = open_artifact(uri, "ranker")
        ranker = LoadedRanker.load(uri, precision).module
        ranker.config.require_pairs()
        pairs = _pair_stage("second_stage", ranker, self.pairs.batch_cost)
        self.second_stage = SecondStage(artifact, ranker, pairs, candidates, together)

    def _load_known_contexts(self) -> None:
        self.known_contexts: dict[str, KnownContexts] = {}
        """By the pool's name; of pools whose candidates have some, and not too many."""
        for open_pool in self.local_pools:
            if contexts := KnownContexts.of(open_pool.pool, self.ranker):
                self.known_contexts[open_pool.name] = contexts
                self._closing.callback(contexts.close)

    def encode_known_contexts(self) -> None:
        """Begins to encode them, in threads; until they are encoded, answers name none."""
        for contexts in self.known_contexts.values():
            contexts.start()

    @property
    def has_vectors(self) -> bool:
        return self.ranker.config.has_vectors

    def close(self) -> None:
        """Releases the pool versions and models, so that old ones and their copies on this node may be
        removed."""
        self._closing.close()

    # Stages

    def _encode_contexts(self, rows: Sequence[Row]) -> list[tuple[Tensor, Tensor]]:
        """Rows of `Ranker.context_rows` → ([M, D], [M]) each."""
        vectors_NMD, mask_NM = inference.context_row_vectors(self.ranker, rows)
        return list(zip(vectors_NMD, mask_NM, strict=True))

    def _encode_candidates(self, rows: Sequence[Row]) -> list[Tensor]:
        """Rows of `Ranker.candidate_rows` → [D] each."""
        return list(inference.row_vectors(self.ranker, rows))

    def _score(self, rankings: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[list[float]]:
        """([M, D], [M], candidates [C, D]) → C scores each."""
        return [inference.vector_scores(self.ranker, *ranking).tolist() for ranking in rankings]

    def _explain(self, rankings: Sequence[ExplainableRanking]) -> list[Explained]:
        return [inference.explain(self.ranker, *ranking) for ranking in rankings]

    # Pools

    def pool_query(
        self,
        vectors_MD: Tensor,
        mask_M: Tensor,
        top_k: int,
        rows: RowFilter = ALL_ROWS,
        with_vectors: bool = False,
        is_checked: bool = False,
    ) -> PoolQuery:
        """A search for the vectors of a context."""
        attention = self.ranker.config.search_attention
        vectors = vectors_MD.numpy(), mask_M.numpy()
        return PoolQuery(*vectors, attention, top_k, rows, with_vectors, is_checked)

    def sample_texts(self) -> list[str]:
        """Some texts of a pool, or made-up ones without a pool."""
        for pool in self.local_pools:
            if pool.canaries:
                return [canary.text for canary in pool.canaries]
        return [f"text number {number}" for number in range(8)]

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
            "pools": [pool.description for pool in self.pools.values()],
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

    def _check_pools(self) -> None:
        """Embeds some texts of each pool, and searches for them.

        Raises RefusedPool if the vectors are not the pool's, or a score is not a number.
        """
        for pool in self.pools.values():
            if pool.canaries:
                self._check_vectors(pool)
        for open_pool in self.local_pools:
            open_pool.warm_up(self.ranker.config.vectors_per_context)
            if open_pool.canaries:
                self._check_search(open_pool)

    def _check_search(self, pool: OpenPool) -> None:
        texts = [[canary.text] for canary in pool.canaries]
        queries = [
            (self.pool_query(vectors_MD, mask_M, 10), None)
            for vectors_MD, mask_M in self._encode_contexts(self.ranker.context_rows(texts))
        ]
        for answer in pool.stage.run(queries):
            if not all(math.isfinite(result.score) for result in answer.results):
                problem = f"{pool.uri}: a search has scores that are no numbers"
                raise RefusedPool(pool.uri, problem)

    def _check_vectors(self, pool: OpenPool | ShardedPool) -> None:
        ids, texts, known_contexts, vectors = zip(*pool.canaries, strict=True)
        text_vectors_ND = inference.candidate_vectors(self.ranker, texts)
        expected_ND = inference.toward_contexts(
            self.ranker, text_vectors_ND, known_contexts
        ).numpy()
        distances_N = np.linalg.norm(expected_ND - np.stack(vectors), axis=1)
        if not (distances_N <= _NEAR * np.linalg.norm(expected_ND, axis=1) + 1e-6).all():
            worst = ids[int(np.argmax(distances_N))]
            problem = f"the vector of {worst!r} is not what the model makes of its text"
            raise RefusedPool(pool.uri, f"{pool.uri}: {problem}; embed the pool again")


def _release(copies: Sequence[Path]) -> None:
    for folder in copies:
        node_cache.release(folder)


def pair_tokens(pair: Pair) -> int:
    """The tokens of a context's and a candidate's row together, which need one [CLS]."""
    context_row, row = pair
    return len(context_row) + len(row) - 1


def _products(ranking: tuple[Tensor, Tensor, Tensor]) -> int:
    vectors_MD, _, vectors_CD = ranking
    return len(vectors_CD) * vectors_MD.numel()


def _pair_stage(name: str, ranker: Ranker, tokens: float) -> Stage[Pair, float]:
    """Scores pairs of a context's and a candidate's row."""

    def score(pairs: Sequence[Pair]) -> list[float]:
        scores: list[float] = inference.pair_row_scores(ranker, pairs).tolist()
        return scores

    return Stage(name, score, tokens, pair_tokens)
