"""Arrays as `.npy` files.

NumPy evaluates a file's header as Python, which fails in Python 3.11 where two threads do so at once ("AST
constructor recursion depth mismatch"). Here a pattern reads it.
"""

from __future__ import annotations

import io
import math
import re
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy_format

_HEADER = re.compile(
    r"\{'descr': '([^']+)', 'fortran_order': (True|False), 'shape': \(([\d, ]*)\), \}\s*"
)


def to_bytes(array: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """An array that can be written to. Raises ValueError for other data, and for one that is truncated."""
    file = io.BytesIO(data)
    shape, is_fortran, dtype = read_header(file)
    array = np.frombuffer(bytearray(data), dtype, math.prod(shape), file.tell())
    return array.reshape(shape, order="F" if is_fortran else "C")


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """(shape, whether columns come first, dtype). Raises ValueError where there is none."""
    version = npy_format.read_magic(file)
    length = int.from_bytes(file.read(2 if version == (1, 0) else 4), "little")
    header = _HEADER.fullmatch(file.read(length).decode("latin1"))
    if not header:
        raise ValueError("not the header of an array")
    dtype, is_fortran, sizes = header.groups()
    return tuple(map(int, re.findall(r"\d+", sizes))), is_fortran == "True", np.dtype(dtype)
