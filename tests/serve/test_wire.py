"""Other vendors' formats: their own clients against a live service, and what they cannot have."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import httpx2
import jsonschema
import numpy as np
import pytest
from fastapi.testclient import TestClient

from pipeline.artifact import Artifact
from pipeline.models import inference
from pipeline.models.ranker import Ranker, load_ranker
from serve.http.api import create_app
from serve.http.guard import MODEL
from serve.service import Service, Work
from tests.helpers import formula_scores

from .conftest import INTERFACE, error_of
from .live import serving

NAME = "our-team/dialogue"
QUERY = "hi , what do you do ?"
TEXTS = ["i sail on the harbour", "tea", "no", "a nurse", "i sail on the harbour", "x" * 200]
NEAR: dict[str, Any] = {"rel": 1e-4, "abs": 1e-6}


class Live(NamedTuple):
    """A service, and the model by itself."""

    url: str
    http: httpx2.Client
    artifact: Artifact
    ranker: Ranker

    def post(self, path: str, body: Any) -> httpx2.Response:
        headers = {"content-type": "application/json"}
        return self.http.post(path, content=json.dumps(body), headers=headers)

    @property
    def scores(self) -> np.ndarray:
        """Of TEXTS for QUERY."""
        return np.array(formula_scores(self.ranker, [QUERY], TEXTS))

    @property
    def ranking(self) -> tuple[list[int], np.ndarray]:
        """The places of TEXTS, best first, and their scores in this order."""
        order = np.argsort(-self.scores, kind="stable")
        return order.tolist(), self.scores[order]

    def vectors(self, texts: list[str]) -> np.ndarray:
        """Of candidates, one at a time; as long as they are."""
        return np.stack(
            [inference.candidate_vectors(self.ranker, [t])[0].double().numpy() for t in texts]
        )

    def tokens(self, texts: list[str]) -> int:
        return sum(map(len, self.ranker.candidate_rows(texts)))


@pytest.fixture(scope="module")
def live(tiny_ranker, asking) -> Iterator[Callable[[str], Live]]:
    """`live("poly")`: a service of that architecture, started once."""
    made: dict[str, Live] = {}
    with ExitStack() as stack:

        def start(architecture: str) -> Live:
            if architecture not in made:
                artifact = tiny_ranker(architecture)
                app = create_app(asking(artifact).service, names=[NAME])
                url = stack.enter_context(serving(app))
                http = stack.enter_context(httpx2.Client(base_url=url, timeout=60))
                made[architecture] = Live(url, http, artifact, load_ranker(Path(artifact.uri)))
            return made[architecture]

        yield start


@pytest.fixture(scope="module")
def cohere() -> ModuleType:
    return pytest.importorskip("cohere", reason="cohere's client is not installed")


@pytest.fixture
def cohere_of(cohere) -> Iterator[Callable[..., Any]]:
    """`cohere_of(live, version)`: Cohere's client of a service."""
    import httpx

    classes = {1: cohere.Client, 2: cohere.ClientV2}
    with httpx.Client(timeout=60) as http:
        yield lambda live, version=1: classes[version](
            api_key="none", base_url=live.url, httpx_client=http
        )


@pytest.fixture(scope="module")
def openai() -> ModuleType:
    return pytest.importorskip("openai", reason="openai's client is not installed")


@pytest.fixture
def openai_of(openai) -> Iterator[Callable[[Live], Any]]:
    """`openai_of(live)`: OpenAI's client of a service."""
    with ExitStack() as stack:
        yield lambda live: stack.enter_context(
            openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
        )


@pytest.fixture
def hugging_face_of(monkeypatch) -> Iterator[Callable[[Live], Any]]:
    """`hugging_face_of(live)`: Hugging Face's client of a service."""
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # it refuses any URL
    with ExitStack() as stack:
        yield lambda live: stack.enter_context(hub.InferenceClient(model=live.url, token="none"))


def sigmoid(scores: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-scores))


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def documented(path: str) -> jsonschema.Draft202012Validator:
    """What openapi.json says of the body that a route takes."""
    body = INTERFACE["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator({**body, "components": INTERFACE["components"]})


# Reranking


@pytest.mark.parametrize("version", [1, 2])
def test_coheres_client_reranks(live, cohere_of, version):
    one = live("poly")
    order, scores = one.ranking
    client = cohere_of(one, version)
    answer = client.rerank(model=NAME, query=QUERY, documents=TEXTS, top_n=3)
    assert [result.index for result in answer.results] == order[:3]
    found = [result.relevance_score for result in answer.results]
    assert found == pytest.approx(sigmoid(scores[:3]), **NEAR)
    assert answer.meta.api_version.version == str(version)
    assert answer.id
    whole = client.rerank(model=NAME, query=QUERY, documents=TEXTS)
    assert len(whole.results) == len(TEXTS)


def test_coheres_client_gets_documents_back(live, cohere_of):
    client = cohere_of(live("poly"))
    documents = [{"text": text, "title": "not read"} for text in TEXTS]
    answer = client.rerank(query=QUERY, documents=documents, return_documents=True)
    assert [r.document.text for r in answer.results] == [TEXTS[r.index] for r in answer.results]
    plain = client.rerank(query=QUERY, documents=TEXTS)
    assert [r.index for r in plain.results] == [r.index for r in answer.results]
    assert {r.document for r in plain.results} == {None}


def test_coheres_client_raises_its_own_error(live, cohere, cohere_of):
    client = cohere_of(live("bi"), 2)
    with pytest.raises(cohere.UnprocessableEntityError) as caught:
        client.rerank(model=NAME, query=QUERY, documents=[" "])
    assert caught.value.body["error"]["field"] == "documents.0"


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_jinas_format(live, path):
    one = live("cross")
    body = {"model": NAME, "query": QUERY, "documents": TEXTS, "top_n": 2}
    answer = one.post(path, {**body, "return_documents": True}).json()
    order, scores = one.ranking
    assert answer["results"] == [
        {
            "index": place,
            "relevance_score": pytest.approx(score, **NEAR),
            "document": {"text": TEXTS[place]},
        }
        for place, score in zip(order[:2], sigmoid(scores), strict=False)
    ]
    assert answer["model"] == one.artifact.fingerprint
    without = one.post(path, body).json()
    assert "document" not in without["results"][0] and "data" not in without


def test_voyages_format(live):
    """Its client reads `data`, and always sends both fields."""
    one, body = live("bi"), {"query": QUERY, "documents": TEXTS, "top_k": None, "truncation": True}
    order, scores = one.ranking
    data = one.post("/v1/rerank", body).json()["data"]
    assert data == [
        {"index": place, "relevance_score": pytest.approx(score, **NEAR)}
        for place, score in zip(order, sigmoid(scores), strict=True)
    ]
    two = one.post("/v1/rerank", {**body, "top_k": 2, "return_documents": True}).json()["data"]
    assert [row["document"] for row in two] == [TEXTS[place] for place in order[:2]]


@pytest.mark.parametrize("architecture", ["poly", "cross"])
def test_tokens_are_those_that_the_model_reads(live, architecture):
    one = live(architecture)
    usage = one.post("/v1/rerank", {"query": QUERY, "documents": TEXTS}).json()["usage"]
    context, distinct = len(one.ranker.context_rows([[QUERY]])[0]), list(dict.fromkeys(TEXTS))
    read = context + one.tokens(distinct)
    if architecture == "cross":  # the context again for each; one [CLS] for a pair
        read = len(distinct) * (context - 1) + one.tokens(distinct)
    assert usage == {"prompt_tokens": read, "total_tokens": read}


@pytest.mark.parametrize("architecture", ["bi", "poly", "cross"])
def test_teis_format(live, architecture):
    one = live(architecture)
    order, scores = one.ranking
    body = {"query": QUERY, "texts": TEXTS, "truncate": True, "truncation_direction": "Right"}
    answer = one.post("/rerank", body).json()
    assert answer == [
        {"index": place, "score": pytest.approx(score, **NEAR)}
        for place, score in zip(order, sigmoid(scores), strict=True)
    ]
    raw = one.post("/rerank", {**body, "raw_scores": True, "return_text": True}).json()
    assert [result["score"] for result in raw] == pytest.approx(scores, **NEAR)
    assert [result["text"] for result in raw] == [TEXTS[place] for place in order]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/rerank", {"query": "a", "texts": ["b", "x" * 31], "truncate": False}, "texts.1"),
        ("/rerank", {"query": "x" * 47, "texts": ["b"], "truncate": False}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["x" * 31], "truncation": False}, "documents.0"),
        ("/embed", {"inputs": "x" * 31, "truncate": False}, "inputs.0"),
        ("/v1/embeddings", {"input": ["x" * 31], "truncate": "NONE"}, "input.0"),
        ("/embed", {"inputs": "x" * 47, "truncate": False, "prompt_name": "context"}, "inputs.0"),
    ],
)
def test_a_text_that_may_not_be_truncated_is_refused_if_it_is_longer(live, path, body, field):
    """The model reads 46 bytes of a context and 30 of a candidate. Clients send `truncate: false`, which was
    refused for any text."""
    one = live("bi")
    error = error_of(one.post(path, body))
    assert (error["code"], error["field"]) == ("invalid_request", field)
    assert "may not be truncated" in error["message"]
    fits = json.loads(json.dumps(body).replace('"x', '"'))  # one byte less
    assert one.post(path, fits).status_code == 200


def test_scores_that_are_1_keep_their_order(live, monkeypatch):
    one = live("bi")

    async def scores(*asked: Any) -> tuple[list[float], int]:
        return [40.0, 700.0, -800.0, 50.0], 1

    monkeypatch.setattr(Work, "scores", scores)
    answer = one.post("/rerank", {"query": QUERY, "texts": TEXTS[:4]}).json()
    assert answer == [
        {"index": 1, "score": 1.0}, {"index": 3, "score": 1.0}, {"index": 0, "score": 1.0},
        {"index": 2, "score": 0.0},
    ]  # fmt: skip


# Embeddings


def test_teis_embeddings(live):
    one = live("poly")
    vectors = one.vectors(TEXTS)
    found = one.post("/embed", {"inputs": TEXTS, "truncate": True}).json()
    assert np.allclose(found, unit(vectors), atol=1e-5)
    found = one.post("/embed", {"inputs": TEXTS, "normalize": False}).json()
    assert np.allclose(found, vectors, atol=1e-4)
    single = one.post("/embed", {"inputs": TEXTS[0], "normalize": False}).json()
    assert np.allclose(single, vectors[:1], atol=1e-4)
    cut = one.post("/embed", {"inputs": TEXTS, "dimensions": 5}).json()
    assert np.allclose(cut, unit(vectors[:, :5]), atol=1e-5)


def test_all_vectors_are_the_champions_while_a_candidate_answers(tiny_ranker, asking):
    champion, candidate = (asking(tiny_ranker("bi", seed)).engine for seed in (0, 1))
    service = Service(lambda: champion, max_wait_s=60.0, candidate=lambda: candidate)
    with closing(service), TestClient(create_app(service)) as client:
        rerank = client.post("/v1/rerank", json={"query": QUERY, "documents": TEXTS})
        assert rerank.json()["model"] == rerank.headers[MODEL] == candidate.model.fingerprint
        texts = unit(inference.candidate_vectors(champion.ranker, TEXTS).numpy())
        vectors = inference.context_vectors(champion.ranker, [[text] for text in TEXTS])[0]
        for path, body, expected in (
            ("/embed", {"inputs": TEXTS}, texts),
            ("/embed", {"inputs": TEXTS, "prompt_name": "context"}, unit(vectors[:, 0].numpy())),
            ("/", {"inputs": TEXTS}, texts),
            ("/v1/embeddings", {"input": TEXTS}, texts),
        ):
            answer = client.post(path, json=body)
            assert answer.headers[MODEL] == champion.model.fingerprint
            found = answer.json()
            if isinstance(found, dict):
                assert found["model"] == champion.model.fingerprint
                found = [row["embedding"] for row in found["data"]]
            assert np.allclose(found, expected, atol=1e-5)


def test_contexts_are_embedded_where_they_have_one_vector(live):
    one = live("bi")
    contexts = [[text] for text in TEXTS]
    vectors, _ = inference.context_vectors(one.ranker, contexts)
    asked = {"inputs": TEXTS, "prompt_name": "context", "normalize": False}
    found = one.post("/embed", asked).json()
    assert np.allclose(found, vectors[:, 0].numpy(), atol=1e-4)
    assert not np.allclose(found, one.vectors(TEXTS), atol=1e-2)
    error = error_of(live("poly").post("/embed", asked))
    assert (error["code"], error["field"]) == ("invalid_request", "prompt_name")
    assert "3 vectors" in error["message"]


@pytest.mark.parametrize("path", ["/embed", "/", "/v1/embeddings"])
def test_a_query_is_embedded_as_a_context(live, path):
    one, texts = live("bi"), "input" if path == "/v1/embeddings" else "inputs"
    vectors, _ = inference.context_vectors(one.ranker, [[text] for text in TEXTS])
    expected_of = {"query": vectors[:, 0].numpy(), "search_query": vectors[:, 0].numpy()} | (
        dict.fromkeys(("document", "search_document", "passage", None), one.vectors(TEXTS))
    )
    for kind, expected in expected_of.items():
        found = one.post(path, {texts: TEXTS, "input_type": kind}).json()
        if isinstance(found, dict):
            found = [row["embedding"] for row in found["data"]]
        assert np.allclose(found, unit(expected), atol=1e-4), kind
    expected = one.post(path, {texts: TEXTS, "input_type": "query"}).json()
    assert one.post(path, {texts: TEXTS, "task": "retrieval.query"}).json() == expected  # Jina's
    error = error_of(live("poly").post(path, {texts: TEXTS, "input_type": "query"}))
    assert (error["code"], error["field"]) == ("invalid_request", "input_type")
    assert error["message"].startswith("input_type: 'query' is not allowed, as contexts of this ")
    assert error["message"].endswith("model have 3 vectors each; allowed: document")


def test_coheres_client_embeds(live, cohere, cohere_of):
    one, client = live("bi"), cohere_of(live("bi"))
    vectors = unit(one.vectors(TEXTS))
    plain = client.embed(texts=TEXTS, model=NAME, input_type="search_document", truncate="END")
    assert plain.response_type == "embeddings_floats"
    assert np.allclose(plain.embeddings, vectors, atol=1e-5)
    assert (plain.texts, plain.meta.billed_units.input_tokens) == (TEXTS, one.tokens(TEXTS))
    both = ["float", "base64"]
    typed = client.embed(texts=TEXTS, model=NAME, embedding_types=both, batching=False)
    assert typed.response_type == "embeddings_by_type"
    assert np.allclose(typed.embeddings.float_, vectors, atol=1e-5)
    decoded = [np.frombuffer(base64.b64decode(v), "<f4") for v in typed.embeddings.base64]
    assert np.allclose(decoded, vectors, atol=1e-5)
    two = cohere_of(one, 2)
    asked = {"texts": TEXTS, "model": NAME, "input_type": "search_document"}
    assert np.allclose(two.embed(**asked).embeddings.float_, vectors, atol=1e-5)
    cut = two.embed(**asked, output_dimension=5, embedding_types=["float"]).embeddings.float_
    assert np.allclose(cut, unit(one.vectors(TEXTS)[:, :5]), atol=1e-5)
    with pytest.raises(cohere.UnprocessableEntityError) as caught:
        two.embed(**asked, embedding_types=["int8"])
    assert caught.value.body["error"]["field"] == "embedding_types.0"
    with pytest.raises(cohere.NotFoundError):
        two.embed(**{**asked, "model": "other"})


@pytest.mark.parametrize("encoding", [{"encoding_format": "float"}, {}])
def test_openais_client_embeds(live, openai_of, encoding):
    """By default it asks for base64, and decodes it."""
    one = live("bi")
    answer = openai_of(one).embeddings.create(model=NAME, input=TEXTS, user="me", **encoding)
    found = [embedding.embedding for embedding in answer.data]
    assert np.allclose(found, unit(one.vectors(TEXTS)), atol=1e-5)
    assert [e.index for e in answer.data] == list(range(len(TEXTS)))
    assert answer.model == one.artifact.fingerprint
    assert answer.usage.total_tokens == answer.usage.prompt_tokens == one.tokens(TEXTS)


def test_an_encoding_that_is_null_is_the_usual_one(live):
    """LiteLLM sends it."""
    answer = live("bi").post("/v1/embeddings", {"input": TEXTS, "encoding_format": None})
    assert isinstance(answer.json()["data"][0]["embedding"], list)


def test_openais_client_cuts_vectors(live, openai, openai_of):
    one = live("poly")
    client = openai_of(one)
    answer = client.embeddings.create(model=NAME, input=TEXTS[0], dimensions=5)
    assert np.allclose(answer.data[0].embedding, unit(one.vectors(TEXTS[:1])[:, :5])[0], atol=1e-5)
    with pytest.raises(openai.UnprocessableEntityError, match="allowed: at most 16") as caught:
        client.embeddings.create(model=NAME, input=TEXTS[0], dimensions=17)
    assert caught.value.code == "invalid_request"


def test_jinas_name_of_base64_is_openais(live):
    one = live("bi")
    found, expected = (
        one.post("/v1/embeddings", {"input": TEXTS, name: "base64"}).json()
        for name in ("embedding_type", "encoding_format")
    )
    assert found == expected and isinstance(found["data"][0]["embedding"], str)


def test_jinas_vectors_are_not_scaled_if_it_says_so(live):
    """They were."""
    one = live("bi")
    answer = one.post("/v1/embeddings", {"input": TEXTS, "normalized": False}).json()
    found = [row["embedding"] for row in answer["data"]]
    assert np.allclose(found, one.vectors(TEXTS), atol=1e-4)


def test_other_clients_cut_vectors_and_results_by_names_of_their_own(live):
    one, cut = live("bi"), {"input": TEXTS, "dimensions": 5}
    expected = one.post("/v1/embeddings", cut).json()
    voyages = {"input": TEXTS, "output_dimension": 5, "output_dtype": "float"}
    assert one.post("/v1/embeddings", voyages).json() == expected
    infinitys = {"input": TEXTS, "dimensions": 0, "modality": "text"}  # its client's default
    whole = one.post("/v1/embeddings", infinitys).json()
    assert len(whole["data"][0]["embedding"]) == 16
    found = one.post("/v1/rerank", {"query": QUERY, "documents": TEXTS, "top_k": 2}).json()
    assert len(found["results"]) == 2
    litellms = {"query": QUERY, "texts": TEXTS, "top_n": 2}  # to a service of TEI's format
    assert len(one.post("/rerank", litellms).json()) == 2


def test_openais_client_lists_the_model(live, openai_of):
    one = live("cross")
    model, named = openai_of(one).models.list().data
    assert (model.id, named.id) == (one.artifact.fingerprint, NAME)
    assert (model.object, model.owned_by) == ("model", "polyrank")
    assert model.created > 1_700_000_000


def test_openais_client_gets_the_model_and_no_other(live, openai, openai_of):
    one = live("bi")
    client = openai_of(one)
    for listed in client.models.list():
        assert client.models.retrieve(listed.id) == listed
    there_are = f"there are: {NAME}, {one.artifact.fingerprint}"
    with pytest.raises(openai.NotFoundError, match=there_are):
        client.models.retrieve("other")


def test_the_list_of_models_with_a_slash_behind_it_is_named(live):
    """It was a model that is not served."""
    error = error_of(live("bi").http.get("/v1/models/"), 404)
    assert (error["code"], error["field"]) == ("not_found", None)
    assert error["message"].endswith("There is /v1/models")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rerank", {"query": QUERY, "documents": TEXTS}),
        ("/v2/rerank", {"query": QUERY, "documents": TEXTS}),
        ("/v1/embeddings", {"input": TEXTS}),
    ],
)
def test_a_model_that_is_not_served_is_refused(live, path, body):
    """An answer of another model was taken for the one that was named."""
    one = live("bi")
    error = error_of(one.post(path, {**body, "model": "rerank-v3.5"}), 404)
    assert (error["code"], error["field"]) == ("unknown_model", "model")
    for name in (NAME, one.artifact.fingerprint):
        assert name in error["message"]
        assert one.post(path, {**body, "model": name}).status_code == 200


def test_without_names_any_model_means_the_served_one(tiny_ranker, asking):
    """Many clients must send one."""
    with TestClient(create_app(asking(tiny_ranker("bi")).service)) as client:
        body = {"query": QUERY, "documents": TEXTS, "model": "rerank-v3.5"}
        assert client.post("/v2/rerank", json=body).status_code == 200
        assert client.get("/v1/models/rerank-v3.5").status_code == 404


@pytest.mark.parametrize(
    ("path", "same_as"), [("/embeddings", "/v1/embeddings"), ("/models", "/v1/models")]
)
def test_infinitys_routes_are_openais(live, path, same_as):
    one = live("bi")
    ask = one.http.get if "models" in path else partial(one.post, body={"input": TEXTS})
    found, expected = ask(path), ask(same_as)
    assert (found.status_code, found.json()) == (200, expected.json())


def test_teis_similarity(live):
    one = live("bi")
    body = {"inputs": {"source_sentence": QUERY, "sentences": TEXTS}}
    assert one.post("/similarity", body).json() == pytest.approx(one.scores, rel=1e-4)


@pytest.mark.parametrize("ids", [[101, 7592], [[101, 7592]]])
def test_token_ids_of_another_vocabulary_are_refused(live, openai, openai_of, ids):
    with pytest.raises(openai.UnprocessableEntityError, match="token ids are not allowed"):
        openai_of(live("bi")).embeddings.create(model=NAME, input=ids)


def test_hugging_faces_client_embeds(live, hugging_face_of):
    one = live("poly")
    found = hugging_face_of(one).feature_extraction(TEXTS, normalize=True, truncate=True)
    assert np.allclose(found, unit(one.vectors(TEXTS)), atol=1e-5)
    single = hugging_face_of(one).feature_extraction(TEXTS[0], normalize=False)
    assert np.allclose(single, one.vectors(TEXTS[:1]), atol=1e-4)


def test_hugging_faces_client_compares_sentences(live, hugging_face_of):
    one = live("cross")
    found = hugging_face_of(one).sentence_similarity(QUERY, other_sentences=TEXTS)
    assert found == pytest.approx(one.scores, **NEAR)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/embed", {"inputs": "a"}), ("/", {"inputs": "a"}), ("/v1/embeddings", {"input": "a"})],
)
def test_a_cross_encoder_has_no_vectors(live, path, body):
    error = error_of(live("cross").post(path, body))
    assert error["code"] == "invalid_request"
    assert "a cross-encoder has no vectors" in error["message"]


# What is refused, and what is ignored

DOCUMENTS = {"query": QUERY, "documents": TEXTS}
MANY = ["a"] * 10_001


@pytest.mark.parametrize(
    ("path", "body", "field", "said"),
    [
        ("/rerank", {"query": QUERY}, "documents", "required"),
        ("/rerank", {"query": QUERY, "texts": []}, "texts", "at least 1"),
        ("/rerank", {"query": QUERY, "texts": ["a"], "raw_scores": "yes"}, "raw_scores", "boolean"),
        ("/rerank", {"query": QUERY, "texts": ["a"], "truncation_direction": "left"},
         "truncation_direction", "right"),
        ("/rerank", [], None, "object"),
        ("/v1/rerank", {**DOCUMENTS, "query": " "}, "query", "empty"),
        ("/v1/rerank", {**DOCUMENTS, "documents": MANY}, "documents", "(limits.candidates)"),
        ("/v1/rerank", {**DOCUMENTS, "documents": [{"title": "a"}]}, "documents.0.text", "required"),
        ("/v1/rerank", {**DOCUMENTS, "documents": ["a", 3]}, "documents.1", "string"),
        ("/v1/rerank", {**DOCUMENTS, "documents": ["\ud800"]}, "documents.0", "surrogate"),
        ("/v1/rerank", {**DOCUMENTS, "rank_fields": ["title"]}, "rank_fields.0", "'text'"),
        ("/v1/rerank", {"query": QUERY, "documents": [{"title": "a"}], "rank_fields": ["title"]},
         "rank_fields.0", "'text'"),
        ("/rerank", {"query": QUERY, "texts": TEXTS, "truncate": "yes"}, "truncate", "NONE"),
        ("/v1/embeddings", {"input": "a", "truncate": "START"}, "truncate", "END"),
        ("/v1/embeddings", {"input": "a", "late_chunking": True}, "late_chunking", "False"),
        ("/v1/embeddings", {"input": "a", "encoding_type": "binary"}, "encoding_type", "float"),
        ("/v1/embeddings", {"input": ["a", {"url": "b"}]}, "input.1", "string"),
        ("/v1/embeddings", {"input": [["a", "b"]]}, "input.0", "string"),
        ("/v1/embeddings", {"input": [[]]}, "input.0", "string"),
        ("/v1/embeddings", {"input": [True]}, "input.0", "string"),
        ("/v1/embeddings", {"input": "a", "return_multivector": True}, "return_multivector", "False"),
        ("/v2/rerank", {**DOCUMENTS, "top_n": 0}, "top_n", "greater than or equal to 1"),
        # What would stand before the texts was left out, and the score was another one without a word.
        ("/rerank", {**DOCUMENTS, "instruction": "judge"}, "instruction", "''"),
        ("/v1/embeddings", {"input": "a", "prompt": "query: "}, "prompt", "''"),
        ("/v1/rerank", {**DOCUMENTS, "truncation_side": "left"}, "truncation_side", "right"),
        ("/v2/embed", {"texts": ["a"], "embedding_types": []}, "embedding_types", "at least 1"),
        ("/v1/embed", {"texts": ["a"], "truncate": "START"}, "truncate", "END"),
        ("/v2/embed", {"inputs": [{"content": []}]}, "texts", "required"),
        ("/embed", {"inputs": []}, "inputs", "at least 1"),
        ("/embed", {"inputs": MANY}, "inputs", "(limits.candidates)"),
        ("/embed", {"inputs": ""}, "inputs.0", "empty"),
        ("/embed", {"inputs": [101]}, "inputs", "token ids"),
        ("/embed", {"inputs": "a", "prompt_name": "STS"}, "prompt_name", "'query'"),
        ("/embed", {"inputs": "a", "input_type": "clustering"}, "input_type", "'search_document'"),
        ("/embed", {"inputs": "a", "dimensions": -1}, "dimensions", "greater"),
        ("/embed", {"inputs": "a", "output_dimension": 17}, "output_dimension", "at most 16"),
        ("/v1/embeddings", {"input": "a", "output_dtype": "int8"}, "output_dtype", "float"),
        ("/v1/embeddings", {"input": "a", "task": "separation"}, "task", "retrieval.query"),
        ("/embed", {"inputs": "a", "dimensions": 17}, "dimensions", "at most 16"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
        ("/v1/embeddings", {"input": "a", "embedding_type": "binary"}, "embedding_type", "float"),
        ("/", {}, "inputs", "required"),
        ("/", {"inputs": {"sentences": ["a"]}}, "inputs.source_sentence", "required"),
        ("/", {"inputs": {"source_sentence": "a", "sentences": []}}, "inputs.sentences", "at least 1"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_allowed_is_named(live, path, body, field, said):
    error = error_of(live("bi").post(path, body))
    assert (error["code"], error["field"]) == ("invalid_request", field)
    assert said in error["message"] and "<" not in error["message"]
    if said not in ("surrogate", "at most 16"):  # which no schema says
        assert not documented(path).is_valid(body)


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        ("/rerank", {"query": QUERY, "texts": TEXTS}, {"truncate": True, "model": "tei"}),
        (
            "/rerank",
            {"query": QUERY, "texts": TEXTS},
            {"raw_scores": None, "return_text": None, "truncation_direction": None},
        ),
        ("/embed", {"inputs": TEXTS}, {"normalize": None, "encoding_format": None}),
        ("/embed", {"inputs": TEXTS}, {"prompt_name": "document"}),
        ("/v2/rerank", DOCUMENTS, {"model": None, "max_tokens_per_doc": 9, "priority": 1}),
        ("/v1/rerank", DOCUMENTS, {"max_chunks_per_doc": 9, "top_n": None}),
        ("/embed", {"inputs": TEXTS}, {"truncate": None, "prompt_name": None, "dimensions": None}),
        ("/v1/embeddings", {"input": TEXTS}, {"model": NAME, "user": "me"}),
        ("/v1/embeddings", {"input": TEXTS}, {"encoding_type": "float", "late_chunking": False}),
        ("/v1/embeddings", {"input": TEXTS}, {"modality": "text", "truncate": "END"}),
        ("/v1/embeddings", {"input": TEXTS}, {"normalized": True, "prompt": None}),
        ("/v1/rerank", DOCUMENTS, {"instruction": None, "truncation_side": "right"}),
        ("/v2/embed", {"texts": TEXTS}, {"embedding_types": ["float"], "priority": 1}),
        ("/v1/embeddings", {"input": TEXTS}, {"input": [{"text": text} for text in TEXTS]}),
        ("/", {"inputs": TEXTS}, {"parameters": {}, "truncate": True}),
    ],
)
def test_what_means_nothing_here_changes_nothing(live, path, body, ignored):
    def answer(asked: Any) -> Any:
        found = live("bi").post(path, asked).json()
        return {**found, "id": ""} if isinstance(found, dict) else found

    assert answer({**body, **ignored}) == answer(body)
    assert documented(path).is_valid({**body, **ignored})
