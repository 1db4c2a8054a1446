"""Scores of a device's rows for some contexts in one pass, as a Triton kernel.

A program takes BLOCK_N rows and GROUP contexts, multiplies them, and reduces the products to scores before it
writes anything: the logits [N, M] never reach memory. What it costs for 10 million rows of 384 dimensions in
bfloat16, and 64 vectors a context (H100 SXM: 3.35 TB/s, 989 TFLOPS of bf16, 132 SMs at some 1.7 GHz):

                          one context                      16 contexts
    bytes of the rows     7.68 GB              2.3 ms      7.68 GB            2.3 ms
    bytes of the scores   0.04 GB              0.0 ms      0.64 GB            0.2 ms
    products              0.49 TFLOP           0.5 ms      7.9 TFLOP          7.9 ms
    exponentials          0.64 G, 16 a clock   0.2 ms      10.2 G             2.9 ms
    bound by              reading the rows                 products, then exponentials
    measured              2.7 ms, 1.06 reads               17.3 ms, 0.46 of the peak

Programs of the same rows and other contexts stand next to each other, so that the rows come from memory
once, and from the L2 cache after that. Of sixteen shapes of a program these were the fastest on an H100, with
three stages. With four, int8 rows beside 256 columns gave wrong scores (Triton 3.6): `device_scores` compares
the first scores with plain torch's, so that only speed was lost.

A module of its own, because it needs Triton; `device_scores` decides where it runs.

Axes: N rows, Q contexts, M vectors of a context, D dimensions, G contexts of a program.
"""

# Triton is not typed, and reads annotations of its own: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-any-return"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# tl.dot multiplies by 16 columns or more.
_LEAST_COLUMNS = 16
_LOG2_E = tl.constexpr(1.4426950408889634)


class _Tile(NamedTuple):
    """The shape of a program's work."""

    rows: int
    contexts: int
    """Power of two."""
    vectors: int
    """Of each context at a time. Power of two."""
    dimensions: int
    """At a time."""
    warps: int
    stages: int


def scores(
    rows_ND: Tensor,
    scales_N: Tensor | None,
    vectors_QMD: Tensor,
    counts_Q: Tensor,
    allowed_N: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, int]:
    """The scores of the rows, [Q, N] float32, -inf for those that are not allowed; the highest one of each
    block of rows, [Q, B]; and how many rows a block has.

    `rows_ND`: bfloat16, float32 or int8; `scales_N`: factors of int8 rows. `vectors_QMD`: float32; the first
    `counts_Q` (int32) of each context count, one at least, and the others are zeros.
    """
    count, width = rows_ND.shape
    contexts, vectors, _ = vectors_QMD.shape
    compute = torch.float32 if rows_ND.dtype == torch.float32 else torch.bfloat16
    tile = _tile(contexts, vectors, compute, rows_ND.device)
    padding = (0, 0, 0, -vectors % tile.vectors, 0, -contexts % tile.contexts)
    vectors_QMD = torch.nn.functional.pad(vectors_QMD.to(compute), padding).contiguous()
    counts_Q = torch.nn.functional.pad(counts_Q, (0, -contexts % tile.contexts), value=1)
    if INTERPRETED:  # Triton 3.9's interpreter multiplies the bits of bfloat16 as whole numbers
        vectors_QMD = vectors_QMD.float()
    scores_QN = torch.empty(contexts, count, dtype=torch.float32, device=rows_ND.device)
    blocks = triton.cdiv(count, tile.rows)
    highest_QB = torch.empty(contexts, blocks, dtype=torch.float32, device=rows_ND.device)
    groups = triton.cdiv(contexts, tile.contexts)
    _kernel[(blocks * groups,)](
        rows_ND,
        scales_N if scales_N is not None else counts_Q,  # not read
        vectors_QMD,
        counts_Q,
        allowed_N.view(torch.uint8) if allowed_N is not None else counts_Q,
        scores_QN,
        highest_QB,
        count,
        contexts,
        scale,
        WIDTH=width,
        VECTORS=vectors_QMD.shape[1],
        BLOCK_N=tile.rows,
        GROUP=tile.contexts,
        BLOCK_M=tile.vectors,
        BLOCK_D=tile.dimensions,
        HAS_SCALES=scales_N is not None,
        HAS_FILTER=allowed_N is not None,
        COMPUTE=tl.float32 if INTERPRETED or compute == torch.float32 else tl.bfloat16,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return scores_QN, highest_QB, tile.rows


def _tile(contexts: int, vectors: int, compute: torch.dtype, device: torch.device) -> _Tile:
    """One context has a kernel of its own, as it waits for memory; several share another one, whatever their
    number, so that a new number of them is not compiled first."""
    is_float32 = compute == torch.float32  # multiplied without tensor cores, from registers
    is_hopper, shared_memory = _hardware(device)
    # With 128 rows and 256 columns, the sums are 128 registers of each of 256 threads. More vectors than 128
    # come in blocks, and what is kept between these needs registers, too.
    columns = 64 if is_float32 else 256 if is_hopper and vectors <= 128 else 128
    block_m = min(triton.next_power_of_2(vectors), columns)
    group = max(1 if contexts == 1 else columns // block_m, _LEAST_COLUMNS // block_m, 1)
    columns = group * block_m
    rows, dimensions = (64, 32) if is_float32 else (128, 64)
    stage_bytes = (rows + columns) * dimensions * (4 if is_float32 else 2)
    stages = max(1, min(3, shared_memory // stage_bytes))
    return _Tile(rows, group, block_m, dimensions, 8 if columns > 64 else 4, stages)


def _hardware(device: torch.device) -> tuple[bool, int]:
    """(whether it multiplies by warp groups, bytes of shared memory that a program may take)"""
    if device.type != "cuda":
        return True, 1 << 18
    properties: Any = torch.cuda.get_device_properties(device)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 48 << 10)
    return torch.version.cuda is not None and properties.major >= 9, int(0.9 * shared_memory)


@triton.jit(do_not_specialize=["count", "contexts", "scale"])
def _kernel(
    rows,
    scales,
    vectors,
    counts,
    allowed,
    scores,
    highest,
    count,
    contexts,
    scale,
    WIDTH: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_FILTER: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    groups = tl.cdiv(contexts, GROUP)
    first_context = tl.program_id(0) % groups * GROUP
    # Numbers of a pool are more than int32 counts; those of a tile are not.
    first_row = (tl.program_id(0) // groups).to(tl.int64) * BLOCK_N
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    column = tl.arange(0, GROUP * BLOCK_M)
    contexts_G = first_context + tl.arange(0, GROUP)
    is_row_N = first_row + n < count
    is_read_N = is_row_N
    if HAS_FILTER:  # a row that is not allowed is not read
        is_read_N &= tl.load(allowed + first_row + n, mask=is_row_N, other=0) != 0
    counts_G = tl.load(counts + contexts_G)
    rows_N1 = rows + first_row * WIDTH + n[:, None] * WIDTH
    vectors_C = (first_context + column // BLOCK_M) * VECTORS + column % BLOCK_M

    # Softmax over blocks of vectors: of those so far, the highest logit (in powers of two), the sum of the
    # weights, and the weighted sum of the logits.
    highest_NG = tl.full([BLOCK_N, GROUP], float("-inf"), tl.float32)
    weights_NG = tl.zeros([BLOCK_N, GROUP], tl.float32)
    sums_NG = tl.zeros([BLOCK_N, GROUP], tl.float32)
    for first_vector in range(0, VECTORS, BLOCK_M):
        logits_NC = tl.zeros([BLOCK_N, GROUP * BLOCK_M], tl.float32)
        vectors_1C = vectors + (vectors_C + first_vector)[None, :] * WIDTH
        for first_d in range(0, WIDTH, BLOCK_D):
            place = first_d + d
            if WIDTH % BLOCK_D == 0:
                rows_ND = tl.load(rows_N1 + place[None, :], mask=is_read_N[:, None], other=0)
                vectors_DC = tl.load(vectors_1C + place[:, None])
            else:
                is_place = place < WIDTH
                is_read_ND = is_read_N[:, None] & is_place[None, :]
                rows_ND = tl.load(rows_N1 + place[None, :], mask=is_read_ND, other=0)
                vectors_DC = tl.load(vectors_1C + place[:, None], mask=is_place[:, None], other=0)
            logits_NC = tl.dot(rows_ND.to(COMPUTE), vectors_DC, logits_NC, input_precision="ieee")
        if HAS_SCALES:
            logits_NC *= tl.load(scales + first_row + n, mask=is_row_N, other=0)[:, None]
        logits_NGM = tl.reshape(logits_NC, [BLOCK_N, GROUP, BLOCK_M])
        counts_vector_GM = (first_vector + tl.arange(0, BLOCK_M))[None, :] < counts_G[:, None]
        powers_NGM = tl.where(
            counts_vector_GM[None, :, :], logits_NGM * (scale * _LOG2_E), float("-inf")
        )
        top_NG = tl.maximum(highest_NG, tl.max(powers_NGM, axis=2))
        weights_NGM = tl.exp2(powers_NGM - top_NG[:, :, None])
        fade_NG = tl.exp2(highest_NG - top_NG)
        weights_NG = weights_NG * fade_NG + tl.sum(weights_NGM, axis=2)
        sums_NG = sums_NG * fade_NG + tl.sum(weights_NGM * logits_NGM, axis=2)
        highest_NG = top_NG
    scores_NG = tl.where(is_read_N[:, None], sums_NG / weights_NG, float("-inf"))
    places_NG = contexts_G[None, :].to(tl.int64) * count + first_row + n[:, None]
    is_context_G = contexts_G < contexts
    tl.store(scores + places_NG, scores_NG, mask=is_row_N[:, None] & is_context_G[None, :])
    tl.store(
        highest + (contexts_G.to(tl.int64) * tl.cdiv(count, BLOCK_N) + first_row // BLOCK_N),
        tl.max(scores_NG, axis=0),
        mask=is_context_G,
    )


INTERPRETED = not isinstance(_kernel, triton.runtime.JITFunction)
"""Whether the kernel runs on a CPU, in Triton's interpreter: TRITON_INTERPRET=1 when Triton was imported."""
