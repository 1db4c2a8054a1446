"""The library of polyrank. Importing it loads nothing, and it never starts a cluster.

    from pipeline import Pool, Ranker

Both names are loaded at their first use, without Ray and torch. `pipeline/API.md` shows how to use them.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.config import BadInput
    from pipeline.pools.pool import Pool
    from pipeline.ranking.ranker import Ranker

if "POLYRANK_PROCESSOR" in os.environ:  # before torch computes
    from pipeline.library_kernels import bound_libraries

    bound_libraries()

__all__ = ["BadInput", "Pool", "Ranker"]

_MODULES = {
    "BadInput": "pipeline.config",
    "Pool": "pipeline.pools.pool",
    "Ranker": "pipeline.ranking.ranker",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
