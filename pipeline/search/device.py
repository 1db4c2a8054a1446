"""Searches the rows in a device's memory: which of them may be among the best for a context.

Scores in bfloat16 products bound the exact ones (`device_scores`). The k rows that score highest give a floor
of the k-th best exact score; a row whose bound lies below it is none of the best. Some dozens of a million
rows remain, and `top_rows` scores those in float64 from the pool's own files, as it does without a device: so
`certified` means the same.

The device finds the blocks of rows with the highest scores, and the CPU reads these and no others: one copy.
A CPU's share of a search is some 1 ms; while it works on a few contexts, the device scores the next ones.

Axes: N rows of a section, Q contexts, B blocks of rows, C blocks that are read, R rows that may be the best.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from pipeline.arrays import Bools, Floats, Ints
from pipeline.pools.device_rows import DeviceRows
from pipeline.search.device_scores import Contexts, Scorer, is_bounded

T = TypeVar("T")

_CONTEXTS = 4  # in one pass
_SCORES = 3 << 25  # of a pass, in memory: 384 MiB, of two passes at a time
_BLOCKS = 128  # that are read, and two more for each row that is wanted
_ROUNDING = 2.0**-22  # of a sum in float64, and much more
_LOWEST = -float(np.finfo(np.float32).max)


def reaching_rows(
    rows: DeviceRows,
    contexts: Sequence[Floats],
    most_vectors: int,
    top_k: int,
    scale: float,
    among: Bools | None,
) -> Iterator[tuple[int, Ints]]:
    """The number of each context, and the places of all rows that may be among its best `top_k`.

    `contexts`: [M, D] float64 each, `most_vectors` at most. `scale`: what the attention multiplies logits by.
    `among` [N]: the rows that count; None: all.
    """
    bounded = [n for n, vectors_MD in enumerate(contexts) if is_bounded(rows, vectors_MD)]
    if not len(rows) or (among is not None and not among.any()):
        bounded, everything = [], np.empty(0, np.int64)
    elif len(bounded) < len(contexts):  # any row may be among the best of the others
        everything = np.arange(len(rows)) if among is None else np.flatnonzero(among)
    for number in sorted(set(range(len(contexts))) - set(bounded)):
        yield number, everything
    if not bounded:
        return
    allowed_N = None if among is None else torch.tensor(among, device=rows.device)
    given = Contexts.of([contexts[n] for n in bounded], most_vectors, scale, rows.device)
    parts = [slice(start, start + _CONTEXTS) for start in range(0, len(bounded), _CONTEXTS)]
    passes = (_Pass(rows, given.part(part), top_k, allowed_N) for part in parts)
    for part, started in zip(parts, _one_ahead(passes), strict=True):
        yield from zip(bounded[part], started.places(), strict=True)


def warm_up(rows: DeviceRows, vectors: int) -> None:
    """Lets Triton compile what searches with so many vectors a context run, which takes it a minute the first
    time on a machine: one context, or several, with a filter and without."""
    width = rows.matrix_ND.shape[1]
    contexts = list(np.random.default_rng(0).standard_normal((2, vectors, width)))
    everything_N = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    for count in (1, 2):
        for allowed_N in (None, everything_N):
            if len(rows) and all(is_bounded(rows, vectors_MD) for vectors_MD in contexts):
                Scorer(rows, Contexts.of(contexts[:count], vectors, 1.0, rows.device), allowed_N)


class _Pass:
    """Some contexts through all rows. A GPU scores their first section while the caller goes on."""

    def __init__(
        self, rows: DeviceRows, contexts: Contexts, top_k: int, allowed_N: Tensor | None
    ) -> None:
        self._rows, self._top_k = rows, top_k
        self._scorer = Scorer(rows, contexts, allowed_N)
        queries = len(contexts.vectors)
        step = max(1, _SCORES // queries)
        self._sections = [
            slice(start, min(len(rows), start + step)) for start in range(0, len(rows), step)
        ]
        self._open = [_OpenRows() for _ in range(queries)]
        self._first = self._score(self._sections[0])

    def places(self) -> Iterator[Ints]:
        """For each context those of the rows that may be among its best."""
        for section in self._sections:
            self._read(section, self._first if section.start == 0 else self._score(section))
        for rows in self._open:
            yield rows.places[np.argsort(-rows.scores)]

    def _score(self, section: slice) -> _Scored:
        """Scores a section, and copies the scores of its best blocks."""
        scores_QN, highest_QB, block_rows = self._scorer.scores(section)
        count = min(highest_QB.shape[1], _BLOCKS + 2 * self._top_k)
        values_QC, blocks_QC = highest_QB.topk(count)
        offsets_N = torch.arange(block_rows, device=scores_QN.device)
        places_QCN = blocks_QC[:, :, None] * block_rows + offsets_N
        read_QR = scores_QN.gather(1, places_QCN.flatten(1).clamp(max=scores_QN.shape[1] - 1))
        columns = torch.cat([values_QC, blocks_QC.float(), read_QR], dim=1)
        return _Scored(scores_QN, block_rows, count, *_begin_copy(columns))

    def _read(self, section: slice, scored: _Scored) -> None:
        if scored.event is not None:
            scored.event.synchronize()
        columns, count = scored.columns.numpy(), scored.read_blocks
        rows = section.stop - section.start
        are_all = count * scored.block_rows >= rows
        for query, open_rows in enumerate(self._open):
            values_C, read_R = columns[query, :count], columns[query, 2 * count :]
            most = float(self._scorer.errors.of(self._rows.longest, query))
            # The best rows of any k blocks give a floor; those of the best blocks give a high one.
            reach = open_rows.floor
            if count >= self._top_k:
                reach = max(reach, _below(float(values_C[self._top_k - 1]), most))
            least = max(_below(reach, most), _LOWEST)
            if not are_all and _above(values_C[-1], most) >= reach:  # so may other blocks
                scores_N = scored.scores_QN[query].cpu().numpy()
                places = np.flatnonzero(scores_N >= least)
                scores = scores_N[places]
            else:
                at = np.flatnonzero(read_R >= least)
                blocks_C = columns[query, count : 2 * count].astype(np.int64)
                places = blocks_C[at // scored.block_rows] * scored.block_rows
                places, scores = places + at % scored.block_rows, read_R[at]
                places, scores = places[places < rows], scores[places < rows]
            places = places + section.start
            errors = self._scorer.errors.of(self._rows.lengths_N[places], query)
            open_rows.add(places, scores.astype(np.float64), errors, self._top_k)


def _begin_copy(columns: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """(the numbers on the CPU, the event from which on they are there; None: they are there)"""
    if not columns.is_cuda:
        return columns.cpu(), None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied = columns.to("cpu", non_blocking=True)  # pinned, and not behind the next pass
    # Of a second GPU: the stream of this process's first one has not heard of the copy.
    event.record(torch.cuda.current_stream(columns.device))
    return copied, event


class _Scored(NamedTuple):
    """A section of the rows. Its fields may not be there yet, but for the numbers, before the event."""

    scores_QN: Tensor
    block_rows: int
    read_blocks: int
    """C: the blocks that are read."""
    columns: Tensor
    """[Q, C + C + rows of C blocks] on the CPU: each block's highest score, its number, its rows' scores."""
    event: torch.cuda.Event | None


class _OpenRows:
    """Rows that may be among the best of a context."""

    def __init__(self) -> None:
        self.places: Ints = np.empty(0, np.int64)
        self.scores: Floats = np.empty(0)
        self._errors: Floats = np.empty(0)
        self.floor = -np.inf
        """What the k-th best exact score is at least."""

    def add(self, places: Ints, scores: Floats, errors: Floats, top_k: int) -> None:
        places = np.concatenate([self.places, places])
        scores = np.concatenate([self.scores, scores])
        errors = np.concatenate([self._errors, errors])
        if len(places) >= top_k:
            self.floor = float(np.partition(_below(scores, errors), -top_k)[-top_k])
        is_open = _above(scores, errors) >= self.floor
        self.places, self.scores = places[is_open], scores[is_open]
        self._errors = errors[is_open]


def _below(scores: Any, errors: Any) -> Any:
    return scores - errors - _ROUNDING * (abs(scores) + errors)


def _above(scores: Any, errors: Any) -> Any:
    return scores + errors + _ROUNDING * (abs(scores) + errors)


def _one_ahead(items: Iterable[T]) -> Iterator[T]:
    """The items; each one is made before the one in front of it is handed over."""
    waiting = list[T]()
    for item in items:
        yield from waiting
        waiting = [item]
    yield from waiting
