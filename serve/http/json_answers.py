"""Answers as JSON. Large ones are made beside the event loop, which would answer nobody meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import Response
from pydantic import TypeAdapter

_SMALL = 2_000  # numbers or texts; they take some 2 ms
_ANY: TypeAdapter[Any] = TypeAdapter(Any)


async def json_answer(make: Callable[[], Any], values: int) -> Response:
    """What `make` returns, of some `values` numbers and texts."""
    return Response(await _json(make, values), media_type="application/json")


async def json_list(makes: Sequence[Callable[[], Any]], values: int) -> Response:
    """A list of some `values` numbers and texts. Its items are encoded one by one, because the encoder holds
    the interpreter's lock."""
    parts = [await _json(make, values) for make in makes]
    return Response(b"[%b]" % b",".join(parts), media_type="application/json")


async def _json(make: Callable[[], Any], values: int) -> bytes:
    if values <= _SMALL:
        return _ANY.dump_json(make())
    return await asyncio.to_thread(lambda: _ANY.dump_json(make()))
