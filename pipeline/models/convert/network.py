"""ConveRT as a ranker: encodings of length 1 for contexts and candidates, their cosine is the score.

One encoder is shared by all texts; each side has a network of its own on top. A multi-context model also
reads the turns before the newest one, all in one text (reference 5.6):

    h_x = context(r(newest turn)),  h_z = earlier(r(earlier turns)) or 0,  h = combined((h_x + h_z) / 2)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeline.models.convert.encoder import (
    Blocks,
    FeedForward2,
    Matrix,
    Reduction,
    TokenVectors,
)
from pipeline.models.convert.quantisation import Table
from pipeline.models.network import VectorNetwork, View
from pipeline.models.polyencoder import poly_scores, poly_weights
from pipeline.models.settings import ConvertConfig
from pipeline.models.tokens import Tokens


class _Texts(NamedTuple):
    """Padded texts of one kind."""

    ids_BT: Tensor
    mask_BT: Tensor


class ConvertNetwork(VectorNetwork):
    """Contexts and candidates to encodings [E] of length 1."""

    scale: Tensor

    def __init__(self, config: ConvertConfig, rows: int) -> None:
        """`rows` of the embedding table: subwords, hash buckets, and the pad's, which is the last."""
        super().__init__()
        self.config = config
        r, outputs = config.reduction_heads * config.width, config.dimensions
        self.tokens = TokenVectors(config, rows)
        self.blocks = Blocks(config)
        self.reduction = Reduction(config.width, config.reduction_width, config.reduction_heads)
        self.skip = Matrix(r, outputs)

        def side(inputs: int, skip: Matrix) -> FeedForward2:
            return FeedForward2(inputs, config.hidden, outputs, skip, config.activation)

        self.context, self.candidate = side(r, self.skip), side(r, self.skip)
        self.earlier = self.combined = self.combined_skip = None
        if config.earlier_turns:
            self.combined_skip = Matrix(outputs, outputs)
            self.earlier = side(r, self.skip)
            self.combined = side(outputs, self.combined_skip)
        # A tensor: compiled code takes a new number every step as new code.
        self.register_buffer("scale", torch.tensor(math.sqrt(outputs)), persistent=False)

    @property
    def pad(self) -> int:
        return self.tokens.subwords.rows - 1

    @property
    def dimensions(self) -> int:
        return self.config.dimensions

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.dimensions,)

    @property
    def token_tables(self) -> Sequence[nn.Parameter]:
        weight = self.tokens.subwords.weight
        return [weight] if weight is not None else []

    @property
    def tables(self) -> list[Table]:
        """All embedding tables."""
        return [part for part in self.modules() if isinstance(part, Table)]

    def before_training(self) -> None:
        """Sets the buffers as they are in a new model."""
        self.scale.fill_(math.sqrt(self.dimensions))
        for table in self.tables:
            table.low.fill_(math.nan)
            table.high.fill_(math.nan)

    def before_step(self, step: int) -> None:
        """The factor on cosines grows from 1 to √E; the ranges of 8-bit tables follow their weights."""
        share = min(1.0, step / self.config.anneal_steps) if self.config.anneal_steps else 1.0
        self.scale.fill_(1 + (math.sqrt(self.dimensions) - 1) * share)
        if self.config.quantised and step % self.config.range_every_steps == 0:
            for table in self.tables:
                table.set_range()

    @property
    def training_scale(self) -> Tensor:
        return self.scale

    def encode_contexts(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        newest, earlier, _ = self._encodings(tokens)
        h_BE = newest if earlier is None else self._combine(newest, earlier)
        return h_BE[:, None], torch.ones(len(h_BE), 1, dtype=torch.bool, device=h_BE.device)

    def context_views(self, tokens: Tokens) -> list[View]:
        """The combined encoding, that of the newest turn, and that of the earlier turns: each is to
        rank the response."""
        newest, earlier, present_B = self._encodings(tokens)
        all_B1 = torch.ones(len(newest), 1, dtype=torch.bool, device=newest.device)
        if earlier is None:
            return [View(newest[:, None], all_B1)]
        combined = self._combine(newest, earlier)
        return [
            View(combined[:, None], all_B1),
            View(newest[:, None], all_B1),
            View(earlier[:, None], present_B[:, None]),
        ]

    def encode_candidates(self, tokens: Tokens) -> Tensor:
        h_NE: Tensor = self.candidate(self.sentence_encodings(tokens.ids_BT, tokens.mask_BT))
        return h_NE

    def scores(self, vectors_BMD: Tensor, mask_BM: Tensor, candidates: Tensor) -> Tensor:
        """Cosines; the factor of the loss is not in them."""
        return poly_scores(vectors_BMD, mask_BM, candidates)

    def vector_weights(self, vectors_BMD: Tensor, mask_BM: Tensor, candidates: Tensor) -> Tensor:
        return poly_weights(vectors_BMD, mask_BM, candidates)

    def cut(self, vectors: Tensor, width: int) -> Tensor:
        return vectors[..., :width]

    def attention_to_tokens(self, tokens: Tokens) -> Tensor:
        """[B, 1, T]: what the reduction takes of each token, the mean over its heads. The newest turn's
        and the earlier ones' tokens have half each, where there are both."""
        in_newest_BT, in_earlier_BT = self._parts(tokens)
        weights_BT = torch.zeros(tokens.ids_BT.shape, device=tokens.ids_BT.device)
        for inside_BT in (in_newest_BT, in_earlier_BT):
            texts = _gathered(tokens.ids_BT, inside_BT, self.pad)
            hidden_BTD = self._token_outputs(*texts)
            own_BT = self.reduction.token_weights(hidden_BTD, texts.mask_BT)
            weights_BT = weights_BT.masked_scatter(inside_BT, own_BT[texts.mask_BT])
        return (weights_BT / weights_BT.sum(dim=1, keepdim=True).clamp(min=1e-9))[:, None]

    def sentence_encodings(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """r [B, heads · D], float32: what serves other tasks, such as intents. Not of length 1."""
        hidden_BTD = self._token_outputs(ids_BT, mask_BT)
        r: Tensor = self.reduction(hidden_BTD, mask_BT)
        return r

    def _token_outputs(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        hidden_BTD: Tensor = self.blocks(self.tokens(ids_BT), mask_BT)
        return hidden_BTD

    def _encodings(self, tokens: Tokens) -> tuple[Tensor, Tensor | None, Tensor]:
        """Of the newest turns [B, E], of the earlier ones [B, E], zeros where there are none, and which
        contexts [B] have earlier ones; None: the model reads none."""
        in_newest_BT, in_earlier_BT = self._parts(tokens)
        newest = _gathered(tokens.ids_BT, in_newest_BT, self.pad)
        h_x: Tensor = self.context(self.sentence_encodings(*newest))
        present_B = in_earlier_BT.any(dim=1)
        if self.earlier is None:
            return h_x, None, present_B
        earlier = _gathered(tokens.ids_BT, in_earlier_BT, self.pad)
        # Texts without a token give zeros for r, and a masked-out encoding: a batch in which none has
        # earlier turns uses the same weights as any other, as DistributedDataParallel needs it.
        h_z: Tensor = self.earlier(self.sentence_encodings(*earlier))
        return h_x, h_z * present_B[:, None], present_B

    def _combine(self, h_x: Tensor, h_z: Tensor) -> Tensor:
        assert self.combined is not None
        h: Tensor = self.combined((h_x + h_z) / 2)
        return h

    def _parts(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """[B, T] each: the tokens of the newest turns, and those of the earlier ones."""
        segments_BT = tokens.segments_BT
        if segments_BT is None:
            return tokens.mask_BT, torch.zeros_like(tokens.mask_BT)
        return tokens.mask_BT & (segments_BT == 0), tokens.mask_BT & (segments_BT > 0)


def _gathered(ids_BT: Tensor, inside_BT: Tensor, pad: int) -> _Texts:
    """The tokens of each row that are inside, moved to the row's beginning."""
    count_B1 = inside_BT.sum(dim=1, keepdim=True)
    width = int(count_B1.max()) if len(ids_BT) else 0
    mask_BT = torch.arange(max(1, width), device=ids_BT.device) < count_B1
    moved_BT = torch.full(mask_BT.shape, pad, dtype=ids_BT.dtype, device=ids_BT.device)
    return _Texts(moved_BT.masked_scatter(mask_BT, ids_BT[inside_BT]), mask_BT)
