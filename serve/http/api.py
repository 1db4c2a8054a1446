"""polyrank's own HTTP interface: rankings, intents, and what a replica says of itself.

The other formats that clients speak are in `wire.py`, the errors in `errors.py`.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request, Response
from pydantic import Discriminator, Field, Tag
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from torch import Tensor

from serve import playground
from serve.answers import Classification, ClassifyResponse, Explanation, Intent
from serve.engine import Engine
from serve.http import bodies, errors, wire
from serve.http.bearer_tokens import BearerTokens
from serve.http.errors import error_responses
from serve.http.guard import MODEL, Guard, RecordAnswer, work_of
from serve.http.json_answers import json_answer, json_list
from serve.limits import MAX_REQUESTS, Limits
from serve.refusals import REFUSALS, Refusal
from serve.service import RankAnswer, Service

_COMPRESSED_BYTES = 16_384  # of a smaller answer compression costs more than it saves


def create_app(
    service: Service,
    limits: Limits | None = None,
    tokens: BearerTokens | None = None,
    origins: Sequence[str] = (),
    state: Callable[[], dict[str, Any]] = dict,
    close: Callable[[], None] = lambda: None,
    record_answer: RecordAnswer = lambda *answer: None,
    record_error: Callable[[int], None] = lambda status: None,
    names: Sequence[str] = (),
    playground_opens: Literal["dialogue", "query", "none"] = "dialogue",
    echoes_request_id: bool = True,
) -> FastAPI:
    """The application for a service. `state`: more fields for /info, about the versions. `close` is called at
    the end. For metrics: `record_answer`, and `record_error`, which takes the status of each error. `names`:
    those by which a request may name the model, beside its fingerprint. `echoes_request_id`: as of `Guard`.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        close()

    app = FastAPI(
        lifespan=lifespan,
        title="polyrank",
        version="2",
        description="Ranks candidate texts for a context: replies for a dialogue, articles for a sentence. "
        f"Every answer of a model has its fingerprint in the header {MODEL}.",
        redirect_slashes=False,  # to the caller's Host
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
    )
    errors.install(app)
    # The one that is added last comes first: what the guard refuses reaches no other.
    # Level 1: 7 MB, the largest answer, take 60 ms, beside the event loop; level 9 takes six times as long.
    app.add_middleware(GZipMiddleware, minimum_size=_COMPRESSED_BYTES, compresslevel=1)
    app.add_middleware(
        Guard,
        limits=limits or Limits(),
        tokens=tokens or BearerTokens(),
        refusal=service.batcher.refusal,
        record_answer=record_answer,
        record_error=record_error,
        echoes_request_id=echoes_request_id,
    )
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", MODEL],
        )

    # Routes with long answers return a `Response` of JSON. Their models are for openapi.json alone, and its
    # tests compare the answers with them.
    own = _Interface(service, state)
    ranking = error_responses(*REFUSALS, "unknown_pool", "shard_missing")
    rankings = bodies.RankResponse | list[bodies.RankResponse]
    classifying = error_responses(*REFUSALS, "no_classifier")
    app.post("/rank", responses=ranking, response_model=rankings)(own.rank)
    app.post("/classify", responses=classifying, response_model=ClassifyResponse)(own.classify)
    app.get("/health")(own.health)
    app.get("/ready", responses=error_responses("not_ready"))(own.ready)
    app.get("/info", responses=error_responses("unauthorized", "not_ready"))(own.info)
    wire.add_routes(app, service, names)
    if playground_opens != "none":  # last, as routes are tried in their order
        playground.install(app, playground_opens)
    return app


_RankRequests = Annotated[
    Annotated[bodies.RankRequest, Tag("<object>")]
    | Annotated[
        list[bodies.RankRequest],
        Field(min_length=1, max_length=MAX_REQUESTS),
        bodies.at_most("requests"),
        Tag("<list>"),
    ],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<object>"),
]


class _Interface:
    """The answers of the routes."""

    def __init__(self, service: Service, state: Callable[[], dict[str, Any]]) -> None:
        self._service, self._state = service, state

    async def rank(self, body: _RankRequests, request: Request) -> Response:
        """Ranks candidates for a context. A list of requests has a list of answers, by the same versions."""
        work, began = work_of(request, self._service), time.monotonic()
        ranking_requests = body if isinstance(body, list) else [body]
        answers = await work.rank([each.query() for each in ranking_requests])
        for answer in answers:
            self._service.record_ranking(answer)
        milliseconds = 1000 * (time.monotonic() - began)
        responses = [functools.partial(_response, answer, milliseconds) for answer in answers]
        values = sum(map(_values, answers))
        if isinstance(body, list):
            return await json_list(work, responses, values)
        return await json_answer(work, responses[0], values)

    async def classify(self, body: bodies.ClassifyRequest, request: Request) -> Response:
        """Classifies texts by intent."""
        work, began = work_of(request, self._service), time.monotonic()
        intents, classified = await work.classify(body.texts)
        milliseconds = round(1000 * (time.monotonic() - began), 3)

        def response() -> ClassifyResponse:
            results = [
                Classification(
                    [Intent(*best) for best in text.intents[: body.top_k]],
                    text.out_of_scope,
                )
                for text in classified
            ]
            encoder = intents.classifier.encoder_fingerprint
            return ClassifyResponse(results, intents.artifact.fingerprint, encoder, milliseconds)

        most_intents = min(body.top_k, len(intents.classifier.labels))
        return await json_answer(work, response, 2 * most_intents * len(body.texts))

    async def health(self) -> bodies.Health:
        """Whether the process answers. It does not wait for rankings."""
        return bodies.Health(status="ok")

    async def ready(self) -> bodies.Health:
        """Whether a model is loaded and computes."""
        if await self._service.problem():
            raise Refusal("not_ready", retry_after_s=1.0)
        return bodies.Health(status="ok")

    async def info(self) -> dict[str, Any]:
        """The model, the pools, their versions and settings."""
        return {**self._service.champion().info(), **self._state()}


def _values(answer: RankAnswer) -> int:
    """The size of an answer in JSON: a result has some ten values, and an explanation a value a weight."""
    explained = answer.explained
    weights = explained.weights_CM.numel() + explained.attention_MT.numel() if explained else 0
    return 10 * len(answer.results) + weights


def _response(answer: RankAnswer, milliseconds: float) -> dict[str, Any]:
    """A `bodies.RankResponse`. As dictionaries, because pydantic's checks of a thousand results would take
    twice as long as their JSON."""
    explained, explanation, pool = answer.explained, None, None
    weights: Sequence[list[float] | None] = [None] * len(answer.results)
    if explained is not None:
        weights = _rounded(explained.weights_CM)
        explanation = Explanation(explained.tokens, _rounded(explained.attention_MT))
    if answer.pool:
        missing = list(answer.missing_shards)
        pool = bodies.PoolVersion(
            name=answer.pool, version=answer.pool_version, missing_shards=missing
        )
    known_contexts = answer.known_contexts or [None] * len(answer.results)
    results = zip(answer.results, known_contexts, weights, strict=True)
    return {
        "results": [
            {
                "id": result.id,
                "text": result.text,
                "score": result.score,
                "columns": result.columns,
                "known_context": known,
                "weights": row,
            }
            for result, known, row in results
        ],
        "certified": answer.certified,
        "model": answer.engine.model.fingerprint,
        "second_stage": answer.second_stage,
        "pool": pool,
        "context_tokens": answer.context_tokens,
        "milliseconds": round(milliseconds, 3),
        "explanation": explanation,
    }


def _rounded(weights: Tensor) -> list[list[float]]:
    """Rounded to six decimals: 64 vectors of 360 tokens take 0.2 MB of JSON instead of 0.5."""
    rows: list[list[float]] = weights.double().round(decimals=6).tolist()
    return rows


def interface() -> dict[str, Any]:
    """The content of openapi.json."""

    def no_engine() -> Engine:
        raise Refusal("not_ready")

    with closing(Service(no_engine, max_wait_s=1.0)) as service:
        return create_app(service).openapi()


if __name__ == "__main__":
    print(json.dumps(interface(), indent=1))
