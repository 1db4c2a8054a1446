"""The request formats of other services: TEI, Jina and infinity, Cohere, Voyage, OpenAI, Hugging Face.

Rules for all of them:

- A query is a context of one turn. Texts are candidates, and are embedded as candidates unless the request
  says otherwise.
- Results are sorted by the model's scores. Formats that promise scores in [0, 1] get the score's sigmoid. It
  keeps the order but is no probability: the scores of a bi- or poly-encoder are products of vectors, and a
  score above 37 becomes 1.0. `raw_scores` returns the score itself.
- There is one model. Where the service has names, a request may say in `model` one of them or the
  fingerprint, and another one is refused. Else `model` is ignored: many clients must send one. The answer
  names the fingerprint in the header of `guard.py`, and in the body where the format has a field
  for it.
- Texts are truncated to the model's maximum, which /info names. With `truncate: false` (TEI) or
  `truncation: false` (Voyage) a longer one is refused.
- Results have a document only if `return_documents` asks for it, as in Cohere's format. In Jina's they have
  it by default, but its clients (those of LangChain, LlamaIndex, Haystack, LiteLLM, Dify) take the text by
  the result's `index`.
- Unknown fields are ignored, because the clients send some that have no meaning here:
  `max_tokens_per_doc`, `max_chunks_per_doc`, `relevant_spans`, `priority` (Cohere), `user` (OpenAI),
  `parameters` (Hugging Face). Fields that would change what of the texts, or before them, is read
  (`rank_fields`, `truncation_direction`, `late_chunking`, `instruction`), or what an answer holds
  (`embedding_type`, `output_dtype`), are refused.
- Errors have the format of `errors.py`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import torch
from fastapi import FastAPI, HTTPException, Request, Response
from torch import Tensor
from torch.nn import functional as F

from serve.engine import Engine
from serve.http import bodies
from serve.http.errors import error_responses
from serve.http.guard import work_of
from serve.http.json_answers import json_answer
from serve.refusals import REFUSALS, Refusal
from serve.service import Service, Work


def add_routes(app: FastAPI, service: Service, names: Sequence[str] = ()) -> None:
    """Adds the routes of all these formats. `names`: those of the model, beside its fingerprint."""
    formats = _Formats(service, names)
    post = partial(app.post, responses=error_responses(*REFUSALS))
    post_to_model = partial(app.post, responses=error_responses(*REFUSALS, "unknown_model"))
    rerank = partial(post_to_model, response_model_exclude_none=True)
    cohere_embed = partial(post_to_model, response_model=bodies.TextsEmbedResponse)
    vectors = list[list[float]]
    not_ready = error_responses("unauthorized", "not_ready")
    no_model = error_responses("unauthorized", "unknown_model", "not_ready")

    rerank("/rerank")(formats.rerank)
    rerank("/v1/rerank", name="rerank_v1")(formats.rerank_documents)
    rerank("/v2/rerank", name="rerank_v2")(formats.rerank_documents)
    post("/embed", response_model=vectors)(formats.embed)
    post_to_model("/v1/embeddings", response_model=bodies.EmbeddingsResponse)(formats.embeddings)
    app.post("/embeddings", include_in_schema=False)(formats.embeddings)  # infinity's route
    cohere_embed("/v1/embed", name="embed_v1")(formats.embed_texts)
    cohere_embed("/v2/embed", name="embed_v2")(formats.embed_texts)
    app.get("/v1/models", responses=not_ready)(formats.models)
    app.get("/models", include_in_schema=False)(formats.models)  # infinity's route
    app.get("/v1/models/{id:path}", responses=no_model)(formats.model)
    post("/", response_model=list[float] | vectors)(formats.hugging_face)
    post("/similarity")(formats.similarity)


class _Formats:
    """The answers of the routes."""

    def __init__(self, service: Service, names: Sequence[str]) -> None:
        self._service, self._names = service, names

    async def rerank(
        self, body: bodies.AnyRerank, request: Request
    ) -> list[bodies.TextScore] | bodies.RerankResponse:
        """TEI's format for `texts`, Jina's and infinity's for `documents`."""
        if isinstance(body, bodies.DocumentsRerank):
            return await self.rerank_documents(body, request)
        best_first, _ = await _score(self._work(body, request), body)
        texts = body.texts if body.return_text else [None] * len(body.texts)
        return [
            bodies.TextScore(index=place, score=score, text=texts[place])
            for place, score in best_first[: body.top_n]
        ]

    async def rerank_documents(
        self, body: bodies.DocumentsRerank, request: Request
    ) -> bodies.RerankResponse:
        """The format of Jina and Voyage, and both versions of Cohere's."""
        best_first, tokens = await _score(self._work(body, request), body)
        texts = body.texts

        def results(document: Callable[[str], Any]) -> list[bodies.DocumentScore]:
            return [
                bodies.DocumentScore(
                    index=place,
                    relevance_score=score,
                    document=document(texts[place]) if body.return_documents else None,
                )
                for place, score in best_first[: body.top_n or body.top_k]
            ]

        is_voyages = body.model_fields_set & {"top_k", "truncation"}
        return bodies.RerankResponse(
            id=request.state.request_id,
            model=request.state.model,
            results=results(lambda text: bodies.Document(text=text)),
            data=results(str) if is_voyages else None,
            usage=_usage(tokens),
            meta=_meta(request, search_units=1),
        )

    async def embed(self, body: bodies.EmbedRequest, request: Request) -> Response:
        """TEI's format."""
        work = self._work(body, request, self._service.champion())
        vectors_ND, _ = await _encode(work, body, body.normalize is not False)
        return await json_answer(work, vectors_ND.tolist, vectors_ND.numel())

    async def embeddings(self, body: bodies.EmbeddingsRequest, request: Request) -> Response:
        """OpenAI's format, to vectors of length 1."""
        work = self._work(body, request, self._service.champion())
        vectors_ND, tokens = await _encode(work, body, body.normalized is not False)
        is_base64 = "base64" in (body.encoding_format, body.embedding_type)
        encode = _ENCODINGS["base64" if is_base64 else "float"]

        def response() -> bodies.EmbeddingsResponse:
            return bodies.EmbeddingsResponse(
                data=[
                    bodies.Embedding(index=n, embedding=vector)
                    for n, vector in enumerate(encode(vectors_ND))
                ],
                model=request.state.model,
                usage=_usage(tokens),
            )

        return await json_answer(work, response, vectors_ND.numel())

    async def embed_texts(self, body: bodies.TextsEmbedRequest, request: Request) -> Response:
        """Both versions of Cohere's format, to vectors of length 1."""
        work = self._work(body, request, self._service.champion())
        vectors_ND, tokens = await _encode(work, body, True)
        meta = _meta(request, input_tokens=tokens)
        by_type = body.embedding_types is not None or meta.api_version.version == "2"

        def response() -> bodies.TextsEmbedResponse:
            embeddings: dict[bodies.VectorType, Any] = {
                kind: _ENCODINGS[kind](vectors_ND) for kind in body.embedding_types or ["float"]
            }
            return bodies.TextsEmbedResponse(
                response_type="embeddings_by_type" if by_type else "embeddings_floats",
                id=request.state.request_id,
                texts=body.texts,
                embeddings=embeddings if by_type else embeddings["float"],
                meta=meta,
            )

        return await json_answer(work, response, vectors_ND.numel())

    async def models(self) -> bodies.ModelList:
        """The model that is served, by all its names, in OpenAI's format."""
        names = (self._fingerprint, *self._names)
        return bodies.ModelList(data=[self._card(name) for name in names])

    async def model(self, id: str) -> bodies.ModelCard:
        """The model of this id, in OpenAI's format."""
        if not id:  # the list, with a slash behind it
            raise HTTPException(404)
        self._require_served(id)
        return self._card(id)

    async def hugging_face(self, body: bodies.HuggingFaceRequest, request: Request) -> Any:
        """Hugging Face's formats: `feature_extraction` (as /embed) and `sentence_similarity`: the model's
        score of each sentence as a candidate for the source sentence, not its sigmoid."""
        if isinstance(body, bodies.EmbedRequest):
            return await self.embed(body, request)
        return await self.similarity(body, request)

    async def similarity(self, body: bodies.SimilarityRequest, request: Request) -> list[float]:
        """TEI's route for Hugging Face's `sentence_similarity`."""
        sentence, others = body.inputs.source_sentence, body.inputs.sentences
        scores, _ = await work_of(request, self._service).scores([sentence], others)
        return scores

    @property
    def _fingerprint(self) -> str:
        return self._service.champion().model.fingerprint

    def _work(self, body: bodies.Body, request: Request, engine: Engine | None = None) -> Work:
        """As `work_of`. Raises Refusal for another model, if the service has names."""
        if self._names and isinstance(body, bodies.ForModel):
            self._require_served(body.model)
        return work_of(request, self._service, engine)

    def _require_served(self, model: str | None) -> None:
        """Raises Refusal for a name of another model. None means the served one."""
        served = [*self._names, self._fingerprint]
        if model is not None and model not in served:
            message = f"model: not served here; there are: {', '.join(served)}"
            raise Refusal("unknown_model", message, "model")

    def _card(self, name: str) -> bodies.ModelCard:
        created_at = self._service.champion().model.manifest["created_at"]
        created = int(datetime.fromisoformat(created_at).timestamp())
        return bodies.ModelCard(id=name, created=created)


async def _score(
    work: Work, body: bodies.TextsRerank | bodies.DocumentsRerank
) -> tuple[list[tuple[int, float]], int]:
    """((place, score) of each text, best first, ties in the order given; tokens read)"""
    texts = body.texts
    if body.needs_whole_texts:
        await _require_whole(work, "query", [body.query], are_contexts=True)
        await _require_whole(work, body.texts_field, texts)
    scores, tokens = await work.scores([body.query], texts)
    order = sorted(range(len(texts)), key=lambda place: -scores[place])
    if not body.raw_scores:
        scores = torch.tensor(scores, dtype=torch.float64).sigmoid().tolist()
    return [(place, scores[place]) for place in order], tokens


async def _encode(
    work: Work,
    body: bodies.EmbedRequest | bodies.EmbeddingsRequest | bodies.TextsEmbedRequest,
    to_unit_length: bool,
) -> tuple[Tensor, int]:
    """(vectors [N, D] as the model scores with them, cut to `dimensions` as in its training; tokens read)

    `work`: the champion's: clients compare vectors of several requests, and those of two models have
    nothing in common. Raises Refusal for what this model has not.
    """
    ranker, texts = work.engine.ranker, body.texts
    config = ranker.config
    if not config.has_vectors:
        message = (
            "model: a cross-encoder has no vectors; allowed: /rank, and the formats that rerank"
        )
        raise Refusal("invalid_request", message)
    if body.needs_whole_texts:
        are_contexts = body.context_field is not None
        await _require_whole(work, body.texts_field, texts, are_contexts)
    field = "dimensions" if body.dimensions else "output_dimension"
    dimensions, width = body.dimensions or body.output_dimension, ranker.dual.dimensions
    if dimensions and dimensions > width:
        allowed = f"at most {width}, which the model has"
        raise _not_allowed(field, dimensions, allowed)
    if body.context_field is None:
        vectors_ND, tokens = await work.candidate_vectors(texts)
    elif config.vectors_per_context == 1:
        pairs, tokens = await work.context_vectors([[text] for text in texts])
        vectors_ND = torch.cat([vectors_MD for vectors_MD, _ in pairs])
    else:
        field, value = body.context_field
        allowed = {"input_type": "document", "task": "retrieval.passage"}.get(field, "none")
        why = f", as contexts of this model have {config.vectors_per_context} vectors each"
        raise _not_allowed(field, value, allowed, why)
    if dimensions:
        vectors_ND = ranker.dual.cut(vectors_ND, dimensions)
    return F.normalize(vectors_ND, dim=1) if to_unit_length else vectors_ND, tokens


async def _require_whole(
    work: Work, field: str, texts: Sequence[str], are_contexts: bool = False
) -> None:
    """Raises Refusal for a text that the model does not read to its end."""
    if longer := await work.longer_texts(texts, are_contexts):
        config = work.engine.ranker.config
        most = config.max_context_tokens if are_contexts else config.max_candidate_tokens
        field = field if field == "query" else f"{field}.{longer[0]}"
        message = f"{field}: has more than {most} tokens, and may not be truncated"
        raise Refusal("invalid_request", message, field)


def _not_allowed(field: str, value: object, allowed: str, why: str = "") -> Refusal:
    message = f"{field}: {value!r} is not allowed{why}; allowed: {allowed}"
    return Refusal("invalid_request", message, field)


def _base64(vectors_ND: Tensor) -> list[str]:
    return [base64.b64encode(row.tobytes()).decode() for row in vectors_ND.numpy().astype("<f4")]


_ENCODINGS: Mapping[bodies.VectorType, Callable[[Tensor], list[Any]]] = {
    "float": Tensor.tolist,
    "base64": _base64,
}
"""How vectors are written."""


def _usage(tokens: int) -> bodies.Usage:
    return bodies.Usage(prompt_tokens=tokens, total_tokens=tokens)


def _meta(request: Request, **units: int) -> bodies.Meta:
    version = "2" if request.state.route.startswith("/v2/") else "1"
    return bodies.Meta(
        api_version=bodies.ApiVersion(version=version), billed_units=bodies.BilledUnits(**units)
    )
