"""How much a client may ask for, and for how long."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

MAX_TURNS = 1000
MAX_CANDIDATES = 1000
MAX_REQUESTS = 64
MAX_TOP_K = 1000
MAX_TIMEOUT_MS = 60_000


class Limits(BaseModel):
    """Those that an operator may set; the others are part of the interface and stand in openapi.json."""

    model_config = ConfigDict(extra="forbid")

    body_bytes: int = Field(default=2_000_000, ge=1_000, description="A request's body.")
    upload_s: float = Field(default=10.0, gt=0, description="A body has to be there after so long.")
    timeout_ms: int = Field(
        default=10_000, ge=1, le=MAX_TIMEOUT_MS,
        description="What a request has that says nothing: what cannot be answered in time is not computed.",
    )  # fmt: skip
    batch_rows: int = Field(
        default=1024,
        ge=1,
        description="So many rows of all requests are computed together at most.",
    )
    waiting_s: float = Field(
        default=2.0,
        gt=0,
        description="So much work may wait in a replica; more is refused with 429.",
    )
