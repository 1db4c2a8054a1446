"""Which examples count as duplicates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipeline.config import require
from pipeline.corpora.schema import SPLITS, Split
from pipeline.options.unread import read_when

_NEAR = {"dedup.near": (True,)}
_IS_NEAR = read_when(_NEAR)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which part of an example is compared, and when two examples are duplicates."""

    text: Literal["example", "pair", "response"] = "example"
    """The compared text: all turns and the response, the newest turn and the response, or the
    response."""
    drop_from: tuple[Split, ...] = SPLITS
    """Splits that lose their duplicates. Of duplicates in several splits the one in test stays, else the
    one in valid."""
    exact: bool = True
    """Drop examples whose words are the same."""
    near: bool = True
    """Drop examples whose shingles are mostly the same."""
    unit: Literal["word", "character"] = field(default="word", metadata=_IS_NEAR)
    """What a shingle is made of. Use characters for languages that are written without spaces."""
    shingle: int = field(default=3, metadata=_IS_NEAR)
    """Number of words, or of characters, in a shingle; 5 suits characters."""
    bands: int = field(default=14, metadata=_IS_NEAR)
    """Number of bands of the LSH. More bands find more pairs."""
    rows_per_band: int = field(default=8, metadata=_IS_NEAR)
    """Number of MinHashes that agree in a band. More rows find fewer pairs."""
    check: bool = field(default=True, metadata=_IS_NEAR)
    """Compare the shingles of each pair that the LSH finds. False: each such pair counts as duplicates,
    also different answers to one long context."""
    threshold: float = field(default=0.75, metadata=read_when(_NEAR, {"dedup.check": (True,)}))
    """The Jaccard similarity of the contexts, and of the responses, from which two examples are
    duplicates."""

    def __post_init__(self) -> None:
        require(bool(self.drop_from), "dedup.drop_from", self.drop_from, "one split at least")
        require(self.shingle >= 1, "dedup.shingle", self.shingle, ">= 1")
        require(self.bands >= 1, "dedup.bands", self.bands, ">= 1")
        require(self.rows_per_band >= 1, "dedup.rows_per_band", self.rows_per_band, ">= 1")
        require(0 < self.threshold <= 1, "dedup.threshold", self.threshold, "above 0, to 1")
