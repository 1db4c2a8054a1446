"""The cross-encoder: context and candidate in one sequence, one number out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pipeline.models.network import PairNetwork
from pipeline.models.settings import CrossConfig
from pipeline.models.tokens import Tokens
from pipeline.models.transformer import Encoder


class CrossEncoder(PairNetwork):
    """s = w · h_first + b over [CLS] context [SEP] candidate [SEP] (paper, section 4.3).

    With a pooler, tanh(W h_first + c) stands for h_first, as in BERT's classifiers.
    """

    def __init__(self, encoder: Encoder, config: CrossConfig) -> None:
        super().__init__()
        self.encoder = encoder
        self.output_scaling = config.output_scaling
        self.pooler = nn.Linear(encoder.width, encoder.width) if config.pooler else None
        self.score = nn.Linear(encoder.width, 1)
        self._has_new_head = True
        for layer in (self.pooler, self.score):
            if layer is not None:
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    def start_score(self, weights: Mapping[str, Tensor]) -> None:
        """Starts from the score of a pre-trained head."""
        self.score.load_state_dict(weights)
        self._has_new_head = False

    @property
    def new_weights(self) -> Sequence[nn.Parameter]:
        return super().new_weights if self._has_new_head else ()

    def score_pairs(self, tokens: Tokens) -> Tensor:
        """[N] for N pairs, float32."""
        hidden_ND = self.encoder(tokens)[:, 0] * self.output_scaling
        with torch.autocast(hidden_ND.device.type, enabled=False):  # bf16 would tie near scores
            hidden_ND = hidden_ND.float()
            if self.pooler is not None:
                hidden_ND = self.pooler(hidden_ND).tanh()
            scores_N1: Tensor = self.score(hidden_ND)
        return scores_N1[:, 0]
