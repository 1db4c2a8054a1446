"""Texts in, vectors, scores or their explanation out: sorted by length, in batches bounded by tokens.

Batches of similar lengths waste little on padding, and on a CPU most encoders compute without it
(`packing`). A batch that does not fit in memory is halved and tried again. Encoders compute in the ranker's
precision; whatever leaves here is float32 on the CPU.

`batch_tokens` bounds a batch, padding included; 0: what suits the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from pipeline.models import cpu
from pipeline.models.encoder import TextEncoder
from pipeline.models.int8 import quantise_layers
from pipeline.models.precision import Precision, resolve_precision
from pipeline.models.ranker import Ranker
from pipeline.models.tokens import Tokenizer, Tokens
from pipeline.models.torch_operators import MOST_LEVEL
from pipeline.storage.prefetch import map_prefetched

BATCH_TOKENS = 0
# A core is fastest while its part of the activations stays in its cache (all-MiniLM, AMX, 256 tokens a
# text: 48 µs a token in batches of 2,048, 75 in batches of 16,384); a GPU has to be filled.
_SUITS_A_CORE, _SUITS_A_GPU = 2_048, 65_536
_WIDTHS = 8
_TEXT_WEIGHT = 2.0  # of a candidate's text beside one of its known contexts
_WINDOW = 4096  # texts that are tokenised, and sorted by length, together

ItemT = TypeVar("ItemT")
VectorsT = TypeVar("VectorsT")
Rows = list[list[int]]
"""Token ids, of `Ranker.context_rows` or `Ranker.candidate_rows`."""


# A forked process lacks the threads of OpenMP, and torch's first product of several threads waits for them
# for ever; DataLoader's processes have one thread for this reason.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def prepare(ranker: Ranker, device: torch.device, precision: Precision = "auto") -> Ranker:
    """As `place`, for inference only: where it computes in bf16 or 8 bits, its encoders' weights are of that
    type from now on."""
    place(ranker.eval().float(), device, precision)  # a program may have another default type
    if ranker.precision == "bf16":
        to_bf16(ranker)
    encoders = [module for module in ranker.modules() if isinstance(module, TextEncoder)]
    for encoder in encoders:
        if ranker.precision == "int8":
            quantise_layers(encoder, MOST_LEVEL)
        if ranker.device.type == "cpu":
            encoder.packs = cpu.prepare_inference(encoder)
    return ranker


def place(ranker: Ranker, device: torch.device, precision: Precision = "auto") -> Ranker:
    """Brings the ranker to a device, and sets its precision there."""
    ranker.to(device)
    ranker.precision = resolve_precision(precision, device)
    return ranker


def to_bf16(ranker: Ranker) -> None:
    """Stores the encoders' weights in bf16, for inference only; what leaves them is float32.

    Autocast would convert the weights for every batch, and compute norms and sums in float32.
    """
    for module in ranker.modules():
        if isinstance(module, TextEncoder):
            module.to(torch.bfloat16)
            module.register_forward_hook(_in_float32)


def _in_float32(module: nn.Module, inputs: object, hidden_BTD: Tensor) -> Tensor:
    return hidden_BTD.float()


def candidate_vectors(
    ranker: Ranker, texts: Sequence[str], batch_tokens: int = BATCH_TOKENS
) -> Tensor:
    """[N, D] for N candidate texts, in their order."""
    return row_vectors(ranker, ranker.candidate_rows(texts), batch_tokens)


def toward_contexts(
    ranker: Ranker,
    vectors_ND: Tensor,
    known_contexts: Sequence[Sequence[Sequence[str]]],
    batch_tokens: int = BATCH_TOKENS,
) -> Tensor:
    """[N, D]: candidates' vectors turned toward the contexts that they are known to answer.

    With u(x) = x / |x|, a candidate's vector v and its n contexts' vectors q: a = (2 u(v) + Σ u(q)) / (2 + n)
    is the mean of what describes the candidate, where the text counts twice, and |v| a / √|a| its vector. So
    a score lies between the mean of the similarities (a) and the cosine to that mean (u(a)). By the first
    answers with many questions lose, by the second those with one. Contexts have one vector each.

    R@1 of new questions, all-MiniLM without training: banking77 0.59, with one context a text 0.67, with
    four 0.75; CLINC150 0.69, 0.79 and 0.87. Where answers have one to eight, the mean of three tables, each
    with and without training, is 0.676 by the texts alone, 0.740 so, 0.737 by u(a) and 0.727 by a. With
    training, answers with one question have 0.743, 0.746, 0.722 and 0.769.
    """
    contexts = [context for contexts in known_contexts for context in contexts]
    if not contexts:
        return vectors_ND
    contexts_KD = context_vectors(ranker, contexts, batch_tokens)[0][:, 0]
    rows_K = torch.tensor([row for row, contexts in enumerate(known_contexts) for _ in contexts])
    sums_ND = torch.zeros_like(vectors_ND).index_add_(0, rows_K, normalize(contexts_KD))
    counts_N1 = torch.tensor([[len(contexts)] for contexts in known_contexts])
    mean_ND = (_TEXT_WEIGHT * normalize(vectors_ND) + sums_ND) / (_TEXT_WEIGHT + counts_N1)
    scale_N1 = vectors_ND.norm(dim=1, keepdim=True) / mean_ND.norm(dim=1, keepdim=True).sqrt()
    turned_ND = scale_N1 * mean_ND
    return torch.where(counts_N1 > 0, turned_ND, vectors_ND)


def in_windows(
    items: Sequence[ItemT],
    tokenise: Callable[[Sequence[ItemT]], Rows],
    encode: Callable[[Rows], VectorsT],
) -> Iterator[tuple[Rows, VectorsT]]:
    """The rows and the vectors of any number of texts or contexts, 4,096 at a time.

    Another thread tokenises the next window meanwhile.
    """
    windows = [items[start : start + _WINDOW] for start in range(0, len(items), _WINDOW)]
    if len(windows) == 1:
        rows = tokenise(items)
        yield rows, encode(rows)
        return
    for rows in map_prefetched(tokenise, windows, threads=1, most_waiting=2):
        yield rows, encode(rows)


def row_vectors(
    ranker: Ranker, rows: Sequence[Sequence[int]], batch_tokens: int = BATCH_TOKENS
) -> Tensor:
    """[N, D] for N candidates that `Ranker.candidate_rows` has tokenised, in their order."""
    return encode_rows(ranker, rows, ranker.dual.encode_candidates, batch_tokens)


def context_vectors(
    ranker: Ranker, contexts: Sequence[Sequence[str]], batch_tokens: int = BATCH_TOKENS
) -> tuple[Tensor, Tensor]:
    """Vectors [N, M, D] and their mask [N, M] for N contexts, in their order."""
    return context_row_vectors(ranker, ranker.context_rows(contexts), batch_tokens)


def context_row_vectors(
    ranker: Ranker, rows: Sequence[Sequence[int]], batch_tokens: int = BATCH_TOKENS
) -> tuple[Tensor, Tensor]:
    """As `context_vectors`, for contexts that `Ranker.context_rows` has tokenised."""

    def encode(tokens: Tokens) -> Tensor:
        vectors_BMD, mask_BM = ranker.dual.encode_contexts(tokens)
        # One tensor for both: the mask travels as a last column.
        return torch.cat([vectors_BMD.float(), mask_BM[:, :, None].float()], dim=2)

    outputs = encode_rows(ranker, rows, encode, batch_tokens)
    return outputs[:, :, :-1], outputs[:, :, -1] > 0


def encode_rows(
    ranker: Ranker,
    rows: Sequence[Sequence[int]],
    encode: Callable[[Tokens], Tensor],
    batch_tokens: int = BATCH_TOKENS,
) -> Tensor:
    """What `encode` makes of rows of token ids, in their order."""

    def forward(places: list[int]) -> Tensor:
        tokens = ranker.tokenizer.batch([rows[place] for place in places])
        return encode(_even(ranker, tokens).to(ranker.device))

    return _run_in_batches(ranker, [len(row) for row in rows], batch_tokens, forward)


def vector_scores(
    ranker: Ranker, vectors_MD: Tensor, mask_M: Tensor, candidates_CD: Tensor
) -> Tensor:
    """[C]: the scores of candidates for one context, by the vectors of both."""
    device = ranker.device
    with torch.inference_mode():
        inputs = (vectors_MD[None].to(device), mask_M[None].to(device), candidates_CD.to(device))
        scores_C: Tensor = ranker.dual.scores(*inputs)[0].cpu()
    return scores_C


class Explained(NamedTuple):
    """The attention of a context's vectors to its tokens, and their weights in each candidate's score:

        score[c] = Σ_m weight[c,m] · (vector[m] · candidate[c]),   vector[m] = Σ_t attention[m,t] · output[t]

    The settings may add a projection, a cut or a length to the vectors. Multi-head attention has layers of
    its own: the weights are the mean over its heads then, and no sum of this kind is the score.
    """

    tokens: list[str]
    """`Tokenizer.pieces`, special tokens included."""
    attention_MT: Tensor
    """Rows add up to 1, those of vectors that do not count to 0."""
    weights_CM: Tensor
    """Rows add up to 1."""


def explain(
    ranker: Ranker,
    row: Sequence[int],
    vectors_MD: Tensor,
    mask_M: Tensor,
    candidates_CD: Tensor,
) -> Explained:
    """Explains the scores of candidates for a context, a row of `Ranker.context_rows`, with these vectors.

    Raises BadInput for a ranker whose contexts have no vectors.
    """
    network, device = ranker.dual, ranker.device
    (attention_MT,) = encode_rows(ranker, [row], network.attention_to_tokens)
    inputs = (vectors_MD[None].to(device), mask_M[None].to(device), candidates_CD.to(device))
    with torch.inference_mode():
        weights_CM = network.vector_weights(*inputs)[0].cpu()
    return Explained(ranker.tokenizer.pieces(row), attention_MT[:, : len(row)], weights_CM)


def pair_scores(
    ranker: Ranker,
    contexts: Sequence[Sequence[str]],
    candidates: Sequence[Sequence[str]],
    batch_tokens: int = BATCH_TOKENS,
) -> list[Tensor]:
    """A cross-encoder's scores: for each context those of its own candidates, [C] each."""
    context_rows = ranker.context_rows(contexts)
    candidate_rows = ranker.candidate_rows([text for texts in candidates for text in texts])
    context_of_row = [place for place, texts in enumerate(candidates) for _ in texts]
    pairs = [(context_rows[context_of_row[place]], row) for place, row in enumerate(candidate_rows)]
    scores = pair_row_scores(ranker, pairs, batch_tokens)
    return list(torch.split(scores, [len(texts) for texts in candidates]))


def pair_row_scores(
    ranker: Ranker,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    batch_tokens: int = BATCH_TOKENS,
) -> Tensor:
    """[N] scores of N pairs of a row of `Ranker.context_rows` and one of `Ranker.candidate_rows`."""
    network = ranker.cross

    def forward(places: list[int]) -> Tensor:
        contexts, candidates = zip(*(pairs[place] for place in places), strict=True)
        tokens = ranker.pairs(contexts, candidates)
        return network.score_pairs(_even(ranker, tokens).to(ranker.device))

    lengths = [len(context) + len(candidate) - 1 for context, candidate in pairs]
    return _run_in_batches(ranker, lengths, batch_tokens, forward)


def _even(ranker: Ranker, tokens: Tokens) -> Tokens:
    """The batch with a width of which there are few: oneDNN prepares a product for each new shape, and keeps
    1,024 of them. So one to eight contexts of any lengths took 2.9 ms in place of 1.7 with the demo's two
    layers, and 15.0 in place of 13.4 with all-MiniLM."""
    if not isinstance(ranker.tokenizer, Tokenizer):  # a ConveRT model packs its batches
        return tokens
    width = -(-tokens.ids_BT.shape[1] // _WIDTHS) * _WIDTHS
    return tokens.widened(min(width, ranker.positions), ranker.tokenizer.pad)


def _run_in_batches(
    ranker: Ranker, lengths: list[int], batch_tokens: int, forward: Callable[[list[int]], Tensor]
) -> Tensor:
    """Runs `forward` over all places, longest first, and puts the results in order. While a GPU computes a
    batch the caller makes the next one: a result is copied when the batch behind it has begun."""
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    parts, waiting = list[Tensor](), list[Tensor]()
    start = 0
    bf16 = resolve_precision(ranker.precision, ranker.device) == "bf16" and not _is_bf16(ranker)
    limit = _SUITS_A_CORE * torch.get_num_threads() if ranker.device.type == "cpu" else _SUITS_A_GPU
    budget = batch_tokens or limit
    with torch.inference_mode(), torch.autocast(ranker.device.type, torch.bfloat16, enabled=bf16):
        while start < len(order):
            rows = max(1, budget // lengths[order[start]])
            try:
                part = forward(order[start : start + rows])
            except (MemoryError, RuntimeError) as error:
                if rows == 1 or not _is_out_of_memory(error):
                    raise
                torch.cuda.empty_cache()
                budget = rows // 2 * lengths[order[start]]
                continue
            parts += [result.cpu() for result in waiting]
            waiting = [part.float()]
            start += rows
    parts += [result.cpu() for result in waiting]
    results = torch.cat(parts)
    inverse = torch.empty(len(order), dtype=torch.long)
    inverse[torch.tensor(order)] = torch.arange(len(order))
    return results[inverse]


def _is_bf16(ranker: Ranker) -> bool:
    """Whether `to_bf16` was there; codes and heads stay float32."""
    encoder = next(module for module in ranker.modules() if isinstance(module, TextEncoder))
    return encoder.dtype == torch.bfloat16


def _is_out_of_memory(error: Exception) -> bool:
    """torch has an exception of its own for this on GPUs only."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)
