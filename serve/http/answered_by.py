"""Names the model that answers a request: for the client in a header, for the metrics in a record with the
time.

Otherwise nobody would see that a candidate model is slow or fails, because errors, and some formats of other
services, have no field for the model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve import tracing
from serve.engine import Engine

MODEL = "x-polyrank-model"
"""Header of an answer: the fingerprint of the model."""
_STATE = "answered_by"  # in the state of a request


class ModelAnswer(NamedTuple):
    """A model's answer to a request, or its failure."""

    model: str
    """Fingerprint."""
    route: str
    status: int
    """499: the client was gone before."""
    seconds: float
    """From the moment that the request was read."""


class _Work(NamedTuple):
    """A model's work on a request."""

    model: str
    route: str
    began: float


def name_engine(request: Request, engine: Engine) -> Engine:
    """Notes the engine that answers a request, before its work begins: a refusal then names it, too."""
    work = _Work(engine.model.fingerprint, request.scope["route"].path, time.monotonic())
    setattr(request.state, _STATE, work)
    tracing.tag(model=work.model, request_id=request.state.request_id)
    return engine


class AnsweredBy:
    """Middleware that names and records the model of an answer.

    It stands before `Guard`, which gives the answer of a route that fails."""

    def __init__(self, app: ASGIApp, record: Callable[[ModelAnswer], None]) -> None:
        self._app, self._record = app, record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500
        state = scope.setdefault("state", {})

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if _STATE in state:
                    MutableHeaders(scope=message)[MODEL] = state[_STATE].model
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except asyncio.CancelledError:
            status = 499
            raise
        finally:
            if _STATE in state:
                work: _Work = state[_STATE]
                seconds = time.monotonic() - work.began
                self._record(ModelAnswer(work.model, work.route, status, seconds))
