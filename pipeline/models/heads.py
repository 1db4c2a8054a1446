"""Heads on an encoder: bi-, poly- and cross-encoders, and the interfaces that they share with ConveRT.

Other modules use these interfaces. Which network stands behind one of them, only `pipeline.models.ranker`
knows. Heads are float32, whatever the encoder computes in: a logit that is rounded to bf16 has 8 bits, and
near scores tie.

The poly-encoder (Humeau et al., ICLR 2020) has M vectors per context and one per candidate. A candidate
attends to the context's M vectors, and the score is its product with what it saw:

    L[b,c,i] = vector[b,i] · candidate[c],   score[b,c] = Σ_i softmax_i(L[b,c,:])_i · L[b,c,i]

This short form is exact, because the attention's logits and the score are the same products; the
attended context, [B, C, D], is never built. A bi-encoder is the case M = 1. Sections are the paper's.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.config import require
from pipeline.models.encoder import Encoder
from pipeline.models.settings import Attention, CrossConfig, DualConfig, PolyConfig, Reduction
from pipeline.models.tokens import Tokens


class View(NamedTuple):
    """One way to see each of B contexts."""

    vectors_BMD: Tensor
    mask_BM: Tensor
    """All false: the context has no such view."""


class Network(nn.Module):
    """The interface that all networks share."""

    def before_step(self, step: int) -> None:
        """Called before each step of training, from 0. What it sets follows from the step or lies in
        buffers."""

    @property
    def new_weights(self) -> Sequence[nn.Parameter]:
        """The weights that start at random beside pre-trained ones."""
        return [value for name, value in self.named_parameters() if "encoder." not in name]

    @property
    def token_tables(self) -> Sequence[nn.Parameter]:
        """Embedding tables of tokens that training may treat apart
        (`LoopConfig.token_tables`)."""
        return ()


class VectorNetwork(Network):
    """Contexts and candidates have vectors of their own, of the same width D."""

    @property
    @abstractmethod
    def dimensions(self) -> int:
        """D"""

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that vectors are cut to in training, ascending; the last one is D."""
        return (self.dimensions,)

    @abstractmethod
    def encode_contexts(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Vectors [B, M, D], float32, and their mask [B, M]."""

    @abstractmethod
    def encode_candidates(self, tokens: Tokens) -> Tensor:
        """[N, D], float32."""

    def encode_texts(self, tokens: Tokens) -> Tensor:
        """[B, F], float32: what a classifier reads of contexts of one turn, the mean of their vectors.

        A network that has a better vector of a text gives that one; F need not be D.
        """
        vectors_BMD, mask_BM = self.encode_contexts(tokens)
        return reduce(vectors_BMD, mask_BM)

    def scores(self, vectors_BMD: Tensor, mask_BM: Tensor, candidates: Tensor) -> Tensor:
        """[B, C] for candidates [B, C, D] or [C, D]; float32."""
        return poly_scores(vectors_BMD, mask_BM, candidates)

    def cut(self, vectors: Tensor, width: int) -> Tensor:
        """The vectors' first `width` dimensions."""
        return vectors[..., :width]

    def context_views(self, tokens: Tokens) -> list[View]:
        """The views that rank the response in training; the first is the result of `encode_contexts`."""
        return [View(*self.encode_contexts(tokens))]

    def encode_batch(
        self, contexts: Tokens, candidates: Sequence[Tokens]
    ) -> tuple[list[View], list[Tensor]]:
        """`context_views`, and `encode_candidates` of each batch, for a step of training."""
        return self.context_views(contexts), [self.encode_candidates(part) for part in candidates]

    @property
    def training_scale(self) -> Tensor | float:
        """Factor on the scores in the loss."""
        return 1.0

    @abstractmethod
    def attention_to_tokens(self, tokens: Tokens) -> Tensor:
        """[B, M, T]: how much each of a context's vectors takes of each token's output.

        Rows add up to 1, those of vectors that do not count to 0. The mean over the heads, where the
        attention has several.
        """

    def vector_weights(self, vectors_BMD: Tensor, mask_BM: Tensor, candidates: Tensor) -> Tensor:
        """[B, C, M]: how much each vector counts in the scores of candidates [B, C, D] or [C, D].

        The mean over the heads, where the candidates' attention has several.
        """
        return poly_weights(vectors_BMD, mask_BM, candidates)


class PairNetwork(Network):
    """Context and candidate are read together."""

    @abstractmethod
    def score_pairs(self, tokens: Tokens) -> Tensor:
        """[N] for N pairs, float32."""


def reduce(
    hidden_BTD: Tensor, mask_BT: Tensor, reduction: Reduction = "mean", m: int = 0
) -> Tensor:
    """[B, T, D], [B, T] → [B, D]: the first output, or the mean over all tokens that are not padding, or
    over the first `m` of them (section 4.2: red(·)).

    The mean counts the special tokens too, as ParlAI's does. Pads stand at the right.
    """
    if reduction == "first":
        return hidden_BTD[:, 0]
    if reduction == "mean_first_m":
        hidden_BTD, mask_BT = hidden_BTD[:, :m], mask_BT[:, :m]
    weight_BT = mask_BT.to(hidden_BTD.dtype)
    count_B1 = weight_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return (hidden_BTD * (weight_BT / count_B1)[:, :, None]).sum(dim=1)


def no_autocast(tensor: Tensor) -> torch.autocast:
    """A block in which the tensor's device multiplies in the tensors' own dtype."""
    return torch.autocast(tensor.device.type, enabled=False)


def masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the last axis; the mask's value is finite, so that no row becomes NaN."""
    return logits.masked_fill(~mask.bool(), torch.finfo(logits.dtype).min).softmax(dim=-1)


def learnt_code_vectors(
    hidden: Tensor, mask: Tensor, codes: Tensor, attention: Attention = "dot"
) -> tuple[Tensor, Tensor]:
    """Context vectors by M learnt codes, each attending to the tokens.

    hidden [B, T, D], mask [B, T] (false or 0 at padding), codes [M, D] → vectors [B, M, D], their mask
    [B, M] (all true). All of it is float32, under autocast too. Section 4.4.
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
    zero vectors follow. Vectors of padding stay in and are ruled out by the mask. Appendix C.
    """
    vectors, vector_mask = hidden[:, :m], mask[:, :m].bool()
    missing = m - vectors.shape[1]
    vectors = nn.functional.pad(vectors, (0, 0, 0, missing))
    vector_mask = nn.functional.pad(vector_mask, (0, missing))
    return vectors, vector_mask


def last_m_vectors(hidden: Tensor, mask: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Context vectors that are the last M outputs of tokens, in the text's order.

    hidden [B, T, D], mask [B, T], padding at the right → vectors [B, M, D], mask [B, M]; where a text
    has fewer tokens, they come first and the mask rules out the rest. Appendix C.
    """
    count_B1 = mask.bool().sum(dim=1, keepdim=True)
    place_BM = (count_B1 - m).clamp(min=0) + torch.arange(m, device=hidden.device)
    vector_mask = place_BM < count_B1
    index_BM = place_BM.clamp(max=hidden.shape[1] - 1)
    return hidden.take_along_dim(index_BM[:, :, None], dim=1), vector_mask


def last_m_and_first_vectors(hidden: Tensor, mask: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The first output, h1, then the last M as `last_m_vectors`.

    hidden [B, T, D], mask [B, T] → vectors [B, M + 1, D], mask [B, M + 1]: h1 is masked where it is
    among the last M already, so that no output counts twice. Appendix C.
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


class MultiHead(nn.Module):
    """Attention with weights of its own, ParlAI's `multihead`. Queries attend to keys, which are values too.

    H heads, each on its D / H dimensions of q(query), k(key) and v(value); what they attend to is joined
    and goes through a last layer, o. All four are linear, with bias; there is no dropout.
    """

    def __init__(self, width: int, heads: int) -> None:
        """Raises BadInput where `heads` do not divide `width`."""
        super().__init__()
        require(width % heads == 0, "ranker.attention_heads", heads,
                f"a divisor of {width}, the vectors' width")  # fmt: skip
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        for layer in (self.q, self.k, self.v, self.o):
            nn.init.xavier_normal_(layer.weight)

    def attend(self, queries_MD: Tensor, keys_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """[B, M, D]: what M queries see in each of B texts; float32, under autocast too."""
        with no_autocast(keys_BTD):
            keys_BTD = keys_BTD.float()
            weights_BHMT = self.weights(queries_MD, keys_BTD, mask_BT)
            values_BTHK = self._split(self.v(keys_BTD))
            sums_BMHK = torch.einsum("bhmt,bthk->bmhk", weights_BHMT, values_BTHK)
            attended: Tensor = self.o(sums_BMHK.flatten(-2))
        return attended

    def scores(self, vectors_BMD: Tensor, mask_BM: Tensor, candidates: Tensor) -> Tensor:
        """[B, C]: each candidate, [B, C, D] or [C, D], times the sum of the vectors that it attends to.

        With W and b of the last layer, candidate · (W seen + b) = Wᵀ candidate · seen + candidate · b.
        So the values are met by Wᵀ candidate, per head, and what is seen, [B, C, D], is never built.
        Float32, under autocast too.
        """
        axes = "chk" if candidates.dim() == 2 else "bchk"
        with no_autocast(candidates):
            vectors_BMD, candidates = vectors_BMD.float(), candidates.float()
            projected = self._split(candidates @ self.o.weight)
            products = torch.einsum(
                f"{axes},bmhk->bhcm", projected, self._split(self.v(vectors_BMD))
            )
            weights_BHCM = self.weights(candidates, vectors_BMD, mask_BM)
            return (weights_BHCM * products).sum(dim=(1, 3)) + candidates @ self.o.bias

    def weights(self, queries: Tensor, keys_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """[B, H, Q, T]: how much each head of the queries, [Q, D] or [B, Q, D], takes of each key.

        Queries and keys are float32; autocast would round their logits.
        """
        axes = "qhk" if queries.dim() == 2 else "bqhk"
        with no_autocast(keys_BTD):
            queries, keys_BTHK = self._split(self.q(queries)), self._split(self.k(keys_BTD))
            logits_BHQT = torch.einsum(f"{axes},bthk->bhqt", queries, keys_BTHK)
            logits_BHQT = logits_BHQT / math.sqrt(keys_BTHK.shape[-1])
            return masked_softmax(logits_BHQT, mask_BT[:, None, None, :])

    def _split(self, rows: Tensor) -> Tensor:
        return rows.reshape(*rows.shape[:-1], self.heads, -1)


class DualEncoder(VectorNetwork):
    """The base of bi- and poly-encoders: two towers, and one vector per candidate.

        token outputs · output_scaling → reduced, or attended to → projected → cut → scaled to a length

    Settings say which of these steps there are; none of the last three by default.
    """

    def __init__(
        self, context_encoder: Encoder, candidate_encoder: Encoder, config: DualConfig
    ) -> None:
        """Raises BadInput for widths that the encoder cannot give."""
        super().__init__()
        self.context_encoder = context_encoder
        self.candidate_encoder = candidate_encoder
        self.config = config
        self.context_projection = self.candidate_projection = None
        width = context_encoder.width
        if config.projection:
            self.context_projection = _projection(width, config.projection, config.projection_bias)
            shared = config.share_towers
            self.candidate_projection = (
                self.context_projection if shared else copy.deepcopy(self.context_projection)
            )
        self.full_width = config.projection or width
        require(config.projection <= width, "ranker.projection", config.projection,
                f"at most {width}, with vectors of {width} dimensions")  # fmt: skip
        widest = max(config.matryoshka, default=0)
        require(widest < self.full_width, "ranker.matryoshka", widest,
                f"at most {self.full_width - 1}, with vectors of {self.full_width} dimensions")  # fmt: skip

    @property
    def dimensions(self) -> int:
        return self.config.dimensions or self.full_width

    @property
    def widths(self) -> tuple[int, ...]:
        narrower = (width for width in self.config.matryoshka if width < self.dimensions)
        return (*narrower, self.dimensions)

    def encode_contexts(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        return self._view(self.context_encoder(tokens), tokens)

    def encode_candidates(self, tokens: Tokens) -> Tensor:
        return self._candidates(self.candidate_encoder(tokens), tokens)

    def encode_batch(
        self, contexts: Tokens, candidates: Sequence[Tokens]
    ) -> tuple[list[View], list[Tensor]]:
        if self.candidate_encoder is self.context_encoder:
            of_contexts, *hidden = self.context_encoder.forward_together([contexts, *candidates])
        else:
            of_contexts = self.context_encoder(contexts)
            hidden = self.candidate_encoder.forward_together(candidates)
        vectors = [self._candidates(*pair) for pair in zip(hidden, candidates, strict=True)]
        return [self._view(of_contexts, contexts)], vectors

    def attention_to_tokens(self, tokens: Tokens) -> Tensor:
        return self.token_weights(self._scaled(self.context_encoder(tokens)), tokens.mask_BT)

    def _view(self, hidden_BTD: Tensor, tokens: Tokens) -> View:
        with no_autocast(hidden_BTD):
            vectors_BMD, mask_BM = self.context_vectors(self._scaled(hidden_BTD), tokens.mask_BT)
            return View(self._project(self.context_projection, vectors_BMD), mask_BM)

    def _candidates(self, hidden_NTD: Tensor, tokens: Tokens) -> Tensor:
        with no_autocast(hidden_NTD):
            vectors_ND = self.reduced(self._scaled(hidden_NTD), tokens.mask_BT)
            return self._project(self.candidate_projection, vectors_ND)

    def _scaled(self, hidden_BTD: Tensor) -> Tensor:
        return hidden_BTD.float() * self.config.output_scaling

    def _project(self, projection: nn.Linear | None, vectors: Tensor) -> Tensor:
        if projection is not None:
            vectors = projection(vectors)
            if self.config.projection_activation == "tanh":
                vectors = vectors.tanh()
        return self.cut(vectors, self.dimensions)

    @abstractmethod
    def context_vectors(self, hidden_BTD: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors [B, M, D] of token outputs, and their mask [B, M]."""

    def token_weights(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """[B, M, T], as `attention_to_tokens`, of token outputs.

        Here for vectors that are the same means of any outputs: those of unit vectors are the weights.
        """
        count = mask_BT.shape[1]
        units_BTT = torch.eye(count, device=hidden_BTD.device).expand(len(mask_BT), -1, -1)
        weights_BMT, mask_BM = self.context_vectors(units_BTT, mask_BT)
        return weights_BMT * mask_BM[:, :, None]

    def reduced(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """[B, D]"""
        return reduce(hidden_BTD, mask_BT, self.config.reduction, self.config.reduction_m)

    def cut(self, vectors: Tensor, width: int) -> Tensor:
        """The vectors' first dimensions; where vectors have a length, they have it again.

        Plain vectors are not made longer to make up for what is cut off: training scores the same
        short ones.
        """
        vectors = vectors[..., :width]
        if self.config.vector_length:
            vectors = F.normalize(vectors, dim=-1) * self.config.vector_length
        return vectors


def _projection(width: int, narrower: int, has_bias: bool) -> nn.Linear:
    """Starts as a random rotation, cut: on average it keeps the products of vectors."""
    layer = nn.Linear(width, narrower, bias=has_bias)
    with torch.no_grad():
        if has_bias:
            nn.init.zeros_(layer.bias)
        nn.init.orthogonal_(layer.weight, gain=math.sqrt(width / narrower))
    return layer


class BiEncoder(DualEncoder):
    """Section 4.2: one vector per context, one per candidate, their plain dot product."""

    def context_vectors(self, hidden_BTD: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        return self.reduced(hidden_BTD, mask_BT)[:, None], mask_BT.new_ones(len(mask_BT), 1)


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
        scales = config.code_attention == "scaled_dot"
        self._code_attention: Attention = "scaled_dot" if scales else "dot"

    def context_vectors(self, hidden_BTD: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        if self.codes_MD is None:
            outputs = _OUTPUT_VECTORS[self.config.context_codes]
            return outputs(hidden_BTD, mask_BT, self.config.m)
        if self.code_heads is None:
            return learnt_code_vectors(hidden_BTD, mask_BT, self.codes_MD, self._code_attention)
        vectors_BMD = self.code_heads.attend(self.codes_MD, hidden_BTD, mask_BT)
        return vectors_BMD, mask_BT.new_ones(vectors_BMD.shape[:2])

    def token_weights(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        if self.codes_MD is None:
            return super().token_weights(hidden_BTD, mask_BT)
        if self.code_heads is None:
            return code_weights(hidden_BTD, mask_BT, self.codes_MD, self._code_attention)
        return self.code_heads.weights(self.codes_MD, hidden_BTD, mask_BT).mean(dim=1)

    def vector_weights(self, vectors_BMD: Tensor, mask_BM: Tensor, candidates: Tensor) -> Tensor:
        if self.candidate_heads is None:
            return poly_weights(vectors_BMD, mask_BM, candidates, self.config.search_attention)
        return self.candidate_heads.weights(candidates, vectors_BMD, mask_BM).mean(dim=1)

    def scores(self, vectors_BMD: Tensor, mask_BM: Tensor, candidates: Tensor) -> Tensor:
        if self.candidate_heads is None:
            return poly_scores(vectors_BMD, mask_BM, candidates, self.config.search_attention)
        device = self.candidate_heads.o.weight.device  # vectors may have been brought to the CPU
        inputs = (vectors_BMD.to(device), mask_BM.to(device), candidates.to(device))
        return self.candidate_heads.scores(*inputs).to(vectors_BMD.device)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "relu": F.relu,
}


class CrossEncoder(PairNetwork):
    """The context and a candidate in one sequence, one number out.

    Reads [CLS] context [SEP] candidate [SEP] and scores the outputs h by the settings' `head`:

        first        s = w · h_first + b (section 4.3)
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
        hidden_NTD = self.encoder(tokens)
        with no_autocast(hidden_NTD):
            if self.config.head == "first":
                hidden_NTD = hidden_NTD[:, :1]
            hidden_NTD = hidden_NTD.float() * self.config.output_scaling
            hidden_ND = hidden_NTD[:, 0]
            if self.config.head == "mean":
                hidden_ND = reduce(hidden_NTD, tokens.mask_BT)
            if self.pooler is not None:
                hidden_ND = self.activation(self.pooler(hidden_ND))
            if self.pooler_norm is not None:
                hidden_ND = self.pooler_norm(hidden_ND)
            scores_N: Tensor = self.score(hidden_ND)[:, 0]
            if self.product_gain is not None:
                assert tokens.segments_BT is not None
                is_candidate_NT = tokens.segments_BT.bool()
                context_ND = reduce(hidden_NTD, tokens.mask_BT & ~is_candidate_NT)
                candidate_ND = reduce(hidden_NTD, is_candidate_NT)
                scores_N = scores_N + self.product_gain * (context_ND * candidate_ND).sum(dim=1)
            return scores_N
