"""The format of every error that a client can get; `serve/refusals.py` lists them:

{"error": {"code": "invalid_request", "message": "context: …", "field": "context"}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
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


def response(refusal: Refusal, headers: Mapping[str, str] | None = None) -> Response:
    """The HTTP answer."""
    headers = dict(headers or {})
    if refusal.retry_after_s:
        headers["retry-after"] = str(math.ceil(refusal.retry_after_s))
    if refusal.code == "unauthorized":
        headers["www-authenticate"] = "Bearer"
    problem = Problem(code=refusal.code, message=refusal.message, field=refusal.field)
    body = ErrorResponse(error=problem).model_dump_json()
    return Response(body, CODES[refusal.code].status, headers, "application/json")


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

    @app.exception_handler(Refusal)
    @app.exception_handler(BadInput)
    async def refuse(request: Request, error: Refusal | BadInput) -> Response:
        if isinstance(error, BadInput):
            error = Refusal("invalid_request", str(error))
        return response(error)

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> Response:
        return response(_refusal_of_body(error.errors()[0]))

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        codes = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}
        code = codes.get(error.status_code, "internal")
        path = request.url.path
        message = f"{_shortened(path)}: {CODES[code].text}"
        if code == "invalid_json" and error.__cause__:  # not UTF-8, or too deep
            message = f"the body is not JSON: {error.__cause__}"
        usual_path = "/" + "/".join(filter(None, path.lower().split("/")))
        routes = [route for route in request.app.routes if isinstance(route, APIRoute)]
        if code == "not_found":
            listed = dict.fromkeys(r.path_format for r in routes if r.include_in_schema)
            is_there = usual_path in [route.path_format for route in routes]
            message += f" There is {usual_path if is_there else ', '.join(listed)}"
        return response(Refusal(code, message), error.headers)


def _refusal_of_body(problem: Mapping[str, Any]) -> Refusal:
    """The refusal that tells one of pydantic's errors."""
    if problem["type"] == "json_invalid":
        fault, place = problem.get("ctx", {}).get("error", ""), problem["loc"][-1]
        return Refusal("invalid_json", f"the body is not JSON: {fault} at character {place}")
    # Parts in <> name the type that a value was read as; they are not fields.
    place = [_shortened(part) for part in problem["loc"] if part != "body" and str(part)[:1] != "<"]
    message = str(problem["msg"]).removeprefix("Value error, ")
    if place or problem["type"] == "too_many":
        field = ".".join(place) or "body"
        return Refusal("invalid_request", f"{field}: {message}", field)
    # A rule over several fields names them.
    message = message if problem["type"] == "value_error" else f"body: {message}"
    return Refusal("invalid_request", message)


def _shortened(text: object) -> str:
    """A client's input, truncated."""
    line = str(text)
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}…"
