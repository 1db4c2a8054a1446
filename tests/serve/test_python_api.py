"""The same numbers whichever way one asks: in Python, over HTTP, and by jobs.search."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jobs import search
from pipeline import Pool, Ranker
from serve.http.api import create_app

from .conftest import REPLIES, ask, serving

CONTEXT = ["hello there", "what do you do ?"]
TEXTS = ["i paint", "no", "a nurse in the harbour", "no", "yes, a boat"]


@pytest.mark.parametrize("architecture", ["bi", "poly", "cross", "convert"])
def test_given_candidates(tiny_ranker, asking, architecture):
    model = tiny_ranker(architecture)
    ranker = Ranker.load(model.uri)
    ours = ranker.rank(CONTEXT, TEXTS, top_k=4)
    explain = ranker.config.has_vectors
    with serving(create_app(asking(model).service)) as port:
        body = {"context": CONTEXT, "candidates": TEXTS, "top_k": 4, "explain": explain}
        status, answer = ask(port, "POST", "/rank", body)
    assert status == 200
    assert [(r["id"], r["text"]) for r in answer["results"]] == [(r.id, r.text) for r in ours]
    assert [r["score"] for r in answer["results"]] == pytest.approx(
        [r.score for r in ours], rel=1e-5
    )
    assert answer["model"] == ranker.fingerprint
    if explain:
        why = ranker.explain(CONTEXT, [one.text for one in ours])
        assert answer["explanation"]["tokens"] == why.tokens
        weights = np.array([one["weights"] for one in answer["results"]])
        np.testing.assert_allclose(weights, why.weights, atol=1e-5)
        np.testing.assert_allclose(answer["explanation"]["vectors"], why.attention, atol=1e-5)


def test_a_pool(tiny_ranker, tiny_pool, asking):
    model = tiny_ranker("poly")
    uri = tiny_pool(model)
    ranker, pool = Ranker.load(model.uri), Pool.open(uri)
    ours = [(r.id, r.text, r.score) for r in ranker.search(pool, CONTEXT, top_k=5)]
    with serving(create_app(asking(model, uri).service)) as port:
        _, answer = ask(port, "POST", "/rank", {"context": CONTEXT, "pool": "replies", "top_k": 5})
    config = search.Config(pool=uri, model=model.uri, context=tuple(CONTEXT), top_k=5)
    shown = search.run(config)
    assert answer["certified"] and shown["certified"]
    for theirs in (answer["results"], shown["results"]):
        assert [(r["id"], r["text"]) for r in theirs] == [one[:2] for one in ours]
        assert [r["score"] for r in theirs] == pytest.approx([one[2] for one in ours], rel=1e-5)
    given = ranker.rank(CONTEXT, REPLIES, top_k=5)
    assert [(r.id, r.text) for r in given] == [one[:2] for one in ours]


def test_the_service_loads_its_model_as_python_does(tiny_ranker, asking):
    model = tiny_ranker("poly")
    served, ranker = asking(model).engine.ranker, Ranker.load(Path(model.uri))
    assert served.precision == ranker.precision
    for one, other in zip(served.parameters(), ranker.module.parameters(), strict=True):
        assert one.dtype == other.dtype and bool((one == other).all())
