"""The base of bi- and poly-encoders: two towers, and one vector per candidate.

    token outputs · output_scaling → reduced, or attended to → projected → cut → scaled to a length

Settings say which of these steps there are; none of the last three by default. All of them are float32,
whatever the encoder computes in.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.config import BadInput
from pipeline.models.attention import no_autocast
from pipeline.models.encoder import Encoder
from pipeline.models.network import VectorNetwork
from pipeline.models.reduction import reduce
from pipeline.models.settings import DualConfig
from pipeline.models.tokens import Tokens


class DualEncoder(VectorNetwork):
    """Contexts and candidates to vectors of the same width."""

    def __init__(
        self, context_encoder: Encoder, candidate_encoder: Encoder, config: DualConfig
    ) -> None:
        """Raises BadInput for widths that the encoder cannot give."""
        super().__init__()
        self.context_encoder = context_encoder
        self.candidate_encoder = candidate_encoder
        self.config = config
        self.context_projection = self.candidate_projection = None
        width = context_encoder.width
        if config.projection:
            self.context_projection = _projection(width, config.projection, config.projection_bias)
            shared = config.share_towers
            self.candidate_projection = (
                self.context_projection if shared else copy.deepcopy(self.context_projection)
            )
        self.full_width = config.projection or width
        for name, value, limit in (
            ("projection", config.projection, width),
            ("matryoshka", max(config.matryoshka, default=0), self.full_width - 1),
        ):
            if value > limit:
                raise BadInput(f"ranker.{name}: {value} is not allowed; allowed: at most {limit}, with "
                               f"vectors of {self.full_width if name == 'matryoshka' else width} "
                               "dimensions")  # fmt: skip

    @property
    def dimensions(self) -> int:
        """The width of the vectors that the network returns."""
        return self.config.dimensions or self.full_width

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of vectors in training: `matryoshka`, then the full width."""
        narrower = (width for width in self.config.matryoshka if width < self.dimensions)
        return (*narrower, self.dimensions)

    def encode_contexts(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Vectors [B, M, D] and their mask [B, M]."""
        hidden_BTD = self._context_outputs(tokens)
        with no_autocast(hidden_BTD):
            vectors_BMD, mask_BM = self.context_vectors(hidden_BTD, tokens.mask_BT)
            vectors_BMD = self._project(self.context_projection, vectors_BMD)
            return self.cut(vectors_BMD, self.dimensions), mask_BM

    def encode_candidates(self, tokens: Tokens) -> Tensor:
        """[N, D]"""
        hidden_NTD = self.candidate_encoder(tokens)
        with no_autocast(hidden_NTD):
            hidden_NTD = hidden_NTD.float() * self.config.output_scaling
            vectors_ND = self.reduced(hidden_NTD, tokens.mask_BT)
            vectors_ND = self._project(self.candidate_projection, vectors_ND)
            return self.cut(vectors_ND, self.dimensions)

    def _project(self, projection: nn.Linear | None, vectors: Tensor) -> Tensor:
        if projection is None:
            return vectors
        projected: Tensor = projection(vectors)
        return projected.tanh() if self.config.projection_activation == "tanh" else projected

    def attention_to_tokens(self, tokens: Tokens) -> Tensor:
        return self.token_weights(self._context_outputs(tokens), tokens.mask_BT)

    def _context_outputs(self, tokens: Tokens) -> Tensor:
        hidden_BTD: Tensor = self.context_encoder(tokens)
        return hidden_BTD.float() * self.config.output_scaling

    @abstractmethod
    def context_vectors(self, hidden_BTD: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors [B, M, D] of token outputs, and their mask [B, M]."""

    def token_weights(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """[B, M, T], as `attention_to_tokens`, of token outputs.

        Here for vectors that are the same means of any outputs: those of unit vectors are the weights.
        """
        count = mask_BT.shape[1]
        units_BTT = torch.eye(count, device=hidden_BTD.device).expand(len(mask_BT), -1, -1)
        weights_BMT, mask_BM = self.context_vectors(units_BTT, mask_BT)
        return weights_BMT * mask_BM[:, :, None]

    def reduced(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """[B, D]"""
        return reduce(hidden_BTD, mask_BT, self.config.reduction, self.config.reduction_m)

    def cut(self, vectors: Tensor, width: int) -> Tensor:
        """The vectors' first dimensions; where vectors have a length, they have it again.

        Plain vectors are not made longer to make up for what is cut off: training scores the same
        short ones.
        """
        vectors = vectors[..., :width]
        if self.config.vector_length:
            vectors = F.normalize(vectors, dim=-1) * self.config.vector_length
        return vectors


def _projection(width: int, narrower: int, has_bias: bool) -> nn.Linear:
    """Starts as a random rotation, cut: on average it keeps the products of vectors."""
    layer = nn.Linear(width, narrower, bias=has_bias)
    with torch.no_grad():
        if has_bias:
            nn.init.zeros_(layer.bias)
        nn.init.orthogonal_(layer.weight, gain=math.sqrt(width / narrower))
    return layer
