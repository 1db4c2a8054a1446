"""The cross-encoder: context and candidate in one sequence, one number out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.models.tokens import Tokens
from pipeline.models.transformer import Encoder


class CrossEncoder(nn.Module):
    """s = w · h_first + b over [CLS] context [SEP] candidate [SEP] (paper, section 4.3)."""

    def __init__(self, encoder: Encoder, output_scaling: float) -> None:
        super().__init__()
        self.encoder = encoder
        self.output_scaling = output_scaling
        self.score = nn.Linear(encoder.width, 1)
        nn.init.normal_(self.score.weight, std=0.02)
        nn.init.zeros_(self.score.bias)

    def score_pairs(self, tokens: Tokens) -> Tensor:
        """[N] for N pairs, float32."""
        hidden_ND = self.encoder(tokens)[:, 0] * self.output_scaling
        with torch.autocast(hidden_ND.device.type, enabled=False):  # bf16 would tie near scores
            scores_N1: Tensor = self.score(hidden_ND.float())
        return scores_N1[:, 0]
