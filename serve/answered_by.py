"""Which model answers a request: a header tells the client, and a record tells the metrics with the time.

Only so is it seen that a candidate model is slow or fails: an error and some formats of other services have
no field for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.engine import Engine

MODEL = "x-polyrank-model"
"""Header of an answer: the fingerprint of the model."""


class Answered(NamedTuple):
    """An answer, or the failure of one."""

    model: str
    """Fingerprint."""
    route: str
    status: int
    """499: the client was gone before."""
    seconds: float


def name_engine(request: Request, engine: Engine) -> Engine:
    """Notes the engine that answers a request, before its work begins: a refusal then names it, too."""
    request.state.model = engine.model.fingerprint
    return engine


class AnsweredBy:
    """Middleware that names and records the model of an answer."""

    def __init__(self, app: ASGIApp, record: Callable[[Answered], None]) -> None:
        self._app, self._record = app, record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.monotonic(), 500
        state = scope.setdefault("state", {})

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if "model" in state:
                    MutableHeaders(scope=message)[MODEL] = state["model"]
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except asyncio.CancelledError:
            status = 499
            raise
        finally:
            if "model" in state:
                seconds = time.monotonic() - began
                self._record(Answered(state["model"], scope["route"].path, status, seconds))
