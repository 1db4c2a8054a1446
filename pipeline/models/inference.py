"""Texts in, vectors or scores out: sorted by length, in batches bounded by tokens.

Batches of similar lengths waste little on padding; a batch that does not fit in memory is halved and
tried again. bf16 where the hardware multiplies it; whatever leaves here is float32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipeline.models.ranker import Ranker
from pipeline.models.tokens import Tokens
from pipeline.models.transformer import use_bf16

BATCH_TOKENS = 16_384


def best_device() -> torch.device:
    """The GPU that this process may use, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def candidate_vectors(
    ranker: Ranker, texts: Sequence[str], batch_tokens: int = BATCH_TOKENS
) -> Tensor:
    """[N, D] for N candidate texts, in their order."""
    rows = ranker.candidate_rows(texts)

    def forward(places: list[int]) -> Tensor:
        tokens = ranker.tokenizer.batch([rows[place] for place in places])
        return ranker.dual.encode_candidates(tokens.to(ranker.device))

    return _in_batches(ranker, [len(row) for row in rows], batch_tokens, forward)


def context_vectors(
    ranker: Ranker, contexts: Sequence[Sequence[str]], batch_tokens: int = BATCH_TOKENS
) -> tuple[Tensor, Tensor]:
    """Vectors [N, M, D] and their mask [N, M] for N contexts, in their order."""
    rows = ranker.context_rows(contexts)
    dual = ranker.dual

    def forward(places: list[int]) -> Tensor:
        tokens = ranker.tokenizer.batch([rows[place] for place in places])
        vectors_BMD, mask_BM = dual.encode_contexts(tokens.to(ranker.device))
        # One tensor for both: the mask travels as a last column.
        return torch.cat([vectors_BMD.float(), mask_BM[:, :, None].float()], dim=2)

    joined = _in_batches(ranker, [len(row) for row in rows], batch_tokens, forward)
    return joined[:, :, :-1], joined[:, :, -1] > 0


def pair_scores(
    ranker: Ranker,
    contexts: Sequence[Sequence[str]],
    candidates: Sequence[Sequence[str]],
    batch_tokens: int = BATCH_TOKENS,
) -> list[Tensor]:
    """A cross-encoder's scores: for each context those of its own candidates, [C] each."""
    network = ranker.cross
    context_rows = ranker.context_rows(contexts)
    flat = ranker.candidate_rows([text for texts in candidates for text in texts])
    owner = [place for place, texts in enumerate(candidates) for _ in texts]

    def forward(places: list[int]) -> Tensor:
        tokens: Tokens = ranker.tokenizer.pairs(
            [context_rows[owner[place]] for place in places], [flat[place] for place in places]
        )
        return network.score_pairs(tokens.to(ranker.device))

    lengths = [len(context_rows[owner[place]]) + len(row) - 1 for place, row in enumerate(flat)]
    scores = _in_batches(ranker, lengths, batch_tokens, forward)
    return list(torch.split(scores, [len(texts) for texts in candidates]))


def _in_batches(
    ranker: Ranker, lengths: list[int], batch_tokens: int, forward: Callable[[list[int]], Tensor]
) -> Tensor:
    """Runs `forward` over all places, longest first, and puts the results in order."""
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    parts: list[Tensor] = []
    done = 0
    bf16 = use_bf16(ranker.device)
    budget = batch_tokens
    with torch.inference_mode(), torch.autocast(ranker.device.type, torch.bfloat16, enabled=bf16):
        while done < len(order):
            rows = max(1, budget // lengths[order[done]])
            try:
                part = forward(order[done : done + rows])
            except torch.OutOfMemoryError:
                if rows == 1:
                    raise
                torch.cuda.empty_cache()
                budget = rows // 2 * lengths[order[done]]
                continue
            parts.append(part.float().cpu())
            done += rows
    joined = torch.cat(parts)
    inverse = torch.empty(len(order), dtype=torch.long)
    inverse[torch.tensor(order)] = torch.arange(len(order))
    return joined[inverse]
