"""Pre-training heads: masked language model (MLM) and next utterance or sentence (NUP, NSP)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.tokens import Tokens
from pipeline.models.transformer import Encoder

IGNORED = -100  # the label of a position that nothing is predicted for


class PretrainingModel(nn.Module):
    """An encoder with both heads; only the encoder is kept afterwards."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        width = encoder.width
        embedding: Tensor = encoder.hf.get_input_embeddings().weight
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias_V = nn.Parameter(torch.zeros(len(embedding)))
        self.next = nn.Linear(width, 1)

    def losses(self, tokens: Tokens, labels_BT: Tensor, is_next_B: Tensor) -> tuple[Tensor, Tensor]:
        """(MLM loss per predicted token, NUP loss per pair), both means in nats.

        `labels_BT` holds the true ids where a token was hidden, else IGNORED. The vocabulary's
        logits are made for those positions only: some 15 % of [B, T, V]. Output embeddings are tied
        to the input's.
        """
        hidden_BTD = self.encoder(tokens)
        hidden_ND = hidden_BTD[labels_BT != IGNORED]
        embedding_VD = self.encoder.hf.get_input_embeddings().weight
        logits_NV = F.linear(self.transform(hidden_ND), embedding_VD, self.bias_V)
        mlm = F.cross_entropy(logits_NV.float(), labels_BT[labels_BT != IGNORED])
        next_B = self.next(hidden_BTD[:, 0])[:, 0].float()
        return mlm, F.binary_cross_entropy_with_logits(next_B, is_next_B.float())


def hide_tokens(
    tokens: Tokens,
    special: Tensor,
    mask_id: int,
    vocabulary: int,
    share: float,
    generator: torch.Generator,
) -> tuple[Tokens, Tensor]:
    """BERT's masking: each token that is not special is predicted with probability `share`; of those
    80 % become [MASK], 10 % a random token, 10 % stay.

    `special` [S]: ids that are never predicted. Returns (tokens, labels_BT). At least one token of
    the batch is always predicted, so that the loss is a number.
    """
    ids_BT = tokens.ids_BT
    allowed_BT = tokens.mask_BT & ~torch.isin(ids_BT, special)
    draw_BT = torch.rand(ids_BT.shape, generator=generator)
    chosen_BT = (draw_BT < share) & allowed_BT
    if not chosen_BT.any() and allowed_BT.any():
        chosen_BT.view(-1)[int(draw_BT.masked_fill(~allowed_BT, 2.0).argmin())] = True
    labels_BT = torch.where(chosen_BT, ids_BT, torch.full_like(ids_BT, IGNORED))
    kind_BT = torch.rand(ids_BT.shape, generator=generator)
    random_BT = torch.randint(vocabulary, ids_BT.shape, generator=generator)
    hidden_BT = torch.where(chosen_BT & (kind_BT < 0.8), torch.full_like(ids_BT, mask_id), ids_BT)
    hidden_BT = torch.where(chosen_BT & (kind_BT >= 0.9), random_BT, hidden_BT)
    return tokens._replace(ids_BT=hidden_BT), labels_BT
