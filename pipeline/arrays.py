"""Names for the types of numpy arrays, and a hash of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Keys = np.ndarray[Any, np.dtype[np.uint64]]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 by the golden ratio: SplitMix64's numbers are `mix` of its multiples."""


def mix(values: Keys) -> Keys:
    """A bijection that spreads every bit over all: the finaliser of SplitMix64 (Steele 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
