"""Explains the scores of a bi- or poly-encoder by attention and weights.

    score[c] = Σ_m weight[c,m] · (vector[m] · candidate[c]),   vector[m] = Σ_t attention[m,t] · output[t]

The settings may add a projection, a cut or a length to the vectors. Multi-head attention has layers of its
own: the weights are the mean over its heads then, and no sum of this kind is the score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.models import inference
from pipeline.models.ranker import Ranker


class Explained(NamedTuple):
    """The attention of a context's vectors to its tokens, and their weights in each candidate's score."""

    tokens: list[str]
    """`Tokenizer.pieces`, special tokens included."""
    attention_MT: Tensor
    """Rows add up to 1, those of vectors that do not count to 0."""
    weights_CM: Tensor
    """Rows add up to 1."""


def explain(
    ranker: Ranker,
    row: Sequence[int],
    vectors_MD: Tensor,
    mask_M: Tensor,
    candidates_CD: Tensor,
) -> Explained:
    """Explains the scores of candidates for a context, a row of `Ranker.context_rows`, with these vectors.

    Raises BadInput for a ranker whose contexts have no vectors.
    """
    network, device = ranker.dual, ranker.device
    (attention_MT,) = inference.encode_rows(ranker, [row], network.attention_to_tokens)
    inputs = (vectors_MD[None].to(device), mask_M[None].to(device), candidates_CD.to(device))
    with torch.inference_mode():
        weights_CM = network.vector_weights(*inputs)[0].cpu()
    return Explained(ranker.tokenizer.pieces(row), attention_MT[:, : len(row)], weights_CM)
