"""`jobs.search`: a look at a pool from the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from jobs import embed_pool
from pipeline.engine import executors
from pipeline.models import inference
from pipeline.models.precision import resolve_precision
from pipeline.models.ranker import load_ranker
from pipeline.pools.pool import Pool
from pipeline.pools.settings import EmbedConfig

TEXTS = ["Hello there!", "a cat", "trains\nand boats", "the sea in winter", "Why?", "B" * 150]


@pytest.fixture(scope="module")
def pools(tracking_uri, tiny_ranker, tmp_path_factory) -> dict[str, str]:
    """By the model's architecture: the texts in shards of two, with the ids t0 to t5 and two columns."""
    folder = tmp_path_factory.mktemp("pools")
    rows = [
        {"id": f"t{n}", "text": text, "kind": "odd" if n % 2 else "even", "page": n}
        for n, text in enumerate(TEXTS)
    ]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with executors.in_this_process():
        given = {"candidates": (str(folder / "texts.jsonl"),), "pools": str(folder)}
        given["embed"] = EmbedConfig(rows_per_shard=2, filter_columns=("kind", "page"))
        return {
            name: embed_pool.run(
                embed_pool.Config(model=tiny_ranker(name).uri, name=name, **given)
            )["pool"]
            for name in ("poly", "bi", "convert")
        }


@pytest.fixture
def search(run_job_here, tiny_ranker, pools):
    def run(*options: object, model: str = "poly"):
        uris = ("--pool", pools[model], "--model", tiny_ranker(model).uri)
        return run_job_here("search", *uris, *options)

    return run


def test_the_best_candidates_of_the_pool_are_shown_best_first(search, pools, tiny_ranker):
    context, pool = ("the sea", "a cat " * 9, "why"), pools["poly"]
    found = search("--context", *context, "--top-k", 4)
    ranker = inference.prepare(load_ranker(tiny_ranker("poly").local()), torch.device("cpu"))
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
    for result, place in zip(results, order, strict=True):
        heaviest = int(np.argmax(weights[place]))
        shares = weights[place] / weights[place].sum()
        assert result["vectors"][str(heaviest)] == pytest.approx(shares[heaviest], abs=1e-3)
    *table, certificate = found.stdout.splitlines()[:-1]
    precision = resolve_precision("auto", torch.device("cpu"))
    assert found.summary["precision"] == found.summary["pool"]["precision"] == precision
    both = f"computed in {precision}, the context in {precision}"
    assert certificate.startswith(f"certified: yes; 6 candidates, {both}; milliseconds: encode ")
    assert [line.split()[1] for line in table] == [f"t{n}" for n in order]
    shown = [" ".join(TEXTS[n].split())[:80] for n in order]
    assert all(text in line for text, line in zip(shown, table, strict=True))


def test_shares_of_a_context_s_only_vector_are_not_shown(search):
    done = search("--context", "a", "--top-k", 1, model="bi")
    (result,) = done.summary["results"]
    assert result["vectors"] == {"0": 1.0}
    shown = done.stdout.splitlines()[0].split(maxsplit=2)[1:]
    assert shown[0] == result["id"] and shown[1].startswith(" ".join(result["text"].split())[:80])


def test_the_context_s_precision_is_chosen_and_said(search):
    for precision in ("bf16", "fp32"):
        done = search("--context", "a", "--precision", precision)
        assert done.summary["precision"] == precision
        assert f"the context in {precision};" in done.stdout


def test_only_what_is_allowed_is_shown(search):
    def ids(*options: str) -> list[str]:
        results = search("--context", "a", *options).summary["results"]
        return sorted(result["id"] for result in results)

    assert ids("--allow", "t1", "t5", "gone") == ["t1", "t5"]
    assert ids("--deny", "t1", "t5", "--allow", "t1", "t2") == ["t2"]
    refusal = search("--context", "a", "--allow", "gone").refusal
    assert "allow, deny, where: no candidate is left" in refusal


def test_results_carry_the_columns_that_the_pool_keeps_and_filters_by(search):
    done = search("--context", "a", "--where", "kind=odd")
    found = {row["id"]: row["columns"] for row in done.summary["results"]}
    assert found == {f"t{n}": {"kind": "odd", "page": str(n)} for n in (1, 3, 5)}
    lines = [line for line in done.stdout.splitlines() if "kind=odd  page=" in line]
    assert len(lines) == 3
    refusal = search("--context", "a", "--where", "kind=strange").refusal
    assert "no candidate is left; values of 'kind' are such as 'even', 'odd'" in refusal


@pytest.mark.parametrize(("model", "scale"), [("poly", 0), ("poly", 1), ("convert", 4)])
def test_a_cross_encoder_puts_the_best_in_order(search, tiny_ranker, model, scale):
    """`scale`: the factor on the search's scores in the mean; 0: they do not count."""
    cross = tiny_ranker("cross")
    options = ("--cross", cross.uri, "--cross-candidates", 4, "--top-k", 3, "--together", scale > 0)
    found = search("--context", "the sea", *options, model=model).summary
    first = search("--context", "the sea", "--top-k", 4, model=model).summary["results"]
    texts = [result["text"] for result in first]
    reader = inference.prepare(load_ranker(cross.local()), torch.device("cpu"))
    scores = inference.pair_scores(reader, [["the sea"]], [texts])[0].numpy()
    decide = scores + scale * np.array([result["score"] for result in first])
    order = np.argsort(-decide)[:3]
    assert [result["text"] for result in found["results"]] == [texts[at] for at in order]
    for result, at in zip(found["results"], order, strict=True):
        assert result["cross_score"] == pytest.approx(scores[at], abs=0.02)
        assert result["score"] == pytest.approx(first[at]["score"])
    assert found["milliseconds"]["cross"] > 0


def test_a_second_stage_needs_a_cross_encoder(search, tiny_ranker):
    refusal = search("--context", "a", "--cross", tiny_ranker("poly").uri).refusal
    assert "architecture: 'poly' is not allowed; allowed: cross" in refusal


@pytest.mark.parametrize(("options", "message"), [
    (("--context", " "), "context: (' ',) is not allowed; allowed: some text"),
    (("--context", "a", "--top-k", "0"), "top_k: 0 is not allowed; allowed: >= 1"),
    (("--top-k", "3"), "--context: missing"),
    (("--context", "a", "--method", "approximate"), "has no index of neighbours"),
    (("--context", "a", "--where", "kind"), "where: 'kind' is not allowed; allowed: column=value"),
    (("--context", "a", "--where", "size=hat"), "where: 'size' is not allowed; allowed: columns"),
    (("--context", "a", "--cross", "x", "--cross-candidates", "5"), "cross_candidates: 5 is not allowed"),
    (("--context", "a", "--together", "true"),
     "together: True is not allowed; allowed: false without cross"),
])  # fmt: skip
def test_bad_usage_is_refused(search, options, message):
    assert message in search(*options).refusal


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_in_one_line(search):
    done = search("--context", "a", "--device", "cuda")
    assert done.code == 2
    assert "device: 'cuda' is not allowed; allowed: cpu" in done.stderr.strip().splitlines()[-1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_finds_what_the_cpu_finds(search):
    on_cpu, on_gpu = (
        search("--context", "a", "--precision", "fp32", "--device", device).summary
        for device in ("cpu", "cuda")
    )
    assert on_gpu["searched_on"] == "cuda" and on_gpu["certified"] is True
    assert [row["id"] for row in on_gpu["results"]] == [row["id"] for row in on_cpu["results"]]
