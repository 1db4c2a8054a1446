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

from pipeline.models.attention import MultiHead, masked_softmax, no_autocast
from pipeline.models.dualencoder import DualEncoder
from pipeline.models.encoder import Encoder
from pipeline.models.settings import PolyConfig

Attention = Literal["dot", "scaled_dot"]


def learnt_code_vectors(
    hidden: Tensor, mask: Tensor, codes: Tensor, attention: Attention = "dot"
) -> tuple[Tensor, Tensor]:
    """Context vectors by M learnt codes, each attending to the tokens.

    hidden [B, T, D], mask [B, T] (false or 0 at padding), codes [M, D] → vectors [B, M, D], their mask
    [B, M] (all true). All of it is float32, under autocast too. Paper, section 4.4.
    """
    with no_autocast(hidden):
        hidden = hidden.float()
        weights_BMT = code_weights(hidden, mask, codes, attention)
        vectors = torch.einsum("bmt,btd->bmd", weights_BMT, hidden)
    return vectors, torch.ones(vectors.shape[:2], dtype=torch.bool, device=hidden.device)


def code_weights(
    hidden: Tensor, mask: Tensor, codes: Tensor, attention: Attention = "dot"
) -> Tensor:
    """[B, M, T]: how much each code takes of each token's output; float32, under autocast too."""
    with no_autocast(hidden):
        hidden = hidden.float()
        logits_BMT = torch.einsum("md,btd->bmt", codes.float(), hidden)
        return masked_softmax(logits_BMT * _scale(hidden, attention), mask[:, None, :])


def first_m_vectors(hidden: Tensor, mask: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Context vectors that are the first M outputs themselves.

    hidden [B, T, D], mask [B, T] → vectors [B, M, D], mask [B, M]; where a text has fewer tokens,
    zero vectors follow. Vectors of padding stay in and are ruled out by the mask. Paper, appendix C.
    """
    vectors, vector_mask = hidden[:, :m], mask[:, :m].bool()
    missing = m - vectors.shape[1]
    vectors = nn.functional.pad(vectors, (0, 0, 0, missing))
    vector_mask = nn.functional.pad(vector_mask, (0, missing))
    return vectors, vector_mask


def last_m_vectors(hidden: Tensor, mask: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Context vectors that are the last M outputs of tokens, in the text's order.

    hidden [B, T, D], mask [B, T], padding at the right → vectors [B, M, D], mask [B, M]; where a text
    has fewer tokens, they come first and the mask rules out the rest. Paper, appendix C.
    """
    count_B1 = mask.bool().sum(dim=1, keepdim=True)
    place_BM = (count_B1 - m).clamp(min=0) + torch.arange(m, device=hidden.device)
    vector_mask = place_BM < count_B1
    index_BM = place_BM.clamp(max=hidden.shape[1] - 1)
    return hidden.take_along_dim(index_BM[:, :, None], dim=1), vector_mask


def last_m_and_first_vectors(hidden: Tensor, mask: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The first output, h1, then the last M as `last_m_vectors`.

    hidden [B, T, D], mask [B, T] → vectors [B, M + 1, D], mask [B, M + 1]: h1 is masked where it is
    among the last M already, so that no output counts twice. Paper, appendix C.
    """
    vectors, vector_mask = last_m_vectors(hidden, mask, m)
    has_first_B1 = mask.bool().sum(dim=1, keepdim=True) > m
    return torch.cat([hidden[:, :1], vectors], dim=1), torch.cat([has_first_B1, vector_mask], dim=1)


def poly_scores(
    vectors: Tensor, vector_mask: Tensor, candidates: Tensor, attention: Attention = "dot"
) -> Tensor:
    """Scores of candidates for contexts; float32, under autocast too.

    vectors [B, M, D], vector_mask [B, M]; candidates [B, C, D], or [C, D] for all contexts → [B, C].
    """
    with no_autocast(vectors):
        logits_BCM = _products(vectors, candidates)
        if vectors.shape[1] == 1:
            return logits_BCM[:, :, 0]
        scale = _scale(vectors, attention)
        weights_BCM = masked_softmax(logits_BCM * scale, vector_mask[:, None, :])
        return (weights_BCM * logits_BCM).sum(dim=2)


def poly_weights(
    vectors: Tensor, vector_mask: Tensor, candidates: Tensor, attention: Attention = "dot"
) -> Tensor:
    """[B, C, M]: how much each vector counts in the scores of `poly_scores`."""
    with no_autocast(vectors):
        logits_BCM = _products(vectors, candidates)
        return masked_softmax(logits_BCM * _scale(vectors, attention), vector_mask[:, None, :])


def _products(vectors: Tensor, candidates: Tensor) -> Tensor:
    """[B, C, M]"""
    equation = "bmd,cd->bcm" if candidates.dim() == 2 else "bmd,bcd->bcm"
    return torch.einsum(equation, vectors.float(), candidates.float())


def _scale(vectors: Tensor, attention: Attention) -> float:
    return 1 / math.sqrt(vectors.shape[-1]) if attention == "scaled_dot" else 1.0


_OUTPUT_VECTORS = {
    "first_m": first_m_vectors,
    "last_m": last_m_vectors,
    "last_m_and_first": last_m_and_first_vectors,
}


class PolyEncoder(DualEncoder):
    """The context's vectors come from learnt codes, or are some of its outputs."""

    def __init__(
        self, context_encoder: Encoder, candidate_encoder: Encoder, config: PolyConfig
    ) -> None:
        super().__init__(context_encoder, candidate_encoder, config)
        self.config: PolyConfig = config
        width, heads = context_encoder.width, config.attention_heads
        codes_MD = code_heads = candidate_heads = None
        if config.context_codes == "learnt":
            codes_MD = nn.Parameter(torch.randn(config.m, width) * config.code_init_std)
            if config.code_attention == "multi_head":
                code_heads = MultiHead(width, heads)
        if config.candidate_attention == "multi_head":
            candidate_heads = MultiHead(self.full_width, heads)
        self.codes_MD, self.code_heads, self.candidate_heads = codes_MD, code_heads, candidate_heads

    def context_vectors(self, hidden_BTD: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        if config.context_codes != "learnt":
            return _OUTPUT_VECTORS[config.context_codes](hidden_BTD, mask_BT, config.m)
        assert self.codes_MD is not None
        if config.code_attention != "multi_head":
            return learnt_code_vectors(hidden_BTD, mask_BT, self.codes_MD, config.code_attention)
        assert self.code_heads is not None
        vectors_BMD = self.code_heads.attend(self.codes_MD, hidden_BTD, mask_BT)
        return vectors_BMD, mask_BT.new_ones(vectors_BMD.shape[:2])

    def token_weights(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        if self.codes_MD is None:
            return super().token_weights(hidden_BTD, mask_BT)
        if self.code_heads is not None:
            return self.code_heads.weights(self.codes_MD, hidden_BTD, mask_BT).mean(dim=1)
        assert self.config.code_attention != "multi_head"
        return code_weights(hidden_BTD, mask_BT, self.codes_MD, self.config.code_attention)

    def vector_weights(self, vectors_BMD: Tensor, mask_BM: Tensor, candidates: Tensor) -> Tensor:
        if self.config.candidate_attention != "multi_head":
            return poly_weights(vectors_BMD, mask_BM, candidates, self.config.candidate_attention)
        assert self.candidate_heads is not None
        return self.candidate_heads.weights(candidates, vectors_BMD, mask_BM).mean(dim=1)

    def scores(self, vectors_BMD: Tensor, mask_BM: Tensor, candidates: Tensor) -> Tensor:
        if self.config.candidate_attention != "multi_head":
            return poly_scores(vectors_BMD, mask_BM, candidates, self.config.candidate_attention)
        assert self.candidate_heads is not None
        device = self.candidate_heads.o.weight.device  # vectors may have been brought to the CPU
        inputs = (vectors_BMD.to(device), mask_BM.to(device), candidates.to(device))
        return self.candidate_heads.scores(*inputs).to(vectors_BMD.device)
