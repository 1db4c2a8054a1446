"""Products of many rows with a few columns, by the kernel that is fastest on this processor.

NumKong has kernels for AVX2, VNNI, AVX-512, AMX, NEON and SVE, and adds bfloat16 in float32; torch calls
oneDNN or MKL. Which one is faster depends on the processor, the type and the number of columns. So each
process measures it once, within some milliseconds. Nanoseconds of a core (AVX2, Zen 3) for 384 numbers:

    columns                                 4     8    16
    int8, NumKong                          44    85   200
    bfloat16, NumKong                      54    99   226     and 50 to make it float32 for MKL
    float32, MKL, columns times rows       99   135   258
    float32, MKL, rows times columns      524   539   199

Axes: B rows of a block, K numbers of a row, C columns.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numkong
import torch
from torch import Tensor

from pipeline.models.torch_operators import int8_mm
from pipeline.processor import KINDS, bound_kind, processor_has
from pipeline.search.threads import one_thread

Product = Callable[[Tensor], Tensor]
"""[B, K] → [B, C] int32, float32, float64 or bfloat16; valid until the next call."""
Kernel = Callable[[Tensor, int], Product]
"""(columns [K, C], the most rows of a block) → product."""

_MEASURED_ROWS, _ROUNDS = 512, 4
_COLUMNS = (4, 8, 16)
_FREE = 1.25
_HOPELESS = 8
# The processors that NumKong names its kernels by, as kinds of `pipeline.processor`.
_NUMKONG_KINDS = {
    "haswell": "avx2", "skylake": "avx512",
    "alder": "avx512_vnni", "sierra": "avx512_vnni", "icelake": "avx512_vnni",
    "genoa": "avx512_bf16", "turin": "avx512_bf16", "sapphire": "avx512_bf16",
    "sapphireamx": "amx", "graniteamx": "amx", "diamond": "amx",
}  # fmt: skip


def product_with(matrix_KC: Tensor, most_rows: int) -> Product:
    """The product with these columns, whose rows have the same type."""
    width, columns = matrix_KC.shape
    return _fastest(matrix_KC.dtype, width, columns)[0](matrix_KC, most_rows)


@functools.cache
def free_columns(dtype: torch.dtype, width: int) -> int:
    """The number of columns that take hardly longer than the fewest: 16 with AMX, 4 with AVX2."""
    seconds = {columns: _fastest(dtype, width, columns)[1] for columns in _COLUMNS}
    return max(columns for columns in seconds if seconds[columns] <= _FREE * seconds[_COLUMNS[0]])


@functools.cache
def _fastest(dtype: torch.dtype, width: int, columns: int) -> tuple[Kernel, float]:
    """(the fastest kernel, its seconds for some rows)"""
    _bound_numkong()
    with one_thread():
        return _measure(dtype, width, columns)


def _measure(dtype: torch.dtype, width: int, columns: int) -> tuple[Kernel, float]:
    rows_BK = torch.ones(_MEASURED_ROWS, width, dtype=dtype)
    matrix_KC = torch.ones(width, columns, dtype=dtype)
    kernels = _KERNELS[dtype]
    if dtype == torch.int8 and not processor_has("avx512_vnni"):
        kernels = kernels[:1]
    products = [kernel(matrix_KC, len(rows_BK)) for kernel in kernels]
    seconds = [_seconds(product, rows_BK) for product in products]
    for number in range(_ROUNDS * len(kernels)):
        place = number % len(kernels)
        if seconds[place] <= _HOPELESS * min(seconds):
            seconds[place] = min(seconds[place], _seconds(products[place], rows_BK))
    best = seconds.index(min(seconds))
    return kernels[best], seconds[best]


def _seconds(product: Product, rows_BK: Tensor) -> float:
    began = time.thread_time()  # of this core alone: others may be at work, too
    product(rows_BK)
    return time.thread_time() - began


def _by_numkong(matrix_KC: Tensor, most_rows: int) -> Product:
    packed = numkong.dots_pack(_for_numkong(matrix_KC.T.contiguous()))
    dtype = torch.int32 if matrix_KC.dtype == torch.int8 else torch.float32
    products_BC = torch.empty(most_rows, matrix_KC.shape[1], dtype=dtype)

    def product(rows_BK: Tensor) -> Tensor:
        out_BC = products_BC[: len(rows_BK)]
        numkong.dots_packed(_for_numkong(rows_BK), packed, out=_for_numkong(out_BC))
        return out_BC

    return product


@functools.cache
def _bound_numkong() -> None:
    """Bounds NumKong's kernels by POLYRANK_PROCESSOR, as `pipeline.processor` does others'."""
    kind = bound_kind()
    for name, needed in _NUMKONG_KINDS.items():
        if kind and KINDS.index(needed) > KINDS.index(kind):
            numkong.disable_capability(name)


def _for_numkong(matrix: Tensor) -> numkong.Tensor:
    """The same memory; DLPack takes ten times as long."""
    name: Any = str(matrix.dtype).removeprefix("torch.")
    matrix = matrix.contiguous()
    return numkong.from_pointer(matrix.data_ptr(), tuple(matrix.shape), name, owner=matrix)


def _by_torch(matrix_KC: Tensor, most_rows: int, copies: bool = False) -> Product:
    dtype = matrix_KC.dtype
    multiply = int8_mm if dtype == torch.int8 else torch.mm
    result = torch.int32 if dtype == torch.int8 else dtype
    # Fresh memory for every block would cost half of a product.
    products_BC = torch.empty(most_rows, matrix_KC.shape[1], dtype=result)
    copied_BK = torch.empty(most_rows if copies else 0, len(matrix_KC), dtype=dtype)

    def product(rows_BK: Tensor) -> Tensor:
        # oneDNN reads rows in strips, which memory does not foresee: on a Zen 5, a million rows that are
        # copied to the cache first take 107 ms instead of 154 (bfloat16, 16 columns, one core).
        rows_BK = copied_BK[: len(rows_BK)].copy_(rows_BK) if copies else rows_BK
        return multiply(rows_BK, matrix_KC, out=products_BC[: len(rows_BK)])

    return product


def _by_torch_copied(matrix_KC: Tensor, most_rows: int) -> Product:
    return _by_torch(matrix_KC, most_rows, copies=True)


def _by_torch_transposed(matrix_KC: Tensor, most_rows: int) -> Product:
    matrix_CK = matrix_KC.T.contiguous()
    products = torch.empty(most_rows * len(matrix_CK), dtype=matrix_KC.dtype)

    def product(rows_BK: Tensor) -> Tensor:
        out_CB = products[: len(matrix_CK) * len(rows_BK)].view(len(matrix_CK), -1)
        return torch.mm(matrix_CK, rows_BK.T, out=out_CB).T

    return product


_KERNELS: dict[torch.dtype, tuple[Kernel, ...]] = {
    torch.int8: (_by_numkong, _by_torch, _by_torch_copied),
    torch.bfloat16: (_by_numkong, _by_torch, _by_torch_copied),
    torch.float32: (_by_torch, _by_torch_transposed),
    torch.float64: (_by_torch,),
}
