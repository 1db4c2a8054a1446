"""The interfaces of networks: a ranker gives vectors to contexts and candidates, or scores pairs.

Other modules use these two interfaces. Which network stands behind one of them, only
`pipeline.models.ranker` knows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from pipeline.models.reduction import reduce
from pipeline.models.tokens import Tokens


class View(NamedTuple):
    """One way to see each of B contexts."""

    vectors_BMD: Tensor
    mask_BM: Tensor
    """All false: the context has no such view."""


class Network(nn.Module):
    """The interface that all networks share."""

    def before_step(self, step: int) -> None:
        """Called before each step of training, from 0. What it sets follows from the step or lies in
        buffers."""

    @property
    def new_weights(self) -> Sequence[nn.Parameter]:
        """The weights that start at random beside pre-trained ones."""
        return [value for name, value in self.named_parameters() if "encoder." not in name]

    @property
    def token_tables(self) -> Sequence[nn.Parameter]:
        """Embedding tables of tokens that training may treat apart
        (`LoopConfig.token_tables`)."""
        return ()


class VectorNetwork(Network):
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

    def context_views(self, tokens: Tokens) -> list[View]:
        """The views that rank the response in training; the first is the result of `encode_contexts`."""
        return [View(*self.encode_contexts(tokens))]

    @property
    def training_scale(self) -> Tensor | float:
        """Factor on the scores in the loss."""
        return 1.0

    @abstractmethod
    def attention_to_tokens(self, tokens: Tokens) -> Tensor:
        """[B, M, T]: how much each of a context's vectors takes of each token's output.

        Rows add up to 1, those of vectors that do not count to 0. The mean over the heads, where the
        attention has several.
        """

    @abstractmethod
    def vector_weights(self, vectors_BMD: Tensor, mask_BM: Tensor, candidates: Tensor) -> Tensor:
        """[B, C, M]: how much each vector counts in the scores of candidates [B, C, D] or [C, D].

        The mean over the heads, where the candidates' attention has several.
        """


class PairNetwork(Network):
    """Context and candidate are read together."""

    @abstractmethod
    def score_pairs(self, tokens: Tokens) -> Tensor:
        """[N] for N pairs, float32."""
