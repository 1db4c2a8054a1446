"""A replica of the service, and of a shard: what runs where Serve starts them."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from pipeline.config import BadInput
from pipeline.pools.shard import PoolPart
from serve import tracing
from serve.engine import Engine
from serve.follower import Follower, collect_garbage
from serve.http.api import create_app
from serve.http.bearer_tokens import BearerTokens
from serve.http.guard import log_to_stderr
from serve.metrics import Metrics
from serve.pools import PoolAnswer
from serve.refusals import Refusal
from serve.service import Service
from serve.shards import PoolShard, ShardedPool, ShardFacts, ShardQuery, ShardUnavailable
from serve.versions import CANDIDATE, CHAMPION, Decision, Report, Versions, without_folders

if TYPE_CHECKING:
    from serve.app import Args

_ANSWER_S = 30.0  # the decider may have to list an object store
_REHEARSAL_S = 60.0  # later than the deadlines of clients, whose requests come first
_SWITCH_S = 0.0005
_OPEN_S = 600.0  # a shard may have to download its part first

_log = logging.getLogger("polyrank.serve")


class Replica:
    """A replica of the service: it follows the decided versions, and answers."""

    def __init__(self, args: Args, shards: list[DeploymentHandle]) -> None:
        # Ray sets OMP_NUM_THREADS to the replica's cores; tokenizers would take all of the node's.
        os.environ.setdefault("RAYON_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
        # The model's operations give up the interpreter's lock, and each waits for it while an event loop is
        # busy: by default for 5 ms, and a short request has dozens of operations.
        sys.setswitchinterval(_SWITCH_S)
        log_to_stderr()
        tracing.install()
        self._args = args
        self._shards = [_DeployedShard(handle) for handle in shards]
        self._metrics = metrics = Metrics()
        limits = args.limits
        self._service = Service(
            lambda: self._champion_follower.engine,
            limits.waiting_s,
            metrics.record_batch,
            metrics.record_ranking,
            limits.batch_rows,
            self._draw_candidate,
        )
        metrics.batcher = self._service.batcher
        self._champion_follower = self._make_follower(CHAMPION)
        self._champion_follower.start()
        self._candidate_follower = self._make_follower(CANDIDATE)
        if args.candidate:
            # The champion answers until the candidate is loaded.
            self._candidate_follower.start(until_loaded=False)

    def _make_follower(self, decider: str) -> Follower:
        replica = serve.get_replica_context().replica_id.unique_id

        def ask(report: Report) -> Decision:
            actor = serve.get_deployment_actor(decider)  # each time, because it may have restarted
            answer: Decision = ray.get(actor.follow.remote(report), timeout=_ANSWER_S)
            return answer

        def record_decision(problems: Sequence[str]) -> None:
            is_champion = decider == CHAMPION and follower.loaded is not None
            pools = follower.engine.info()["pools"] if is_champion else []
            self._metrics.record_decision(decider, problems, pools)

        follower = Follower(replica, ask, self._load, self._args.poll_s, record_decision)
        return follower

    def _draw_candidate(self) -> Engine | None:
        """The candidate, if the next request is one of its share."""
        is_drawn = random.random() < self._args.candidate_share
        return self._candidate_follower.loaded if is_drawn else None

    def _state(self) -> dict[str, Any]:
        candidate = self._candidate_follower.loaded
        candidate_fingerprint = candidate.model.fingerprint if candidate else None
        pools = [*self._args.pools, *self._args.sharded_pools]
        problems = [
            without_folders(problem, pools)
            for problem in (*self._champion_follower.problems, *self._candidate_follower.problems)
        ]
        return {"candidate": candidate_fingerprint, "problems": problems}

    def _load(self, versions: Versions) -> Engine:
        args, began = self._args, time.monotonic()
        count_missing, local = self._metrics.record_missing_shard, len(args.pools)
        sharded = [
            ShardedPool(pool, self._shards, args.shard_wait_s, args.on_missing_shard, count_missing)
            for pool in versions.pools[local:]
        ]
        engine = Engine(
            versions.model, versions.pools[:local], args.precision, args.second_stage, args.classifier,
            sharded, args.second_stage_candidates, args.together,
        )  # fmt: skip
        try:
            if engine.model.fingerprint != versions.fingerprint:
                now = engine.model.fingerprint
                raise BadInput(f"{versions.model}: is {now} now, not {versions.fingerprint}")
            asyncio.run(self._service.rehearse(engine, time.monotonic() + _REHEARSAL_S))
            engine.encode_known_contexts()
        except BaseException:
            engine.close()
            raise
        self._metrics.load_seconds.set(time.monotonic() - began)
        collect_garbage()
        _log.warning("loaded %s with %s", versions.model, ", ".join(versions.pools) or "no pools")
        return engine

    def create_app(self) -> FastAPI:
        """The HTTP interface. It closes the replica at its end."""
        args = self._args
        return create_app(
            self._service,
            limits=args.limits,
            tokens=BearerTokens.of_environment(),
            origins=args.origins,
            state=self._state,
            close=self._close,
            record_answer=self._metrics.record_answer,
            record_error=self._metrics.record_error,
            names=args.names,
            playground_opens=args.playground,
            echoes_request_id=False,
        )

    async def problem(self) -> str:
        """The reason why nothing can be answered, or ""."""
        return await self._service.problem()

    def _close(self) -> None:
        self._service.close()
        self._champion_follower.close()
        self._candidate_follower.close()


def open_shard(number: int, args: Args) -> PoolShard:
    """The shard of that number of each of `sharded_pools`."""
    shard = PoolShard(PoolPart(number, args.shards), args.limits.waiting_s, Metrics().record_batch)
    for pool in args.sharded_pools:  # probably what the rankers ask for
        with suppress(BadInput, OSError):
            shard.preload(pool)
    return shard


class _DeployedShard:
    """A shard's deployment, as a ranker's replica sees it."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    def open(self, version: str) -> ShardFacts | Refusal:
        facts: ShardFacts | Refusal
        try:
            facts = self._handle.open.remote(version).result(timeout_s=_OPEN_S)
            other_replicas = self._handle.broadcast("open", version)
            other_replicas.results(timeout_s=_OPEN_S, return_exceptions=True)
        except (TimeoutError, RayError, RayServeException) as error:
            raise _unavailable(error) from None
        return facts

    async def search(self, query: ShardQuery) -> PoolAnswer | Refusal:
        try:
            try:
                return await self._handle.search.remote(query)  # type: ignore[no-any-return]
            except RayActorError:  # its replica has died under it: another one may live
                return await self._handle.search.remote(query)  # type: ignore[no-any-return]
        except BackPressureError:
            message = "a shard of the pool has too much to do"
            return Refusal("overloaded", message, retry_after_s=1.0)
        except (RayError, RayServeException) as error:
            raise _unavailable(error) from None


def _unavailable(error: Exception) -> ShardUnavailable:
    """An error of Ray's in one line; some have no text."""
    return ShardUnavailable((str(error) or repr(error)).splitlines()[0])
