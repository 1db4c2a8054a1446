"""How many texts a ranker does not read to their end. Importing it loads no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.models.settings import OnEncoderConfig

if TYPE_CHECKING:
    from pipeline.models.ranker import Ranker

SAMPLED = 2_000
_COUNTED = 100_000  # tokens of the longest text


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
    config, tokenise = ranker.config, ranker.tokenizer.contexts
    prompt = config.context_prompt if isinstance(config, OnEncoderConfig) else ""
    most = config.max_context_tokens
    of_contexts = _truncated(_with_prompt(tokenise, prompt), contexts, most)
    of_candidates = truncated_candidates(ranker, candidates)
    lines = (
        of_contexts.line("contexts", most),
        of_candidates.line("candidates", config.max_candidate_tokens),
    )
    return "; ".join(filter(None, lines))


def truncated_candidates(ranker: Ranker, candidates: Sequence[str]) -> Truncated:
    """The numbers of the first 2,000."""
    config, tokenise = ranker.config, ranker.tokenizer.candidates
    prompt = config.candidate_prompt if isinstance(config, OnEncoderConfig) else ""
    return _truncated(_with_prompt(tokenise, prompt), candidates, config.max_candidate_tokens)


def _with_prompt(tokenise: Any, prompt: str) -> Callable[[Any, int], list[list[int]]]:
    """Only the tokenizers of encoders have prompts."""
    return functools.partial(tokenise, prompt=prompt) if prompt else tokenise


def _truncated(
    rows_of: Callable[[Any, int], list[list[int]]], texts: Sequence[Any], most: int
) -> Truncated:
    """Only the longest text is tokenised beyond what the model reads."""
    texts = texts[:SAMPLED]
    rows = rows_of(texts, most + 1)
    longer = [text for text, row in zip(texts, rows, strict=True) if len(row) > most]
    longest = max(longer, key=lambda text: sum(map(len, text)), default=None)
    tokens = 0 if longest is None else len(rows_of([longest], _COUNTED)[0])
    return Truncated(texts=len(texts), longer=len(longer), longest=tokens)
