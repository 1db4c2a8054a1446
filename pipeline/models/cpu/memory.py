"""Memory that a training process on a CPU keeps from step to step; glibc only."""

from __future__ import annotations

import ctypes
from contextlib import suppress

# Of mallopt: M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD (without which threads unmap heaps, of 64 MiB each).
_KEEP = {-4: 0, -1: 2**31 - 1, -2: 1 << 26}


def keep_memory() -> None:
    """Lets a process that trains keep what it frees, for its next step.

    Otherwise each tensor above 32 MiB is mapped, zeroed page by page and unmapped again: GELU of 8,000
    tokens in float32 takes 37 ms, not 4.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for setting, value in _KEEP.items():
            mallopt(setting, value)


def return_memory() -> None:
    """Gives free memory back to the system.

    As batches are of many lengths, some blocks fit no later tensor: a worker of all-MiniLM's kept 2.9 GB
    after 10 steps and 4.0 after 68. To be called now and then, not after each step: touching returned
    pages again is dear (1.5 s where memory is a virtual machine's).
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
