"""First weights with which an untrained ConveRT model ranks about as TF-IDF does, or as a bag of subwords
that a teacher has taught (ours, not the paper's).

The paper's start suits 700 million pairs: encodings are random functions of a text, and with Glorot's
weights the reduction, whose logits are not scaled, takes all of a text from a few tokens. On 1-of-100 of
3,500 pairs of Reddit such a model ranked 3 % right before training, this one 26 %, one of taught words 36 %,
and TF-IDF 27 %.

Here an encoding is nearly a weighted sum of its tokens' random vectors g, so that texts which share rare
words have similar ones. Two directions of a token's vector are kept for the weights:

    x = g + t(token) u + constant v,    query = v · x,    key = u · x,    softmax of query · key ~ rarity

u and v stand in the embeddings and in the first norm's beta; the skip projection leaves them out.
Of a bag of subwords, g are the directions of its vectors and their lengths take the place of the rarity; the
skip projection turns sums of g back into the teacher's space. `fit_bag` makes the vectors, whose sums follow
a teacher's:

    text → Σ weight(subword) vector(subword)          a bag of subwords: their order is lost

It learns in seconds what ConveRT's blocks take half an hour for: fitted to all-MiniLM's vectors of 160,000
pairs of Reddit it ranks 36 % of 1-of-100 right (all-MiniLM 44 %, TF-IDF 27 %).

All weights are trained further; the other layers start small.

D dimensions, E of an encoding or a teacher's vector, V subwords.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.models.convert_rt.encoder import ConvertNetwork
from pipeline.models.losses import cosine_loss

_EMBEDDINGS = 0.4
"""Largest number of a random embedding: a step of AdamW, some 0.001, is small beside it."""
_DEVIATION = _EMBEDDINGS / math.sqrt(3)
_POSITIONS = 1 / 8  # of a token's vector, at most
_BRANCHES = 0.1  # of the usual weights, in layers that are added (R@1 with 0.3: 3 to 7 points less)
_REDUCTION = 0.1  # likewise, in queries and keys
_CONSTANT, _RARITY = 0.3, 0.45  # shares of a vector's length along v, and at most along u
_LEAST_LENGTH = -5.0  # ln of a vector's length over the longest one's, at least
_POWER = 1.5  # of the inverse document frequency (R@1 of 1,000 Reddit pairs: 27.7 with 1, 28.5, 27.7 with 2)
# Of a bag.
_PASSES, _BATCH, _RATE = 2, 1024, 3e-3  # others: 35.5 to 36.4 % of the same 3,500 pairs
_LEAST_STEPS = 200  # of few texts: more passes
_SPREAD = 0.01  # of new vectors


def rarity(holding_V: Tensor, texts: int) -> Tensor:
    """[V]: ln of each subword's weight, 1.5 ln ln (texts / texts that hold it)."""
    frequency_V = holding_V.float().clamp(min=1.0, max=0.9 * texts) / max(texts, 2)
    return _POWER * (-frequency_V.clamp(max=0.9).log()).log()


@torch.no_grad()
def start_from_shared_words(network: ConvertNetwork, rarity_V: Tensor | None) -> None:
    """Sets the weights of a new network, by torch's generator. `rarity_V`: of the subwords; those of hash
    buckets count as the rarest. None: all tokens count the same."""
    u_D, v_D = _directions(network.config.width)
    _set_weights(network, rarity_V, u_D, v_D)


@torch.no_grad()
def start_from_taught_words(network: ConvertNetwork, vectors_VE: Tensor) -> None:
    """Sets the weights of a new network, by torch's generator, so that it encodes as `fit_bag`'s vectors.

    E is the length of an encoding. Subwords of hash buckets have random vectors, which count least.
    """
    width = network.config.width
    u_D, v_D = _directions(width)
    log_length_V = vectors_VE.norm(dim=1).clamp(min=1e-9).log()
    log_length_V = (log_length_V - log_length_V.max()).clamp(min=_LEAST_LENGTH)
    _set_weights(network, log_length_V, u_D, v_D, buckets_share=0.0)

    to_width_ED = _rotation(vectors_VE, width, u_D, v_D)
    table = network.tokens.subwords.weight
    assert table is not None
    g_VD = nn.functional.normalize(vectors_VE @ to_width_ED, dim=1)
    along_u_V1 = (table[: len(g_VD)] @ u_D)[:, None]
    table[: len(g_VD)] = _DEVIATION * math.sqrt(width) * g_VD + along_u_V1 * u_D
    heads = network.config.reduction_heads
    network.skip.weight.copy_(to_width_ED.T.repeat(heads, 1) / math.sqrt(heads))


def _set_weights(
    network: ConvertNetwork,
    rarity_V: Tensor | None,
    u_D: Tensor,
    v_D: Tensor,
    buckets_share: float = _RARITY,
) -> None:
    width = network.config.width
    table = network.tokens.subwords.weight
    assert table is not None
    share_V1 = torch.zeros(len(table), 1)
    spread = 0.0
    if rarity_V is not None:
        low, high = rarity_V.min(), rarity_V.max()
        spread = (high - low).item()
        share_V1.fill_(buckets_share)
        share_V1[: len(rarity_V), 0] = _RARITY * (rarity_V - low) / max(spread, 1e-6)
    table.uniform_(-_EMBEDDINGS, _EMBEDDINGS)
    _project_out(table, u_D, v_D)
    ratio_V1 = share_V1 / (1 - share_V1**2).sqrt()  # so that of the normed vector it is the share
    table.add_(_DEVIATION * math.sqrt(width) * ratio_V1 * u_D)
    part: Any  # a ModuleList does not tell its members' type
    for part in network.tokens.positions:
        part.weight.normal_(std=_POSITIONS * _DEVIATION * math.sqrt(width))
        _project_out(part.weight, u_D, v_D)
    network.tokens.norm.beta.copy_(_CONSTANT * math.sqrt(width) * v_D)

    block: Any
    for block in network.blocks.layers:
        block.attention.out.weight *= _BRANCHES
        block.feed_forward.narrow.weight *= _BRANCHES
    for side in (network.context, network.candidate, network.earlier):
        if side is not None:
            side.out.weight.mul_(_BRANCHES)
    # Vectors of length √H are added to means of encodings, of length 1/2 to 1, and to encodings.
    if network.combined is not None and network.combined_skip is not None:
        nn.init.eye_(network.combined_skip.weight)
        hidden = network.combined.out.weight.shape[0]
        network.combined.out.weight.mul_(_BRANCHES / (2 * math.sqrt(hidden)))
    if network.code_projection is not None:
        network.code_projection.weight.mul_(_BRANCHES / math.sqrt(width))

    # A block's norms shorten all of x by √(1 + constant²), as v makes it longer.
    squared_length = 1 + _CONSTANT**2
    slope = spread / (_RARITY * _CONSTANT * width / squared_length)
    for query, key in zip(network.reduction.queries, network.reduction.keys, strict=True):
        for weight, direction_D in ((query, v_D), (key, u_D)):
            weight *= _REDUCTION
            weight[:, 0] = math.sqrt(slope) * direction_D
    heads = network.config.reduction_heads
    skip_DE = nn.init.orthogonal_(torch.empty(width, network.dimensions))
    skip_DE -= u_D[:, None] * (u_D @ skip_DE) + v_D[:, None] * (v_D @ skip_DE)
    network.skip.weight.copy_(skip_DE.repeat(heads, 1) / math.sqrt(heads))


def _directions(width: int) -> tuple[Tensor, Tensor]:
    """Two orthogonal directions of length 1 and mean 0, which layer norms keep."""
    random_D2 = torch.randn(width, 2)
    q_D2, _ = torch.linalg.qr(random_D2 - random_D2.mean(dim=0))
    return q_D2[:, 0], q_D2[:, 1]


def _rotation(vectors_VE: Tensor, width: int, u_D: Tensor, v_D: Tensor) -> Tensor:
    """[E, D]: into the width, orthogonal to u, v and the mean, which layer norms take away. Where E is too
    large for it, the principal directions."""
    length = vectors_VE.shape[1]
    dimensions = min(length, width - 3)
    excluded_3D = torch.stack([torch.ones(width), u_D, v_D])
    q_DX, _ = torch.linalg.qr(torch.cat([excluded_3D, torch.randn(dimensions, width)]).T)
    principal_EK = torch.eye(length)
    if dimensions < length:
        principal_EK = torch.linalg.eigh(vectors_VE.T @ vectors_VE).eigenvectors[:, -dimensions:]
    rotation_ED: Tensor = principal_EK @ q_DX[:, 3:].T
    return rotation_ED


def _project_out(rows_VD: Tensor, *directions: Tensor) -> None:
    for direction_D in directions:
        rows_VD -= (rows_VD @ direction_D)[:, None] * direction_D


def fit_bag(rows: Sequence[Sequence[int]], teacher_NE: Tensor, log_weight_V: Tensor) -> Tensor:
    """[V, E] float32: vectors whose lengths are the subwords' weights.

    rows: the ids of N texts, from 0 to V - 1. `log_weight_V`: of the weights at first, the rarity of a
    subword. The same texts give the same vectors. A subword that is in no text has zeros.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (len(log_weight_V), teacher_NE.shape[1])
    vectors_VE = nn.Parameter(_SPREAD * torch.randn(shape, generator=generator))
    log_weight_V = nn.Parameter(log_weight_V.float().clone())
    optimizer = torch.optim.Adam([vectors_VE, log_weight_V], lr=_RATE)
    filled = torch.tensor([number for number, row in enumerate(rows) if row], dtype=torch.long)
    is_found_V = torch.zeros(len(log_weight_V), dtype=torch.bool)
    batches = max(1, -(-len(filled) // _BATCH))
    passes = max(_PASSES, -(-_LEAST_STEPS // batches))
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, passes * batches)
    for _ in range(passes):
        order = torch.randperm(len(filled), generator=generator)
        for numbers in torch.split(filled[order], _BATCH):
            batch = [rows[number] for number in numbers.tolist()]
            ids = torch.tensor([subword for row in batch for subword in row])
            starts = torch.tensor([0, *map(len, batch[:-1])]).cumsum(0)
            is_found_V[ids] = True
            # Not log_weight_V[ids], whose gradient threads add up in any order.
            weights = nn.functional.embedding(ids, log_weight_V[:, None])[:, 0].exp()
            sums = nn.functional.embedding_bag(
                ids, vectors_VE, starts, mode="sum", per_sample_weights=weights
            )
            loss = cosine_loss(sums, teacher_NE[numbers].float())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            decay.step()
    return (vectors_VE * (log_weight_V.exp() * is_found_V)[:, None]).detach()
