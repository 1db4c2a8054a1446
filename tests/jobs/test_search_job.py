"""`jobs.search`: a look at a pool from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.models import inference
from pipeline.models.ranker import load_ranker
from pipeline.retrieval.pool import Pool

TEXTS = ["Hello there!", "a cat", "trains and boats", "the sea in winter", "Why?", "B" * 150]


@pytest.fixture
def pool(run_job, tiny_ranker, actors_in_process, tmp_path) -> str:
    """The texts in shards of two, with the ids t0 to t5."""
    rows = [json.dumps({"id": f"t{n}", "text": text}) + "\n" for n, text in enumerate(TEXTS)]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(rows))
    return run_job(
        "embed_pool", "--model", tiny_ranker("poly").uri, "--candidates", file,
        "--pools", tmp_path, "--name", "p", "--embed.rows-per-shard", 2
    ).summary["pool"]  # fmt: skip


@pytest.fixture
def search(run_job, tiny_ranker, pool):
    def run(*options: object, model: str = "", pool: str = pool):
        model = model or tiny_ranker("poly").uri
        return run_job("search", "--pool", pool, "--model", model, *options)

    return run


@pytest.mark.parametrize("context", [("Do you like winter?",), ("the sea", "a cat " * 9, "why")])
def test_the_best_candidates_of_the_pool_are_shown_best_first(search, pool, tiny_ranker, context):
    found = search("--context", *context, "--top-k", 4)
    ranker = load_ranker(tiny_ranker("poly").local())
    vectors, mask = inference.context_vectors(ranker, [context])
    assert mask.all()
    logits = Pool.open(pool).vectors_at(np.arange(6)).astype(np.float64) @ vectors[0].numpy().T
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores = (weights * logits).sum(axis=1) / weights.sum(axis=1)
    order = np.argsort(-scores)[:4]

    results = found.summary["results"]
    assert [row["id"] for row in results] == [f"t{n}" for n in order]
    assert [row["text"] for row in results] == [TEXTS[n] for n in order]
    assert [row["score"] for row in results] == pytest.approx(scores[order], rel=1e-5)
    assert found.summary["certified"] is True
    assert found.summary["pool"]["version"] == Pool.open(pool).version
    table = found.stdout.splitlines()[:-1]
    assert [line.split()[1] for line in table] == [f"t{n}" for n in order]
    assert all(TEXTS[n][:100] in line for n, line in zip(order, table, strict=True))


def test_more_than_there_are_shows_all(search):
    results = search("--context", "hello", "--top-k", 50).summary["results"]
    assert sorted(row["id"] for row in results) == [f"t{n}" for n in range(6)]


def test_a_version_may_be_named(search, pool):
    version = Path(Pool.open(pool).artifact.uri)
    assert search("--context", "a", pool=str(version)).summary["pool"]["version"] == version.name


def test_another_model_than_the_pools_is_refused_in_one_line_that_names_both(search, tiny_ranker):
    other = tiny_ranker("poly", seed=1)
    found = search("--context", "a", model=other.uri)
    assert f"embedded by the model {tiny_ranker('poly').fingerprint}, not by" in found.refusal
    assert f"{other.uri} ({other.fingerprint})" in found.refusal
    assert found.stdout == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--context", " "), "context: (' ',) is not allowed; allowed: some text"),
        (("--context", "a", "--top-k", "0"), "top_k: 0 is not allowed; allowed: >= 1"),
        (("--context", "a", "--pool", "nowhere"), "nowhere: not a pool"),
        (("--context", "a", "--model", "nowhere"), "nowhere: not a ranker"),
        (("--top-k", "3"), "--context: missing"),
    ],
)
def test_bad_usage_is_refused(search, options, message):
    assert message in search(*options).refusal
