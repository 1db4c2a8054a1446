"""Answers as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import Response
from pydantic import TypeAdapter

from serve.service import Work

_ANY: TypeAdapter[Any] = TypeAdapter(Any)


async def json_answer(work: Work, make: Callable[[], Any], values: int) -> Response:
    """What `make` returns, of some `values` numbers and texts."""
    (part,) = await _parts(work, [make], values)
    return Response(part, media_type="application/json")


async def json_list(work: Work, makes: Sequence[Callable[[], Any]], values: int) -> Response:
    """A list of some `values` numbers and texts. A large one is made item by item."""
    parts = await _parts(work, makes, values)
    return Response(b"[%b]" % b",".join(parts), media_type="application/json")


async def _parts(work: Work, makes: Sequence[Callable[[], Any]], values: int) -> list[bytes]:
    return await work.make([partial(_json, make) for make in makes], values)


def _json(make: Callable[[], Any]) -> bytes:
    return _ANY.dump_json(make())
