"""Answers queries: tokenises, hands rows to the batcher, and sorts the results.

A query takes one engine at its beginning and uses no other, so no answer mixes two versions.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from pipeline.classification.classifier import Classified
from pipeline.models.inference import Explained
from pipeline.models.truncation import longer_candidates, longer_contexts
from pipeline.ranking.results import Result, best_results
from serve import tracing
from serve.batcher import SENDER, Batch, Batcher, Costs, Stage, Step, all_of
from serve.engine import Engine, ExplainableRanking, Row, SecondStage, pair_tokens
from serve.intents import Intents
from serve.pools import ALL_ROWS, OpenPool, PoolQuery, RowFilter, search_cost
from serve.refusals import Refusal
from serve.shards import ShardedPool

RowT = TypeVar("RowT")
ResultT = TypeVar("ResultT")
_HEALTH_S = 5.0  # for the answer to a query of a health check
_SMALL_ANSWER = 2_000
"""Numbers and texts of an answer that the event loop makes, which takes some 2 ms."""
_VALUES = 20_000  # numbers and texts of answers in a batch, some 15 ms
_VALUES_OF_A_RESULT = 10


Make = Callable[[], bytes]
"""Makes an answer, or a part of one."""


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

    context_row: Row
    rows: Sequence[Row]
    """The distinct texts."""
    places: list[int]
    """For each text of the request its place in `rows`."""
    costs: Costs


def _sample_query(engine: Engine, pool: str | None = None) -> RankQuery:
    """Some texts of a pool, of which the first is the context, too."""
    texts = engine.sample_texts()
    candidates = None if pool else [CandidateText(text, text) for text in texts]
    return RankQuery(texts[:1], candidates, pool, len(texts))


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
        self.champion, self._candidate, self.record_ranking = champion, candidate, record_ranking
        self.batcher, self._on_batch = Batcher(max_wait_s, on_batch, batch_rows), on_batch
        self.answers: Stage[tuple[Make, int], bytes] = Stage(
            "answers", lambda rows: [make() for make, _ in rows], _VALUES, lambda row: row[1]
        )
        """Large answers. Beside the thread that computes, another one that holds the interpreter's lock would
        delay each of its operations by up to 5 ms."""
        # Rust tokenises without the interpreter's lock, beside the thread that computes.
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")

    def close(self) -> None:
        self.batcher.close()
        self._tokenizing.shutdown(wait=False)

    def work(self, deadline: float, engine: Engine | None = None) -> Work:
        """For a new request. `engine`: None: the champion, or the candidate for its share of the requests."""
        return Work(self, engine or self._candidate() or self.champion(), deadline)

    async def problem(self) -> str:
        """The reason why no request can be answered, or "".

        If the latest batches failed, it asks the champion, which requests that cannot be computed do not
        make sick."""
        if not (problem := self.batcher.problem()) and self.batcher.is_failing:
            SENDER.set("health check")
            try:
                engine = self.champion()
                work = self.work(time.monotonic() + _HEALTH_S, engine)
                await work.rank([_sample_query(engine)])
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
                await self.work(deadline, engine).rank([query])

    async def tokenize(self, rows_of: Callable[[Any], ResultT], texts: Any) -> ResultT:
        """Calls a function with texts, beside the event loop."""
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


class Work:
    """What one engine computes for a request, or for a list of them, before its deadline. The methods raise
    Refusal where too much is waiting (overloaded) or the deadline is over (too_late)."""

    def __init__(self, service: Service, engine: Engine, deadline: float) -> None:
        self.engine, self.deadline = engine, deadline
        self._batcher, self._tokenize = service.batcher, service.tokenize
        self._answers = service.answers

    async def rank(self, queries: Sequence[RankQuery]) -> list[RankAnswer]:
        """Admits all or none. Raises Refusal also where a pool is not served, or the model cannot explain."""
        for query in queries:
            self._check(query)
        tokenized = await all_of(*map(self._candidates_to_score, queries))
        costs = Counter[Stage[Any, Any]]()
        for query, texts in zip(queries, tokenized, strict=True):
            costs.update(texts.costs if texts else self._search_costs(query))
        values = _VALUES_OF_A_RESULT * sum(query.top_k for query in queries)
        if values > _SMALL_ANSWER:
            costs[self._answers] = values
        with self._admit(costs):
            return await all_of(
                *(
                    self._rank_candidates(query, texts) if texts else self._search(query, place > 0)
                    for place, (query, texts) in enumerate(zip(queries, tokenized, strict=True))
                )
            )

    async def make(self, makes: Sequence[Make], values: int) -> list[bytes]:
        """The parts of an answer of some `values` numbers and texts; a large one beside the event loop, which
        would answer nobody meanwhile."""
        if values <= _SMALL_ANSWER:
            return [make() for make in makes]
        return await self._run(self._answers, [(make, values // len(makes)) for make in makes])

    def _check(self, query: RankQuery) -> None:
        engine = self.engine
        if query.explain and not engine.has_vectors:
            message = "explain: the model is a cross-encoder, which has no vectors; allowed: false"
            raise Refusal("invalid_request", message, "explain")
        if query.pool is not None and query.pool not in engine.pools:
            served_pools = ", ".join(sorted(engine.pools)) or "none"
            message = f"pool: not served here; there are: {served_pools}"
            raise Refusal("unknown_pool", message, "pool")

    async def _candidates_to_score(self, query: RankQuery) -> _TextsToScore | None:
        """None: those of a pool."""
        if query.pool is not None:
            return None
        texts = [candidate.text for candidate in query.candidates or []]
        return await self._texts_to_score(query.context, texts)

    def _depth(self, query: RankQuery) -> int:
        """Number of rows to search for: more than `top_k` if a second stage scores them again."""
        stage = self.engine.second_stage
        return max(query.top_k, stage.candidates) if stage else query.top_k

    def _search_costs(self, query: RankQuery) -> Costs:
        """Before the context is tokenised: most requests of an overload are refused."""
        engine, depth = self.engine, self._depth(query)
        costs: dict[Stage[Any, Any], float] = {engine.contexts: engine.contexts.row_cost.value}
        if isinstance(pool := engine.pools[query.pool or ""], OpenPool):
            costs[pool.stage] = search_cost(depth)
        if stage := engine.second_stage:
            costs[stage.pairs] = depth * stage.pairs.row_cost.value
        return costs

    async def _rank_candidates(self, query: RankQuery, tokenized: _TextsToScore) -> RankAnswer:
        candidates = query.candidates or []
        texts, explained = [candidate.text for candidate in candidates], None
        scores, vectors = await self._score(tokenized)
        ids = [candidate.id for candidate in candidates]
        results = best_results(ids, texts, scores, query.top_k)
        if query.explain and vectors is not None:
            vectors_MD, mask_M, vectors_CD = vectors
            best_KD = vectors_CD[[tokenized.places[result.index] for result in results]]
            explained = await self._explain(tokenized.context_row, vectors_MD, mask_M, best_KD)
        return RankAnswer(
            results,
            True,
            self.engine,
            explained=explained,
            candidates=len(texts),
            context_tokens=len(tokenized.context_row),
        )

    async def _search(self, query: RankQuery, is_checked: bool) -> RankAnswer:
        """`is_checked`: shards do not refuse it, because they have admitted another part of its request."""
        engine, depth = self.engine, self._depth(query)
        pool: OpenPool | ShardedPool = engine.pools[query.pool or ""]
        (row,) = await self._tokenize(engine.ranker.context_rows, [query.context])
        encoded: list[tuple[Tensor, Tensor]] = []

        def pool_query(results: list[tuple[Tensor, Tensor]]) -> PoolQuery:
            encoded.extend(results)
            return engine.pool_query(*results[0], depth, query.rows, query.explain, is_checked)

        if isinstance(pool, OpenPool):
            row_mask = await pool.mask(query.rows)
            search = Step(pool.stage, lambda results: [(pool_query(results), row_mask)])
            (found,) = await self._run(engine.contexts, [row], search)
        else:
            results = await self._run(engine.contexts, [row])
            found = await pool.search(pool_query(results), self.deadline)
        ((vectors_MD, mask_M),) = encoded
        results, explained = found.results, None
        if engine.second_stage and results:
            results = await self._rerank(engine.second_stage, query, results)
        known_contexts: Sequence[list[str] | None] = ()
        if known := engine.known_contexts.get(pool.name):
            known_contexts = known.nearest(vectors_MD[0], [result.index for result in results])
        if query.explain and results:
            best_KD = np.stack([found.vectors[result.index] for result in results])
            explained = await self._explain(row, vectors_MD, mask_M, torch.from_numpy(best_KD))
        return RankAnswer(
            results,
            found.certified,
            engine,
            pool=pool.name,
            pool_version=pool.version,
            known_contexts=known_contexts,
            explained=explained,
            missing_shards=found.missing_shards,
            candidates=pool.rows,
            context_tokens=len(row),
        )

    async def _rerank(
        self, stage: SecondStage, query: RankQuery, results: list[Result]
    ) -> list[Result]:
        (context_row,) = await self._tokenize(stage.ranker.context_rows, [query.context])
        texts = [result.text for result in results]
        rows = await self._tokenize(stage.ranker.candidate_rows, texts)
        scores = await self._run(stage.pairs, [(context_row, row) for row in rows])
        scale = self.engine.ranker.loss_scale
        rescored = [
            replace(result, score=(score + scale * result.score) / 2 if stage.together else score)
            for result, score in zip(results, scores, strict=True)
        ]
        return sorted(rescored, key=lambda result: -result.score)[: query.top_k]

    async def _explain(
        self, row: Row, vectors_MD: Tensor, mask_M: Tensor, best_KD: Tensor
    ) -> Explained:
        ranking = ExplainableRanking(row, vectors_MD, mask_M, best_KD)
        explained: list[Explained] = await self._run(self.engine.explanations, [ranking])
        return explained[0]

    async def scores(self, context: Sequence[str], texts: Sequence[str]) -> tuple[list[float], int]:
        """(score of each text, tokens read); equal texts are scored once, and so score alike."""
        tokenized = await self._texts_to_score(context, texts)
        with self._admit(tokenized.costs):
            scores, _ = await self._score(tokenized)
        return scores, int(sum(tokenized.costs.values()))

    async def _texts_to_score(self, context: Sequence[str], texts: Sequence[str]) -> _TextsToScore:
        engine = self.engine
        distinct_texts = list(dict.fromkeys(texts))
        place_of = {text: place for place, text in enumerate(distinct_texts)}
        (context_row,) = await self._tokenize(engine.ranker.context_rows, [context])
        rows = await self._tokenize(engine.ranker.candidate_rows, distinct_texts)
        costs: Costs
        if engine.has_vectors:
            costs = {engine.contexts: len(context_row), engine.candidates: _tokens(rows)}
        else:
            costs = {engine.pairs: sum(pair_tokens((context_row, row)) for row in rows)}
        return _TextsToScore(context_row, rows, [place_of[text] for text in texts], costs)

    async def _score(
        self, texts: _TextsToScore
    ) -> tuple[list[float], tuple[Tensor, Tensor, Tensor] | None]:
        """The scores; and if the model has vectors, those of the context [M, D], which of them count [M], and
        those of the distinct texts [C, D]."""
        engine, vectors = self.engine, None
        if engine.has_vectors:
            encoded: list[Any] = []

            def candidate_rows(contexts: list[tuple[Tensor, Tensor]]) -> Sequence[Row]:
                encoded.extend(contexts[0])
                return texts.rows

            def ranking(vectors_C: list[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
                encoded.append(torch.stack(vectors_C))
                return [tuple(encoded)]

            steps = Step(engine.candidates, candidate_rows), Step(engine.scores, ranking)
            (scores,) = await self._run(engine.contexts, [texts.context_row], *steps)
            vectors = tuple(encoded)
        else:
            scores = await self._run(engine.pairs, [(texts.context_row, row) for row in texts.rows])
        return [scores[place] for place in texts.places], vectors

    async def longer_texts(self, texts: Sequence[str], are_contexts: bool) -> list[int]:
        """Places of the texts that the model does not read to their end. A context has one turn here."""
        if are_contexts:
            contexts = [[text] for text in texts]
            return await self._tokenize(partial(longer_contexts, self.engine.ranker), contexts)
        return await self._tokenize(partial(longer_candidates, self.engine.ranker), texts)

    async def candidate_vectors(self, texts: Sequence[str]) -> tuple[Tensor, int]:
        """([N, D], tokens read)"""
        rows = await self._tokenize(self.engine.ranker.candidate_rows, texts)
        return torch.stack(await self._run_alone(self.engine.candidates, rows)), _tokens(rows)

    async def context_vectors(
        self, contexts: Sequence[Sequence[str]]
    ) -> tuple[list[tuple[Tensor, Tensor]], int]:
        """(([M, D], [M]) of each context, tokens read)"""
        rows = await self._tokenize(self.engine.ranker.context_rows, contexts)
        return await self._run_alone(self.engine.contexts, rows), _tokens(rows)

    async def classify(self, texts: Sequence[str]) -> tuple[Intents, list[Classified]]:
        """(the classifier, its answer for each text); equal texts are read once.

        Raises Refusal also where no classifier is served."""
        if (intents := self.engine.intents) is None:
            raise Refusal("no_classifier")
        distinct_texts = list(dict.fromkeys(texts))
        rows = await self._tokenize(intents.rows, distinct_texts)
        classified = await self._run_alone(intents.stage, rows)
        classified_of_text = dict(zip(distinct_texts, classified, strict=True))
        return intents, [classified_of_text[text] for text in texts]

    async def _run_alone(self, stage: Stage[Row, ResultT], rows: Sequence[Row]) -> list[ResultT]:
        """Admits and computes a request that has one stage, of tokens."""
        with self._admit({stage: _tokens(rows)}):
            return await self._run(stage, rows)

    async def _run(
        self, stage: Stage[RowT, ResultT], rows: Sequence[RowT], *then: Step
    ) -> list[Any]:
        costs = list(map(stage.cost, rows))
        return await self._batcher.run(stage, rows, costs, self.deadline, *then)

    def _admit(self, costs: Costs) -> AbstractContextManager[None]:
        return self._batcher.admit(costs, self.deadline)


def _tokens(rows: Sequence[Row]) -> int:
    return sum(map(len, rows))
