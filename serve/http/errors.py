"""The format of every error that a client can get; `serve/refusals.py` lists them:

{"error": {"code": "invalid_request", "message": "context: …", "field": "context"}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from pipeline.config import BadInput
from serve.refusals import CODES, Refusal

_SHOWN_CHARACTERS = 200  # of a client's input in an error message


class Problem(BaseModel):
    """`code` is for programs, `message` for people; `field` names the wrong field of the request."""

    code: str
    message: str
    field: str | None = None


class ErrorResponse(BaseModel):
    """The body of every answer whose status is not 200."""

    error: Problem


def response(refusal: Refusal) -> JSONResponse:
    """The HTTP answer."""
    headers = (
        {"retry-after": str(math.ceil(refusal.retry_after_s))} if refusal.retry_after_s else {}
    )
    if refusal.code == "unauthorized":
        headers["www-authenticate"] = "Bearer"
    return _response(refusal.code, refusal.message, refusal.field, headers)


def _response(
    code: str, message: str, field: str | None, headers: Mapping[str, str]
) -> JSONResponse:
    problem = {"code": code, "message": message, "field": field}
    return JSONResponse({"error": problem}, CODES[code].status, dict(headers))


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
    return response(error)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return invalid_request(error.errors())


def invalid_request(errors: Any) -> JSONResponse:
    """The answer to pydantic's errors: the first of them."""
    problem = errors[0]
    if problem["type"] == "json_invalid":
        fault, place = problem.get("ctx", {}).get("error", ""), problem["loc"][-1]
        return _response(
            "invalid_json", f"the body is not JSON: {fault} at character {place}", None, {}
        )
    # Parts in <> name the type that a value was read as; they are not fields.
    place = [_shortened(part) for part in problem["loc"] if part != "body" and str(part)[:1] != "<"]
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not place:
        # A rule over several fields names them.
        message = message if problem["type"] == "value_error" else f"body: {message}"
        return _response("invalid_request", message, None, {})
    field = ".".join(place)
    return _response("invalid_request", f"{field}: {message}", field, {})


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    codes = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}
    code = codes.get(error.status_code, "internal")
    path = request.url.path
    message = f"{_shortened(path)}: {CODES[code].text}"
    usual_path = "/" + "/".join(filter(None, path.lower().split("/")))
    if code == "not_found" and any(
        usual_path == getattr(r, "path", "") for r in request.app.routes
    ):
        message += f" There is {usual_path}"
    return _response(code, message, None, error.headers or {})


async def _bad_input(request: Request, error: Exception) -> JSONResponse:
    return _response("invalid_request", str(error), None, {})


def _shortened(text: object) -> str:
    """A client's input, truncated."""
    line = str(text)
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}…"
