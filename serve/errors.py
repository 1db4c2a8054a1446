"""Every error that a client can see: its code, its status, its meaning, and its one shape.

{"error": {"code": "invalid_request", "message": "context: …", "field": "context"}}
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from pipeline.config import BadInput

_log = logging.getLogger("polyrank.serve")
_SHOWN = 200  # characters of what a client has sent that an error repeats


class Meaning(NamedTuple):
    """What a code stands for."""

    status: int
    text: str


CODES: Mapping[str, Meaning] = {
    "invalid_json": Meaning(400, "The body is not JSON."),
    "unauthorized": Meaning(401, "The bearer token is missing or unknown."),
    "not_found": Meaning(404, "There is no such route."),
    "unknown_pool": Meaning(404, "No pool of that name is served."),
    "no_classifier": Meaning(404, "No classifier of intents is served."),
    "method_not_allowed": Meaning(405, "The route has other methods; `Allow` names them."),
    "upload_too_slow": Meaning(408, "The body was not there in time."),
    "too_large": Meaning(413, "The body is too long."),
    "unsupported_media_type": Meaning(415, "The body is not said to be JSON."),
    "invalid_request": Meaning(422, "A field is missing, unknown, or has a value not allowed."),
    "overloaded": Meaning(429, "Too much is waiting; `Retry-After` says when to come again."),
    "internal": Meaning(500, "The request failed; the service's log says why."),
    "not_ready": Meaning(503, "No model is loaded yet; `Retry-After` says when to come again."),
    "shard_missing": Meaning(503, "A part of the pool is out of reach; `Retry-After` says when."),
    "too_late": Meaning(504, "The request's time was over before its answer was computed."),
}

FULL_FOR = "x-polyrank-full-for-ms"
"""Header of a replica's 429: for so long its proxies refuse by themselves, and take the header away."""

REFUSALS = ("invalid_json", "unauthorized", "upload_too_slow", "too_large", "unsupported_media_type",
            "invalid_request", "overloaded", "internal", "not_ready", "too_late")  # fmt: skip
"""Codes that every route with a body may answer with."""


class Problem(BaseModel):
    """`code` is for programs, `message` for people, `field` names what is wrong in the request."""

    code: str
    message: str
    field: str | None = None


class ErrorResponse(BaseModel):
    """Every answer that is no 200."""

    error: Problem


class Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        code: str,
        message: str,
        field: str | None = None,
        retry_after_s: float = 0.0,
        full_for_s: float = 0.0,
    ) -> None:
        """`full_for_s`: what a replica tells the proxies, see FULL_FOR."""
        super().__init__(message)
        self.code, self.message, self.field = code, message, field
        self.retry_after_s, self.full_for_s = retry_after_s, full_for_s

    def response(self) -> JSONResponse:
        """The one shape."""
        headers = {"retry-after": str(math.ceil(self.retry_after_s))} if self.retry_after_s else {}
        if self.full_for_s:
            headers[FULL_FOR] = str(math.ceil(1000 * self.full_for_s))
        if self.code == "unauthorized":
            headers["www-authenticate"] = "Bearer"
        return _response(self.code, self.message, self.field, headers)


def _response(
    code: str, message: str, field: str | None, headers: Mapping[str, str]
) -> JSONResponse:
    problem = {"code": code, "message": message, "field": field}
    return JSONResponse({"error": problem}, CODES[code].status, dict(headers))


def overloaded(waiting_s: float, most_waiting_s: float) -> Refusal:
    """`most_waiting_s`: of work that may wait. A tenth of it is done before a proxy asks again: no core is
    idle meanwhile."""
    message = f"{waiting_s:.1f} s of work are waiting"
    return Refusal("overloaded", message, None, max(1.0, waiting_s), most_waiting_s / 10)


def documented(*codes: str) -> dict[int | str, dict[str, Any]]:
    """What OpenAPI says of a route that answers with these codes."""
    texts: dict[int, list[str]] = {}
    for code in codes:
        texts.setdefault(CODES[code].status, []).append(f"`{code}`: {CODES[code].text}")
    return {
        status: {"model": ErrorResponse, "description": " ".join(lines)}
        for status, lines in texts.items()
    }


def install(app: FastAPI) -> None:
    """Lets the application answer every exception in the one shape."""
    app.exception_handler(Refusal)(_refusal)
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(BadInput)(_bad_input)
    app.exception_handler(Exception)(_unexpected)


async def _refusal(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    return error.response()


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return invalid(error.errors())


def invalid(errors: Any) -> JSONResponse:
    """The answer to what pydantic found; its first finding."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return _response("invalid_json", "the body is not JSON", None, {})
    # In <> stands which of several types a value was read as.
    place = [_short(part) for part in first["loc"] if part != "body" and str(part)[:1] != "<"]
    message = str(first["msg"]).removeprefix("Value error, ")
    if not place:  # said by a rule over several fields, which names them itself
        return _response("invalid_request", message, None, {})
    field = ".".join(place)
    return _response("invalid_request", f"{field}: {message}", field, {})


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    codes = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}
    code = codes.get(error.status_code, "internal")
    message = f"{_short(request.url.path)}: {CODES[code].text}"
    return _response(code, message, None, error.headers or {})


async def _bad_input(request: Request, error: Exception) -> JSONResponse:
    return _response("invalid_request", str(error), None, {})


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    _log.error("%s failed", _short(request.url.path), exc_info=error)
    return _response("internal", CODES["internal"].text, None, {})


def _short(text: object) -> str:
    """What a client sent, cut: an answer repeats no megabyte."""
    line = str(text)
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"
