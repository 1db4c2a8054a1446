"""Every error that a client can get: code, HTTP status and meaning. All have the same format:

{"error": {"code": "invalid_request", "message": "context: …", "field": "context"}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from pipeline.config import BadInput
from serve.limits import Limits

_SHOWN_CHARACTERS = 200  # of a client's input in an error message


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


class Problem(BaseModel):
    """`code` is for programs, `message` for people; `field` names the wrong field of the request."""

    code: str
    message: str
    field: str | None = None


class ErrorResponse(BaseModel):
    """The body of every answer whose status is not 200."""

    error: Problem


class Refusal(Exception):
    """Raised to answer a request with an error."""

    def __init__(
        self, code: str, message: str, field: str | None = None, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.field = code, message, field
        self.retry_after_s = retry_after_s

    def response(self) -> JSONResponse:
        """The HTTP answer."""
        headers = {"retry-after": str(math.ceil(self.retry_after_s))} if self.retry_after_s else {}
        if self.code == "unauthorized":
            headers["www-authenticate"] = "Bearer"
        return _response(self.code, self.message, self.field, headers)


def _response(
    code: str, message: str, field: str | None, headers: Mapping[str, str]
) -> JSONResponse:
    problem = {"code": code, "message": message, "field": field}
    return JSONResponse({"error": problem}, CODES[code].status, dict(headers))


def overload_refusal(waiting_s: float) -> Refusal:
    """The refusal of a request because too much work is waiting."""
    message = f"{waiting_s:.1f} s of work are waiting"
    return Refusal("overloaded", message, None, max(1.0, waiting_s))


def too_late_refusal() -> Refusal:
    """The refusal of a request whose deadline is over. Clients do not send such a request again."""
    return Refusal("too_late", "the request's time was over before it was computed")


def require_at_most(limits: Limits, field: str, count: int, limit: str = "candidates") -> None:
    """Raises Refusal if the field of a request has or asks for more than this limit of the operator's."""
    if count > (most := getattr(limits, limit)):
        message = f"{field}: {count:,} are not allowed; allowed: at most {most:,} (limits.{limit})"
        raise Refusal("invalid_request", message, field)


def error_responses(*codes: str) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route in OpenAPI, for the codes that it may return."""
    texts: dict[int, list[str]] = {}
    for code in codes:
        texts.setdefault(CODES[code].status, []).append(f"`{code}`: {CODES[code].text}")
    return {
        status: {"model": ErrorResponse, "description": " ".join(lines)}
        for status, lines in texts.items()
    }


def install(app: FastAPI) -> None:
    """Makes the application answer in this format; `Guard` answers for exceptions that are not expected."""
    app.exception_handler(Refusal)(_refusal)
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(BadInput)(_bad_input)


async def _refusal(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    return error.response()


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return invalid_request(error.errors())


def invalid_request(errors: Any) -> JSONResponse:
    """The answer to pydantic's errors: the first of them."""
    problem = errors[0]
    if problem["type"] == "json_invalid":
        return _response("invalid_json", "the body is not JSON", None, {})
    # Parts in <> name the type that a value was read as; they are not fields.
    place = [_shortened(part) for part in problem["loc"] if part != "body" and str(part)[:1] != "<"]
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not place:  # a rule over several fields, whose message names them
        return _response("invalid_request", message, None, {})
    field = ".".join(place)
    return _response("invalid_request", f"{field}: {message}", field, {})


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    codes = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}
    code = codes.get(error.status_code, "internal")
    message = f"{_shortened(request.url.path)}: {CODES[code].text}"
    return _response(code, message, None, error.headers or {})


async def _bad_input(request: Request, error: Exception) -> JSONResponse:
    return _response("invalid_request", str(error), None, {})


def _shortened(text: object) -> str:
    """A client's input, truncated."""
    line = str(text)
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}…"
