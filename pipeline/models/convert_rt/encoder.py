"""ConveRT (Henderson et al., 2019; reference 5.1 to 5.6): token ids to encodings of length 1 for contexts and
candidates; their cosine is the score.

    ids → embeddings · √D + two positions → norm → blocks → summed up by attention → r [heads · D]
    r → one feed-forward network a side → encoding [E]

One encoder is shared by all texts; each side has a network of its own on top. A multi-context model also
reads the turns before the newest one, all in one text (reference 5.6):

    h_x = context(r(newest turn)),  h_z = earlier(r(earlier turns)) or 0,  h = combined((h_x + h_z) / 2)

With learnt codes a context has M vectors, h + projected(what code m attends to), and a candidate attends to
them as a poly-encoder's does. They and the candidates' have the length E^¼ then, so that their products are
√E · cosine: attention over products of at most 1 would be nearly even.

B texts, T tokens, N tokens of all texts, D dimensions, K dimensions of queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.convert_rt.quantisation import Table
from pipeline.models.cpu import PackedLinear
from pipeline.models.encoder import TextEncoder
from pipeline.models.heads import (
    VectorNetwork,
    View,
    code_weights,
    learnt_code_vectors,
    no_autocast,
)
from pipeline.models.settings import Activation, ConvertConfig
from pipeline.models.tokens import Tokens

NORM_EPSILON = 1e-12
_MASKED = -1e9
_FAST_GELU = 1.702
_SPARE_ROWS = 512
_LEAST_SQUARE = 1e-12  # of a vector that is made to have length 1


def fast_gelu(values: Tensor) -> Tensor:
    """x · σ(1.702 x) (Hendrycks and Gimpel, 2016)."""
    return F.silu(_FAST_GELU * values) / _FAST_GELU  # silu is x · σ(x), in one pass


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "fast_gelu": fast_gelu}


def norm(values: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return F.layer_norm(values, gamma.shape, gamma, beta, NORM_EPSILON)


def token_vectors(
    ids_BT: Tensor,
    embedding: Tensor,
    position_tables: Sequence[Tensor],
    gamma: Tensor,
    beta: Tensor,
) -> Tensor:
    """[B, T, D]: LN(embedding[id] · √D + Σ table[place mod rows of the table]). Reference 5.2.

    Pads are treated as any other token here.
    """
    rows_BTD = F.embedding(ids_BT, embedding)
    place_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    positions = [table[place_T % len(table)] for table in position_tables]
    return _token_vectors(rows_BTD, positions, gamma, beta)


def _token_vectors(
    rows_BTD: Tensor, positions: Sequence[Tensor], gamma: Tensor, beta: Tensor
) -> Tensor:
    summed_BTD = rows_BTD * math.sqrt(rows_BTD.shape[-1])
    for position in positions:
        summed_BTD = summed_BTD + position
    return norm(summed_BTD, gamma, beta)


def token_weights(
    vectors_BTD: Tensor, mask_BT: Tensor, queries: Sequence[Tensor], keys: Sequence[Tensor]
) -> Tensor:
    """[B, heads, T]: how much each head of `reduced` takes of each token; 0 at pads.

    What each token gives to each other, softmax((X Q)(X K)ᵀ), not scaled, summed over the givers that
    are no pads, over √ of their number.
    """
    mask_BT = mask_BT.to(vectors_BTD.dtype)
    count_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    penalty_B1T = _MASKED * (1 - mask_BT)[:, None]
    weights = []
    for query, key in zip(queries, keys, strict=True):
        logits_BTT = (vectors_BTD @ query) @ (vectors_BTD @ key).transpose(1, 2)
        attention_BTT = (logits_BTT + penalty_B1T).softmax(dim=-1) * mask_BT[:, :, None]
        weights.append(attention_BTT.sum(dim=1) / count_B1.sqrt())
    return torch.stack(weights, dim=1)


def reduced(
    vectors_BTD: Tensor, mask_BT: Tensor, queries: Sequence[Tensor], keys: Sequence[Tensor]
) -> Tensor:
    """[B, heads · D]: each head's weighted sum of the tokens' vectors themselves (reference 5.2).

    queries, keys: a matrix [D, K] per head. mask_BT [B, T] is false or 0 at pads; a text without a token
    gives zeros.
    """
    weights_BHT = token_weights(vectors_BTD, mask_BT, queries, keys)
    return torch.einsum("bht,btd->bhd", weights_BHT, vectors_BTD).flatten(1)


def feed_forward_2(
    r: Tensor, weights: Mapping[str, Tensor], skip: Tensor, activation: Activation
) -> Tensor:
    """[B, E]: what makes an encoding of r [B, R] for one side, of length 1 (reference 5.3).

        a_0 = LN(r),   a_k = LN(activation(a_{k-1} W_k)),   h = L2(LN(a_n W_out + r skip))

    `weights`: "norm_in.gamma", "norm_in.beta"; "hidden_1.weight" [R, H], "norm_1.gamma", "norm_1.beta" and
    so on; "out.weight" [H, E], "norm_out.gamma", "norm_out.beta". `skip` [R, E].
    """
    hidden = norm(r, weights["norm_in.gamma"], weights["norm_in.beta"])
    number = 1
    while f"hidden_{number}.weight" in weights:
        hidden = ACTIVATIONS[activation](hidden @ weights[f"hidden_{number}.weight"])
        hidden = norm(hidden, weights[f"norm_{number}.gamma"], weights[f"norm_{number}.beta"])
        number += 1
    summed = hidden @ weights["out.weight"] + r @ skip
    summed = norm(summed, weights["norm_out.gamma"], weights["norm_out.beta"])
    return summed * torch.rsqrt((summed * summed).sum(-1, keepdim=True).clamp(min=_LEAST_SQUARE))


class Norm(nn.Module):
    """Layer norm; biased variance, epsilon inside the root."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, values: Tensor) -> Tensor:
        return norm(values, self.gamma, self.beta)


class Matrix(nn.Module):
    """A weight [in, out], to be used as x @ weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(inputs, outputs)))


class TokenVectors(nn.Module):
    """ids → the blocks' inputs, float32. Its tables are quantised where the settings say so."""

    def __init__(self, config: ConvertConfig, rows: int) -> None:
        super().__init__()
        # Times √D the subwords' have a standard deviation of 0.13 at D = 512; so do both positions' sum.
        self.subwords = Table(rows, config.width, 0.01)
        spread = 0.01 * math.sqrt(config.width / len(config.position_tables))
        self._position_counts = config.position_tables
        self.positions = nn.ModuleList(
            Table(count, config.width, spread) for count in config.position_tables
        )
        self.norm = Norm(config.width)

    def forward(self, ids_BT: Tensor) -> Tensor:
        place_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        with no_autocast(self.norm.gamma):
            counts = self._position_counts
            positions = [
                table(place_T % count) for table, count in zip(self.positions, counts, strict=True)
            ]
            rows_BTD = self.subwords(ids_BT)
            return _token_vectors(rows_BTD, positions, self.norm.gamma, self.norm.beta)


class Places:
    """Where the N tokens of a padded batch [B, T] stand, so that layers leave the pads out.

    Only attention, whose queries and keys are narrow, sees the texts apart and padded.
    """

    def __init__(self, mask_BT: Tensor, spare: bool = False) -> None:
        """`spare`: packed rows are followed by rows of zeros up to a multiple of `_SPARE_ROWS`. A process
        that trains meets few sizes of memory then (6.5 GB after 340 steps without, of batches of 256)."""
        self.mask_BT = mask_BT
        self._place_N = mask_BT.flatten().nonzero().flatten()
        self._spare = -len(self._place_N) % _SPARE_ROWS if spare else 0

    def pack(self, padded: Tensor) -> Tensor:
        """[B, T, X] → [N, X]"""
        packed = padded.flatten(0, 1).index_select(0, self._place_N)
        return F.pad(packed, (0, 0, 0, self._spare)) if self._spare else packed

    def unpack(self, packed: Tensor) -> Tensor:
        """[N, X] → [B, T, X], zeros at pads."""
        zeros = packed.new_zeros(self.mask_BT.numel(), packed.shape[1])
        tokens = packed[: len(self._place_N)]
        return zeros.index_copy(0, self._place_N, tokens).view(*self.mask_BT.shape, -1)


class Attention(nn.Module):
    """One head; a learnt bias for each distance, and none beyond the window."""

    def __init__(self, width: int, projection: int, longest: int, window: int) -> None:
        super().__init__()
        self.projection, self.longest, self.window = projection, longest, window
        self.qkv = nn.Linear(width, 3 * projection, bias=False)
        self.out = nn.Linear(projection, width, bias=False)
        # Of a text with n tokens at most, distances j - i are -(n - 1) to n - 1; the middle is 0.
        self.bias = nn.Parameter(torch.zeros(2 * longest + 1))

    def forward(self, hidden_ND: Tensor, places: Places) -> Tensor:
        q_BTK, k_BTK, v_BTK = places.unpack(self.qkv(hidden_ND)).chunk(3, dim=-1)
        logits_BTT = q_BTK @ k_BTK.transpose(1, 2)
        logits_BTT = logits_BTT.float() / math.sqrt(self.projection)
        place_T = torch.arange(logits_BTT.shape[1], device=logits_BTT.device)
        distance_TT = place_T[None, :] - place_T[:, None]
        is_beyond_TT = distance_TT.abs() > self.window
        logits_BTT = logits_BTT + self.bias.float()[self.longest + distance_TT]
        is_masked_BTT = is_beyond_TT | ~places.mask_BT[:, None, :]
        weights_BTT = logits_BTT.masked_fill(is_masked_BTT, _MASKED).softmax(dim=-1)
        attended_BTK = weights_BTT.to(v_BTK.dtype) @ v_BTK
        attended: Tensor = self.out(places.pack(attended_BTK))
        return attended


class FeedForward(nn.Module):
    """Two linear layers with fast GeLU between them."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, intermediate), nn.Linear(intermediate, width)

    def forward(self, hidden: Tensor) -> Tensor:
        narrowed: Tensor = self.narrow(fast_gelu(self.wide(hidden)))
        return narrowed

    def pack(self) -> nn.Module:
        """Its fast form on a CPU: 1.702 goes into the weights, so that the activation is swish, which the
        first product applies itself."""
        wide, narrow = self.wide, self.narrow
        if not isinstance(wide, nn.Linear):
            return self
        return nn.Sequential(
            PackedLinear(wide.weight * _FAST_GELU, wide.bias * _FAST_GELU, "swish"),
            PackedLinear(narrow.weight / _FAST_GELU, narrow.bias, "none"),
        )


class Block(nn.Module):
    """Attention and two linear layers, each added to its input and then normalised."""

    def __init__(self, config: ConvertConfig, window: int) -> None:
        super().__init__()
        self.attention = Attention(
            config.width, config.attention_width, config.longest_text, window
        )
        self.norm_1 = Norm(config.width)
        self.feed_forward = FeedForward(config.width, config.intermediate)
        self.norm_2 = Norm(config.width)

    def forward(self, hidden_ND: Tensor, places: Places) -> Tensor:
        hidden_ND = self.norm_1(hidden_ND + self.attention(hidden_ND, places))
        normed: Tensor = self.norm_2(hidden_ND + self.feed_forward(hidden_ND))
        return normed


class Blocks(TextEncoder):
    """The Transformer blocks: what computes in the ranker's precision."""

    def __init__(self, config: ConvertConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config, window) for window in config.windows)
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.xavier_uniform_(part.weight)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)

    def forward(self, vectors_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D], zeros at pads."""
        places = Places(mask_BT, spare=self.training)
        hidden_ND = places.pack(vectors_BTD).to(self.dtype)
        for layer in self.layers:
            hidden_ND = layer(hidden_ND, places)
        return places.unpack(hidden_ND)


class Reduction(nn.Module):
    """A text's token outputs to r, float32."""

    def __init__(self, width: int, projection: int, heads: int) -> None:
        super().__init__()
        self.queries, self.keys = (
            nn.ParameterList(
                nn.init.xavier_uniform_(torch.empty(width, projection)) for _ in range(heads)
            )
            for _ in range(2)
        )

    def forward(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        with no_autocast(hidden_BTD):
            return reduced(hidden_BTD.float(), mask_BT, list(self.queries), list(self.keys))

    def token_weights(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """[B, T]: the mean over the heads, adding up to 1 for a text with tokens."""
        queries, keys = list(self.queries), list(self.keys)
        weights_BHT = token_weights(hidden_BTD.float(), mask_BT, queries, keys)
        weights_BT = weights_BHT.mean(dim=1)
        return weights_BT / weights_BT.sum(dim=1, keepdim=True).clamp(min=1e-9)


class FeedForward2(nn.Module):
    """One side's network on r. `skip` may be shared between sides."""

    def __init__(
        self, inputs: int, hidden: Sequence[int], outputs: int, skip: Matrix, activation: Activation
    ) -> None:
        super().__init__()
        self.activation: Activation = activation
        self._skip = (skip,)  # in a tuple: it is no part of this module
        self.norm_in = Norm(inputs)
        for number, width in enumerate(hidden, 1):
            setattr(self, f"hidden_{number}", Matrix(inputs, width))
            setattr(self, f"norm_{number}", Norm(width))
            inputs = width
        self.out = Matrix(inputs, outputs)
        self.norm_out = Norm(outputs)

    def forward(self, r: Tensor) -> Tensor:
        with no_autocast(r):
            weights = dict(self.named_parameters())
            return feed_forward_2(r.float(), weights, self._skip[0].weight, self.activation)


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
        return self.context_views(tokens)[0]

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
        outputs = [self._outputs(tokens.ids_BT, inside_BT) for inside_BT in self._parts(tokens)]
        hidden_BTD, is_token_BT = (torch.cat(parts, dim=1) for parts in zip(*outputs, strict=True))
        if self.codes_MD is not None:
            weights_BMT = code_weights(hidden_BTD, is_token_BT, self.codes_MD)
        else:
            weights = [self.reduction.token_weights(*output) for output in outputs]
            weights_BMT = torch.cat(weights, dim=1)[:, None]
        # The kept tokens of a row come in its order: the newest turn's stand before the earlier ones'.
        zeros_BT = weights_BMT.new_zeros(tokens.mask_BT.shape)
        rows = [weights_BT[is_token_BT] for weights_BT in weights_BMT.unbind(dim=1)]
        placed = [zeros_BT.masked_scatter(tokens.mask_BT, row) for row in rows]
        weights_BMT = torch.stack(placed, dim=1)
        return weights_BMT / weights_BMT.sum(dim=2, keepdim=True).clamp(min=1e-9)

    def encode_texts(self, tokens: Tokens) -> Tensor:
        """r [B, heads · D] of the newest turns, float32: what other tasks take of a text, such as intents
        (reference 5.8). Not of length 1."""
        r: Tensor = self.reduction(*self._outputs(tokens.ids_BT, self._parts(tokens)[0]))
        return r

    def _outputs(self, ids_BT: Tensor, inside_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Token outputs [B, T', D] of the tokens inside, moved to the beginning, and their mask."""
        ids_BT, mask_BT = _gather_inside(ids_BT, inside_BT, self.pad)
        return self.blocks(self.tokens(ids_BT), mask_BT), mask_BT

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


def _gather_inside(ids_BT: Tensor, inside_BT: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """(ids [B, T'], mask [B, T']): the tokens of each row that are inside, moved to the row's beginning."""
    count_B1 = inside_BT.sum(dim=1, keepdim=True)
    width = int(count_B1.max()) if len(ids_BT) else 0
    mask_BT = torch.arange(max(1, width), device=ids_BT.device) < count_B1
    moved_BT = torch.full(mask_BT.shape, pad, dtype=ids_BT.dtype, device=ids_BT.device)
    return moved_BT.masked_scatter(mask_BT, ids_BT[inside_BT]), mask_BT
