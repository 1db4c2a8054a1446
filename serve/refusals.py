"""Why a request is not answered: code, HTTP status and meaning of everything that a client can be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Meaning(NamedTuple):
    """HTTP status and explanation of a code."""

    status: int
    text: str


CODES: Mapping[str, Meaning] = {
    "invalid_json": Meaning(400, "The body is not JSON."),
    "unauthorized": Meaning(401, "The bearer token is missing or unknown."),
    "not_found": Meaning(404, "There is no such route."),
    "unknown_model": Meaning(404, "No model of that name is served."),
    "unknown_pool": Meaning(404, "No pool of that name is served."),
    "no_classifier": Meaning(404, "No classifier of intents is served."),
    "method_not_allowed": Meaning(405, "The route has other methods; `Allow` names them."),
    "upload_too_slow": Meaning(408, "The body was not there in time."),
    "too_large": Meaning(413, "The body is too long."),
    "unsupported_media_type": Meaning(415, "The body is not said to be JSON."),
    "invalid_request": Meaning(422, "A field is missing, unknown, or has a value not allowed."),
    "overloaded": Meaning(429, "Too much is waiting; `Retry-After` says when to come again."),
    "internal": Meaning(500, "The request failed; the service's log says why."),
    "not_ready": Meaning(503, "No model can answer yet; `Retry-After` says when to come again."),
    "shard_missing": Meaning(503, "A part of the pool is out of reach; `Retry-After` says when."),
    "too_late": Meaning(504, "The request's time was over before its answer was computed."),
}

REFUSALS = ("invalid_json", "unauthorized", "upload_too_slow", "too_large", "unsupported_media_type",
            "invalid_request", "overloaded", "internal", "not_ready", "too_late")  # fmt: skip
"""Codes that every route with a body may return."""


@dataclass(eq=False)
class Refusal(Exception):
    """Raised to answer a request with an error. Without a message it has the code's explanation."""

    code: str
    message: str = ""
    field: str | None = None
    retry_after_s: float = 0.0

    def __post_init__(self) -> None:
        self.message = self.message or CODES[self.code].text

    def __str__(self) -> str:
        return self.message
