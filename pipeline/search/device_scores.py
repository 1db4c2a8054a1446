"""Scores of a device's rows for some contexts, and what they may be off, proved.

With L[c,i] = candidate[c] · vector[i] and an attention that multiplies by a > 0, the score is

    f(L) = Σ w_i L_i,   w = softmax(a L),   ∂f/∂L_i = w_i (1 + a (L_i - f))

If no logit is off by more than δ, the score is off by at most δ times the highest sum of |∂f/∂L_i| that any
M logits can have. With d_i = a (L_i - f), whose mean by the weights is 0, and p for the weight of all i with
d_i ≥ -1, that sum is

    Σ w_i |1 + d_i| = 1 + 2 Σ{d_i < -1} w_i (-1 - d_i) = 1 + 2 (Σ{d_i ≥ -1} w_i d_i - (1 - p))

As a L_i = ln w_i + constant, d_i = ln w_i + H, where H is the entropy of the weights. H is made of the
entropies of the split, of this part (≥ 0), and of the rest (≤ ln (M - 1)), so that over this part
Σ w_i d_i ≤ p (1 - p) (ln (p / (1 - p)) + ln (M - 1)), and

    Σ |∂f/∂L_i| ≤ max over p of 1 + 2 (1 - p) (p (ln (p / (1 - p)) + ln (M - 1)) - 1)        M = 64: 2.5

which one high logit among M - 1 equal ones reaches. What a logit may be off, of a row c and a vector y:

    y as v in bfloat16                      |c| |y - v|                 |y - v| is computed in float64
    c in bfloat16 (if the pool is float32)  2⁻⁸ |c| |y|
    adding D products in float32            4 D u |c| |v|               u = 2⁻²⁴
    rounding a L, on which weights depend   4 u |c| |v|
    numbers below 2⁻¹²⁶ taken for 0         2⁻¹²⁶ (2 D (|c| + |v| + 1))

Tensor cores truncate what they add (Fasi et al., Numerical behavior of NVIDIA tensor cores, 2021), so the
sums have twice the error that `bounds` gives them. The softmax, in float32 with exponentials of a relative
error of 2⁻²², is off by (4 M + 64) u |c| |v|.

Axes: N rows, Q contexts, M vectors of a context, D dimensions.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from pipeline.arrays import Floats, Ints
from pipeline.models.heads import no_autocast
from pipeline.pools.device_rows import DeviceRows

_UNIT, _BF16, _TINY = 2.0**-24, 2.0**-8, 2.0**-126
# Of what is in a bound: the product of all second-order terms, and the rounding of the bound itself.
_SAFETY = 2.0**-6
_LARGE = 2.0**100
_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 26, "mps": 1 << 24}  # of a chunk, without the kernel
_CHECKED_ROWS = 1024
_BLOCK_ROWS = 128

_log = logging.getLogger("polyrank.search")


@dataclass(frozen=True)
class Contexts:
    """The vectors of some contexts on a device."""

    vectors_QMD: Tensor
    """float32, exact; zeros behind the last one that counts."""
    counts_Q: Tensor
    """int32: vectors that count, one at least."""
    scale: float
    """The attention's factor a."""
    vectors: Sequence[Floats]
    """[M, D] float64 each."""

    @classmethod
    def of(
        cls, vectors: Sequence[Floats], most: int, scale: float, device: torch.device
    ) -> Contexts:
        """`most`: M. The kernel is compiled for a number of vectors, so that of the model is best."""
        padded_QMD = np.zeros((len(vectors), most, vectors[0].shape[1]), np.float32)
        for row_MD, vectors_MD in zip(padded_QMD, vectors, strict=True):
            row_MD[: len(vectors_MD)] = vectors_MD
        counts_Q = torch.tensor([len(v) for v in vectors], dtype=torch.int32)
        return cls(torch.from_numpy(padded_QMD).to(device), counts_Q.to(device), scale, vectors)

    def part(self, some: slice) -> Contexts:
        """Without a copy: one to a GPU would wait until it has scored what was begun before."""
        return Contexts(self.vectors_QMD[some], self.counts_Q[some], self.scale, self.vectors[some])


@dataclass(frozen=True)
class Errors:
    """What a score of each context may be off, by the length of the row."""

    per_length_Q: Floats
    """float64"""
    constant_Q: Floats

    def of(self, lengths: Floats | float, queries: Ints | int) -> Floats:
        """The errors for pairs of a row's length and a context."""
        return self.per_length_Q[queries] * lengths + self.constant_Q[queries]


class Scorer:
    """Scores the rows by the kernel where it runs, or else in chunks by plain torch. The contexts are such
    that `is_bounded`."""

    def __init__(self, rows: DeviceRows, contexts: Contexts, allowed_N: Tensor | None) -> None:
        self._rows, self._contexts, self._allowed_N = rows, contexts, allowed_N
        kernel = kernel_module(rows.device.type)
        self._kernel = kernel if kernel is not None and self._agrees(kernel) else None

    @functools.cached_property
    def errors(self) -> Errors:
        """Computed on the CPU, while a GPU scores."""
        return error_bounds(self._rows, self._contexts, by_kernel=self._kernel is not None)

    def scores(self, section: slice) -> tuple[Tensor, Tensor, int]:
        """The scores of a section of the rows, [Q, N] float32, -inf for rows that are not allowed; the
        highest one of each block of rows, [Q, B]; and how many rows a block has."""
        inputs = (self._rows, section, self._contexts, self._allowed_N)
        if self._kernel is not None:
            return kernel_scores(self._kernel, *inputs)
        scores_QN = plain_scores(*inputs)
        padding = (0, -scores_QN.shape[1] % _BLOCK_ROWS)
        padded_QN = torch.nn.functional.pad(scores_QN, padding, value=-torch.inf)
        blocks_QBN = padded_QN.view(len(padded_QN), -1, _BLOCK_ROWS)
        return scores_QN, blocks_QBN.amax(2), _BLOCK_ROWS

    def _agrees(self, kernel: ModuleType) -> bool:
        """Whether the kernel runs for such contexts, and gives the scores that it should: it is compiled for
        the GPU at hand, and its first answer is compared with that of plain torch."""
        rows, contexts = self._rows, self._contexts
        key = (str(rows.device), rows.matrix_ND.dtype, contexts.vectors_QMD.shape[1:],
               len(contexts.vectors) == 1, self._allowed_N is None)  # fmt: skip
        if key not in _agreement:
            _agreement[key] = self._compare(kernel)
        return _agreement[key]

    def _compare(self, kernel: ModuleType) -> bool:
        first_rows = slice(0, min(len(self._rows), _CHECKED_ROWS))
        inputs = (self._rows, first_rows, self._contexts, self._allowed_N)
        expected_QN = plain_scores(*inputs)
        try:
            differences_QN = (kernel_scores(kernel, *inputs)[0] - expected_QN).abs()
        except Exception as problem:  # whatever a compiler or a driver raises
            reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
            _log.warning("search: plain torch scores the rows, as Triton cannot (%s)", reason)
            return False
        differences_QN[expected_QN.isneginf()] = 0
        lengths_N = self._rows.lengths_N[first_rows].astype(np.float64)
        queries_Q1 = np.arange(len(expected_QN))[:, None]
        errors = (
            error_bounds(self._rows, self._contexts, by_kernel) for by_kernel in (True, False)
        )
        allowed_QN = sum(each.of(lengths_N, queries_Q1) for each in errors)
        if not (differences_QN.double().cpu().numpy() <= allowed_QN).all():
            _log.warning("search: plain torch scores the rows, as Triton's scores on %s are wrong",
                         self._rows.device)  # fmt: skip
            return False
        return True


_agreement: dict[object, bool] = {}


@functools.cache
def kernel_module(device_type: str) -> ModuleType | None:
    """The kernel's module if it may run on a kind of device: CUDA and ROCm, or a CPU by the interpreter."""
    is_interpreted = device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if find_spec("triton") is None or not (device_type == "cuda" or is_interpreted):
        return None
    from pipeline.search import triton_scores

    return triton_scores


def kernel_scores(
    kernel: ModuleType,
    rows: DeviceRows,
    section: slice,
    contexts: Contexts,
    allowed_N: Tensor | None,
) -> tuple[Tensor, Tensor, int]:
    """See `triton_scores.scores`."""
    # Triton starts kernels on the current GPU.
    with torch.cuda.device_of(rows.matrix_ND):  # type: ignore[no-untyped-call]
        scored: tuple[Tensor, Tensor, int] = kernel.scores(
            rows.matrix_ND[section],
            None if rows.scales_N is None else rows.scales_N[section],
            contexts.vectors_QMD,
            contexts.counts_Q,
            None if allowed_N is None else allowed_N[section],
            contexts.scale,
        )
    return scored


def plain_scores(
    rows: DeviceRows, section: slice, contexts: Contexts, allowed_N: Tensor | None
) -> Tensor:
    """The same in chunks by plain torch, with products in float32."""
    queries, most, _ = contexts.vectors_QMD.shape
    device = rows.device
    vectors_DC = contexts.vectors_QMD.flatten(0, 1).T
    counts_QM = torch.arange(most, device=device) < contexts.counts_Q[:, None]
    scores_QN = torch.empty(queries, section.stop - section.start, device=device)
    step = max(1, _LOGITS.get(device.type, 1 << 24) // (queries * most))
    for start in range(section.start, section.stop, step):
        part = slice(start, min(start + step, section.stop))
        with no_autocast(vectors_DC):
            logits_NC = rows.matrix_ND[part].float() @ vectors_DC
        if rows.scales_N is not None:
            logits_NC *= rows.scales_N[part, None]
        logits_NQM = logits_NC.view(-1, queries, most)
        powers_NQM = (logits_NQM * contexts.scale).masked_fill(~counts_QM, -torch.inf)
        scores_NQ = (powers_NQM.softmax(2) * logits_NQM).sum(2)
        scores_QN[:, start - section.start : part.stop - section.start] = scores_NQ.T
    if allowed_N is not None:
        scores_QN.masked_fill_(~allowed_N[section], -torch.inf)
    return scores_QN


def is_bounded(rows: DeviceRows, vectors_MD: Floats) -> bool:
    """Whether all products stay far from the end of float32's range; otherwise nothing is bounded."""
    codes = 0.0 if rows.scales_N is None else 127 * vectors_MD.shape[1] ** 0.5
    return max(1.0, rows.longest, codes) * max(1.0, 2 * _longest(vectors_MD)) < _LARGE


def error_bounds(rows: DeviceRows, contexts: Contexts, by_kernel: bool) -> Errors:
    """What the scores of the kernel, or of plain torch, may be off; the proof is above."""
    width = rows.matrix_ND.shape[1]
    of_rows = _BF16 if rows.is_rounded else 0.0
    of_products = 4 * (width + 1) * _UNIT
    if not by_kernel and torch.get_float32_matmul_precision() != "highest":
        of_products += 2.0**-6  # TF32 or bfloat16, truncated perhaps, of both
    is_bf16 = by_kernel and rows.matrix_ND.dtype != torch.float32
    per_length, constant = [], []
    for vectors_MD in contexts.vectors:
        multiplied_MD = torch.from_numpy(vectors_MD)
        if is_bf16:
            multiplied_MD = multiplied_MD.bfloat16().double()
        missed = _longest(vectors_MD - multiplied_MD.numpy())
        exact, multiplied = _longest(vectors_MD), _longest(multiplied_MD.numpy())
        count = len(vectors_MD)
        of_softmax = (4 * count + 64) * _UNIT * multiplied
        tiny = 2 * width * _TINY
        of_logits = missed + of_rows * exact + of_products * multiplied + tiny
        slope = sensitivity(count)
        per_length.append((slope * of_logits + of_softmax) * (1 + _SAFETY))
        constant.append(slope * tiny * (exact + multiplied + 1) * (1 + _SAFETY))
    return Errors(np.array(per_length), np.array(constant))


@functools.cache
def sensitivity(vectors: int) -> float:
    """How many times a logit's error the score of M vectors may be off; the proof is above."""
    if vectors == 1:
        return 1.0
    p = np.linspace(0, 1, 10_001)[1:-1]
    sums = 1 + 2 * (1 - p) * (p * np.log(p * (vectors - 1) / (1 - p)) - 1)
    return 1.001 * max(1.0, float(sums.max()))


def _longest(vectors_MD: Floats) -> float:
    return float(np.linalg.norm(vectors_MD, axis=1).max())
