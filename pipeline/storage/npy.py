"""Arrays as `.npy` files.

NumPy evaluates a file's header as Python, which fails in Python 3.11 where two threads do so at once ("AST
constructor recursion depth mismatch"). Here a pattern reads it.
"""

from __future__ import annotations

import functools
import io
import math
import re
from typing import Any

import numpy as np

HEADER_BYTES = 1024
"""No header of an array of numbers is longer."""
_MAGIC = b"\x93NUMPY"
_HEADER = re.compile(
    r"\{'descr': '([^']+)', 'fortran_order': (True|False), 'shape': \(([\d, ]*)\), \}\s*"
)


def to_bytes(array: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """An array that can be written to. Raises ValueError for other data, and for one that is truncated."""
    shape, is_fortran, dtype, start = read_header(data)
    array = np.frombuffer(bytearray(data), dtype, math.prod(shape), start)
    return array.reshape(shape, order="F" if is_fortran else "C")


def read_header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """(shape, whether columns come first, dtype, where the numbers begin). Raises ValueError where there is
    no header."""
    if not data.startswith(_MAGIC):
        raise ValueError("not the header of an array")
    text_start = 10 if data[6:7] == b"\x01" else 12  # behind the length, of 2 or 4 bytes
    end = text_start + int.from_bytes(data[8:text_start], "little")
    return *_read_text(data[text_start:end]), end


@functools.lru_cache
def _read_text(text: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """What a header says. A pool of 100 million rows has 24,416 headers, which are mostly the same."""
    header = _HEADER.fullmatch(text.decode("latin1"))
    if not header:
        raise ValueError("not the header of an array")
    dtype, is_fortran, sizes = header.groups()
    return tuple(map(int, re.findall(r"\d+", sizes))), is_fortran == "True", np.dtype(dtype)
