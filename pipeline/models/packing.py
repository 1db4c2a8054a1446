"""Texts of many lengths through an encoder without padding.

A batch that is drawn at random holds short and long texts: padded to its longest, half of ConvAI2's tokens
are padding; of 500 of its replies that are sorted for inference 44 % are. So the tokens of all texts go as
one row through the layers that look at a token alone, and only attention sees them text by text: on a CPU
padded in groups of similar lengths, on a GPU by FlashAttention's form for texts of several lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pipeline.models.tokens import copied

# Models known to take positions for a token from `position_ids` alone.
_PACKED = ("bert", "roberta", "xlm-roberta", "electra", "modernbert")
# Padded tokens of a group: what suits a core's cache.
_GROUP_TOKENS = 2_048
# Lengths of groups are multiples: oneDNN prepares a product in bf16 for each new shape, and keeps 1,024.
_LENGTHS = 8
# Rows of any length leave holes in glibc's memory that no later row fits: they have a multiple of 64
# tokens, or of a sixteenth of themselves, rounded down to a power of two. (All-MiniLM, 16
# examples a step, one run each: 1,500 MiB at most and 1,406 after 40 steps; multiples of 512, a twentieth
# of them spare: 1,551 and 1,343.)
_ROW_PARTS, _ROW_TOKENS = 16, 64
# Name of the attention in `transformers`' register.
_GPU = "polyrank_varlen"


@dataclass(frozen=True)
class _Group:
    texts: int
    length: int
    """Tokens of the longest text, rounded up."""
    mask: Tensor | None
    """bool [texts, 1, 1, length], false at padding; None: there are none."""


class Groups(NamedTuple):
    """Texts of similar lengths, padded: P tokens with one more pad, one group after the other."""

    groups: tuple[_Group, ...]
    grouped_R: Tensor
    """The place of each token of the row in the padded groups; spare tokens have the last place."""
    packed_P: Tensor
    """The place in the row of each token of the groups; padding has the first spare place."""


@dataclass(frozen=True)
class Packing:
    """The N tokens of some batches' texts, shortest text first, as one row of R: N and some spare ones."""

    shapes: tuple[tuple[int, int], ...]
    """B, T of each batch"""
    length_B: Tensor
    """Of all texts, ascending, on the CPU."""
    place_N: Tensor
    """The place of each token in the batches' [B · T], one batch after the other."""
    position_R: Tensor
    """The number of each token in its text."""

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]], widths: Sequence[int]) -> Packing:
        """For batches [B, T] of texts with so many tokens, padded at the right to T, the batch's width."""
        shapes = tuple((len(part), width) for part, width in zip(lengths, widths, strict=True))
        length_B = torch.tensor([length for part in lengths for length in part])
        width_B = torch.tensor([width for rows, width in shapes for _ in range(rows)])
        start_B = width_B.cumsum(0) - width_B
        order_B = length_B.argsort(stable=True)
        length_B = length_B[order_B]
        position_N = _positions(length_B)
        place_N = start_B[order_B].repeat_interleave(length_B) + position_N
        position_R = F.pad(position_N, (0, row_tokens(len(position_N)) - len(position_N)))
        return cls(shapes, length_B, place_N, position_R)

    def to(self, device: torch.device) -> Packing:
        """With the places on the device of the batch."""
        places = (copied(tensor, device) for tensor in (self.place_N, self.position_R))
        return Packing(self.shapes, self.length_B, *places)

    @property
    def spare(self) -> int:
        return len(self.position_R) - len(self.place_N)

    @cached_property
    def ends(self) -> tuple[Tensor, int]:
        """0 and the place behind each text, int32 on the device of the batch, the spare tokens one more
        text; and the longest text's length."""
        length_T = F.pad(self.length_B, (1, 1))
        length_T[-1] = self.spare
        ends = copied(length_T.cumsum(0).int(), self.place_N.device)
        return ends, int(length_T.max())

    @cached_property
    def groups(self) -> Groups:
        groups, text_starts, start, tokens = [], [], 0, 0
        for texts in _group_sizes(self.length_B.tolist(), _GROUP_TOKENS):
            group_B = self.length_B[start : start + texts]
            longest = _rounded(int(group_B[-1]))
            mask = None if group_B[0] == longest else torch.arange(longest) < group_B[:, None]
            text_starts.append(tokens + torch.arange(texts) * longest)
            groups.append(_Group(texts, longest, None if mask is None else mask[:, None, None]))
            start += texts
            tokens += texts * longest
        starts_N = torch.cat(text_starts).repeat_interleave(self.length_B)
        grouped_N = starts_N + _positions(self.length_B)
        grouped_R = F.pad(grouped_N, (0, self.spare), value=tokens)
        packed_P = torch.full((tokens + 1,), len(grouped_N))
        packed_P[grouped_N] = torch.arange(len(grouped_N))
        return Groups(tuple(groups), grouped_R, packed_P)

    def pack(self, batches: Sequence[Tensor]) -> Tensor:
        """[B, T] each → [1, R]"""
        tokens = torch.cat([padded_BT.flatten() for padded_BT in batches])
        return F.pad(tokens.index_select(0, self.place_N), (0, self.spare))[None]

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """[1, R, D] → [B, T, D] of each batch, zeros at padding."""
        sizes = [rows * width for rows, width in self.shapes]
        tokens = packed[0, : len(self.place_N)]
        padded = tokens.new_zeros(sum(sizes), tokens.shape[1]).index_copy(0, self.place_N, tokens)
        parts = zip(torch.split(padded, sizes), self.shapes, strict=True)
        return [part.view(*shape, -1) for part, shape in parts]

    def attend(
        self, attention: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Calls `attention` (q, k, v [G, H, T, d] and a mask → [G, T, H, d]) with each group.

        [1, H, R, d] → [1, R, H, d], zeros for the spare ones.
        """
        shape, (groups, grouped_R, packed_P) = query.shape[1::2], self.groups
        sizes = [*(group.texts * group.length for group in groups), 1]
        split = (
            torch.split(_move(tensor[0].transpose(0, 1), packed_P, grouped_R), sizes)
            for tensor in (query, key, value)
        )
        parts = []
        for group, *qkv in zip(groups, *split, strict=False):
            padded = (
                tensor.view(group.texts, group.length, *shape).transpose(1, 2) for tensor in qkv
            )
            parts.append(attention(*padded, group.mask).flatten(0, 1))
        parts.append(parts[0].new_zeros(1, *shape))
        return _move(torch.cat(parts), grouped_R, packed_P)[None]


def _positions(length_B: Tensor) -> Tensor:
    """The number of each token in its text, one text after the other."""
    end_B = length_B.cumsum(0)
    return torch.arange(int(end_B[-1])) - (end_B - length_B).repeat_interleave(length_B)


def _move(tokens: Tensor, places: Tensor, inverse: Tensor) -> Tensor:
    moved: Tensor = _Move.apply(tokens, places, inverse)  # type: ignore[no-untyped-call]
    return moved


class _Move(torch.autograd.Function):
    """tokens[places], and gradients[back]: between the packed row and the padded groups.

    `places` has several that are alike only where gradients are zeros: padding and spare tokens change no
    loss. So nothing is added up, and no zeros are made first: 0.17 ms, not 1.3 (8,000 tokens of 384).
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, places: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return tokens.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, ctx.inverse), None, None


def fits(hf: Any) -> bool:
    """Whether a `transformers` model computes packed rows, if its attention takes a `packing`."""
    layers = set(getattr(hf.config, "layer_types", None) or ["full_attention"])
    return hf.config.model_type in _PACKED and layers == {"full_attention"}


def set_gpu_attention(hf: Any) -> None:
    """Gives a `transformers` model on a GPU an attention that takes a `packing`, in bf16 and without
    dropout."""
    AttentionInterface.register(_GPU, _attend_on_gpu)
    AttentionMaskInterface.register(_GPU, sdpa_mask)
    hf.set_attn_implementation(_GPU)


def _attend_on_gpu(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packing: Packing | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """[B, heads, T, d] → [B, T, heads, d]; of a packed row by FlashAttention's form for texts of several
    lengths, where padding would be masked by a slower kernel."""
    if packing is None:
        attended, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return attended, None
    width = query.shape[-1]
    if scaling not in (None, width**-0.5):  # the scale of varlen_attn
        query = query * (scaling * width**0.5)
    ends, longest = packing.ends
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    attended_RHD: Tensor = varlen_attn(q, k, v, ends, ends, longest, longest)  # type: ignore[assignment]
    return attended_RHD[None], None


def first_position(hf: Any) -> int:
    """The position of a text's first token: RoBERTa's stands behind the padding's."""
    table = getattr(getattr(hf, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return 0 if padding is None else padding + 1


def row_tokens(tokens: int) -> int:
    """The length of a row with so many tokens, and one spare one at least."""
    share = 1 << (tokens // _ROW_PARTS).bit_length() >> 1  # a power of two
    part = max(share, _ROW_TOKENS)
    return (tokens // part + 1) * part


def _rounded(length: int) -> int:
    return -(-length // _LENGTHS) * _LENGTHS


def _group_sizes(lengths: Sequence[int], budget: int) -> Iterator[int]:
    """Texts of each group of ascending lengths: as many as take `budget` tokens with padding."""
    texts = 0
    for length in lengths:
        if texts and (texts + 1) * _rounded(length) > budget:
            yield texts
            texts = 0
        texts += 1
    yield texts
