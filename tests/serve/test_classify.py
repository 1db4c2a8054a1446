"""POST /classify: the head's own probabilities, over HTTP, in batches; and where there is no head."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

from pipeline.classification.classifier import open_classifier
from pipeline.config import BadInput
from serve import app
from serve.engine import Engine
from serve.http import api
from serve.service import Service

from .conftest import error_of, run

TEXTS = ["please pay my bill", "hello there ? 3", "££ øø", "a text of nothing"]


@pytest.fixture(scope="module")
def model(tiny_ranker):
    return tiny_ranker("bi")


@pytest.fixture(scope="module")
def served(model, tiny_classifier, asking):
    return asking(model, classifier=tiny_classifier(model))


@pytest.fixture(scope="module")
def client(served) -> TestClient:
    return TestClient(api.create_app(served.service))


def expected(uri: str, text: str) -> tuple[list[str], list[float], bool]:
    """What the head says of a text alone, its encoder loaded anew."""
    _, made = open_classifier(uri)
    (said,) = made.classify(made.load_encoder(torch.device("cpu")).vectors([text]))
    names, values = zip(*said.intents[:2], strict=True)
    return list(names), list(values), said.out_of_scope


def answer_as_expected(service: Service, uri: str) -> dict[str, Any]:
    """The service's answer for TEXTS, which is that of the head."""
    client = TestClient(api.create_app(service))
    answer = client.post("/classify", json={"texts": TEXTS, "top_k": 2}).json()
    for text, result in zip(TEXTS, answer["results"], strict=True):
        names, values, outside = expected(uri, text)
        assert [one["intent"] for one in result["intents"]] == names
        assert [one["probability"] for one in result["intents"]] == pytest.approx(values, abs=1e-5)
        assert result["out_of_scope"] == outside
    return answer


def test_a_head_on_convert_answers(tiny_ranker, tiny_classifier, asking):
    model = tiny_ranker("convert")
    uri = tiny_classifier(model)
    answer_as_expected(asking(model, classifier=uri).service, uri)


@pytest.mark.slow
@pytest.mark.parametrize(
    "own", [True, False], ids=["the served model's vectors", "another model's"]
)
def test_answers_are_the_heads(tiny_ranker, tiny_classifier, asking, model, own):
    encoder = model if own else tiny_ranker("bi", 1)
    uri = tiny_classifier(encoder)
    answer = answer_as_expected(asking(model, classifier=uri).service, uri)
    assert answer["encoder"] == encoder.fingerprint
    assert answer["classifier"] == open_classifier(uri)[0].fingerprint


def test_equal_texts_are_answered_alike_and_in_order(client):
    texts = [TEXTS[1], TEXTS[0], TEXTS[1]]
    found = client.post("/classify", json={"texts": texts}).json()["results"]
    assert found[0] == found[2] != found[1]
    assert found[1]["intents"][0]["intent"] == "pay"
    assert len(found[0]["intents"]) == 3


def test_texts_of_several_requests_are_computed_together(served):
    """The first batch holds the thread; what comes meanwhile is one batch."""
    stage, batches = served.engine.intents.stage, []

    async def ask_all():
        deadline = time.monotonic() + 60
        asked = [served.service.work(deadline).classify([f"{text} {at}"])
                 for text in TEXTS for at in range(5)]  # fmt: skip
        return await asyncio.gather(*asked)

    served.service.batcher._on_batch = lambda batch: batches.append(batch)
    found = run(ask_all())
    assert len(found) == 20
    mine = [batch.rows for batch in batches if batch.stage == stage.name]
    assert sum(mine) == 20 and len(mine) < 20


def test_strange_texts_have_answers(client):
    texts = ["😀", "مرحبا بالعالم", "x" * 10_000, "\u0000", "[SEP]"]
    found = client.post("/classify", json={"texts": texts}).json()["results"]
    assert all(0 <= one["probability"] <= 1 for result in found for one in result["intents"])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "texts"),
        ({"texts": "pay"}, "texts"),
        ({"texts": [" "]}, "texts.0"),
        ({"texts": ["a"], "top_k": 0}, "top_k"),
        ({"texts": ["a"], "top": 1}, "top"),
        ({"texts": ["a"] * 10_001}, "texts"),
    ],
)
def test_requests_that_are_not_allowed(client, body, field):
    assert error_of(client.post("/classify", json=body))["field"] == field


def test_without_a_head_the_error_says_so(model, asking):
    client = TestClient(api.create_app(asking(model).service))
    answer = client.post("/classify", json={"texts": ["a"]})
    assert error_of(answer, 404)["code"] == "no_classifier"
    assert client.get("/info").json()["classifier"] is None


def test_the_service_says_which_head_it_serves(client, model, tiny_classifier):
    shown = client.get("/info").json()["classifier"]
    assert shown["fingerprint"] == open_classifier(tiny_classifier(model))[0].fingerprint
    assert shown["intents"] == ["block", "greet", "pay"]
    assert 0 < shown["threshold"] < 1


def test_what_cannot_be_served_is_refused(model, tiny_classifier, tmp_path: Path):
    with pytest.raises(BadInput, match="not a classifier"):
        Engine(model.uri, classifier=str(tmp_path))
    with pytest.raises(BadInput, match="needed here: classifier"):
        Engine(model.uri, classifier=model.uri)
    folder = tmp_path / "head"
    shutil.copytree(tiny_classifier(model), folder)
    settings = json.loads((folder / "classifier.json").read_text())
    settings["encoder"]["fingerprint"] = "0" * 16
    text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
    (folder / "classifier.json").write_text(text)
    with pytest.raises(BadInput, match="trained on 0000"):
        app.build(app.Args(model=model.uri, classifier=str(folder)))
