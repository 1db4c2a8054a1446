"""Answers queries: tokenises, hands rows to the batcher, and sorts the results.

A query takes one engine at its beginning and uses no other, so no answer mixes two versions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from pipeline.classification.classifier import Classified
from pipeline.models.explanation import Explained
from pipeline.models.truncation import longer_candidates, longer_contexts
from pipeline.ranking.results import Result, best_results
from serve import tracing
from serve.batcher import SENDER, Batch, Batcher, Stage, all_of
from serve.engine import Engine, ExplainableRanking, SecondStage
from serve.intents import Intents
from serve.pools import ALL_ROWS, RowFilter, search_share
from serve.refusals import Refusal

ResultT = TypeVar("ResultT")
_HEALTH_S = 5.0  # for the answer to a query of a health check


class CandidateText(NamedTuple):
    """A candidate in the query."""

    id: str
    text: str


@dataclass(frozen=True)
class RankQuery:
    """The candidates are in the query, or in a pool."""

    context: Sequence[str]
    candidates: Sequence[CandidateText] | None
    pool: str | None
    top_k: int
    rows: RowFilter = ALL_ROWS
    """Of the pool."""
    explain: bool = False


@dataclass(frozen=True)
class RankAnswer:
    """Best first; ties in the order given, in a pool by id."""

    results: list[Result]
    certified: bool
    """Whether this is provably the exact top k; with a second stage: whether that one scored the exact best
    rows of the first."""
    engine: Engine
    pool: str = ""
    """"": the candidates were in the query."""
    pool_version: str = ""
    known_contexts: Sequence[list[str] | None] = ()
    """For each result the known context that is nearest to the query's; (): the pool names none."""
    explained: Explained | None = None
    """Only if the query asks for it and there are results."""
    missing_shards: Sequence[int] = ()
    """Shards of the pool whose rows are not among the results."""
    candidates: int = 0
    """Number of ranked candidates: those in the query, or the pool's rows."""
    context_tokens: int = 0
    """Tokens of the context that were read."""

    @property
    def second_stage(self) -> str | None:
        """Fingerprint of the model that scored the best rows again, which it does for pools only."""
        stage = self.engine.second_stage if self.pool else None
        return stage.model.fingerprint if stage else None


class _TextsToScore(NamedTuple):
    """A context and candidates as tokens."""

    context_row: Sequence[int]
    rows: Sequence[Sequence[int]]
    """The distinct texts."""
    places: list[int]
    """For each text of the request its place in `rows`."""
    tokens: int
    cost: float
    """In batches."""


def _sample_query(engine: Engine, pool: str | None = None) -> RankQuery:
    """Some texts of a pool, of which the first is the context, too."""
    texts = engine.sample_texts()
    candidates = None if pool else [CandidateText(text, text) for text in texts]
    return RankQuery(texts[:1], candidates, pool, len(texts))


def _search_depth(engine: Engine, query: RankQuery) -> int:
    """Number of rows to search for: more than `top_k` if a second stage scores them again."""
    stage = engine.second_stage
    return max(query.top_k, stage.candidates) if stage else query.top_k


class Service:
    """The ranking service of a replica. Deadlines are times of `time.monotonic`."""

    def __init__(
        self,
        champion: Callable[[], Engine],
        max_wait_s: float,
        on_batch: Callable[[Batch], None] = lambda batch: None,
        record_ranking: Callable[[RankAnswer], None] = lambda answer: None,
        batch_rows: int = 1024,
        candidate: Callable[[], Engine | None] = lambda: None,
    ) -> None:
        """`champion` returns the engine that the service stands for; `candidate` one for the next request
        instead, or None. `on_batch` and `record_ranking` are for metrics."""
        self._champion, self._candidate, self._record_ranking = champion, candidate, record_ranking
        self.batcher = Batcher(max_wait_s, on_batch, batch_rows)
        self._on_batch = on_batch
        # Rust tokenises without the interpreter's lock, beside the thread that computes.
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")

    def close(self) -> None:
        self.batcher.close()
        self._tokenizing.shutdown(wait=False)

    def choose_engine(self) -> Engine:
        """The engine for a new request, which uses no other: the champion, or the candidate for its share."""
        return self._candidate() or self._champion()

    @property
    def champion(self) -> Engine:
        """The engine that the service describes."""
        return self._champion()

    async def rank(
        self, query: RankQuery, deadline: float, engine: Engine | None = None
    ) -> RankAnswer:
        """Raises Refusal where too much is waiting, the deadline is over, there is no such pool, or the
        model cannot explain."""
        answer = await self._answer(query, deadline, engine or self.choose_engine())
        self._record_ranking(answer)
        return answer

    async def problem(self) -> str:
        """The reason why no request can be answered, or "".

        If the latest batches failed, it asks the champion, which requests that cannot be computed do not
        make sick."""
        if not (problem := self.batcher.problem()) and self.batcher.is_failing:
            SENDER.set("health check")
            try:
                query, deadline = _sample_query(self.champion), time.monotonic() + _HEALTH_S
                await self._answer(query, deadline, self.champion)
            except Exception as error:
                problem = f"batches fail: {error!r}"
        return problem

    async def rehearse(self, engine: Engine, deadline: float) -> None:
        """Ranks some texts of an engine's pools before clients ask it. Otherwise a new replica would admit
        any burst of requests, because its batcher would not know how long one takes.

        It asks three times, as the batcher ignores the first measurement. A busy one, which knows the times,
        may refuse."""
        SENDER.set("rehearsal")
        pools = [None, *(pool.name for pool in engine.local_pools)]
        for query in [_sample_query(engine, pool) for pool in pools] * 3:
            with suppress(Refusal):
                await self._answer(query, deadline, engine)

    async def _answer(self, query: RankQuery, deadline: float, engine: Engine) -> RankAnswer:
        if query.explain and not engine.has_vectors:
            message = "explain: the model is a cross-encoder, which has no vectors; allowed: false"
            raise Refusal("invalid_request", message, "explain")
        if query.pool is None:
            return await self._rank_candidates(engine, query, deadline)
        if query.pool not in engine.pools:  # before admission: the batcher keeps times by pool
            served_pools = ", ".join(sorted(engine.pools)) or "none"
            message = f"pool: not served here; there are: {served_pools}"
            raise Refusal("unknown_pool", message, "pool")
        cost = search_share(_search_depth(engine, query))
        with self.batcher.admit(f"search {query.pool}", cost, deadline):
            return await self._search(engine, query, query.pool, deadline)

    async def _rank_candidates(
        self, engine: Engine, query: RankQuery, deadline: float
    ) -> RankAnswer:
        candidates = query.candidates or []
        texts = [candidate.text for candidate in candidates]
        texts_to_score = await self._texts_to_score(engine, query.context, texts)
        context_row = texts_to_score.context_row
        explained = None
        with self.batcher.admit("rank", texts_to_score.cost, deadline):
            scores, vectors = await self._score(engine, texts_to_score, deadline)
            ids = [candidate.id for candidate in candidates]
            results = best_results(ids, texts, scores, query.top_k)
            if query.explain and vectors is not None:
                vectors_MD, mask_M, vectors_CD = vectors
                best_KD = vectors_CD[[texts_to_score.places[result.index] for result in results]]
                ranking = ExplainableRanking(context_row, vectors_MD, mask_M, best_KD)
                explained = await self._explain(engine, ranking, deadline)
        return RankAnswer(
            results,
            True,
            engine,
            explained=explained,
            candidates=len(texts),
            context_tokens=len(context_row),
        )

    async def scores(
        self, engine: Engine, context: Sequence[str], texts: Sequence[str], deadline: float
    ) -> tuple[list[float], int]:
        """(score of each text, tokens read); equal texts are scored once, and so score alike."""
        texts_to_score = await self._texts_to_score(engine, context, texts)
        with self.batcher.admit("rank", texts_to_score.cost, deadline):
            scores, _ = await self._score(engine, texts_to_score, deadline)
        return scores, texts_to_score.tokens

    async def _texts_to_score(
        self, engine: Engine, context: Sequence[str], texts: Sequence[str]
    ) -> _TextsToScore:
        distinct_texts = list(dict.fromkeys(texts))
        place_of = {text: place for place, text in enumerate(distinct_texts)}
        context_row = (await self._tokenize(engine.ranker.context_rows, [context]))[0]
        rows = await self._tokenize(engine.ranker.candidate_rows, distinct_texts)
        if engine.has_vectors:
            tokens = len(context_row) + sum(map(len, rows))
        else:
            tokens = sum(len(context_row) + len(row) - 1 for row in rows)  # one [CLS] for both
        cost = tokens / engine.candidates.batch_cost
        return _TextsToScore(context_row, rows, [place_of[text] for text in texts], tokens, cost)

    async def _score(
        self, engine: Engine, texts: _TextsToScore, deadline: float
    ) -> tuple[list[float], tuple[Tensor, Tensor, Tensor] | None]:
        """The scores; and if the model has vectors, those of the context [M, D], which of them count [M], and
        those of the distinct texts [C, D]."""
        context_row, rows, places, _, _ = texts
        vectors = None
        if engine.has_vectors:
            ((vectors_MD, mask_M),), vectors_C = await all_of(
                self.batcher.run(engine.contexts, [context_row], [len(context_row)], deadline),
                self.batcher.run(engine.candidates, rows, list(map(len, rows)), deadline),
            )
            vectors = (vectors_MD, mask_M, torch.stack(vectors_C))
            products = len(rows) * vectors_MD.numel()
            (scores,) = await self.batcher.run(engine.scores, [vectors], [products], deadline)
        else:
            pairs = [(context_row, row) for row in rows]
            sizes = [len(context_row) + len(row) - 1 for row in rows]
            scores = await self.batcher.run(engine.pairs, pairs, sizes, deadline)
        return [scores[place] for place in places], vectors

    async def _explain(
        self, engine: Engine, ranking: ExplainableRanking, deadline: float
    ) -> Explained:
        size, stage = len(ranking.row), engine.explanations
        explained: list[Explained] = await self.batcher.run(stage, [ranking], [size], deadline)
        return explained[0]

    async def longer_texts(
        self, engine: Engine, texts: Sequence[str], are_contexts: bool
    ) -> list[int]:
        """Places of the texts that the model does not read to their end. A context has one turn here."""
        if are_contexts:
            contexts = [[text] for text in texts]
            return await self._tokenize(partial(longer_contexts, engine.ranker), contexts)
        return await self._tokenize(partial(longer_candidates, engine.ranker), texts)

    async def candidate_vectors(
        self, engine: Engine, texts: Sequence[str], deadline: float
    ) -> tuple[Tensor, int]:
        """([N, D], tokens read)"""
        rows = await self._tokenize(engine.ranker.candidate_rows, texts)
        vectors = await self._run_alone(engine.candidates, rows, deadline)
        return torch.stack(vectors), sum(map(len, rows))

    async def context_vectors(
        self, engine: Engine, contexts: Sequence[Sequence[str]], deadline: float
    ) -> tuple[list[tuple[Tensor, Tensor]], int]:
        """(([M, D], [M]) of each context, tokens read)"""
        rows = await self._tokenize(engine.ranker.context_rows, contexts)
        return await self._run_alone(engine.contexts, rows, deadline), sum(map(len, rows))

    async def _run_alone(
        self, stage: Stage, rows: Sequence[Sequence[int]], deadline: float
    ) -> list[Any]:
        """Admits and computes a request that has one stage, of tokens."""
        sizes = list(map(len, rows))
        with self.batcher.admit(stage.name, sum(sizes) / stage.batch_cost, deadline):
            return await self.batcher.run(stage, rows, sizes, deadline)

    async def classify(
        self, texts: Sequence[str], deadline: float, engine: Engine | None = None
    ) -> tuple[Intents, list[Classified]]:
        """(the classifier, its answer for each text); equal texts are read once.

        Raises Refusal where none is served, too much is waiting, or the deadline is over."""
        intents = (engine or self.choose_engine()).intents
        if intents is None:
            raise Refusal("no_classifier")
        distinct_texts = list(dict.fromkeys(texts))
        rows = await self._tokenize(intents.rows, distinct_texts)
        classified = await self._run_alone(intents.stage, rows, deadline)
        classified_of_text = dict(zip(distinct_texts, classified, strict=True))
        return intents, [classified_of_text[text] for text in texts]

    async def _search(
        self, engine: Engine, query: RankQuery, name: str, deadline: float
    ) -> RankAnswer:
        (row,) = await self._tokenize(engine.ranker.context_rows, [query.context])
        ((vectors_MD, mask_M),) = await self.batcher.run(
            engine.contexts, [row], [len(row)], deadline
        )
        pool, top_k = engine.pools[name], _search_depth(engine, query)
        pool_query = engine.pool_query(vectors_MD, mask_M, top_k, query.rows, query.explain)
        found = await pool.search(pool_query, deadline, self.batcher)
        results, explained = found.results, None
        if engine.second_stage and results:
            results = await self._rerank(engine.second_stage, query, results, deadline)
        known_contexts: Sequence[list[str] | None] = ()
        if known := engine.known_contexts.get(name):
            known_contexts = known.nearest(vectors_MD[0], [result.index for result in results])
        if query.explain and results:
            vectors_KD = np.stack([found.vectors[result.index] for result in results])
            ranking = ExplainableRanking(row, vectors_MD, mask_M, torch.from_numpy(vectors_KD))
            explained = await self._explain(engine, ranking, deadline)
        return RankAnswer(
            results,
            found.certified,
            engine,
            pool=name,
            pool_version=pool.version,
            known_contexts=known_contexts,
            explained=explained,
            missing_shards=found.missing_shards,
            candidates=pool.rows,
            context_tokens=len(row),
        )

    async def _rerank(
        self, stage: SecondStage, query: RankQuery, results: list[Result], deadline: float
    ) -> list[Result]:
        (context,) = await self._tokenize(stage.ranker.context_rows, [query.context])
        texts = [result.text for result in results]
        rows = await self._tokenize(stage.ranker.candidate_rows, texts)
        sizes = [len(context) + len(row) for row in rows]
        pairs = [(context, row) for row in rows]
        scores = await self.batcher.run(stage.pairs, pairs, sizes, deadline)
        rescored = [
            replace(result, score=(score + result.score) / 2 if stage.together else score)
            for result, score in zip(results, scores, strict=True)
        ]
        return sorted(rescored, key=lambda result: -result.score)[: query.top_k]

    async def _tokenize(self, rows_of: Callable[[Any], ResultT], texts: Any) -> ResultT:
        since = time.monotonic()

        def tokenize() -> ResultT:
            began = time.monotonic()
            rows = rows_of(texts)
            seconds = time.monotonic() - began
            self._on_batch(Batch("tokenize", len(texts), len(texts), began - since, seconds))
            return rows

        rows = await asyncio.get_running_loop().run_in_executor(self._tokenizing, tokenize)
        tracing.record("tokenize", since, time.monotonic(), texts=len(texts))
        return rows
