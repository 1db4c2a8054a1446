"""Which failures another try may mend, and trying again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from pipeline.tasks.failures import storage_failure, store_refusal

DELAYS_S = (1.0, 4.0, 16.0)
"""Before the second, third and fourth try: an object store that is overloaded, or a network that is away
for a moment. The store's client has tried several times itself before it raises."""

ResultT = TypeVar("ResultT")


def is_transient(error: BaseException) -> bool:
    """Whether it is an I/O error that may be gone in a moment: no full disk, no file or bucket that is not
    there."""
    permanent = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
    return (
        isinstance(error, OSError)
        and not isinstance(error, permanent)
        and storage_failure(error) is None
        and store_refusal(error) is None
    )


def with_retries(action: Callable[[], ResultT], delays_s: Sequence[float] = DELAYS_S) -> ResultT:
    """Returns the result of `action`, and tries again after transient errors, with each delay once.

    Each delay is drawn from its half to its whole, so that a thousand tasks do not come back at once.
    """
    for delay in delays_s:
        try:
            return action()
        except OSError as error:
            if not is_transient(error):
                raise
            time.sleep(delay * random.uniform(0.5, 1.0))
    return action()
