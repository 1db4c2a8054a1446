"""Limits on the size and duration of a request."""

from __future__ import annotations

from contextvars import ContextVar

from pydantic import BaseModel, ConfigDict, Field

MAX_TURNS = 1000
MAX_CANDIDATES = 10_000
MAX_POOL_NAME = 200
MAX_REQUESTS = 1_000
MAX_TOP_K = 10_000
MAX_TIMEOUT_MS = 60_000


class Limits(BaseModel):
    """The limits that an operator may set. The constants above are part of the interface (openapi.json): no
    operator may allow more."""

    model_config = ConfigDict(extra="forbid")

    body_bytes: int = Field(default=2_000_000, ge=1_000)
    """Size of a request's body."""
    all_bodies_bytes: int = Field(default=64_000_000, ge=1_000_000)
    """Size of the bodies of all requests at once. Bodies of 64 KiB or less always pass."""
    candidates: int = Field(default=1_000, ge=1, le=MAX_CANDIDATES)
    """Texts of a request: candidates, documents, inputs; and ids of `allow` and `deny`."""
    top_k: int = Field(default=1_000, ge=10, le=MAX_TOP_K)
    """Results of a request."""
    requests: int = Field(default=64, ge=1, le=MAX_REQUESTS)
    """Requests in a list of them."""
    upload_s: float = Field(default=10.0, gt=0)
    """Seconds in which the body must arrive."""
    timeout_ms: int = Field(default=10_000, ge=1, le=MAX_TIMEOUT_MS)
    """Deadline of a request that names none (x-timeout-ms). It is not computed too late."""
    batch_rows: int = Field(default=1024, ge=1)
    """Most rows, of all requests, that are computed together."""
    requests_per_s: float | None = Field(default=None, gt=0)
    """Requests of a sender in a second, in each replica; a sender may save up 10 s of them."""
    waiting_s: float = Field(default=2.0, gt=0)
    """Seconds of work that a request may wait for in a replica; else it is refused with 429."""


LIMITS: ContextVar[Limits] = ContextVar("limits")
"""Those of the service that reads the current request; `Guard` sets them."""
