"""The request formats of other services: TEI, Jina and infinity, Cohere, OpenAI, Hugging Face.

Rules for all of them:

- A query is a context of one turn. Texts are candidates, and are embedded as candidates unless the request
  says otherwise.
- Results are sorted by the model's scores. Formats that promise scores in [0, 1] get the score's sigmoid. It
  keeps the order but is no probability: the scores of a bi- or poly-encoder are products of vectors, and a
  score above 37 becomes 1.0. `raw_scores` returns the score itself.
- There is one model, whatever `model` the request names. The answer names its fingerprint.
- Texts are always truncated to the model's maximum, which /info names.
- Unknown fields are ignored, because the clients send some that have no meaning here:
  `model` (all of them), `truncate` (TEI), `max_tokens_per_doc`, `max_chunks_per_doc`, `relevant_spans`,
  `priority` (Cohere), `user` (OpenAI), `parameters` (Hugging Face). Fields that would change which parts of
  the texts are read (`rank_fields`, `truncation_direction`) are refused.
- Errors have the format of `errors.py`.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, NamedTuple

import torch
from fastapi import FastAPI, Request
from pydantic import BaseModel, BeforeValidator, Discriminator, Field, StrictBool, Tag
from torch import Tensor
from torch.nn import functional as F

from serve.engine import Engine
from serve.errors import REFUSALS, Refusal, documented
from serve.fields import Count, FilledText
from serve.limits import MAX_CANDIDATES
from serve.service import Service


def _as_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and any(isinstance(one, (int, list)) for one in value):
        raise ValueError("token ids are not allowed; allowed: a text, or a list of texts")
    return value


_SomeTexts = Annotated[list[FilledText], Field(min_length=1, max_length=MAX_CANDIDATES)]
Texts = Annotated[
    _SomeTexts, BeforeValidator(_as_list, json_schema_input_type=FilledText | _SomeTexts)
]
"""A single text means a list of one."""


class Document(BaseModel):
    """A text to rank. Other fields are ignored."""

    text: FilledText


GivenDocument = Annotated[
    Annotated[FilledText, Tag("<text>")] | Annotated[Document, Tag("<object>")],
    Discriminator(lambda value: "<object>" if isinstance(value, dict) else "<text>"),
]


# Requests

_DIMENSIONS = (
    "Keep the first dimensions only; sensible only for a model trained for it (matryoshka)."
)


class TextsRerank(BaseModel):
    """A rerank request in TEI's format."""

    query: FilledText
    texts: _SomeTexts
    raw_scores: StrictBool = False
    return_text: StrictBool = False
    truncation_direction: Literal["right", "Right"] = "right"


class DocumentsRerank(BaseModel):
    """A rerank request in the format of Jina, infinity and Cohere."""

    query: FilledText
    documents: list[GivenDocument] = Field(min_length=1, max_length=MAX_CANDIDATES)
    top_n: Count | None = Field(default=None, description="Most results; by default all.")
    return_documents: StrictBool | None = None
    raw_scores: StrictBool = False
    rank_fields: list[Literal["text"]] | None = Field(
        default=None, description="Fields of a document to read."
    )

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


class EmbedRequest(BaseModel):
    """An embedding request in TEI's format."""

    inputs: Texts
    normalize: StrictBool = Field(default=True, description="Scale the vectors to length 1.")
    prompt_name: Literal["context"] | None = Field(
        default=None,
        description="context: embed the texts as contexts, if the model makes one vector of a context. "
        "Default: as candidates.",
    )
    dimensions: Count | None = Field(default=None, description=_DIMENSIONS)
    truncation_direction: Literal["right", "Right"] = "right"
    encoding_format: Literal["float"] = "float"


class EmbeddingsRequest(BaseModel):
    """An embedding request in OpenAI's format."""

    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = Field(default=None, description=_DIMENSIONS)


class Sentences(BaseModel):
    """A sentence, and those to compare with it."""

    source_sentence: FilledText
    sentences: _SomeTexts


class SimilarityRequest(BaseModel):
    """A request of Hugging Face's `sentence_similarity`."""

    inputs: Sentences


AnyRerank = Annotated[
    Annotated[TextsRerank, Tag("<texts>")] | Annotated[DocumentsRerank, Tag("<documents>")],
    Discriminator(
        lambda body: "<texts>" if isinstance(body, dict) and "texts" in body else "<documents>"
    ),
]
HuggingFaceRequest = Annotated[
    Annotated[SimilarityRequest, Tag("<similarity>")] | Annotated[EmbedRequest, Tag("<embed>")],
    Discriminator(
        lambda body: (
            "<similarity>"
            if isinstance(body, dict) and isinstance(body.get("inputs"), dict)
            else "<embed>"
        )
    ),
]


# Answers


class TextScore(BaseModel):
    """A text's place in the request, and its score."""

    index: int
    score: float
    text: str | None = None


class DocumentScore(BaseModel):
    """A document's place in the request, and its score."""

    index: int
    relevance_score: float
    document: Document | None = None


class Usage(BaseModel):
    """Tokens that the model read, with special tokens. Equal texts are read once."""

    prompt_tokens: int
    total_tokens: int


class ApiVersion(BaseModel):
    """The version of the format."""

    version: str


class BilledUnits(BaseModel):
    """A field of Cohere's format. Nothing is billed here."""

    search_units: int = 1


class Meta(BaseModel):
    """Metadata in Cohere's format."""

    api_version: ApiVersion
    billed_units: BilledUnits = BilledUnits()


class RerankResponse(BaseModel):
    """The results, best first. `id` is the request id, as in the logs."""

    id: str
    model: str
    results: list[DocumentScore]
    usage: Usage
    meta: Meta


class Embedding(BaseModel):
    """A vector of length 1; in base64: little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsResponse(BaseModel):
    """The embeddings, in the order of the texts."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


class ModelCard(BaseModel):
    """A model: `id` is its fingerprint, as in /info."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "polyrank"


class ModelList(BaseModel):
    """The models that are served."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


# Routes


def add_routes(app: FastAPI, loaded: Callable[[], Service]) -> None:
    """Adds the routes of all these formats. `loaded` returns the service, or raises Refusal."""

    @app.post("/rerank", responses=documented(*REFUSALS), response_model_exclude_none=True)
    async def rerank(asked: AnyRerank, request: Request) -> list[TextScore] | RerankResponse:
        """TEI's format for `texts`, Jina's and infinity's for `documents`."""
        if isinstance(asked, DocumentsRerank):
            return await _rerank(loaded(), asked, request, "1")
        scored = await _score(loaded(), asked.query, asked.texts, request)
        return [
            TextScore(
                index=place,
                score=scored.scores[place] if asked.raw_scores else sigmoid(scored.scores[place]),
                text=asked.texts[place] if asked.return_text else None,
            )
            for place in scored.order
        ]

    @app.post("/v1/rerank", responses=documented(*REFUSALS), response_model_exclude_none=True)
    async def rerank_v1(asked: DocumentsRerank, request: Request) -> RerankResponse:
        """Jina's format, and version 1 of Cohere's."""
        return await _rerank(loaded(), asked, request, "1")

    @app.post("/v2/rerank", responses=documented(*REFUSALS), response_model_exclude_none=True)
    async def rerank_v2(asked: DocumentsRerank, request: Request) -> RerankResponse:
        """Version 2 of Cohere's format."""
        return await _rerank(loaded(), asked, request, "2")

    @app.post("/embed", responses=documented(*REFUSALS))
    async def embed(asked: EmbedRequest, request: Request) -> list[list[float]]:
        """TEI's format. Texts that are too long are always truncated."""
        return await _embed(loaded(), asked, request)

    @app.post("/v1/embeddings", responses=documented(*REFUSALS))
    async def embeddings(asked: EmbeddingsRequest, request: Request) -> EmbeddingsResponse:
        """OpenAI's format. Texts are embedded as candidates, to vectors of length 1."""
        embedded = await _embedded(loaded(), asked.input, request, asked.dimensions)
        vectors_ND = F.normalize(embedded.vectors_ND, dim=1)
        found = _base64(vectors_ND) if asked.encoding_format == "base64" else vectors_ND.tolist()
        return EmbeddingsResponse(
            data=[Embedding(index=place, embedding=one) for place, one in enumerate(found)],
            model=embedded.engine.model.fingerprint,
            usage=_usage(embedded.tokens),
        )

    @app.get("/v1/models", responses=documented("unauthorized", "not_ready"))
    async def models() -> ModelList:
        """The model that is served, in OpenAI's format."""
        model = loaded().engine.model
        created = datetime.fromisoformat(model.manifest["created_at"]).timestamp()
        return ModelList(data=[ModelCard(id=model.fingerprint, created=int(created))])

    @app.post("/", responses=documented(*REFUSALS))
    async def hugging_face(
        asked: HuggingFaceRequest, request: Request
    ) -> list[float] | list[list[float]]:
        """Hugging Face's formats: `feature_extraction` (as /embed) and `sentence_similarity`: the model's
        score of each sentence as a candidate for the source sentence, not its sigmoid."""
        if isinstance(asked, EmbedRequest):
            return await _embed(loaded(), asked, request)
        sentences = asked.inputs
        scored = await _score(loaded(), sentences.source_sentence, sentences.sentences, request)
        return scored.scores


def sigmoid(score: float) -> float:
    """The sigmoid of any finite score, without overflow."""
    small = math.exp(-abs(score))
    return (1.0 if score >= 0 else small) / (1.0 + small)


class _Scored(NamedTuple):
    engine: Engine
    scores: list[float]
    order: list[int]
    """Places, best first; ties in the order given."""
    tokens: int


async def _score(service: Service, query: str, texts: Sequence[str], request: Request) -> _Scored:
    engine, deadline = service.engine, request.state.deadline
    scores, tokens = await service.scores(engine, [query], texts, deadline)
    order = sorted(range(len(texts)), key=lambda place: -scores[place])
    return _Scored(engine, scores, order, tokens)


async def _rerank(
    service: Service, asked: DocumentsRerank, request: Request, version: str
) -> RerankResponse:
    texts = asked.texts
    scored = await _score(service, asked.query, texts, request)
    results = []
    for place in scored.order[: asked.top_n]:
        score = scored.scores[place]
        document = Document(text=texts[place]) if asked.return_documents else None
        results.append(
            DocumentScore(
                index=place,
                relevance_score=score if asked.raw_scores else sigmoid(score),
                document=document,
            )
        )
    return RerankResponse(
        id=request.state.request_id,
        model=scored.engine.model.fingerprint,
        results=results,
        usage=_usage(scored.tokens),
        meta=Meta(api_version=ApiVersion(version=version)),
    )


class _Embedded(NamedTuple):
    engine: Engine
    vectors_ND: Tensor
    tokens: int


async def _embed(service: Service, asked: EmbedRequest, request: Request) -> list[list[float]]:
    as_contexts = asked.prompt_name == "context"
    embedded = await _embedded(service, asked.inputs, request, asked.dimensions, as_contexts)
    vectors_ND = embedded.vectors_ND
    found: list[list[float]] = (
        F.normalize(vectors_ND, dim=1) if asked.normalize else vectors_ND
    ).tolist()
    return found


async def _embedded(
    service: Service,
    texts: Sequence[str],
    request: Request,
    dimensions: int | None,
    as_contexts: bool = False,
) -> _Embedded:
    """Vectors as the model scores with them, cut to `dimensions` the way it cuts them in training.

    Raises Refusal for what this model has not.
    """
    engine, deadline = service.engine, request.state.deadline
    config = engine.ranker.config
    if not config.has_vectors:
        raise Refusal("invalid_request", "model: a cross-encoder has no vectors; allowed: /rank, "
                      "and the formats that rerank")  # fmt: skip
    width = engine.ranker.dual.dimensions
    if dimensions is not None and dimensions > width:
        raise Refusal("invalid_request", f"dimensions: {dimensions} is not allowed; allowed: at most "
                      f"{width}, which the model has", "dimensions")  # fmt: skip
    if not as_contexts:
        vectors_ND, tokens = await service.candidate_vectors(engine, texts, deadline)
    elif config.vectors_per_context == 1:
        contexts = [[text] for text in texts]
        pairs, tokens = await service.context_vectors(engine, contexts, deadline)
        vectors_ND = torch.cat([vectors_MD for vectors_MD, _ in pairs])
    else:
        raise Refusal("invalid_request", "prompt_name: 'context' is not allowed, as contexts of this "
                      f"model have {config.vectors_per_context} vectors each; allowed: none",
                      "prompt_name")  # fmt: skip
    if dimensions is not None:
        vectors_ND = engine.ranker.dual.cut(vectors_ND, dimensions)
    return _Embedded(engine, vectors_ND, tokens)


def _base64(vectors_ND: Tensor) -> list[str]:
    return [base64.b64encode(row.tobytes()).decode() for row in vectors_ND.numpy().astype("<f4")]


def _usage(tokens: int) -> Usage:
    return Usage(prompt_tokens=tokens, total_tokens=tokens)
