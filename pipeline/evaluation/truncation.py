"""How many texts a ranker does not read to their end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipeline.models.ranker import Ranker

_SAMPLED = 2_000
_WHOLE = 1_000_000  # tokens


def truncation(ranker: Ranker, contexts: Sequence[Sequence[str]], candidates: Sequence[str]) -> str:
    """One line, of the first 2,000 of each; "" where none is longer than what the ranker reads."""
    config, tokenizer = ranker.config, ranker.tokenizer
    found = [
        _longer("contexts", tokenizer.contexts, contexts, config.max_context_tokens),
        _longer("candidates", tokenizer.candidates, candidates, config.max_candidate_tokens),
    ]
    return "; ".join(filter(None, found))


def _longer(
    name: str, rows_of: Callable[[Any, int], list[list[int]]], texts: Sequence[Any], most: int
) -> str:
    texts = texts[:_SAMPLED]
    full = [text for text, row in zip(texts, rows_of(texts, most), strict=True) if len(row) == most]
    lengths = [len(row) for row in rows_of(full, _WHOLE)] if full else []
    longer = sum(length > most for length in lengths)
    if not longer:
        return ""
    return (
        f"{longer:,} of {len(texts):,} {name} are longer than the {most} tokens that it reads (the longest: "
        f"{max(lengths):,})"
    )
