"""Checks of contexts and candidates that come from a program: what is no text is named in one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from pipeline.config import BadInput, require

Context = str | Sequence[str]
"""A text, or turns, oldest first and newest last."""
GivenT = TypeVar("GivenT")


def context(given: Context, name: str = "context") -> list[str]:
    """The turns. Raises BadInput where none of them has any text."""
    turns = [given] if isinstance(given, str) else _listed(given, name, "turns, or a text")
    for number, turn in enumerate(turns):
        _require_text(turn, name if isinstance(given, str) else f"{name}[{number}]")
    if not any(turn.strip() for turn in turns):
        raise BadInput(f"{name}: empty; allowed: a text, or turns, one of them with text at least")
    return turns


def contexts(given: Iterable[Context]) -> list[list[str]]:
    """The turns of each context. Raises BadInput as `context`."""
    listed = _listed(given, "contexts", "contexts")
    return [context(one, f"contexts[{number}]") for number, one in enumerate(listed)]


def texts(given: Iterable[str], name: str) -> list[str]:
    """Raises BadInput for what is no text, and for an empty one."""
    listed = _listed(given, name, "texts")
    for number, text in enumerate(listed):
        _require_filled(text, f"{name}[{number}]")
    return listed


def candidates(given: Iterable[str] | Mapping[str, str]) -> tuple[list[str], list[str]]:
    """(ids, texts). Raises BadInput as `texts`, and where there is none."""
    if isinstance(given, Mapping):
        for key, text in given.items():
            require(isinstance(key, str), "candidates", key, "ids that are text")
            _require_filled(text, f"candidates[{key!r}]")
        ids, found = list(given), list(given.values())
    else:
        found = texts(given, "candidates")
        ids = [str(number) for number in range(len(found))]
    if not found:
        raise BadInput("candidates: none; allowed: one text at least")
    return ids, found


def require_top_k(top_k: int) -> None:
    """More than there are candidates is allowed."""
    is_number = isinstance(top_k, int) and not isinstance(top_k, bool)
    require(is_number and top_k >= 1, "top_k", top_k, "a whole number >= 1")


def _listed(given: Iterable[GivenT], name: str, what: str) -> list[GivenT]:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise BadInput(f"{name}: {_shown(given)} is not allowed; allowed: a list of {what}")
    return list(given)


def _require_text(text: object, name: str) -> None:
    if not isinstance(text, str):
        raise BadInput(f"{name}: {_shown(text)} is not allowed; allowed: a text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{name}: the text holds half of a surrogate pair") from None


def _require_filled(text: object, name: str) -> None:
    _require_text(text, name)
    if not str(text).strip():
        raise BadInput(f"{name}: {_shown(text)} is not allowed; allowed: a text that is not empty")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
