"""ConveRT's encoder: token ids to one vector r per text (Henderson et al., 2019; reference 5.1 to 5.3).

    ids → embeddings · √D + two positions → norm → blocks → summed up by attention → r [heads · D]

B texts, T tokens, N tokens of all texts, D dimensions, K dimensions of queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.convert.quantisation import Table
from pipeline.models.cpu import PackedLinear
from pipeline.models.encoder import TextEncoder
from pipeline.models.heads import no_autocast
from pipeline.models.settings import Activation, ConvertConfig

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
        self.queries = nn.ParameterList(_xavier(width, projection) for _ in range(heads))
        self.keys = nn.ParameterList(_xavier(width, projection) for _ in range(heads))

    def forward(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        with no_autocast(hidden_BTD):
            return reduced(hidden_BTD.float(), mask_BT, list(self.queries), list(self.keys))

    def token_weights(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """[B, T]: the mean over the heads, adding up to 1 for a text with tokens."""
        queries, keys = list(self.queries), list(self.keys)
        weights_BHT = token_weights(hidden_BTD.float(), mask_BT, queries, keys)
        weights_BT = weights_BHT.mean(dim=1)
        return weights_BT / weights_BT.sum(dim=1, keepdim=True).clamp(min=1e-9)


def _xavier(inputs: int, outputs: int) -> nn.Parameter:
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(inputs, outputs)))


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
