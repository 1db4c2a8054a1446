"""Pools that are divided into shards, each of which is served by a deployment of its own.

A ranker's replica encodes the context, asks all shards at once, and merges their best rows. Every query
names the pool's version by its URI, so no answer mixes two. A `PoolShard` is the work of one shard's replica,
a `ShardedPool` one version of a pool as a ranker sees it. No HTTP, no Ray.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch

from pipeline.arrays import Bools, Floats
from pipeline.config import BadInput
from pipeline.models.settings import Attention, read_settings
from pipeline.pools.lock import lease
from pipeline.pools.pool import Canary, Pool, describe
from pipeline.pools.shard import PoolPart
from pipeline.search import device
from serve.batcher import SENDER, Batch, Batcher
from serve.engine import (
    CANARIES,
    PoolAnswer,
    PoolQuery,
    search_cost,
    search_device,
    search_share,
    search_stage,
    vectors_at,
)
from serve.follower import close_later
from serve.masks import Masks, RowFilter
from serve.refusals import Refusal
from serve.versions import RefusedPool

OnMissingShard = Literal["refuse", "answer"]
_VERSIONS = 4
"""Versions of a pool that a shard keeps open: the old, the new, and those of a candidate model."""

_log = logging.getLogger("polyrank.serve")


@dataclass(frozen=True)
class ShardQuery:
    """A query to a shard."""

    vectors_MD: Floats
    mask_M: Bools
    attention: Attention
    top_k: int
    rows: RowFilter
    with_vectors: bool
    is_admitted: bool
    """Whether it belongs to a list of queries that was admitted."""
    version: str = ""
    """URI of the pool's version. `ShardedPool` sets it and the fields below."""
    timeout_s: float = 0.0
    """A later answer is of no use."""
    sender: str = ""


class ShardFacts(NamedTuple):
    """A shard's description of its part of a version."""

    description: dict[str, Any]
    """The pool's description; `candidates` are those of the shard."""
    columns: list[str]
    canaries: list[Canary]
    """Some rows, to check that the model embedded them."""


class PoolShard:
    """One shard of every version that is asked for. Calls may come from any thread."""

    def __init__(
        self,
        part: PoolPart,
        max_wait_s: float,
        on_batch: Callable[[Batch], None] = lambda batch: None,
    ) -> None:
        self._part = part
        self.batcher = Batcher(max_wait_s, on_batch)
        self._open_shards: OrderedDict[str, _OpenShard] = OrderedDict()
        self._lock = threading.Lock()
        self._opening = ThreadPoolExecutor(max_workers=1, thread_name_prefix="open-version")

    def close(self) -> None:
        self.batcher.close()
        self._opening.shutdown(wait=False)
        for shard in self._open_shards.values():
            shard.close()

    def problem(self) -> str:
        """The reason why nothing can be searched, or ""."""
        # A query that cannot be searched has failed in the ranker.
        return self.batcher.problem() or ("searches fail" if self.batcher.is_failing else "")

    async def open(self, version: str) -> ShardFacts | Refusal:
        """Opens the shard of a version, and checks its files, unless it is open."""
        try:
            pool = (await self._opened(version)).pool
        except (BadInput, OSError) as error:
            return Refusal("invalid_request", str(error).splitlines()[0])
        return ShardFacts(describe(pool), pool.filter_columns, pool.canaries(CANARIES))

    def preload(self, version: str) -> _OpenShard:
        """Opens a version, or a pool's CURRENT one; on one thread at a time. Raises BadInput or OSError."""
        if (shard := self._find(version)) is not None:
            return shard
        pool = Pool.open(version, part=self._part, device=search_device())
        shard = _OpenShard(pool, self._part)
        with self._lock:
            self._open_shards[shard.pool.artifact.uri] = shard
            name = shard.pool.name
            versions = [uri for uri, other in self._open_shards.items() if other.pool.name == name]
            old_shards = [self._open_shards.pop(uri) for uri in versions[:-_VERSIONS]]
        for old_shard in old_shards:
            close_later(old_shard.close)
        return shard

    async def _opened(self, version: str) -> _OpenShard:
        """The shard of a version, which is opened beside the event loop unless it is open."""
        if (shard := self._find(version)) is not None:
            return shard
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._opening, self.preload, version)

    def _find(self, version: str) -> _OpenShard | None:
        with self._lock:
            if version in self._open_shards:
                self._open_shards.move_to_end(version)
            return self._open_shards.get(version)

    async def search(self, query: ShardQuery) -> PoolAnswer | Refusal:
        """The best rows of the shard, with their places in the whole pool; or the refusal, which would reach
        the ranker as an error of Ray's if it were raised. A version that is not open yet (the replica is
        new) is opened.

        Raises ShardUnavailable where the version cannot be opened.
        """
        deadline = time.monotonic() + query.timeout_s
        try:
            shard = await self._opened(query.version)
        except (BadInput, OSError) as error:
            _log.warning("%s: cannot be opened: %s", query.version, error)
            raise ShardUnavailable("it cannot open the version") from None
        try:
            return await self._search(shard, query, deadline)
        except Refusal as refusal:
            return refusal
        except BadInput as error:
            return Refusal("invalid_request", str(error))

    async def _search(self, shard: _OpenShard, query: ShardQuery, deadline: float) -> PoolAnswer:
        if not len(shard.pool):
            return PoolAnswer([], True)
        SENDER.set(query.sender)
        name = f"search {shard.pool.name}"
        with self.batcher.admit(name, search_share(query.top_k), deadline, query.is_admitted):
            vectors_MD, mask_M = map(torch.from_numpy, (query.vectors_MD, query.mask_M))
            row_mask = await shard.masks.allowed_rows(shard.pool, query.rows)
            pool_query = PoolQuery(vectors_MD, mask_M, query.top_k, row_mask)
            stage, cost = shard.searches(query.attention), search_cost(query.top_k)
            (answer,) = await self.batcher.run(stage, [pool_query], [cost], deadline)
        places = [result.index for result in answer.results]
        pool_places = [shard.first + place for place in places]
        results = [
            replace(result, index=place)
            for result, place in zip(answer.results, pool_places, strict=True)
        ]
        if not query.with_vectors:
            return PoolAnswer(results, answer.certified)
        vectors = dict(zip(pool_places, vectors_at(shard.pool, places), strict=True))
        return PoolAnswer(results, answer.certified, vectors)


class _OpenShard:
    """A part of one version of a pool."""

    def __init__(self, pool: Pool, part: PoolPart) -> None:
        self.pool = pool
        self.first = part.rows(pool.artifact.rows("rows/")).start
        """The place of its first row in the whole pool."""
        self._lease = lease(pool.artifact.uri)
        self.masks = Masks()
        self.searches = functools.cache(functools.partial(search_stage, pool))
        """A stage for each attention."""
        if pool.on_device is not None:
            # For the vectors of the model, if it can still be read where it was; else the first query waits.
            with suppress(BadInput, OSError):
                model = read_settings(pool.artifact.manifest["inputs"]["model"]["uri"])
                device.warm_up(pool.on_device, model.vectors_per_context)

    def close(self) -> None:
        self.pool.close()
        if self._lease is not None:
            self._lease.stop()


class ShardUnavailable(RuntimeError):
    """A shard cannot answer, or not in time."""


class ShardHandle(Protocol):
    """A ranker's connection to a shard, all of whose replicas hold the same rows."""

    def open(self, version: str) -> ShardFacts | Refusal:
        """Lets every replica open a version; waits for one. Raises ShardUnavailable."""

    async def search(self, query: ShardQuery) -> PoolAnswer | Refusal:
        """Asks one replica, and another one where it dies."""


class ShardedPool:
    """One version of a pool, which shards hold."""

    def __init__(
        self,
        version: str,
        shards: Sequence[ShardHandle],
        wait_s: float,
        on_missing: OnMissingShard,
        count_missing: Callable[[str, int], None] = lambda pool, shard: None,
    ) -> None:
        """Lets all shards open the version. `wait_s`: after so long a shard is missing; `on_missing`: then
        refuse the query, or answer it without that shard's rows. `count_missing` is for metrics.

        Raises BadInput where one cannot open it, and ShardUnavailable.
        """
        self.uri, self._shards = version, shards
        self._wait_s, self._on_missing = wait_s, on_missing
        self._count_missing = count_missing
        with ThreadPoolExecutor(len(shards)) as threads:
            replies = list(threads.map(lambda shard: shard.open(version), shards))
        facts = []
        for number, reply in enumerate(replies):
            if isinstance(reply, Refusal):
                raise RefusedPool(version, f"shard {number}: {reply.message}")
            facts.append(reply)
        self.name = str(facts[0].description["name"])
        self.version = str(facts[0].description["version"])
        self.columns: list[str] = next((reply.columns for reply in facts if reply.columns), [])
        self.canaries = [canary for reply in facts for canary in reply.canaries]
        candidates = [reply.description["candidates"] for reply in facts]
        self.description = {
            **facts[0].description,
            "candidates": sum(candidates),
            "candidates_of_shards": candidates,
        }

    async def search(self, query: ShardQuery, deadline: float) -> PoolAnswer:
        """The best rows of all shards. Deadlines are of `time.monotonic`.

        Raises Refusal where a shard refuses, or is missing and may not be, or the deadline is over.
        """
        timeout_s = min(self._wait_s, deadline - time.monotonic())
        query = replace(query, version=self.uri, timeout_s=timeout_s, sender=SENDER.get())
        answers = await asyncio.gather(
            *(self._ask(number, query, deadline) for number in range(len(self._shards)))
        )
        missing = [number for number, answer in enumerate(answers) if answer is None]
        answered = [answer for answer in answers if answer is not None]
        if missing and (self._on_missing == "refuse" or not answered):
            numbers = ", ".join(map(str, missing))
            message = f"pool {self.name}: shards that do not answer: {numbers} of {len(answers)}"
            raise Refusal("shard_missing", message, retry_after_s=1.0)
        results = heapq.nsmallest(
            query.top_k,
            (result for answer in answered for result in answer.results),
            key=lambda result: (-result.score, result.id),
        )
        vectors = {
            place: vector_D for answer in answered for place, vector_D in answer.vectors.items()
        }
        certified = not missing and all(answer.certified for answer in answered)
        return PoolAnswer(results, certified, vectors, missing)

    async def _ask(self, number: int, query: ShardQuery, deadline: float) -> PoolAnswer | None:
        """None: the shard is missing. Raises Refusal."""
        try:
            async with asyncio.timeout(query.timeout_s):
                answer = await self._shards[number].search(query)
        except (ShardUnavailable, TimeoutError) as error:
            if isinstance(error, TimeoutError) and time.monotonic() >= deadline:
                raise Refusal("too_late") from None
            _log.warning("pool %s: shard %d is missing: %r", self.name, number, error)
            self._count_missing(self.name, number)
            return None
        if isinstance(answer, Refusal):
            raise answer
        return answer
