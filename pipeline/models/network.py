"""What networks have in common: a ranker gives vectors to contexts and candidates, or scores pairs.

Other modules use these two interfaces. Which network stands behind one of them, only
`pipeline.models.ranker` knows.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

from pipeline.models.reduction import reduce
from pipeline.models.tokens import Tokens


class VectorNetwork(nn.Module):
    """Contexts and candidates have vectors of their own, of the same width D."""

    @property
    @abstractmethod
    def dimensions(self) -> int:
        """D"""

    @property
    @abstractmethod
    def widths(self) -> tuple[int, ...]:
        """The widths that vectors are cut to in training, ascending; the last one is D."""

    @abstractmethod
    def encode_contexts(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Vectors [B, M, D], float32, and their mask [B, M]."""

    @abstractmethod
    def encode_candidates(self, tokens: Tokens) -> Tensor:
        """[N, D], float32."""

    def encode_texts(self, tokens: Tokens) -> Tensor:
        """[B, F], float32: what a classifier reads of contexts of one turn, the mean of their vectors.

        A network that has a better vector of a text gives that one; F need not be D.
        """
        vectors_BMD, mask_BM = self.encode_contexts(tokens)
        return reduce(vectors_BMD, mask_BM, "mean", 0)

    @abstractmethod
    def scores(self, vectors_BMD: Tensor, mask_BM: Tensor, candidates: Tensor) -> Tensor:
        """[B, C] for candidates [B, C, D] or [C, D]; float32."""

    @abstractmethod
    def cut(self, vectors: Tensor, width: int) -> Tensor:
        """The vectors' first `width` dimensions."""


class PairNetwork(nn.Module):
    """Context and candidate are read together."""

    @abstractmethod
    def score_pairs(self, tokens: Tokens) -> Tensor:
        """[N] for N pairs, float32."""
