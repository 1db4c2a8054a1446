"""Texts of many lengths through an encoder without padding.

A batch that is drawn at random holds short and long texts: padded to its longest, half of ConvAI2's tokens
are pads. So the tokens of all texts go as one row through the layers that look at a token alone, and
only attention sees them text by text, padded in groups of similar lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# Padded tokens of a group: what suits a core's cache, and what fills a GPU.
_CPU_TOKENS, _GPU_TOKENS = 2_048, 65_536
# Rows of any length leave holes in glibc's memory that no later row fits: they have a multiple of 64
# tokens, or of a sixteenth of themselves, rounded down to a power of two. (All-MiniLM, 16
# examples a step, one run each: 1,500 MiB at most and 1,406 after 40 steps; multiples of 512, a twentieth
# of them spare: 1,551 and 1,343.)
_ROW_PARTS, _ROW_TOKENS = 16, 64


@dataclass(frozen=True)
class _Group:
    texts: int
    length: int
    """Tokens of the longest."""
    place_N: Tensor
    """Where each token stands in [texts · length]."""
    mask: Tensor | None
    """bool [texts, 1, 1, length], false at pads; None: there are none."""


@dataclass(frozen=True)
class Packing:
    """The N tokens of B texts, shortest text first, as one row of R: N and some spare ones."""

    place_N: Tensor
    """Where each token stands in [B · T]."""
    position_R: Tensor
    """Its number in its text."""
    groups: tuple[_Group, ...]

    @property
    def spare(self) -> int:
        return len(self.position_R) - len(self.place_N)

    @classmethod
    def of(cls, lengths: Sequence[int], width: int, device: torch.device) -> Packing:
        """For a batch [B, T] of texts with so many tokens, padded at the right to T = `width`."""
        length_B = torch.tensor(lengths)
        order_B = length_B.argsort(stable=True)
        length_B = length_B[order_B]
        end_B = length_B.cumsum(0)
        position_N = torch.arange(int(end_B[-1])) - (end_B - length_B).repeat_interleave(length_B)
        place_N = (order_B * width).repeat_interleave(length_B) + position_N
        budget = _GPU_TOKENS if device.type == "cuda" else _CPU_TOKENS
        ends, groups, done = [0, *end_B.tolist()], [], 0
        for texts in _cut(length_B.tolist(), budget):
            own_B = length_B[done : done + texts]
            longest = int(own_B[-1])
            own_N = position_N[ends[done] : ends[done + texts]]
            starts = (torch.arange(texts) * longest).repeat_interleave(own_B)
            mask = None if own_B[0] == longest else torch.arange(longest) < own_B[:, None]
            groups.append(_Group(
                texts, longest, (starts + own_N).to(device, non_blocking=True),
                None if mask is None else mask[:, None, None].to(device, non_blocking=True),
            ))  # fmt: skip
            done += texts
        position_R = F.pad(position_N, (0, _spare(len(position_N))))
        return cls(
            place_N.to(device, non_blocking=True),
            position_R.to(device, non_blocking=True),
            tuple(groups),
        )

    def pack(self, padded_BT: Tensor) -> Tensor:
        """[B, T] → [1, R]"""
        tokens_N = padded_BT.flatten().index_select(0, self.place_N)
        return F.pad(tokens_N, (0, self.spare))[None]

    def unpack(self, packed: Tensor, rows: int, width: int) -> Tensor:
        """[1, R, D] → [B, T, D], zeros at pads."""
        return _spread(packed[0, : len(self.place_N)], self.place_N, rows * width).view(
            rows, width, -1
        )

    def attend(
        self, attention: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Calls `attention` (q, k, v [G, H, T, d] and a mask → [G, T, H, d]) with each group.

        [1, H, R, d] → [1, R, H, d], zeros for the spare ones.
        """
        sizes = [*(len(group.place_N) for group in self.groups), self.spare]
        split = (torch.split(tensor[0].transpose(0, 1), sizes) for tensor in (query, key, value))
        parts = []
        for group, *qkv in zip(self.groups, *split, strict=False):
            shape = (group.texts, group.length, *query.shape[1::2])
            padded = (
                _spread(tensor, group.place_N, shape[0] * shape[1]).view(shape).transpose(1, 2)
                for tensor in qkv
            )
            found = attention(*padded, group.mask)
            parts.append(found.flatten(0, 1).index_select(0, group.place_N))
        parts.append(parts[0].new_zeros(self.spare, *parts[0].shape[1:]))
        return torch.cat(parts)[None]


_current: ContextVar[Packing | None] = ContextVar("packing", default=None)


def current() -> Packing | None:
    """That of the row which an encoder works on; None: a padded batch."""
    return _current.get()


@contextmanager
def using(packing: Packing) -> Iterator[None]:
    token = _current.set(packing)
    try:
        yield
    finally:
        _current.reset(token)


def _spare(tokens: int) -> int:
    """Spare tokens of a row with so many."""
    share = 1 << (tokens // _ROW_PARTS).bit_length() >> 1  # a power of two
    return -tokens % max(share, _ROW_TOKENS)


def _cut(lengths: Sequence[int], budget: int) -> Iterator[int]:
    """Texts of each group of ascending lengths: as many as take `budget` tokens with padding."""
    texts = 0
    for length in lengths:
        if texts and (texts + 1) * length > budget:
            yield texts
            texts = 0
        texts += 1
    yield texts


def _spread(packed: Tensor, place_N: Tensor, size: int) -> Tensor:
    """[N, …] → [size, …], zeros where nothing is."""
    return packed.new_zeros(size, *packed.shape[1:]).index_copy(0, place_N, packed)
