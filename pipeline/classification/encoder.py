"""A frozen encoder: any model, of polyrank or of others, that gives a text a vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, device

from pipeline.classification.settings import EncodeConfig
from pipeline.config import require
from pipeline.models import inference, interop
from pipeline.models.encoder import Encoder
from pipeline.models.ranker import Ranker, new_network
from pipeline.models.settings import SETTINGS, BiConfig
from pipeline.models.sources import SENTENCE_TRANSFORMERS
from pipeline.models.tokens import Tokenizer


@dataclass(frozen=True)
class FrozenEncoder:
    """Texts to vectors of F numbers."""

    ranker: Ranker
    config: EncodeConfig

    def rows(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids, cut to what the side takes."""
        if self.config.side == "candidate":
            return self.ranker.candidate_rows(texts)
        return self.ranker.context_rows([[text] for text in texts])

    def row_vectors(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """[N, F] of N `rows`, float32, on the CPU."""
        if self.config.side == "candidate":
            return inference.row_vectors(self.ranker, rows)
        return inference.encode_rows(self.ranker, rows, self.ranker.dual.encode_texts)

    def vectors(self, texts: Sequence[str]) -> Tensor:
        """[N, F] of N texts, float32, on the CPU."""
        return self.row_vectors(self.rows(texts))


def load(folder: Path, config: EncodeConfig, on: device) -> FrozenEncoder:
    """The model of a folder, on a device, in the precision that the settings name.

    Raises BadInput for a model that gives texts no vectors of their own.
    """
    ranker = _load_ranker(folder, config)
    ranker.config.require_vectors()
    return FrozenEncoder(inference.prepare(ranker, on, config.precision), config)


def _load_ranker(folder: Path, config: EncodeConfig) -> Ranker:
    folders = (folder, folder / "context")  # the second: with a folder for each side
    is_external = any((path / SENTENCE_TRANSFORMERS).exists() for path in folders)
    if is_external or (folder / SETTINGS).exists():
        hint, tokens = f"as {folder} says it itself", config.max_tokens
        require(config.reduction == "mean", "encode.reduction", config.reduction, f"mean, {hint}")
        require(is_external or not tokens, "encode.max_tokens", tokens, f"0, {hint}")
        return interop.load(folder, tokens, tokens)
    encoder = Encoder.load(folder)
    tokens = config.max_tokens or encoder.positions
    settings = BiConfig(
        reduction=config.reduction,
        share_towers=True,
        max_context_tokens=tokens,
        max_candidate_tokens=tokens,
    )
    return Ranker(settings, Tokenizer.load(folder), new_network(settings, encoder))
