"""The page at `/`: type a dialogue or a query, see what the service ranks, and why.

The files beside this one are served as they are: no build step, nothing from elsewhere, no inline script.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fastapi import FastAPI
from fastapi.responses import Response

from serve.refusals import Refusal

_MEDIA = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_PAGE = "index.html"
_HEADERS = {
    # Other services may be asked, so that models can be compared; nothing may be loaded from them.
    "content-security-policy": "default-src 'self'; connect-src *",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def install(app: FastAPI, opens: Literal["dialogue", "query"] = "dialogue") -> None:
    """Adds the page and its files; they are no part of the interface that openapi.json describes.

    `opens`: what the page first asks for. In a dialogue Enter adds a turn; a query is asked anew each time.
    """
    files = {
        path.name: path.read_bytes()
        for path in Path(__file__).parent.iterdir()
        if path.suffix in _MEDIA
    }
    if opens == "query":
        choice = b'name="context" value="%s"'
        dialogue, query = choice % b"dialogue", choice % b"query"
        page_bytes = files[_PAGE].replace(dialogue + b" checked", dialogue)
        files[_PAGE] = page_bytes.replace(query, query + b" checked")

    def answer(name: str) -> Response:
        return Response(files[name], headers=_HEADERS, media_type=_MEDIA[Path(name).suffix])

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return answer(_PAGE)

    @app.get("/playground/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in files or name == _PAGE:
            raise Refusal("not_found")
        return answer(name)
