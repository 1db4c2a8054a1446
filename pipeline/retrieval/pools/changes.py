"""How many ids of a pool are new, changed, the same or gone, beside the version before."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Changes:
    """The ids of a pool beside those of the version before."""

    new: int
    changed: int
    """Ids with another text."""
    same: int
    gone: int

    @property
    def none(self) -> bool:
        return not (self.new or self.changed or self.gone)
