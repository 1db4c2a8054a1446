from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.corpora.report import text
from pipeline.engine.draft import Draft, draft
from pipeline.pools.shard import ROWS
from pipeline.training.tokenizer import TokenizerConfig
from tests.helpers import rows_of


def test_the_job_prints_writes_and_sums_up(run_job_here, reddit_corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_job_here("inspect", "--corpus", reddit_corpus.uri, "--examples", 1)
    assert done.summary["job"] == "inspect"
    assert done.summary["fingerprint"] == reddit_corpus.fingerprint
    assert sum(done.summary["rows"].values()) == reddit_corpus.counts["examples"]
    assert done.summary["sampled"] == reddit_corpus.counts["examples"]
    assert done.summary["dropped"] == reddit_corpus.manifest["dropped"]
    responses = [row["response"] for row in rows_of(reddit_corpus)]
    repeated = 1 - len(set(responses)) / len(responses)
    assert done.summary["repeated_share"]["responses"] == pytest.approx(repeated)
    words = [len(response.split()) for response in responses]
    assert done.summary["median"]["response words"] == np.median(words)
    written = tmp_path / f"{Path(reddit_corpus.uri).name}.html"
    assert done.summary["html"] == str(written)
    assert str(written) in done.stdout.splitlines()[-2]
    assert written.read_text().startswith("<!DOCTYPE html>")
    for response, number in Counter(responses).most_common(1):
        assert f"{number:>13,}  {text.printable(response, 100)}" in done.stdout


def test_a_sample_may_be_asked_for_and_a_place_for_the_page(run_job_here, reddit_corpus, tmp_path):
    done = run_job_here(
        "inspect", "--corpus", reddit_corpus.uri, "--sample-rows", 20, "--html", tmp_path / "a" / "p.html"
    )  # fmt: skip
    assert 0 < done.summary["sampled"] <= 20
    assert "(20 rows, spread evenly" in done.stdout
    assert (tmp_path / "a" / "p.html").is_file()


def test_no_corpus_an_empty_and_a_damaged_one_are_refused(run_job_here, reddit_corpus, tmp_path):
    def refusal(name: str) -> str:
        return run_job_here("inspect", "--corpus", tmp_path / name).refusal

    for kind in ("tokenizer", "corpus"):
        out = draft(str(tmp_path / kind), kind, TokenizerConfig(), {})
        assert isinstance(out, Draft)
        out.publish([out.write_file("notes.txt", b"")], {})
    assert "kind is 'tokenizer'" in refusal("tokenizer")
    assert "has no rows" in refusal("corpus")

    shutil.copytree(reddit_corpus.uri, tmp_path / "damaged")
    file = next((tmp_path / "damaged").glob("train/*.parquet"))
    file.write_bytes(bytes(file.stat().st_size))
    assert f"{file}: no readable Parquet file" in refusal("damaged")
    file.unlink()
    assert f"{file}: is missing" in refusal("damaged")


def test_an_option_outside_its_range_is_refused(run_job_here, reddit_corpus):
    refusal = run_job_here("inspect", "--corpus", reddit_corpus.uri, "--sample-rows=-1").refusal
    assert "sample_rows: -1 is not allowed; allowed: >= 0" in refusal


# Pools


@pytest.fixture
def pool(publish_pool, tiny_ranker, tmp_path) -> str:
    """Eight rows; t1, t4 and t6 have one vector, t2 and t3 nearly one, t7 none."""
    angles = np.radians([0, 90, 200, 201, 90, 300, 90, 0])
    lengths = np.array([[2.0]] * 7 + [[0.0]])
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1) * lengths
    ids = [f"t{n}" for n in range(8)]
    table = pa.table([ids, [f"text {n}" for n in range(8)], ids], ROWS)
    uri, matrix = tmp_path / "pools" / "p" / "v", vectors.astype(np.float32)
    return publish_pool(uri, table, matrix, [5], model=tiny_ranker("poly")).uri


def test_a_pool_is_shown(run_job_here, pool, tiny_ranker):
    done = run_job_here("inspect", "--pool", pool, "--examples", 2)
    summary = done.summary
    assert summary["pool"]["candidates"] == 8
    assert summary["model"] == tiny_ranker("poly").fingerprint
    assert summary["lengths"] == pytest.approx([0, 0.7, 2, 2, 2], rel=1e-5)
    assert summary["equal_vectors"] == 3
    (nearest, *pair), (second, *other) = summary["nearest"]
    assert (nearest, pair) == (pytest.approx(np.cos(np.radians(1)), abs=1e-6), ["t2", "t3"])
    assert (second, other[0]) == (pytest.approx(np.cos(np.radians(60)), abs=1e-6), "t0")
    assert "   3 times that of t1: text 1" in done.stdout
    assert "text 2" in done.stdout
    assert "== Equal vectors: 3 of 8 rows have another's" in done.stdout


def test_a_corpus_or_a_pool_is_inspected_but_not_both(run_job_here, pool):
    for options in ((), ("--corpus", "a", "--pool", pool)):
        assert "corpus, pool: " in (refusal := run_job_here("inspect", *options).refusal)
        assert "allowed: one of both" in refusal
