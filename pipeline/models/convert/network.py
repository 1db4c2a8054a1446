"""ConveRT as a ranker: encodings of length 1 for contexts and candidates, their cosine is the score.

One encoder is shared by all texts; each side has a network of its own on top. A multi-context model also
reads the turns before the newest one, all in one text (reference 5.6):

    h_x = context(r(newest turn)),  h_z = earlier(r(earlier turns)) or 0,  h = combined((h_x + h_z) / 2)

With learnt codes a context has M vectors, h + projected(what code m attends to), and a candidate attends to
them as a poly-encoder's does. They and the candidates' have the length E^¼ then, so that their products are
√E · cosine: attention over products of at most 1 would be nearly even.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.convert.encoder import (
    Blocks,
    FeedForward2,
    Matrix,
    Reduction,
    TokenVectors,
)
from pipeline.models.convert.quantisation import Table
from pipeline.models.heads import (
    VectorNetwork,
    View,
    code_weights,
    learnt_code_vectors,
    no_autocast,
)
from pipeline.models.settings import ConvertConfig
from pipeline.models.tokens import Tokens


class _Texts(NamedTuple):
    """Padded texts of one kind."""

    ids_BT: Tensor
    mask_BT: Tensor


class ConvertNetwork(VectorNetwork):
    """Contexts and candidates to encodings [E] of length 1. Scores are cosines where there are no codes; the
    factor of the loss is not in them."""

    scale: Tensor

    def __init__(self, config: ConvertConfig, rows: int) -> None:
        """`rows` of the embedding table: subwords, hash buckets, and the pad's, which is the last."""
        super().__init__()
        self.config = config
        r, outputs = config.reduction_heads * config.width, config.encoding_width
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
        self.codes_MD = self.code_projection = None
        self.length = 1.0
        if config.context_codes:
            codes_MD = torch.randn(config.context_codes, config.width)
            self.codes_MD = nn.Parameter(codes_MD / math.sqrt(config.width))
            self.code_projection = Matrix(config.width, outputs)
            self.length = outputs**0.25
        # A tensor: compiled code takes a new number every step as new code.
        self.register_buffer("scale", torch.tensor(math.sqrt(outputs)), persistent=False)

    @property
    def pad(self) -> int:
        return self.tokens.subwords.rows - 1

    @property
    def dimensions(self) -> int:
        return self.config.encoding_width

    @property
    def new_weights(self) -> Sequence[nn.Parameter]:
        return ()  # without a pre-trained encoder all weights are alike

    @property
    def token_tables(self) -> Sequence[nn.Parameter]:
        weight = self.tokens.subwords.weight
        return [weight] if weight is not None else []

    @property
    def tables(self) -> dict[str, Table]:
        """All embedding tables, by name."""
        return {name: part for name, part in self.named_modules() if isinstance(part, Table)}

    def reset_buffers(self) -> None:
        """Sets the buffers as they are in a new model."""
        self.scale.fill_(math.sqrt(self.dimensions))
        for table in self.tables.values():
            table.low.fill_(math.nan)
            table.high.fill_(math.nan)

    def before_step(self, step: int) -> None:
        """The factor on cosines grows from 1 to √E; the ranges of 8-bit tables follow their weights."""
        share = min(1.0, step / self.config.anneal_steps) if self.config.anneal_steps else 1.0
        self.scale.fill_(1 + (math.sqrt(self.dimensions) - 1) * share)
        if self.config.quantised and step % self.config.range_every_steps == 0:
            for table in self.tables.values():
                table.set_range()

    @property
    def training_scale(self) -> Tensor:
        return self.scale / self.length**2

    def encode_contexts(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        view = self.context_views(tokens)[0]
        return view.vectors_BMD, view.mask_BM

    def context_views(self, tokens: Tokens) -> list[View]:
        """The combined encoding, that of the newest turn, and that of the earlier turns: each is to
        rank the response. Codes are in the first one."""
        in_newest_BT, in_earlier_BT = self._parts(tokens)
        newest = self._outputs(tokens.ids_BT, in_newest_BT)
        h_x: Tensor = self.context(self.reduction(*newest))
        ones_B = torch.ones(len(h_x), dtype=torch.bool, device=h_x.device)
        if self.earlier is None or self.combined is None:
            return [self._with_codes(h_x, *newest)]
        earlier, present_B = self._outputs(tokens.ids_BT, in_earlier_BT), in_earlier_BT.any(dim=1)
        # A text without a token has an encoding that is masked out, so that a batch in which none has
        # earlier turns uses the same weights as any other: DistributedDataParallel waits for them.
        h_z: Tensor = self.earlier(self.reduction(*earlier)) * present_B[:, None]
        h: Tensor = self.combined((h_x + h_z) / 2)
        outputs = (torch.cat(parts, dim=1) for parts in zip(newest, earlier, strict=True))
        return [
            self._with_codes(h, *outputs),
            self._single_view(h_x, ones_B),
            self._single_view(h_z, present_B),
        ]

    def encode_candidates(self, tokens: Tokens) -> Tensor:
        hidden_BTD = self.blocks(self.tokens(tokens.ids_BT), tokens.mask_BT)
        h_NE: Tensor = self.candidate(self.reduction(hidden_BTD, tokens.mask_BT))
        return h_NE * self.length

    def attention_to_tokens(self, tokens: Tokens) -> Tensor:
        """[B, M, T]: what each code takes of each token. Without codes [B, 1, T]: what the reduction takes,
        the mean over its heads; the newest turn's and the earlier ones' tokens have half each, where there
        are both."""
        rows, mask_BT = [], tokens.mask_BT
        outputs = [self._outputs(tokens.ids_BT, inside_BT) for inside_BT in self._parts(tokens)]
        if self.codes_MD is not None:
            hidden_BTD, is_token_BT = (torch.cat(p, dim=1) for p in zip(*outputs, strict=True))
            weights_BMT = code_weights(hidden_BTD, is_token_BT, self.codes_MD)
            rows = [weights_BMT[:, m][is_token_BT] for m in range(len(self.codes_MD))]
        else:
            weights = [self.reduction.token_weights(*output) for output in outputs]
            is_token_BT = torch.cat([mask for _, mask in outputs], dim=1)
            rows = [torch.cat(weights, dim=1)[is_token_BT]]
        zeros_BT = torch.zeros(mask_BT.shape, device=mask_BT.device)
        # The kept tokens of a row come in its order: the newest turn's stand before the earlier ones'.
        weights_BMT = torch.stack([zeros_BT.masked_scatter(mask_BT, row) for row in rows], dim=1)
        return weights_BMT / weights_BMT.sum(dim=2, keepdim=True).clamp(min=1e-9)

    def encode_texts(self, tokens: Tokens) -> Tensor:
        """r [B, heads · D] of the newest turns, float32: what other tasks take of a text, such as intents
        (reference 5.8). Not of length 1."""
        r: Tensor = self.reduction(*self._outputs(tokens.ids_BT, self._parts(tokens)[0]))
        return r

    def _outputs(self, ids_BT: Tensor, inside_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Token outputs [B, T', D] of the tokens inside, moved to the beginning, and their mask."""
        texts = _gather_inside(ids_BT, inside_BT, self.pad)
        hidden_BTD: Tensor = self.blocks(self.tokens(texts.ids_BT), texts.mask_BT)
        return hidden_BTD, texts.mask_BT

    def _with_codes(self, h_BE: Tensor, hidden_BTD: Tensor, mask_BT: Tensor) -> View:
        """An encoding, or M of them where there are codes."""
        if self.codes_MD is None or self.code_projection is None:
            return View(h_BE[:, None], h_BE.new_ones(len(h_BE), 1, dtype=torch.bool))
        with no_autocast(h_BE):
            attended_BMD, mask_BM = learnt_code_vectors(hidden_BTD, mask_BT, self.codes_MD)
            vectors_BME = h_BE[:, None] + attended_BMD @ self.code_projection.weight
            return View(F.normalize(vectors_BME, dim=-1) * self.length, mask_BM)

    def _single_view(self, h_BE: Tensor, present_B: Tensor) -> View:
        """One encoding beside views that have M vectors."""
        count = self.config.vectors_per_context
        is_first_M = torch.arange(count, device=h_BE.device) == 0
        vectors_BME = (h_BE * self.length)[:, None].expand(-1, count, -1)
        return View(vectors_BME, present_B[:, None] & is_first_M)

    def _parts(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """[B, T] each: the tokens of the newest turns, and those of the earlier ones."""
        segments_BT = tokens.segments_BT
        if segments_BT is None:
            return tokens.mask_BT, torch.zeros_like(tokens.mask_BT)
        return tokens.mask_BT & (segments_BT == 0), tokens.mask_BT & (segments_BT > 0)


def _gather_inside(ids_BT: Tensor, inside_BT: Tensor, pad: int) -> _Texts:
    """The tokens of each row that are inside, moved to the row's beginning."""
    count_B1 = inside_BT.sum(dim=1, keepdim=True)
    width = int(count_B1.max()) if len(ids_BT) else 0
    mask_BT = torch.arange(max(1, width), device=ids_BT.device) < count_B1
    moved_BT = torch.full(mask_BT.shape, pad, dtype=ids_BT.dtype, device=ids_BT.device)
    return _Texts(moved_BT.masked_scatter(mask_BT, ids_BT[inside_BT]), mask_BT)
