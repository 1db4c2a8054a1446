"""A pool night after night, as several files test it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import embed_pool
from pipeline.engine import executors
from pipeline.models.ranker import Ranker
from tests.jobs.nights import FIRST, Rows


@pytest.fixture
def night(run_job_here, tiny_ranker, tmp_path):
    """`night(rows, …)`: the job on a table of rows, into pool "p" of `tmp_path / "pools"`."""

    def run(rows: Rows | list[tuple[str, str]], *options: object, model: str = ""):
        pairs = rows.items() if isinstance(rows, dict) else rows
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in pairs))
        return run_job_here(
            "embed_pool", "--model", model or tiny_ranker("poly").uri, "--candidates", file,
            "--pools", tmp_path / "pools", "--name", "p", *options
        )  # fmt: skip

    return run


@pytest.fixture
def pools(tmp_path) -> Path:
    return tmp_path / "pools"


@pytest.fixture
def model_texts(monkeypatch) -> list[str]:
    """The candidate texts that went through the model so far, but for the empty one."""
    seen, rows = list[str](), Ranker.candidate_rows

    def tokenise(self, texts, max_tokens=0):
        if not max_tokens:  # as many as the model reads: no look at how long they are
            seen.extend(filter(None, texts))
        return rows(self, texts, max_tokens)

    monkeypatch.setattr(Ranker, "candidate_rows", tokenise)
    return seen


@pytest.fixture(scope="module")
def made_once(tracking_uri, tiny_ranker, tmp_path_factory) -> tuple[Path, dict]:
    """Pools with the version that `night(FIRST)` makes, and its summary."""
    folder = tmp_path_factory.mktemp("first-night")
    rows = ({"id": name, "text": text} for name, text in FIRST.items())
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = embed_pool.Config(
        model=tiny_ranker("poly").uri,
        candidates=(str(folder / "rows.jsonl"),),
        pools=str(folder / "pools"),
        name="p",
    )
    with executors.in_this_process():
        return folder / "pools", {"job": "embed_pool", **embed_pool.run(config)}


@pytest.fixture
def first_night(made_once, pools) -> Callable[[], dict]:
    """What `night(FIRST).summary` is of empty pools: a copy of what it makes, as most tests begin so."""

    def copy() -> dict:
        made, summary = made_once
        shutil.copytree(made, pools)
        return json.loads(json.dumps(summary).replace(str(made), str(pools)))

    return copy
