"""A pool whose filter columns change: vectors are copied, columns are written anew."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from jobs import embed_pool
from pipeline.config import parse
from pipeline.engine import executors
from pipeline.pools.pool import Pool
from tests.jobs.nights import EXACT, columns, contents, current

ROWS = [
    {"id": str(n), "text": f"text {n}", "language": "en" if n % 2 else "de", "year": 2000 + n}
    for n in range(30)
]
Records = list[dict[str, object]]


def arguments(model: str, folder: Path, rows: Records, names: str, pools: str) -> list[object]:
    """Those of the job on a table of rows, into pool "p" of the folder's `pools`."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "--model", model, "--candidates", folder / "rows.jsonl", "--pools", folder / pools,
        "--name", "p", "--embed.filter-columns", f"[{names}]", *EXACT,
    ]  # fmt: skip


@pytest.fixture
def build(run_job_here, tiny_ranker, tmp_path):
    """`build(rows, filter columns, …)`: the job on a table of rows."""

    def run(rows: Records, names: str, *options: object, pools: str = "pools"):
        words = arguments(tiny_ranker("poly").uri, tmp_path, rows, names, pools)
        return run_job_here("embed_pool", *words, *options)

    return run


@pytest.fixture(scope="module")
def made_once(tracking_uri, tiny_ranker, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("by-language")
    words = arguments(tiny_ranker("poly").uri, folder, ROWS, "language", "pools")
    with executors.in_this_process():
        embed_pool.run(parse(embed_pool.Config, list(map(str, words)), "test"))
    return folder / "pools"


@pytest.fixture
def by_language(made_once, tmp_path) -> None:
    """What `build(ROWS, "language")` makes."""
    shutil.copytree(made_once, tmp_path / "pools")


@pytest.mark.parametrize("after", ["year, language", ""])
def test_other_filter_columns_copy_every_vector(by_language, build, model_texts, after):
    finished = build(ROWS, after, "--gate.min-recall", 1)
    assert model_texts == []
    assert finished.summary["plan"] == {"new": 0, "changed": 0, "same": 30, "gone": 0}
    assert "to embed 0 of 30" in finished.stdout
    from_nothing = build(ROWS, after, pools="other").summary
    assert len(model_texts) == 30
    ours, theirs = finished.summary["output"], from_nothing["output"]
    # Canaries are asked all the same.
    assert Pool.open(ours).artifact.manifest["gate"]["recall"] == 1.0
    assert contents(ours) == contents(theirs)
    assert columns(ours) == columns(theirs)
    assert finished.summary["fingerprint"] == from_nothing["fingerprint"]


def test_a_text_of_several_values_counts_once_for_the_canaries(by_language, build):
    """20 copies of a text would take the places of the other answers."""
    copies = [{**ROWS[3], "id": f"copy {n}", "language": f"language {n}"} for n in range(20)]
    options = ("--gate.min-recall", 1, "--gate.top-k", 5, "--embed.rows-per-shard", 7)
    summary = build(ROWS + copies, "language", *options).summary
    manifest = Pool.open(summary["output"]).artifact.manifest
    assert manifest["gate"]["recall"] == 1.0
    assert all(len(set(keys)) == 5 for keys in manifest["canaries"]["answers"])


def test_other_values_of_a_text_are_a_change_and_copy_its_vector(by_language, build, model_texts):
    rows = [{**row, "language": 7} if row["id"] in ("1", "2") else row for row in ROWS]
    summary = build(rows, "language").summary
    assert summary["plan"] == {"new": 0, "changed": 2, "same": 28, "gone": 0}
    assert model_texts == []
    assert columns(summary["output"])["1"] == {"language": "7"}


def test_a_text_with_two_values_is_two_candidates_of_one_vector(build, model_texts):
    build(ROWS, "")
    model_texts.clear()
    twice = [*ROWS, {**ROWS[4], "id": "4b", "language": "fr"}]
    assert build(twice, "").summary["already_done"] is True
    summary = build(twice, "language").summary
    assert summary["plan"] == {"new": 1, "changed": 0, "same": 30, "gone": 0}
    assert model_texts == []
    rows = contents(summary["output"])
    assert rows["4b"] == rows["4"]
    assert columns(summary["output"])["4b"] == {"language": "fr"}


def test_a_version_that_is_there_already_is_compared_by_its_texts(by_language, build, tmp_path):
    """Back to the columns of two nights ago: the gate does not call every id changed."""
    first = current(tmp_path / "pools")
    build(ROWS, "")
    again = build(ROWS, "language").summary
    assert (again["version"], again["already_done"]) == (first, True)
