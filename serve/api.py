"""The HTTP interface: routes, the shapes of requests and answers, and one shape for every error.

{"error": {"code": "invalid_request", "message": "context: …", "field": "context"}}
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.config import BadInput
from serve.ranker import Engine, Ranked, UnknownPool

MAX_BODY_BYTES = 2_000_000
MAX_CANDIDATES = 1000
MAX_TURNS = 1000
MAX_TOP_K = 1000

_log = logging.getLogger("polyrank.serve")
ResultT = TypeVar("ResultT")


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("the text is empty")
    return _encodable(text)


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text holds half of a surrogate pair") from None
    return text


Text = Annotated[str, AfterValidator(_not_blank)]
Turn = Annotated[str, AfterValidator(_encodable)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class RankRequest(_Strict):
    """Candidates come with the request, or from a pool that is served."""

    context: list[Turn] = Field(
        min_length=1, max_length=MAX_TURNS, description="The turns so far, oldest first."
    )
    candidates: list[Text] | None = Field(
        None, min_length=1, max_length=MAX_CANDIDATES, description="The texts to rank."
    )
    pool: str | None = Field(None, min_length=1, description="The pool to search.")
    top_k: int = Field(10, ge=1, le=MAX_TOP_K, description="Results at most.")

    @model_validator(mode="after")
    def _one_source(self) -> RankRequest:
        if not any(turn.strip() for turn in self.context):
            raise ValueError("context: every turn is empty")
        if (self.candidates is None) == (self.pool is None):
            raise ValueError("candidates, pool: exactly one of them is needed")
        return self


class Result(BaseModel):
    """A candidate: `id` is its id in the pool, or its place among the request's candidates."""

    id: str
    text: str
    score: float


class PoolVersion(BaseModel):
    """Which version of a pool answered."""

    name: str
    version: str


class RankResponse(BaseModel):
    """Best first; `model` is the fingerprint of the ranker that scored."""

    results: list[Result]
    model: str
    pool: PoolVersion | None


class Health(BaseModel):
    """The replica is loaded."""

    status: str


class Problem(BaseModel):
    """`code` is for programs, `message` for people, `field` names what is wrong in the request."""

    code: str
    message: str
    field: str | None = None


class ErrorResponse(BaseModel):
    """Every answer that is no 200."""

    error: Problem


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text}
    for status, text in {
        400: "The body is not JSON.",
        404: "No such pool.",
        413: f"The body has more than {MAX_BODY_BYTES:,} bytes.",
        422: "A field is missing, unknown, or not allowed.",
        429: "Overloaded; Retry-After says when to come again.",
    }.items()
}


def create_app(engine: Engine | None) -> FastAPI:
    """The application over an engine; None is enough to write the interface down."""
    app = FastAPI(
        title="polyrank",
        version="1",
        description="Ranks candidate texts for a context: replies for a dialogue, articles for a sentence.",
    )
    app.add_middleware(_BodyLimit)
    # The event loop stays free for other requests; torch has its own threads inside a call.
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ranker")

    async def compute(work: Callable[..., ResultT], *arguments: Any) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(worker, work, *arguments)

    def loaded() -> Engine:
        if engine is None:
            raise HTTPException(503, "no model is loaded")
        return engine

    @app.post("/rank", responses=_ERRORS)
    async def rank(request: RankRequest) -> RankResponse:
        """Ranks candidates for a context."""
        ranker = loaded()
        if request.pool is not None:
            opened = ranker.pool(request.pool)
            ranked = await compute(ranker.rank_pool, request.context, request.pool, request.top_k)
            version = PoolVersion(name=opened.name, version=opened.version)
            return _response(ranked, ranker, version)
        ranked = await compute(ranker.rank, request.context, request.candidates, request.top_k)
        return _response(ranked, ranker, None)

    @app.get("/health")
    async def health() -> Health:
        """Whether the replica can answer."""
        loaded()
        return Health(status="ok")

    @app.get("/info")
    async def info() -> dict[str, Any]:
        """Which model and which pools are served."""
        return loaded().info()

    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(BadInput)(_bad_input)
    app.exception_handler(Exception)(_unexpected)
    return app


def _response(ranked: list[Ranked], engine: Engine, pool: PoolVersion | None) -> RankResponse:
    results = [Result(id=one.id, text=one.text, score=one.score) for one in ranked]
    return RankResponse(results=results, model=engine.model.fingerprint, pool=pool)


def _error(status: int, code: str, message: str, field: str | None = None) -> JSONResponse:
    problem = {"code": code, "message": message, "field": field}
    return JSONResponse({"error": problem}, status_code=status)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return _error(400, "invalid_json", "the body is not JSON")
    place = [str(part) for part in first["loc"] if part != "body"]
    message = str(first["msg"]).removeprefix("Value error, ")
    if not place:  # said by a rule over several fields, which names them itself
        return _error(422, "invalid_request", message)
    field = ".".join(place)
    return _error(422, "invalid_request", f"{field}: {message}", field)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    codes = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed", 503: "not_ready"}
    code = codes.get(error.status_code, "http_error")
    return _error(error.status_code, code, f"{request.url.path}: {error.detail}")


async def _bad_input(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, UnknownPool):
        return _error(404, "unknown_pool", str(error), "pool")
    return _error(422, "invalid_request", str(error))


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    _log.error("%s failed", request.url.path, exc_info=error)
    return _error(500, "internal", "the request failed; the service's log says why")


class _BodyLimit:
    """Answers 413 to a body over MAX_BODY_BYTES, and keeps none of it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        size, more = 0, True
        while more:  # to the end, so that the client has finished sending when it hears of it
            message = await receive()
            size += len(message.get("body", b""))
            more = message["type"] == "http.request" and message.get("more_body", False)
            messages = [*messages, message] if size <= MAX_BODY_BYTES else []
        if size > MAX_BODY_BYTES:
            text = f"the body has {size:,} bytes; allowed: at most {MAX_BODY_BYTES:,}"
            await _error(413, "too_large", text)(scope, receive, send)
            return
        waiting = iter(messages)

        async def replay() -> Message:
            return next(waiting, None) or await receive()

        await self._app(scope, replay, send)


if __name__ == "__main__":
    print(json.dumps(create_app(None).openapi(), indent=1))
