"""The bi-encoder: one vector per context, one per candidate, their plain dot product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.models.polyencoder import poly_scores
from pipeline.models.reduction import Reduction, reduce
from pipeline.models.tokens import Tokens
from pipeline.models.transformer import Encoder


class BiEncoder(nn.Module):
    """Two towers (Poly-encoder paper, section 4.2), in the poly-encoder's shapes with M = 1."""

    def __init__(
        self,
        context_encoder: Encoder,
        candidate_encoder: Encoder,
        reduction: Reduction,
        output_scaling: float,
    ) -> None:
        super().__init__()
        self.context_encoder = context_encoder
        self.candidate_encoder = candidate_encoder
        self.reduction = reduction
        self.output_scaling = output_scaling

    def encode_contexts(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Vectors [B, 1, D] and their mask [B, 1]."""
        hidden_BTD = self.context_encoder(tokens) * self.output_scaling
        vectors_B1D = reduce(hidden_BTD, tokens.mask_BT, self.reduction)[:, None]
        mask_B1 = torch.ones(vectors_B1D.shape[:2], dtype=torch.bool, device=vectors_B1D.device)
        return vectors_B1D, mask_B1

    def encode_candidates(self, tokens: Tokens) -> Tensor:
        """[N, D]"""
        hidden_NTD = self.candidate_encoder(tokens) * self.output_scaling
        return reduce(hidden_NTD, tokens.mask_BT, self.reduction)

    def scores(self, vectors_B1D: Tensor, mask_B1: Tensor, candidates: Tensor) -> Tensor:
        """[B, C] for candidates [B, C, D] or [C, D]; float32."""
        return poly_scores(vectors_B1D, mask_B1, candidates)
