"""Pools that are divided into shards, each of which is served by a deployment of its own.

A ranker's replica encodes the context, asks all shards at once, and merges their best rows. Every query
names the pool's version by its URI, so no answer mixes two. A `PoolShard` is the work of one shard's replica,
a `ShardedPool` one version of a pool as a ranker sees it. No HTTP, no Ray.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Protocol

from pipeline.config import BadInput
from pipeline.models.settings import read_settings
from pipeline.pools.pool import Canary
from pipeline.pools.shard import PoolPart
from serve.batcher import SENDER, Batch, Batcher, all_of
from serve.follower import close_later
from serve.pools import Masks, OpenPool, PoolAnswer, PoolQuery, search_cost
from serve.refusals import Refusal
from serve.versions import RefusedPool, problem_of

OnMissingShard = Literal["refuse", "answer"]
_VERSIONS = 4
"""Versions of a pool that a shard keeps open: the old, the new, and those of a candidate model."""

_log = logging.getLogger("polyrank.serve")


class ShardQuery(NamedTuple):
    """A query to a shard."""

    version: str
    """URI of the pool's version."""
    query: PoolQuery
    timeout_s: float
    """A later answer is of no use."""
    sender: str


class ShardFacts(NamedTuple):
    """A shard's description of its part of a version."""

    description: dict[str, Any]
    """The pool's description; `candidates` are those of the shard."""
    canaries: list[Canary]


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
        self._masks = Masks()
        self._open_pools: OrderedDict[str, OpenPool] = OrderedDict()
        """By the version's URI, the one that was asked last at the end."""
        self._lock = threading.Lock()
        self._opening = ThreadPoolExecutor(max_workers=1, thread_name_prefix="open-version")

    def close(self) -> None:
        self.batcher.close()
        self._opening.shutdown(wait=False)
        for pool in self._open_pools.values():
            pool.close()

    def problem(self) -> str:
        """The reason why nothing can be searched, or ""."""
        # A query that cannot be searched has failed in the ranker.
        return self.batcher.problem() or ("searches fail" if self.batcher.is_failing else "")

    async def open(self, version: str) -> ShardFacts | Refusal:
        """Opens the shard of a version, and checks its files, unless it is open."""
        try:
            pool = await self._opened(version)
        except (BadInput, OSError) as error:
            return Refusal("invalid_request", problem_of(error))
        return ShardFacts(pool.description, pool.canaries)

    def preload(self, version: str) -> OpenPool:
        """Opens a version, or a pool's CURRENT one; on one thread at a time. Raises BadInput or OSError."""
        if (pool := self._find(version)) is not None:
            return pool
        pool = OpenPool(version, self._masks, self._part)
        if pool.on_device is not None:
            # For the vectors of the model, if it can still be read where it was; else the first query waits.
            with suppress(BadInput, OSError):
                model = read_settings(pool.pool.artifact.manifest["inputs"]["model"]["uri"])
                pool.warm_up(model.vectors_per_context)
        with self._lock:
            self._open_pools[pool.uri] = pool
            versions = [uri for uri, other in self._open_pools.items() if other.name == pool.name]
            old_pools = [self._open_pools.pop(uri) for uri in versions[:-_VERSIONS]]
        for old_pool in old_pools:
            close_later(old_pool.close)
        return pool

    async def _opened(self, version: str) -> OpenPool:
        """The shard of a version, which is opened beside the event loop unless it is open."""
        if (pool := self._find(version)) is not None:
            return pool
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._opening, self.preload, version)

    def _find(self, version: str) -> OpenPool | None:
        with self._lock:
            if version in self._open_pools:
                self._open_pools.move_to_end(version)
            return self._open_pools.get(version)

    async def search(self, asked: ShardQuery) -> PoolAnswer | Refusal:
        """The best rows of the shard, with their places in the whole pool; or the refusal, which would reach
        the ranker as an error of Ray's if it were raised. A version that is not open yet (the replica is
        new) is opened.

        Raises ShardUnavailable where the version cannot be opened.
        """
        deadline, query = time.monotonic() + asked.timeout_s, asked.query
        SENDER.set(asked.sender)
        try:
            pool = await self._opened(asked.version)
        except (BadInput, OSError) as error:
            _log.warning("%s: cannot be opened: %s", asked.version, error)
            raise ShardUnavailable("it cannot open the version") from None
        costs = {pool.stage: search_cost(query.top_k)}
        try:
            with self.batcher.admit(costs, deadline, query.is_checked):
                return await pool.search(query, deadline, self.batcher)
        except Refusal as refusal:
            return refusal
        except BadInput as error:
            return Refusal("invalid_request", str(error))


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
        self.canaries = [canary for reply in facts for canary in reply.canaries]
        candidates = [reply.description["candidates"] for reply in facts]
        columns = [reply.description["columns"] for reply in facts]
        self.description = {
            **facts[0].description,
            "candidates": sum(candidates),
            "candidates_of_shards": candidates,
            "columns": next(filter(None, columns), []),  # a shard without rows has none
        }
        self.name, self.version = self.description["name"], self.description["version"]
        self.rows: int = self.description["candidates"]

    async def search(self, query: PoolQuery, deadline: float) -> PoolAnswer:
        """The best rows of all shards. Deadlines are of `time.monotonic`.

        Raises Refusal where a shard refuses, or is missing and may not be, or the deadline is over.
        """
        timeout_s = min(self._wait_s, deadline - time.monotonic())
        asked = ShardQuery(self.uri, query, timeout_s, SENDER.get())
        answers = await all_of(
            *(self._ask(number, asked, deadline) for number in range(len(self._shards)))
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

    async def _ask(self, number: int, asked: ShardQuery, deadline: float) -> PoolAnswer | None:
        """None: the shard is missing. Raises Refusal."""
        try:
            async with asyncio.timeout(asked.timeout_s):
                answer = await self._shards[number].search(asked)
        except (ShardUnavailable, TimeoutError) as error:
            if isinstance(error, TimeoutError) and time.monotonic() >= deadline:
                raise Refusal("too_late") from None
            _log.warning("pool %s: shard %d is missing: %r", self.name, number, error)
            self._count_missing(self.name, number)
            return None
        if isinstance(answer, Refusal):
            raise answer
        return answer
