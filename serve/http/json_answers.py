"""Answers as JSON. Large ones are made beside the event loop, which would answer nobody meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import Response
from pydantic import TypeAdapter

_SMALL = 2_000  # numbers or texts; they take some 2 ms
_ANY: TypeAdapter[Any] = TypeAdapter(Any)


async def json_answer(make: Callable[[], Any], values: int, exclude_none: bool = False) -> Response:
    """What `make` returns, of some `values` numbers and texts."""
    return Response(await _json(make, values, exclude_none), media_type="application/json")


async def json_list(makes: Sequence[Callable[[], Any]], values: int) -> Response:
    """A list of some `values` numbers and texts. Its items are encoded one by one, because the encoder holds
    the interpreter's lock."""
    parts = [await _json(make, values, False) for make in makes]
    return Response(b"[%b]" % b",".join(parts), media_type="application/json")


async def _json(make: Callable[[], Any], values: int, exclude_none: bool) -> bytes:
    def encode() -> bytes:
        return _ANY.dump_json(make(), exclude_none=exclude_none)

    return encode() if values <= _SMALL else await asyncio.to_thread(encode)
