"""The benchmark of searches: its rows, and that it notices a wrong answer."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jobs.benchmarks import search

pytest.importorskip("faiss")
IDS = [
    "search.exact_1m_m64.vs_plain_torch",
    "search.exact_1m_m64.time_over_read_floor",
    "search.pruned_1m.time_share_of_exact",
    "search.approximate_1m.time_share_of_exact",
    "search.exact_1m_m64.16_together_vs_alone",
    "search.exact_100k.poly64_time_over_bi",
    "search.pruned_1m.time_over_read_floor",
    "search.approximate_1m.recall_at_10",
    "search.auto.time_over_best",
    "search.small_pools.time_over_plain_torch",
    "search.bi.time_over_faiss_flat",
]


@pytest.fixture
def run(run_job_here, tiny_ranker, convai2_corpus, tmp_path, monkeypatch):
    sizes = {
        "CANDIDATES": 3000,
        "EMBEDDED": 40,
        "QUESTIONS": 16,
        "CHECKED": 20,
        "ROUNDS": 1,
    }
    for name, value in sizes.items():
        monkeypatch.setattr(search, f"_{name}", {"small": value})
    monkeypatch.setattr(search, "_SIZES", (600, 3000, 5000))  # more than there are
    monkeypatch.setattr(search, "_SHARD_ROWS", 1000)

    def run():
        return run_job_here(
            "benchmark", "search", "--model", tiny_ranker("poly").uri, "--corpus", convai2_corpus.uri,
            "--work", tmp_path / "work", "--json", tmp_path / "rows.json",
        )  # fmt: skip

    return run


@pytest.mark.long  # 31 s on two slow cores
def test_all_rows_are_there_and_answers_are_those_of_float64(run, tmp_path):
    summary = run().summary
    rows = {row["row"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert sorted(rows) == sorted(summary["rows"]) == sorted(IDS)
    approximate = rows["search.approximate_1m.time_share_of_exact"]
    recall = rows["search.approximate_1m.recall_at_10"]["ours"]
    assert approximate["ours"] > 1 or recall >= 0.99, "a share counts only with its recall"
    assert all(row["ours"] > 0 for row in rows.values())
    faiss = rows["search.bi.time_over_faiss_flat"]["detail"]["ratios"]
    assert list(faiss) == [f"{size} rows, m = 1, 1 contexts" for size in ("600", "3,000")]
    # A row that is named after a million says how many it searched.
    assert all("3,000" in row["detail"]["note"] for row in rows.values())
    detail = rows["search.pruned_1m.time_share_of_exact"]["detail"]
    assert detail["certified"] == "20 of 20 questions"


def test_a_wrong_answer_is_noticed(run, monkeypatch):
    top_rows = search.top_rows

    def wrong(*arguments, **options):
        found = top_rows(*arguments, **options)
        return found._replace(scores=found.scores * np.float32(1.00001))

    monkeypatch.setattr(search, "top_rows", wrong)
    with pytest.raises(AssertionError):
        run()


def test_what_is_no_poly_encoder_is_refused(run_job_here, tiny_ranker, convai2_corpus, tmp_path):
    done = run_job_here("benchmark", "search", "--model", tiny_ranker("bi").uri, "--corpus",
                   convai2_corpus.uri, "--work", tmp_path)  # fmt: skip
    assert "model: 'bi' is not allowed; allowed: a ranker with several vectors" in done.refusal
    assert "model: '' is not allowed" in run_job_here("benchmark", "search").refusal
