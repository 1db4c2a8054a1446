"""The poly-encoder (Humeau et al., ICLR 2020): M vectors per context, one per candidate.

A candidate attends to the context's M vectors, and the score is its product with what it saw:

    L[b,c,i] = vector[b,i] · candidate[c],   score[b,c] = Σ_i softmax_i(L[b,c,:])_i · L[b,c,i]

This short form is exact, because the attention's logits and the score are the same products; the
attended context, [B, C, D], is never built. A bi-encoder is the case M = 1.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from pipeline.models.reduction import Reduction, reduce
from pipeline.models.tokens import Tokens
from pipeline.models.transformer import Encoder

Attention = Literal["dot", "scaled_dot"]


def learnt_code_vectors(
    hidden: Tensor, mask: Tensor, codes: Tensor, attention: Attention = "dot"
) -> tuple[Tensor, Tensor]:
    """Context vectors by M learnt codes, each attending to the tokens.

    hidden [B, T, D], mask [B, T] (false or 0 at pads), codes [M, D] → vectors [B, M, D] in
    hidden's dtype, their mask [B, M] (all true). The softmax is float32. Paper, section 4.4.
    """
    logits_BMT = torch.einsum("md,btd->bmt", codes.to(hidden.dtype), hidden).float()
    weights_BMT = _masked_softmax(logits_BMT, mask[:, None, :], hidden.shape[-1], attention)
    vectors = torch.einsum("bmt,btd->bmd", weights_BMT.to(hidden.dtype), hidden)
    return vectors, torch.ones(vectors.shape[:2], dtype=torch.bool, device=hidden.device)


def first_m_vectors(hidden: Tensor, mask: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Context vectors that are the first M outputs themselves.

    hidden [B, T, D], mask [B, T] → vectors [B, M, D], mask [B, M]; where a text has fewer tokens,
    zero vectors follow. What stands at pads is left in and ruled out by the mask. Paper, appendix C.
    """
    vectors, vector_mask = hidden[:, :m], mask[:, :m].bool()
    missing = m - vectors.shape[1]
    vectors = nn.functional.pad(vectors, (0, 0, 0, missing))
    vector_mask = nn.functional.pad(vector_mask, (0, missing))
    return vectors, vector_mask


def poly_scores(
    vectors: Tensor, vector_mask: Tensor, candidates: Tensor, attention: Attention = "dot"
) -> Tensor:
    """Scores of candidates for contexts, float32.

    vectors [B, M, D], vector_mask [B, M]; candidates [B, C, D], or [C, D] for all contexts → [B, C].
    """
    equation = "bmd,cd->bcm" if candidates.dim() == 2 else "bmd,bcd->bcm"
    logits_BCM = torch.einsum(equation, vectors, candidates).float()
    if vectors.shape[1] == 1:
        return logits_BCM[:, :, 0]
    mask = vector_mask[:, None, :]
    weights_BCM = _masked_softmax(logits_BCM, mask, vectors.shape[-1], attention)
    return (weights_BCM * logits_BCM).sum(dim=2)


def _masked_softmax(logits: Tensor, mask: Tensor, width: int, attention: Attention) -> Tensor:
    """Softmax over the last axis; the mask's value is finite, so that no row becomes NaN."""
    if attention == "scaled_dot":
        logits = logits / math.sqrt(width)
    return logits.masked_fill(~mask.bool(), torch.finfo(logits.dtype).min).softmax(dim=-1)


class PolyEncoder(nn.Module):
    """Two towers; the context's vectors come from learnt codes, or are its first outputs."""

    def __init__(
        self,
        context_encoder: Encoder,
        candidate_encoder: Encoder,
        codes_MD: Tensor | int,
        reduction: Reduction,
        code_attention: Attention,
        candidate_attention: Attention,
        output_scaling: float,
    ) -> None:
        super().__init__()
        self.context_encoder = context_encoder
        self.candidate_encoder = candidate_encoder
        self.first_m = codes_MD if isinstance(codes_MD, int) else 0
        self.codes_MD = None if isinstance(codes_MD, int) else nn.Parameter(codes_MD)
        self.reduction = reduction
        self.code_attention = code_attention
        self.candidate_attention = candidate_attention
        self.output_scaling = output_scaling

    def encode_contexts(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Vectors [B, M, D] and their mask [B, M]."""
        hidden_BTD = self.context_encoder(tokens) * self.output_scaling
        if self.codes_MD is None:
            return first_m_vectors(hidden_BTD, tokens.mask_BT, self.first_m)
        return learnt_code_vectors(hidden_BTD, tokens.mask_BT, self.codes_MD, self.code_attention)

    def encode_candidates(self, tokens: Tokens) -> Tensor:
        """[N, D]"""
        hidden_NTD = self.candidate_encoder(tokens) * self.output_scaling
        return reduce(hidden_NTD, tokens.mask_BT, self.reduction)

    def scores(self, vectors_BMD: Tensor, mask_BM: Tensor, candidates: Tensor) -> Tensor:
        """[B, C], as `poly_scores`."""
        return poly_scores(vectors_BMD, mask_BM, candidates, self.candidate_attention)
