"""The service on Ray Serve.

    serve run serve.app:build model=RANKER pools=POOLS/replies,POOLS/articles

One deployment holds the model and the memory-mapped pools: a hop between deployments costs 3 to 6 ms,
more than most rankings. Replicas of one node share the pools' pages.
"""

# No `from __future__ import annotations`: Ray reads the class of `build`'s argument from its signature,
# and would pass a plain dictionary where it finds a string.
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, field_validator
from ray import serve
from ray.serve.config import BackpressureConfig

from pipeline import storage
from pipeline.models.precision import Precision
from serve.api import create_app
from serve.ranker import Engine, open_pools


class Args(BaseModel):
    """What is served."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, description="A ranker (of jobs.finetune).")
    pools: list[str] = Field(
        default=[], description="Pools that it embedded; on the command line a,b."
    )
    precision: Precision = Field(
        default="auto",
        description="What the encoder computes in; auto: bf16 where the hardware multiplies it.",
    )
    name: str = Field(default="ranker", description="Name of the deployment.")

    @field_validator("pools", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return [part for part in value.split(",") if part] if isinstance(value, str) else value


@serve.deployment(
    max_ongoing_requests=32,
    max_queued_requests=128,
    backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
)
@serve.ingress()
class Ranker:
    """A replica."""

    def __init__(self, args: Args) -> None:
        self._engine = Engine(args.model, args.pools, args.precision)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._engine)


def build(args: Args) -> serve.Application:
    """The application; refuses a pool of another model before any replica starts.

    Raises BadInput.
    """
    model = storage.absolute(args.model)  # a replica's directory is not this process'
    pools = [storage.absolute(uri) for uri in args.pools]
    open_pools(model, pools)
    args = args.model_copy(update={"model": model, "pools": pools})
    return Ranker.options(name=args.name).bind(args)  # type: ignore[attr-defined]
