"""Parts of the answers of /rank and /classify, as the service makes them and its client reads them.

The client ignores fields that a later service adds.
"""

from __future__ import annotations

from pydantic import Field, JsonValue
from pydantic.dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """A candidate. `id` is the client's or the pool's, or the text's place in the request. `columns` are the
    pool's. `known_context`: the turns of the candidate's known context (such as a FAQ's question) that is
    nearest to the request's; null where the pool has none or too many, and until they are encoded. `weights`,
    with `explain`: the share of each context vector in the score; they add up to 1."""

    id: str
    text: str
    score: float
    columns: dict[str, JsonValue] = Field(default={})
    known_context: list[str] | None = None
    weights: list[float] | None = None


@dataclass(frozen=True)
class Explanation:
    """`tokens`: the context as the model read it. `vectors`: for each context vector its attention to each
    token, which adds up to 1, or to 0 for a vector that does not count."""

    tokens: list[str]
    vectors: list[list[float]]


@dataclass(frozen=True)
class Intent:
    """An intent and its probability."""

    intent: str
    probability: float


@dataclass(frozen=True)
class Classification:
    """A text's most probable intents, best first. `out_of_scope`: even the best is too improbable."""

    intents: list[Intent]
    out_of_scope: bool


@dataclass(frozen=True)
class ClassifyResponse:
    """A result for each text, in order; `classifier` and `encoder` are fingerprints."""

    results: list[Classification]
    classifier: str
    encoder: str
    milliseconds: float
