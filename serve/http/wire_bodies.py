"""The bodies of requests and answers in the formats of other services; `wire.py` has their rules."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, StrictBool, Tag

from serve.http.fields import Count, FilledText
from serve.limits import MAX_CANDIDATES


def _as_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and any(isinstance(item, (int, list)) for item in value):
        raise ValueError("token ids are not allowed; allowed: a text, or a list of texts")
    return value


_TextList = Annotated[list[FilledText], Field(min_length=1, max_length=MAX_CANDIDATES)]
Texts = Annotated[
    _TextList, BeforeValidator(_as_list, json_schema_input_type=FilledText | _TextList)
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

Truncate = Annotated[
    Literal[True, None], Field(description="Texts that are too long are always truncated.")
]
_DIMENSIONS = (
    "Keep the first dimensions only; sensible only for a model trained for it (matryoshka)."
)


class TextsRerank(BaseModel):
    """A rerank request in TEI's format."""

    query: FilledText
    texts: _TextList
    raw_scores: StrictBool = False
    return_text: StrictBool = False
    truncate: Truncate = True
    truncation_direction: Literal["right", "Right"] = "right"


class _ForModel(BaseModel):
    model: str | None = Field(
        default=None,
        description="A name or the fingerprint of the served model; null means it, too.",
    )


class DocumentsRerank(_ForModel):
    """A rerank request in the format of Jina, infinity and Cohere."""

    query: FilledText
    # Before the documents: those with other fields have no text, and the error names what asks for them.
    rank_fields: list[Literal["text"]] | None = Field(
        default=None, description="Fields of a document to read."
    )
    documents: list[GivenDocument] = Field(min_length=1, max_length=MAX_CANDIDATES)
    top_n: Count | None = Field(default=None, description="Most results; by default all.")
    return_documents: StrictBool | None = None
    raw_scores: StrictBool = False

    @property
    def texts(self) -> list[str]:
        return [
            document if isinstance(document, str) else document.text for document in self.documents
        ]


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
    truncate: Truncate = True
    truncation_direction: Literal["right", "Right"] = "right"
    encoding_format: Literal["float"] = "float"


class EmbeddingsRequest(_ForModel):
    """An embedding request in OpenAI's format."""

    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    embedding_type: Literal["float"] | None = None
    dimensions: Count | None = Field(default=None, description=_DIMENSIONS)


class Sentences(BaseModel):
    """A sentence, and those to compare with it."""

    source_sentence: FilledText
    sentences: _TextList


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
