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


class Attended(NamedTuple):
    """The tokens that the vectors of a context attend to."""

    tokens: list[str]
    """`Tokenizer.pieces`, special tokens included."""
    weights_MT: Tensor
    """Rows add up to 1, those of vectors that do not count to 0."""


class Explained(NamedTuple):
    """The attention of the context's vectors, and their weights in each candidate's score."""

    attended: Attended
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

    Raises BadInput for a ranker whose contexts have no vectors; so do the functions below.
    """
    weights_CM = candidate_weights(ranker, vectors_MD, mask_M, candidates_CD)
    return Explained(attention_to_tokens(ranker, row), weights_CM)


def attention_to_tokens(ranker: Ranker, row: Sequence[int]) -> Attended:
    """Which tokens of a row of `Ranker.context_rows` each of the context's vectors attends to."""
    (weights_MT,) = inference.encode_rows(ranker, [row], ranker.dual.attention_to_tokens)
    return Attended(ranker.tokenizer.pieces(row), weights_MT[:, : len(row)])


def candidate_weights(
    ranker: Ranker, vectors_MD: Tensor, mask_M: Tensor, candidates_CD: Tensor
) -> Tensor:
    """[C, M]: how much each of the context's vectors counts in each candidate's score; rows add up to 1."""
    network, device = ranker.dual, ranker.device
    inputs = (vectors_MD[None].to(device), mask_M[None].to(device), candidates_CD.to(device))
    with torch.inference_mode():
        weights_CM: Tensor = network.vector_weights(*inputs)[0].cpu()
    return weights_CM
