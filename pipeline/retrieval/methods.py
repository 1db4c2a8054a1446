"""The ways to search a pool. Apart from the search, so that a job can name them without torch."""

from typing import Literal

Method = Literal["auto", "exact", "pruned", "approximate"]
