"""Pages of other origins, which may ask the service from a browser and read its answers (CORS)."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from serve.answered_by import MODEL


class CrossOrigin(CORSMiddleware):
    """A middleware that lets pages of these origins ask."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", MODEL],
        )
