"""Searches the rows in a device's memory: which of them may be among the best for a context.

Scores in bfloat16 products bound the exact ones (`device_scores`). The k rows that score highest give a floor
of the k-th best exact score; a row whose bound lies below it is none of the best. Some dozens of a million
rows remain, and `top_rows` scores those in float64 from the pool's own files, as it does without a device: so
`certified` means the same.
"""

from __future__ import annotations

from collections.abc import Sequence
import numpy as np
import torch
from torch import Tensor

from pipeline.arrays import Bools, Floats, Ints
from pipeline.retrieval.pools.device_rows import DeviceRows
from pipeline.retrieval.search.device_scores import Contexts, Scorer, is_bounded

_CONTEXTS = 16  # in one pass
_SCORES = 3 << 26  # in memory: 768 MiB
_BLOCKS = 64  # so many times as many as rows are wanted: few of the best share one
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
    queries = len(contexts.vectors)
    best_QK = torch.empty(queries, 0, device=rows.device)
    found = list[Floats]()
    step = max(1, _SCORES // queries)
    for start in range(0, len(rows), step):
        section = slice(start, min(len(rows), start + step))
        scores_QN, highest_QB, block_rows = scorer.scores(section)
        if highest_QB.shape[1] < _BLOCKS * top_k:  # some of the best k may share a block
            highest_QB, block_rows = scores_QN, 1
        # The best rows of any k blocks give a floor; those of the best blocks give a high one.
        section_best_QK = highest_QB.topk(min(top_k, highest_QB.shape[1])).values
        best_QK = torch.cat([best_QK, section_best_QK], dim=1)
        best_QK = best_QK.topk(min(top_k, best_QK.shape[1])).values
        least_Q = torch.full((queries,), _LOWEST, device=rows.device)
        if best_QK.shape[1] == top_k:  # by one error for all rows, which reads only the scores
            errors_Q = _on_device(scorer.errors.of(rows.longest, np.arange(queries)), rows.device)
            least_Q = _below(_below(best_QK[:, -1], errors_Q), errors_Q).clamp(min=_LOWEST)
        queries_R, places_R = _rows_from(scores_QN, highest_QB, block_rows, least_Q)
        places_R = places_R + start
        columns = (queries_R, places_R, scores_QN[queries_R, places_R - start],
                   rows.lengths_N[places_R])  # fmt: skip
        found.append(torch.stack([column.double() for column in columns]).cpu().numpy())
    queries_R, places_R, scores_R, lengths_R = np.concatenate(found, axis=1)
    errors_R = scorer.errors.of(lengths_R, queries_R.astype(np.int64))
    errors_R += _ROUNDING * (abs(scores_R) + errors_R)
    places = []
    for query in range(queries):
        [own] = np.nonzero(queries_R == query)
        scores, errors = scores_R[own], errors_R[own]
        reach = -np.inf
        if len(own) >= top_k:  # now by each row's own error
            reach = np.partition(scores - errors, -top_k)[-top_k]
        own = own[scores + errors >= reach]
        places.append(places_R[own[np.argsort(-scores_R[own])]].astype(np.int64))
    return places


def _rows_from(
    scores_QN: Tensor, highest_QB: Tensor, block_rows: int, least_Q: Tensor
) -> tuple[Tensor, Tensor]:
    """The contexts and places of all scores from `least_Q` on. Only blocks with such a score are read."""
    queries_S, blocks_S = torch.nonzero(highest_QB >= least_Q[:, None], as_tuple=True)
    if block_rows == 1:
        return queries_S, blocks_S
    if len(blocks_S) > highest_QB.numel() // _BLOCKS:
        queries_R, places_R = torch.nonzero(scores_QN >= least_Q[:, None], as_tuple=True)
        return queries_R, places_R
    rows = scores_QN.shape[1]
    places_SN = blocks_S[:, None] * block_rows + torch.arange(block_rows, device=blocks_S.device)
    scores_SN = scores_QN[queries_S[:, None], places_SN.clamp(max=rows - 1)]
    is_open_SN = (scores_SN >= least_Q[queries_S, None]) & (places_SN < rows)
    blocks_R, offsets_R = torch.nonzero(is_open_SN, as_tuple=True)
    return queries_S[blocks_R], places_SN[blocks_R, offsets_R]


def _on_device(errors: Floats, device: torch.device) -> Tensor:
    """float32, rounded up."""
    return torch.from_numpy(np.nextafter(errors.astype(np.float32), np.float32(np.inf))).to(device)


def _below(scores: Tensor, errors: Tensor) -> Tensor:
    """A sum in float32 that is not above the exact one."""
    return scores - errors - _ROUNDING * (scores.abs() + errors)
