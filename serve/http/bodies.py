"""The bodies of requests and answers: polyrank's own, and in the formats of other services.

`serve/answers.py` has those that the client reads, too. `wire.py` has the rules of the others' formats.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictStr,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from serve.answers import Explanation, Result
from serve.limits import LIMITS, MAX_CANDIDATES, MAX_POOL_NAME, MAX_TOP_K, MAX_TURNS
from serve.pools import RowFilter
from serve.service import CandidateText, RankQuery

_SHOWN_DIGITS = 200  # of a number in a message
ItemT = TypeVar("ItemT")

# Fields


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("the text is empty")
    return _encodable(text)


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text holds half of a surrogate pair") from None
    return text


def _number(value: Any) -> Any:
    """JSON has one type of number, so 10.0 is allowed for 10. Strings and booleans are not numbers."""
    if isinstance(value, (bool, str)):
        raise ValueError("input should be a valid integer")
    return value


def at_most(limit: str) -> BeforeValidator:
    """Refuses a list with more items than this limit of the operator's, whose items are not read then, and a
    number above it. Bounds of the interface must stand before it, or OpenAPI does not show them."""

    def check(value: Any) -> Any:
        count, most = len(value) if isinstance(value, list) else value, getattr(LIMITS.get(), limit)
        if isinstance(count, (int, float)) and count > most:
            facts = {"count": f"{count:,}"[:_SHOWN_DIGITS], "most": most, "limit": limit}
            message = "{count} are not allowed; allowed: at most {most} (limits.{limit})"
            raise PydanticCustomError("too_many", message, facts)
        return value

    return BeforeValidator(check)


FilledText = Annotated[
    StrictStr, AfterValidator(_not_blank), Field(json_schema_extra={"pattern": r"\S"})
]
Text = Annotated[StrictStr, AfterValidator(_encodable)]
Count = Annotated[int, Field(ge=1), BeforeValidator(_number)]
TopK = Annotated[int, Field(ge=1, le=MAX_TOP_K), BeforeValidator(_number), at_most("top_k")]
Ids = Annotated[list[Text], Field(max_length=MAX_CANDIDATES), at_most("candidates")]
Many = Annotated[list[ItemT], Field(min_length=1, max_length=MAX_CANDIDATES), at_most("candidates")]
Dimensions = Annotated[int, Field(ge=0), BeforeValidator(_number)]
TextOr = Annotated[
    Annotated[FilledText, Tag("<text>")] | Annotated[ItemT, Tag("<object>")],
    Discriminator(lambda value: "<object>" if isinstance(value, (dict, BaseModel)) else "<text>"),
]


class Body(BaseModel):
    """A request's body. The docstrings of its fields are their descriptions in openapi.json."""

    model_config = ConfigDict(use_attribute_docstrings=True)


# polyrank's own


class Strict(Body):
    """Refuses unknown fields."""

    model_config = ConfigDict(extra="forbid")


class Candidate(Strict):
    """A text with the client's own id."""

    id: Text
    text: FilledText


class RankRequest(Strict):
    """The candidates come with the request, or from a pool."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["candidates"]}, {"required": ["pool"]}]}
    )

    context: Annotated[
        Annotated[FilledText, Tag("<text>")]
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_TURNS), Tag("<list>")],
        Discriminator(lambda value: "<list>" if isinstance(value, list) else "<text>"),
    ]
    """The turns so far, oldest first, newest last; a text is one turn."""
    candidates: Many[TextOr[Candidate]] | None = None
    """The texts to rank."""
    pool: StrictStr | None = Field(default=None, min_length=1, max_length=MAX_POOL_NAME)
    """The pool to search."""
    top_k: TopK = 10
    """Most results."""
    where: dict[str, list[Text]] | None = Field(default=None, max_length=10)
    """With a pool: its columns, and the values that a row may have there."""
    allow: Ids | None = None
    """With a pool: the only ids that count."""
    deny: Ids | None = None
    """With a pool: ids that do not count."""
    explain: StrictBool = False
    """Say which tokens the context's vectors attend to, and how much each vector counts in each score. Not
    with a cross-encoder, which has no vectors."""

    @model_validator(mode="after")
    def _check_source(self) -> RankRequest:
        if not any(turn.strip() for turn in self.turns):
            raise ValueError("context: every turn is empty")
        if (self.candidates is None) == (self.pool is None):
            raise ValueError("candidates, pool: exactly one of them is needed")
        for name in ("where", "allow", "deny"):
            if self.pool is None and getattr(self, name) is not None:
                raise ValueError(f"{name}: allowed: only with a pool")
        return self

    @property
    def turns(self) -> list[str]:
        return [self.context] if isinstance(self.context, str) else self.context

    def query(self) -> RankQuery:
        candidates = None
        if self.candidates is not None:
            candidates = [
                CandidateText(str(place), candidate)
                if isinstance(candidate, str)
                else CandidateText(candidate.id, candidate.text)
                for place, candidate in enumerate(self.candidates)
            ]
        rows = RowFilter(
            where=tuple((name, tuple(values)) for name, values in (self.where or {}).items()),
            allow=None if self.allow is None else tuple(self.allow),
            deny=tuple(self.deny or ()),
        )
        return RankQuery(self.turns, candidates, self.pool, self.top_k, rows, self.explain)


class PoolVersion(BaseModel):
    """The pool version that answered. `missing_shards`: numbers of the shards that did not answer, whose rows
    are not among the results."""

    name: str
    version: str
    missing_shards: list[int] = []


class RankResponse(BaseModel):
    """The results, best first. `model`: the ranker's fingerprint. `second_stage`: that of the model that
    scored the best rows of a pool again. `certified`: whether this is provably the exact top k; with a
    second stage: whether it scored provably the exact best. `context_tokens`: tokens of the context that
    were read; a context longer than `limits.max_context_tokens` of /info is cut. `milliseconds`: the
    replica's time.
    `explanation`: only with `explain`, and if there are results."""

    results: list[Result]
    certified: bool
    model: str
    second_stage: str | None = None
    pool: PoolVersion | None
    context_tokens: int = 0
    milliseconds: float
    explanation: Explanation | None = None


class ClassifyRequest(Strict):
    """Texts with one intent each, such as customers' messages."""

    texts: Many[FilledText]
    top_k: TopK = 3
    """Most intents of each text."""


class Health(BaseModel):
    """`ok`: the process answers; for /ready also: a model is loaded and computes."""

    status: str


# Other services


def _as_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        return value
    firsts = [item[0] if isinstance(item, list) and item else item for item in value]
    if any(type(first) is int for first in firsts):
        raise ValueError("token ids are not allowed; allowed: a text, or a list of texts")
    return [item.get("text", item) if isinstance(item, dict) else item for item in value]


class Document(BaseModel):
    """A text to rank or to embed. Other fields are ignored."""

    text: FilledText


Texts = Annotated[
    Many[FilledText],
    BeforeValidator(_as_list, json_schema_input_type=FilledText | Many[FilledText | Document]),
]
"""A single text means a list of one. Clients of Jina send objects with a text."""


# Requests


class _OfTexts(Body):
    texts_field: ClassVar[str] = "texts"
    """The name that clients give to `texts`."""

    truncate: Literal[True, False, "END", "NONE", None] = None
    """false, NONE: refuse a text that is longer than what the model reads. By default its end is left out; of
    a query, which is a context, its beginning."""
    truncation: StrictBool | None = None
    """The same for clients of Voyage."""
    truncation_direction: Literal["right", "Right", None] = "right"
    truncation_side: Literal["right", None] = None
    # What stands before a text belongs to the model, which was trained with it or without.
    instruction: Literal["", None] = None
    prompt: Literal["", None] = None

    @property
    def needs_whole_texts(self) -> bool:
        return any(value in (False, "NONE") for value in (self.truncate, self.truncation))


class _Rerank(_OfTexts):
    query: FilledText
    top_n: Count | None = None
    """Most results; by default all."""
    raw_scores: StrictBool | None = False


class TextsRerank(_Rerank):
    """A rerank request in TEI's format."""

    texts: Many[FilledText]
    return_text: StrictBool | None = False


class ForModel(Body):
    """What requests have that may name the model."""

    model: str | None = None
    """A name or the fingerprint of the served model; null means it, too."""


class DocumentsRerank(ForModel, _Rerank):
    """A rerank request in the format of Jina, infinity, Cohere and Voyage."""

    texts_field = "documents"

    # Before the documents: those with other fields have no text, and the error names what asks for them.
    rank_fields: list[Literal["text"]] | None = None
    """Fields of a document to read."""
    documents: Many[TextOr[Document]]
    top_k: Count | None = None
    """As `top_n`, for clients of Voyage."""
    return_documents: StrictBool | None = None

    @property
    def texts(self) -> list[str]:
        return [
            document if isinstance(document, str) else document.text for document in self.documents
        ]


class _ToEmbed(_OfTexts):
    texts: Texts
    input_type: (
        Literal["query", "search_query", "document", "search_document", "passage"] | None
    ) = None
    """query, search_query: embed the texts as contexts, if the model makes one vector of a context. Else: as
    candidates."""
    task: Literal["retrieval.query", "retrieval.passage"] | None = None
    """retrieval.query: the same for clients of Jina."""
    dimensions: Dimensions | None = None
    """Keep the first dimensions only; sensible only for a model trained for it (matryoshka). 0: all."""
    output_dimension: Dimensions | None = None
    """The same for clients of Voyage and Cohere."""
    output_dtype: Literal["float"] | None = None
    prompt_name: Literal["context", "query", "document", "passage"] | None = None
    """context, query: the same for clients of TEI."""

    @property
    def context_field(self) -> tuple[str, str] | None:
        """The field that asks for contexts, and its value."""
        if self.prompt_name in ("context", "query"):
            return "prompt_name", self.prompt_name
        if self.input_type in ("query", "search_query"):
            return "input_type", self.input_type
        return ("task", self.task) if self.task == "retrieval.query" else None


class EmbedRequest(_ToEmbed):
    """An embedding request in TEI's format."""

    texts_field = "inputs"

    texts: Texts = Field(alias="inputs")
    normalize: StrictBool | None = True
    """Scale the vectors to length 1."""
    encoding_format: Literal["float", None] = "float"


VectorType = Literal["float", "base64"]


class EmbeddingsRequest(ForModel, _ToEmbed):
    """An embedding request in OpenAI's format."""

    texts_field = "input"

    texts: Texts = Field(alias="input")
    encoding_format: VectorType | None = None
    embedding_type: VectorType | None = None
    """The same for clients of Jina."""
    encoding_type: Literal["float"] | None = None
    late_chunking: Literal[False, None] = None
    """Each text is embedded by itself."""
    return_multivector: Literal[False, None] = None
    """Each text has one vector."""
    modality: Literal["text"] | None = None
    normalized: StrictBool | None = True
    """For clients of Jina: scale the vectors to length 1."""


class TextsEmbedRequest(ForModel, _ToEmbed):
    """An embedding request in Cohere's format."""

    embedding_types: list[VectorType] | None = Field(default=None, min_length=1)
    """null: float."""


class Sentences(BaseModel):
    """A sentence, and those to compare with it."""

    source_sentence: FilledText
    sentences: Many[FilledText]


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
    """A document's place in the request, and its score. In Voyage's format `document` is a text."""

    index: int
    relevance_score: float
    document: Document | str | None = None


class Usage(BaseModel):
    """Tokens that the model read, with special tokens. Equal texts are read once."""

    prompt_tokens: int
    total_tokens: int


class ApiVersion(BaseModel):
    """The version of the format."""

    version: str


class BilledUnits(BaseModel):
    """A field of Cohere's format: a reranking is one unit, and an embedding has its tokens. Nothing is billed
    here."""

    search_units: int | None = None
    input_tokens: int | None = None


class Meta(BaseModel):
    """Metadata in Cohere's format."""

    api_version: ApiVersion
    billed_units: BilledUnits


class RerankResponse(BaseModel):
    """The results, best first. `id` is the request id, as in the logs. `data`: the same in Voyage's format,
    for a request with a field of that format, `top_k` or `truncation`."""

    id: str
    model: str
    results: list[DocumentScore]
    data: list[DocumentScore] | None = None
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


class TextsEmbedResponse(BaseModel):
    """The embeddings of the texts, in their order, by type; only the vectors in version 1 for a request
    without `embedding_types`. In base64: little-endian float32. `id` is the request id, as in the logs."""

    response_type: Literal["embeddings_floats", "embeddings_by_type"]
    id: str
    texts: list[str]
    embeddings: list[list[float]] | dict[VectorType, list[list[float]] | list[str]]
    meta: Meta


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
