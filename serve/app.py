"""The service on Ray Serve.

    serve deploy serve/config.cluster.yaml      names serve.app:build and its arguments, `Args`
    python -m jobs.serve --model RANKER         builds it on this machine

One deployment holds the model and the memory-mapped pools: a hop between deployments costs 3 to 6 ms,
more than most rankings. Replicas of one node share the pools' pages. Pools that are too large for a node are
`sharded_pools`: each shard of their rows is in a deployment of its own.
"""

# No `from __future__ import annotations`: Ray reads the class of `build`'s argument from its signature,
# and would pass a plain dictionary where it finds a string.
import functools
import logging
import re
from typing import TYPE_CHECKING, Any, Literal

import ray
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, field_validator
from ray import serve
from ray.serve.config import BackpressureConfig, DeploymentActorConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from pipeline import storage
from pipeline.artifact import open_artifact
from pipeline.config import BadInput, require
from pipeline.models.precision import Precision
from pipeline.models.settings import read_settings
from pipeline.processor import bound_kind
from pipeline.registry import REGISTRY, model_uri
from serve.http.bearer_tokens import BearerTokens
from serve.limits import Limits
from serve.versions import CANDIDATE, CHAMPION, PollingDecider, problem_of, resolve

if TYPE_CHECKING:
    from serve.pools import PoolAnswer
    from serve.refusals import Refusal
    from serve.shards import ShardFacts, ShardQuery

_log = logging.getLogger("polyrank.serve")


class Args(BaseModel):
    """The arguments of `build`."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1)
    """A ranker (of jobs.finetune), or models:/name@alias of MLflow's registry."""
    pools: list[str] = []
    """Pools that the model embedded; on the command line a,b."""
    sharded_pools: list[str] = []
    """Pools that are divided into shards, each in a deployment of its own."""
    shards: int = Field(default=2, ge=1, le=1000)
    """Number of shards of `sharded_pools`."""
    shard_replicas: int = Field(default=1, ge=1)
    """Replicas of each shard."""
    shard_cpus: float = Field(default=1.0, ge=0)
    """Cores, and threads, of each replica of a shard."""
    shard_gpus: float = Field(default=0.0, ge=0)
    """GPUs of each replica of a shard; with one it searches there."""
    shard_resources: dict[str, float] = {}
    """Further resources of such a replica, such as serving: 1; only nodes with these run it."""
    shard_wait_s: float = Field(default=2.0, gt=0)
    """Seconds after which a silent shard counts as missing."""
    on_missing_shard: Literal["refuse", "answer"] = "refuse"
    """refuse: answer 503. answer: answer without the shard's rows, and say so."""
    second_stage: str = ""
    """A cross-encoder that scores the best of a pool again. An alias is resolved once."""
    second_stage_candidates: int = Field(default=50, ge=1, le=1000)
    """Rows of a pool that the second stage scores at least."""
    together: bool = False
    """Order by the mean of the second stage's scores and the search's, not by its own alone."""
    classifier: str = ""
    """A classifier (of jobs.classify_intents), for /classify. An alias is resolved once."""
    candidate: str = ""
    """Another model, such as models:/name@candidate, that answers a share of the requests."""
    candidate_share: float = Field(default=0.05, gt=0, le=1)
    """The candidate's share of the requests."""
    precision: Precision = "auto"
    """Precision of the encoder; auto: bf16 if the hardware has it; int8: for CPUs without it."""
    name: str = "ranker"
    """Name of the deployment."""
    poll_s: float = Field(default=2.0, gt=0)
    """Seconds between two looks for new versions."""
    origins: list[str] = []
    """Origins whose pages may call the service (CORS); on the command line a,b."""
    names: list[str] = []
    """Names that a request's `model` may say, beside the fingerprint; another one is a 404.
    None: `model` is ignored."""
    playground: Literal["dialogue", "query", "none"] = "dialogue"
    """What the page at `/` first asks for; none: there is no page."""
    limits: Limits = Limits()
    """Limits on requests."""

    @field_validator("pools", "sharded_pools", "origins", "names", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return [part for part in value.split(",") if part] if isinstance(value, str) else value

    @field_validator("origins")
    @classmethod
    def _without_path(cls, origins: list[str]) -> list[str]:
        """A browser sends no path, so an origin with one would never match."""
        for origin in origins:
            if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+|\*|null", origin):
                raise ValueError(f"{origin!r}: allowed: https://HOST or https://HOST:PORT, or *")
        return origins


_deployment = functools.partial(
    serve.deployment,
    # The service itself admits requests, by the work that waits. Serve's router passes a full queue on at
    # only 4 requests a second, so it should never have one: max_queued_requests is for requests in transit.
    # 16 was too few: some of 32 simultaneous clients were refused. Of 512, the batcher leaves a sender 400.
    max_ongoing_requests=512,
    max_queued_requests=256,
    backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
    graceful_shutdown_timeout_s=30,
    # polyrank.serve.access says the same, with the sender. Its line takes 0.03 ms of a refusal's 0.5 ms.
    logging_config=LoggingConfig(enable_access_log=False),
    health_check_period_s=2.0,  # a dead replica is replaced after so long; Serve's default is 10 s
)


@_deployment()
@serve.ingress()
class Ranker:
    """A replica of the service, `serve.replica.Replica`.

    It is imported where it runs: whoever deploys it need not wait for torch and transformers, which take
    seconds to load.
    """

    def __init__(self, args: Args, shards: list[DeploymentHandle]) -> None:
        from serve.replica import Replica

        self._replica = Replica(args, shards)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._replica.create_app()

    async def check_health(self) -> None:
        """Serve replaces a replica for which this raises three times in a row."""
        if problem := await self._replica.problem():
            raise RuntimeError(problem)


@_deployment()
class RankerShard:
    """Holds one shard of each of `sharded_pools`, a `serve.shards.PoolShard`; loaded as above."""

    def __init__(self, number: int, args: Args) -> None:
        from serve.replica import open_shard

        self._shard = open_shard(number, args)

    async def open(self, version: str) -> "ShardFacts | Refusal":
        return await self._shard.open(version)

    async def search(self, asked: "ShardQuery") -> "PoolAnswer | Refusal":
        return await self._shard.search(asked)

    async def check_health(self) -> None:
        """Serve replaces a replica for which this raises three times in a row."""
        if problem := self._shard.problem():
            raise RuntimeError(problem)


def build(args: Args) -> serve.Application:
    """The application. Raises BadInput, before any replica starts, for what cannot be served."""
    return application(args)


def application(args: Args, **options: Any) -> serve.Application:
    """Like `build`, with options for the deployment, such as `num_replicas`."""
    pools = [storage.absolute(uri.rstrip("/")) for uri in [*args.pools, *args.sharded_pools]]
    models = {CHAMPION: _absolute(args.model)}
    resolve(models[CHAMPION], pools)
    BearerTokens.of_environment()
    bound_kind()
    second_stage = _resolved(args.second_stage)
    require(bool(second_stage) or not args.together, "together", True, "false without second_stage")
    if second_stage:
        read_settings(open_artifact(second_stage, "ranker").uri).require_pairs()
    classifier = _resolved(args.classifier)
    if classifier:
        from pipeline.classification.classifier import open_classifier

        open_classifier(classifier)[1].open_encoder()
    if args.candidate:
        models[CANDIDATE] = _absolute(args.candidate)
        try:
            resolve(models[CANDIDATE], pools)
        except (BadInput, OSError) as error:
            _log.warning("candidate: not served until it can be: %s", problem_of(error))
    deciders = [
        DeploymentActorConfig(
            name=name,
            actor_class=ray.remote(PollingDecider),
            # Plain types: for a file with `deployments`, Serve turns a dataclass into a dictionary.
            init_kwargs={"model": model, "pools": pools, "poll_s": args.poll_s},
            actor_options={"num_cpus": 0},
        )
        for name, model in models.items()
    ]
    args = args.model_copy(
        update={
            "second_stage": second_stage,
            "classifier": classifier,
            "pools": pools[: len(args.pools)],
            "sharded_pools": pools[len(args.pools) :],
        }
    )
    deployment = Ranker.options(  # type: ignore[attr-defined]
        name=args.name, deployment_actors=deciders, **options
    )
    shards = range(args.shards if args.sharded_pools else 0)
    bound_app: serve.Application = deployment.bind(
        args, [_shard(number, args) for number in shards]
    )
    return bound_app


def _shard(number: int, args: Args) -> serve.Application:
    deployment = RankerShard.options(  # type: ignore[attr-defined]
        name=f"{args.name}-shard-{number}",
        num_replicas=args.shard_replicas,
        ray_actor_options={
            "num_cpus": args.shard_cpus,
            "num_gpus": args.shard_gpus,
            "resources": args.shard_resources,
        },
    )
    bound_app: serve.Application = deployment.bind(number, args)
    return bound_app


def _resolved(model: str) -> str:
    """The URI that an alias means now: the service follows the aliases of `model` and `candidate` alone."""
    return _absolute(model_uri(model))


def _absolute(model: str) -> str:
    """An absolute URI, because a replica has another working directory. An alias stays an alias."""
    return storage.absolute(model) if model and not model.startswith(REGISTRY) else model
