"""The questions and answers of a client of the service. Fields that a later service adds are ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Question:
    """Candidates to rank for a context. They come with the request, or from a pool."""

    context: str | Sequence[str]
    """The turns so far, newest last; a text is one turn."""
    candidates: Sequence[str] | Mapping[str, str] | None = None
    """Texts; or texts by ids, which the results name."""
    pool: str | None = None
    top_k: int = 10
    where: Mapping[str, Sequence[str]] | None = None
    """With a pool: columns, and the values that count."""
    allow: Sequence[str] | None = None
    """With a pool: the ids that count."""
    deny: Sequence[str] | None = None
    """With a pool: the ids that do not count."""
    explain: bool = False
    """Ask for the ranking's explanation, and the weights of its results. Not with a cross-encoder."""

    def body(self) -> dict[str, Any]:
        """The question as JSON."""
        body = {name: value for name, value in vars(self).items() if value is not None}
        if isinstance(self.candidates, Mapping):
            texts = self.candidates.items()
            body["candidates"] = [{"id": key, "text": text} for key, text in texts]
        return body


@dataclass(frozen=True)
class Result:
    """A candidate; `id` is the pool's or the caller's, or its place among the texts given."""

    id: str
    text: str
    score: float
    columns: Mapping[str, Any] = field(default_factory=dict)
    weights: Sequence[float] | None = None
    """With `explain`: the share of each of the context's vectors in the score; they add up to 1."""


@dataclass(frozen=True)
class Explanation:
    """The tokens and vectors of the context that a ranking comes from."""

    tokens: Sequence[str]
    """The context as the model read it."""
    vectors: Sequence[Sequence[float]]
    """For each of the context's vectors its attention to each token."""


@dataclass(frozen=True)
class Ranking:
    """Best first."""

    results: list[Result]
    certified: bool
    """Whether this is provably the exact top k; with a second stage: whether it scored
    the exact best rows."""
    model: str
    """Fingerprint of the ranker."""
    pool: str | None
    pool_version: str | None
    milliseconds: float
    """The service's time."""
    missing_shards: Sequence[int] = ()
    """Parts of the pool that did not answer: better rows may be there."""
    explanation: Explanation | None = None
    """Only with `explain`, and if there are results."""
    second_stage: str | None = None
    """Fingerprint of the model that scored the best rows of the pool again."""
    context_tokens: int = 0
    """Tokens of the context that were read; 0: the service does not say."""


@dataclass(frozen=True)
class Intent:
    """An intent and its probability."""

    intent: str
    probability: float


@dataclass(frozen=True)
class Classification:
    """A text's most probable intents, best first."""

    intents: list[Intent]
    out_of_scope: bool
    """Even the best intent is too improbable."""


@dataclass(frozen=True)
class Classifications:
    """One for each text, in order."""

    results: list[Classification]
    classifier: str
    """Fingerprint of the classifier."""
    encoder: str
    """Fingerprint of the encoder that it reads texts with."""
    milliseconds: float
    """The service's time."""


def ranking_of(answer: Any) -> Ranking:
    pool = answer["pool"] or {"name": None, "version": None}
    results = [
        Result(row["id"], row["text"], row["score"], row["columns"], row.get("weights"))
        for row in answer["results"]
    ]
    explained = answer.get("explanation")
    explanation = Explanation(explained["tokens"], explained["vectors"]) if explained else None
    return Ranking(
        results, answer["certified"], answer["model"], pool["name"], pool["version"],
        answer["milliseconds"], pool.get("missing_shards", ()), explanation,
        answer.get("second_stage"), answer.get("context_tokens", 0),
    )  # fmt: skip


def rankings_of(answer: Any) -> list[Ranking]:
    return [ranking_of(ranking) for ranking in answer]


def classifications_of(answer: Any) -> Classifications:
    results = [
        Classification(
            [Intent(intent["intent"], intent["probability"]) for intent in result["intents"]],
            result["out_of_scope"],
        )
        for result in answer["results"]
    ]
    return Classifications(results, answer["classifier"], answer["encoder"], answer["milliseconds"])
