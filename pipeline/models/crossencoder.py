"""The cross-encoder: context and candidate in one sequence, one number out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.models.network import PairNetwork
from pipeline.models.reduction import reduce
from pipeline.models.settings import CrossConfig
from pipeline.models.tokens import Tokens
from pipeline.models.transformer import Encoder

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "relu": functional.relu,
}


class CrossEncoder(PairNetwork):
    """s = w · h + b over [CLS] context [SEP] candidate [SEP] (paper, section 4.3), h the first output.

    The classifiers of published rerankers have more: h may be the mean of all outputs, and a pooler,
    norm(activation(W h + c)), may stand for it. BERT's is tanh without norm.
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
        hidden_NTD = self.encoder(tokens)
        with torch.autocast(hidden_NTD.device.type, enabled=False):  # bf16 would tie near scores
            if self.config.score_of == "first":
                hidden_ND = hidden_NTD[:, 0].float()
            else:
                hidden_ND = reduce(hidden_NTD.float(), tokens.mask_BT, "mean", 0)
            hidden_ND = hidden_ND * self.config.output_scaling
            if self.pooler is not None:
                hidden_ND = self.activation(self.pooler(hidden_ND))
            if self.pooler_norm is not None:
                hidden_ND = self.pooler_norm(hidden_ND)
            scores_N1: Tensor = self.score(hidden_ND)
        return scores_N1[:, 0]
