"""Converts rankers to and from the formats of other projects; `load` knows a folder's format by its files."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import require
from pipeline.models.interop import from_parlai, sentence_transformers
from pipeline.models.ranker import Ranker, load_ranker
from pipeline.models.settings import SETTINGS


def load(folder: Path, max_context_tokens: int, max_candidate_tokens: int) -> Ranker:
    """The lengths hold for models of sentence-transformers, which keep none for two texts; 0: what the
    model takes.

    Raises BadInput for a folder of no known format.
    """
    is_ranker = (folder / SETTINGS).exists()
    if is_ranker or (folder / f"{from_parlai.CHECKPOINT}.opt").exists():
        lengths = (max_context_tokens, max_candidate_tokens)
        require(not any(lengths), "max_context_tokens, max_candidate_tokens", lengths,
                f"0 and 0: {folder} says itself what it takes")  # fmt: skip
        return load_ranker(folder) if is_ranker else from_parlai.load(folder)
    return sentence_transformers.load(
        folder, sentence_transformers.Lengths(max_context_tokens, max_candidate_tokens)
    )
