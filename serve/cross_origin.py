"""Pages of other origins, which may ask the service from a browser and read its answers (CORS)."""

from __future__ import annotations

import os
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from serve.answered_by import MODEL

ORIGINS = "POLYRANK_ORIGINS"
"""Environment variable of Serve's proxies: the service's `origins`, separated by commas. A proxy knows no
application's arguments, and a page cannot read what the proxy refuses if the origins are not named."""


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


def origins_of_environment() -> list[str]:
    return [part.strip() for part in os.environ.get(ORIGINS, "").split(",") if part.strip()]
