"""Ranking losses: softmax over the candidates of each context."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def ranking_loss(scores_BC: Tensor, label_B: Tensor, excluded_BC: Tensor | None = None) -> Tensor:
    """Mean cross-entropy of the right candidate among all (paper, section 4.1.2), in nats.

    scores_BC float32; label_B the right column; `excluded_BC`: columns that do not count, such as
    another example's response that is the same text.
    """
    if excluded_BC is not None:
        scores_BC = scores_BC.masked_fill(excluded_BC, torch.finfo(scores_BC.dtype).min)
    return F.cross_entropy(scores_BC, label_B)


def false_negatives(key_C: Tensor, label_B: Tensor) -> Tensor:
    """[B, C]: columns whose text is the right candidate's own, the right one itself not among them.

    `key_C` names each column's text. Without this a frequent answer is pushed away from its own
    contexts.
    """
    same_BC = key_C[label_B][:, None] == key_C[None, :]
    return same_BC & (torch.arange(len(key_C), device=key_C.device) != label_B[:, None])
