"""Checks contexts and candidates that a program hands in. The error names the wrong one in one line."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral
from typing import TypeVar

from pipeline.config import BadInput, require

Context = str | Sequence[str]
"""A text, or turns, oldest first and newest last."""
Where = Mapping[str, str | Collection[str]]
"""Columns of a pool, and the value or the values that a candidate may have there."""
ItemT = TypeVar("ItemT")


def context(value: Context, name: str = "context") -> list[str]:
    """The turns of a context. Raises BadInput if a turn is not a text, or if no turn has any text."""
    turns = [value] if isinstance(value, str) else _require_list(value, name, "turns, or a text")
    for number, turn in enumerate(turns):
        _require_text(turn, name if isinstance(value, str) else f"{name}[{number}]")
    if not any(turn.strip() for turn in turns):
        raise BadInput(f"{name}: empty; allowed: a text, or turns, one of them with text at least")
    return turns


def contexts(values: Iterable[Context]) -> list[list[str]]:
    """The turns of each context. Raises BadInput as `context` does."""
    items = _require_list(values, "contexts", "contexts")
    return [context(item, f"contexts[{number}]") for number, item in enumerate(items)]


def texts(values: Iterable[str], name: str) -> list[str]:
    """The values as a list. Raises BadInput if one is not a text, or is empty."""
    items = _require_list(values, name, "texts")
    for number, text in enumerate(items):
        _require_filled(text, f"{name}[{number}]")
    return items


def candidates(values: Iterable[str] | Mapping[str, str]) -> tuple[list[str], list[str]]:
    """(ids, texts). Raises BadInput as `texts` does, and if there are no candidates."""
    if isinstance(values, Mapping):
        for key, text in values.items():
            require(isinstance(key, str), "candidates", key, "ids that are text")
            _require_filled(text, f"candidates[{key!r}]")
        ids, candidate_texts = list(values), list(values.values())
    else:
        candidate_texts = texts(values, "candidates")
        ids = [str(number) for number in range(len(candidate_texts))]
    if not candidate_texts:
        raise BadInput("candidates: none; allowed: one text at least")
    return ids, candidate_texts


def require_top_k(top_k: int) -> None:
    """Raises BadInput unless `top_k` is a whole number from 1. It may exceed the number of candidates."""
    is_number = isinstance(top_k, Integral) and not isinstance(top_k, bool)
    require(is_number and top_k >= 1, "top_k", top_k, "a whole number >= 1")


def _require_list(values: Iterable[ItemT], name: str, contents: str) -> list[ItemT]:
    is_table = hasattr(values, "columns")  # which would give the names of its columns
    is_no_list = isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable)
    if is_table or is_no_list:
        raise BadInput(
            f"{name}: {_short_repr(values)} is not allowed; allowed: a list of {contents}"
        )
    return list(values)


def _require_text(text: object, name: str) -> None:
    if not isinstance(text, str):
        raise BadInput(f"{name}: {_short_repr(text)} is not allowed; allowed: a text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{name}: the text holds half of a surrogate pair") from None


def _require_filled(text: object, name: str) -> None:
    _require_text(text, name)
    if not str(text).strip():
        raise BadInput(
            f"{name}: {_short_repr(text)} is not allowed; allowed: a text that is not empty"
        )


def _short_repr(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
