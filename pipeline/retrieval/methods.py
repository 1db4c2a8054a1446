"""The methods of searching a pool. They have a module of their own, so that jobs need no torch to name
them."""

from typing import Literal

Method = Literal["auto", "exact", "pruned", "approximate"]
