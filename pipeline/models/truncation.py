"""How many texts a ranker does not read to their end. Importing it loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.models.ranker import Ranker

SAMPLED = 2_000
_COUNTED = 100_000  # tokens of the longest text
_RowsOf = Callable[[Any, int], list[list[int]]]
"""Texts and the most tokens of a row to rows of token ids."""


@dataclass(frozen=True, kw_only=True)
class Truncated:
    """Numbers of texts; `longest`: tokens of the one with the most characters, 100,000 at most."""

    texts: int = 0
    longer: int = 0
    longest: int = 0

    def __add__(self, other: Truncated) -> Truncated:
        return Truncated(
            texts=self.texts + other.texts,
            longer=self.longer + other.longer,
            longest=max(self.longest, other.longest),
        )

    def line(self, name: str, most: int) -> str:
        """One line; "" where no text is longer."""
        if not self.longer:
            return ""
        at_least = "at least " if self.longest == _COUNTED else ""
        return (
            f"{self.longer:,} of {self.texts:,} {name} are longer than the {most} tokens that the model "
            f"reads (the longest: {at_least}{self.longest:,})"
        )


def truncation(ranker: Ranker, contexts: Sequence[Sequence[str]], candidates: Sequence[str]) -> str:
    """One line, of the first 2,000 of each; "" where none is longer than what the ranker reads."""
    config = ranker.config
    of_contexts = _truncated(ranker.context_rows, config.max_context_tokens, contexts)
    of_candidates = truncated_candidates(ranker, candidates)
    lines = (
        of_contexts.line("contexts", config.max_context_tokens),
        of_candidates.line("candidates", config.max_candidate_tokens),
    )
    return "; ".join(filter(None, lines))


def truncated_candidates(ranker: Ranker, candidates: Sequence[str]) -> Truncated:
    """The numbers of the first 2,000."""
    return _truncated(ranker.candidate_rows, ranker.config.max_candidate_tokens, candidates)


def longer_contexts(ranker: Ranker, contexts: Sequence[Sequence[str]]) -> list[int]:
    """Places of the contexts that the ranker does not read to their end."""
    return _longer(ranker.context_rows, ranker.config.max_context_tokens, contexts)


def longer_candidates(ranker: Ranker, candidates: Sequence[str]) -> list[int]:
    """Places of the candidates that the ranker does not read to their end."""
    return _longer(ranker.candidate_rows, ranker.config.max_candidate_tokens, candidates)


def _longer(rows_of: _RowsOf, most: int, texts: Sequence[Any]) -> list[int]:
    rows = rows_of(texts, most + 1)
    long_places = [place for place, row in enumerate(rows) if len(row) > most]
    # A multi-context ConveRT's row is two texts, and each of them keeps `most` tokens.
    kept = rows_of([texts[place] for place in long_places], most) if long_places else []
    return [
        place for place, row in zip(long_places, kept, strict=True) if len(row) < len(rows[place])
    ]


def _truncated(rows_of: _RowsOf, most: int, texts: Sequence[Any]) -> Truncated:
    """Only the longest text is tokenised beyond what the model reads."""
    texts = texts[:SAMPLED]
    longer = [texts[place] for place in _longer(rows_of, most, texts)]
    longest = max(longer, key=lambda text: sum(map(len, text)), default=None)
    tokens = 0 if longest is None else len(rows_of([longest], _COUNTED)[0])
    return Truncated(texts=len(texts), longer=len(longer), longest=tokens)
