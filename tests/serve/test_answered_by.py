"""Every answer of a model names it, and is recorded with its time: so a slow or failing candidate is seen."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from serve.http.api import create_app
from serve.http.guard import MODEL
from serve.service import Service

from .conftest import Asking

RANK = ("/rank", {"context": "hi", "candidates": ["a", "b"]})
ASKED = [
    RANK,
    ("/rank", [RANK[1], RANK[1]]),
    ("/rerank", {"query": "hi", "texts": ["a", "b"]}),
    ("/rerank", {"query": "hi", "documents": ["a", "b"]}),
    ("/v1/rerank", {"query": "hi", "documents": ["a", "b"]}),
    ("/v2/rerank", {"query": "hi", "documents": ["a", "b"]}),
    ("/", {"inputs": {"source_sentence": "hi", "sentences": ["a"]}}),
    ("/classify", {"texts": ["a"]}),
]


@pytest.fixture(scope="module")
def champion(tiny_ranker, tiny_classifier, asking) -> Asking:
    model = tiny_ranker("poly")
    return asking(model, classifier=tiny_classifier(model))


@pytest.fixture(scope="module")
def candidate(tiny_ranker, tiny_classifier, asking) -> Asking:
    return asking(tiny_ranker("poly", 1), classifier=tiny_classifier(tiny_ranker("poly")))


@pytest.fixture
def answered() -> list[tuple[str, str, int, float]]:
    """(model, route, status, seconds) of each answer."""
    return []


@pytest.fixture
def client(champion, candidate, answered):
    """A service whose candidate answers all that it may."""
    service = Service(lambda: champion.engine, 60.0, candidate=lambda: candidate.engine)
    app = create_app(service, record_answer=lambda *answer: answered.append(answer))
    yield TestClient(app, raise_server_exceptions=False)
    service.close()


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_an_answer_of_the_candidate_names_it(client, candidate, answered, path, body):
    answer = client.post(path, json=body)
    fingerprint = candidate.engine.model.fingerprint
    assert (answer.status_code, answer.headers[MODEL]) == (200, fingerprint)
    ((*named, seconds),) = answered
    assert named == [fingerprint, path, 200]
    assert 0 < seconds < 60


def test_what_no_model_answers_names_none_and_describes_the_champion(client, champion, answered):
    info, models = client.get("/info"), client.get("/v1/models")
    fingerprint = champion.engine.model.fingerprint
    assert info.json()["model"]["fingerprint"] == fingerprint
    assert [model["id"] for model in models.json()["data"]] == [fingerprint]
    for answer in (info, models, client.get("/health"), client.post("/rank", json={})):
        assert MODEL not in answer.headers
    assert answered == []


def test_a_refusal_and_a_failure_are_recorded_with_the_model(
    client, candidate, answered, monkeypatch
):
    def fail(rows: Any) -> Any:
        raise RuntimeError("out of memory")

    refused = client.post("/rank", json={"context": "hi", "pool": "nope"})
    monkeypatch.setattr(candidate.engine.ranker, "candidate_rows", fail)
    failed = client.post("/rank", json=RANK[1])
    assert (refused.status_code, failed.status_code) == (404, 500)
    fingerprint = candidate.engine.model.fingerprint
    assert refused.headers[MODEL] == failed.headers[MODEL] == fingerprint
    assert [(model, status) for model, _, status, _ in answered] == [
        (fingerprint, 404), (fingerprint, 500)
    ]  # fmt: skip
