"""The cross-encoder: context and candidate in one sequence, one number out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.models.encoder import Encoder
from pipeline.models.network import PairNetwork
from pipeline.models.reduction import reduce
from pipeline.models.settings import CrossConfig
from pipeline.models.tokens import Tokens

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "relu": functional.relu,
}


class CrossEncoder(PairNetwork):
    """Reads [CLS] context [SEP] candidate [SEP] and scores the outputs h by the settings' `head`:

        first        s = w · h_first + b (paper, section 4.3)
        mean         s = w · mean(h) + b
        two_means    s = w · h_first + b + g · mean(h of the context) · mean(h of the candidate)

    A pooler, norm(activation(W h + c)), may stand for what w is multiplied with, as in the classifiers of
    published rerankers; BERT's is tanh without norm. Outputs are multiplied by `output_scaling` first. With
    w = b = 0 and g = 1 two_means is a bi-encoder's head.
    """

    def __init__(self, encoder: Encoder, config: CrossConfig) -> None:
        super().__init__()
        self.encoder = encoder
        self.config = config
        self.pooler = nn.Linear(encoder.width, encoder.width) if config.pooler else None
        self.activation = _ACTIVATIONS[config.pooler_activation]
        has_norm = config.pooler and config.pooler_norm
        self.pooler_norm = nn.LayerNorm(encoder.width, bias=False) if has_norm else None
        self.score = nn.Linear(encoder.width, 1)
        self.product_gain = nn.Parameter(torch.ones(1)) if config.head == "two_means" else None
        self._has_new_head = True
        for layer in (self.pooler, self.score):
            if layer is not None:
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    def start_score(self, weights: Mapping[str, Tensor]) -> None:
        """Starts from the score of a pre-trained head."""
        self.score.load_state_dict(weights)
        self._has_new_head = False

    def start_as_bi(self) -> None:
        """Starts from an encoder that has read texts alone: the means alone score, and a candidate has the
        segment that the encoder knows."""
        nn.init.zeros_(self.score.weight)
        self.encoder.copy_first_segment()

    @property
    def new_weights(self) -> Sequence[nn.Parameter]:
        return super().new_weights if self._has_new_head else ()

    def score_pairs(self, tokens: Tokens) -> Tensor:
        """[N] for N pairs, float32."""
        hidden_NTD = self.encoder(tokens)
        with torch.autocast(hidden_NTD.device.type, enabled=False):  # bf16 would tie near scores
            if self.config.head == "first":
                hidden_NTD = hidden_NTD[:, :1]
            hidden_NTD = hidden_NTD.float() * self.config.output_scaling
            hidden_ND = hidden_NTD[:, 0]
            if self.config.head == "mean":
                hidden_ND = reduce(hidden_NTD, tokens.mask_BT, "mean", 0)
            if self.pooler is not None:
                hidden_ND = self.activation(self.pooler(hidden_ND))
            if self.pooler_norm is not None:
                hidden_ND = self.pooler_norm(hidden_ND)
            scores_N: Tensor = self.score(hidden_ND)[:, 0]
            if self.product_gain is not None:
                assert tokens.segments_BT is not None
                is_candidate_NT = tokens.segments_BT.bool()
                context_ND = reduce(hidden_NTD, tokens.mask_BT & ~is_candidate_NT, "mean", 0)
                candidate_ND = reduce(hidden_NTD, is_candidate_NT, "mean", 0)
                scores_N = scores_N + self.product_gain * (context_ND * candidate_ND).sum(dim=1)
            return scores_N
