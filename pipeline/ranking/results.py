"""A ranking, in Python and over HTTP: candidates with their scores, best first.

Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from pipeline.arrays import Floats, Ints
    from pipeline.pools.pool import Pool


@dataclass(frozen=True)
class Result:
    """A candidate with its score."""

    index: int
    """The candidate's place in the caller's list or in the pool, from 0."""
    id: str
    """The id in the pool or in the caller's dictionary; for a plain list, the index as text."""
    text: str
    score: float
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The columns that a pool keeps to filter by."""


@dataclass(frozen=True)
class Ranking(Sequence[Result]):
    """A sequence of `Result`, best first. Ties keep the order given; in a pool they are ordered by id."""

    results: tuple[Result, ...]
    certified: bool = True
    """Whether this is provably the exact top k."""

    @overload
    def __getitem__(self, place: int) -> Result: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Result, ...]: ...
    def __getitem__(self, place: int | slice) -> Result | tuple[Result, ...]:
        return self.results[place]

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def __str__(self) -> str:
        """A line for each result, with its score and its text."""
        lines = (f"{result.score:9.3f}  {' '.join(result.text.split())}" for result in self.results)
        return "\n".join(lines)


def best_results(
    ids: Sequence[str], texts: Sequence[str], scores: Sequence[float], top_k: int
) -> list[Result]:
    """The `top_k` candidates with the highest scores, best first. Ties keep the order given."""
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[:top_k]
    return [Result(index, ids[index], texts[index], scores[index]) for index in order]


def results_at(pool: Pool, places_K: Ints, scores_K: Floats, first: int = 0) -> list[Result]:
    """The candidates at these places of a pool, in the order of the places. `first`: the place of the open
    part's first row in the whole pool, which the results name."""
    names = pool.filter_columns
    rows = pool.rows_at(places_K, ("id", "text", *names))
    return [
        Result(first + place, row["id"], row["text"], score, {name: row[name] for name in names})
        for place, score, row in zip(places_K.tolist(), scores_K.tolist(), rows, strict=True)
    ]
