"""Searches the rows in a device's memory: which of them may be among the best for a context.

Scores in bfloat16 products bound the exact ones (`device_scores`). The k rows that score highest give a floor
of the k-th best exact score; a row whose bound lies below it is none of the best. Some dozens of a million
rows remain, and `top_rows` scores those in float64 from the pool's own files, as it does without a device: so
`certified` means the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.arrays import Bools, Floats, Ints
from pipeline.retrieval.pools.device_rows import DeviceRows
from pipeline.retrieval.search.device_scores import Contexts, Scorer, is_bounded

_CONTEXTS = 16  # in one pass
_SCORES = 1 << 27  # in memory: 512 MiB
_ROUNDING = 2.0**-22  # of a sum in float32, and more
_LOWEST = -float(np.finfo(np.float32).max)


@torch.no_grad()
def reaching_rows(
    rows: DeviceRows,
    contexts: Sequence[Floats],
    most_vectors: int,
    top_k: int,
    scale: float,
    among: Bools | None,
) -> list[Ints]:
    """For each context the places of all rows that may be among its best `top_k`, the likeliest first.

    `contexts`: [M, D] float64 each, `most_vectors` at most. `scale`: what the attention multiplies logits by.
    `among` [N]: the rows that count; None: all.
    """
    bounded = [n for n, vectors_MD in enumerate(contexts) if is_bounded(rows, vectors_MD)]
    places = [np.empty(0, np.int64)] * len(contexts)
    if not len(rows) or (among is not None and not among.any()):
        return places
    if len(bounded) < len(contexts):  # any row may be among their best
        places = [np.arange(len(rows)) if among is None else np.flatnonzero(among)] * len(contexts)
    allowed_N = None if among is None else torch.tensor(among, device=rows.device)
    for start in range(0, len(bounded), _CONTEXTS):
        batch = bounded[start : start + _CONTEXTS]
        on_device = Contexts.of([contexts[n] for n in batch], most_vectors, scale, rows.device)
        found = _reaching_rows(rows, on_device, top_k, allowed_N)
        for number, places_of_context in zip(batch, found, strict=True):
            places[number] = places_of_context
    return places


@torch.no_grad()
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


def _reaching_rows(
    rows: DeviceRows, contexts: Contexts, top_k: int, allowed_N: Tensor | None
) -> list[Ints]:
    scorer = Scorer(rows, contexts, allowed_N)
    errors, queries_Q = scorer.errors, torch.arange(len(contexts.vectors), device=rows.device)
    highest_errors_Q = errors.of(torch.full_like(errors.constant_Q, rows.longest), queries_Q)
    floors_QK = torch.empty(len(queries_Q), 0, device=rows.device)
    floor_Q = torch.full_like(highest_errors_Q, -torch.inf)
    open_rows = list[_OpenRows]()
    step = max(1, _SCORES // len(queries_Q))
    for start in range(0, len(rows), step):
        section = slice(start, min(len(rows), start + step))
        lengths_N = rows.lengths_N[section]
        scores_QN = scorer.scores(section)
        # Any k rows give a floor; those with the highest scores give a high one.
        values_QK, places_QK = scores_QN.topk(min(top_k, scores_QN.shape[1]))
        lowest_QK = _below(values_QK, errors.of(lengths_N[places_QK], queries_Q[:, None]))
        floors_QK = torch.cat([floors_QK, lowest_QK], dim=1)
        floors_QK = floors_QK.topk(min(top_k, floors_QK.shape[1])).values
        if floors_QK.shape[1] == top_k:
            floor_Q = floors_QK[:, -1]
        # First by one error for all rows, which reads only the scores; then by each row's own.
        least_Q = _below(floor_Q, highest_errors_Q).clamp(min=_LOWEST)
        queries_R, places_R = torch.nonzero(scores_QN >= least_Q[:, None], as_tuple=True)
        scores_R = scores_QN[queries_R, places_R]
        bounds_R = _above(scores_R, errors.of(lengths_N[places_R], queries_R))
        columns = [queries_R, places_R + start, scores_R, bounds_R]
        is_open_R = bounds_R >= floor_Q[queries_R]
        open_rows.append(_OpenRows(*(column[is_open_R].cpu().numpy() for column in columns)))
    merged = _OpenRows(*(np.concatenate(columns) for columns in zip(*open_rows, strict=True)))
    still_open = merged.bounds >= floor_Q.cpu().numpy()[merged.queries]
    order = np.lexsort((-merged.scores, merged.queries))
    order = order[still_open[order]]
    edges = np.searchsorted(merged.queries[order], np.arange(1, len(queries_Q)))
    return np.split(merged.places[order], edges)


class _OpenRows(NamedTuple):
    """Pairs of a context and a row that may be among its best."""

    queries: Ints
    places: Ints
    scores: Floats
    bounds: Floats


def _below(scores: Tensor, errors: Tensor) -> Tensor:
    """A sum in float32 that is not above the exact one."""
    return scores - errors - _ROUNDING * (scores.abs() + errors)


def _above(scores: Tensor, errors: Tensor) -> Tensor:
    return scores + errors + _ROUNDING * (scores.abs() + errors)
