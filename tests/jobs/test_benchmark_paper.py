"""The paper's tables beside ours: that the rows are there, and are what they say."""

from __future__ import annotations

import json

import pytest
import torch

from jobs.benchmarks.paper import inference_time
from pipeline.evaluation import ranking
from pipeline.models.shape import Shape
from pipeline.models.tokens import Tokenizer
from pipeline.models.transformer import Encoder

MODELS = ["bi", "poly-16", "poly-64", "poly-360", "cross"]


@pytest.fixture
def encoder(tiny_ranker, tmp_path):
    """As narrow as it can be, with the positions that the paper's lengths need."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.load(tiny_ranker("bi").local() / "context_encoder")
    places = {"pad": tokenizer.pad, "cls": tokenizer.cls, "sep": tokenizer.sep}
    shape = Shape(layers=1, width=8, heads=1, positions=440)
    Encoder.new(shape, len(tokenizer), places).save(tmp_path / "encoder")
    tokenizer.save(tmp_path / "encoder")
    return tmp_path / "encoder"


def test_table_5_has_every_model_among_1000_and_100000(
    run_job_here, encoder, convai2_corpus, tmp_path, monkeypatch
):
    asked = []
    seconds = ranking._seconds

    def once(ready, questions, numbers, at_most_s):
        asked.append((type(ready).__name__, questions.shared, len(questions.texts)))
        return seconds(ready, questions, numbers[:1], at_most_s)

    monkeypatch.setattr(ranking, "_seconds", once)
    monkeypatch.setattr(inference_time, "best_device", lambda: torch.device("cpu"))
    done = run_job_here("benchmark", "--name", "paper", "--table", 5, "--encoder", encoder, "--corpus",
                   convai2_corpus.uri, "--json", tmp_path / "t.json", "--work", tmp_path)  # fmt: skip
    assert done.code == 0, done.stderr
    rows = {row["row"]: row for row in json.loads((tmp_path / "t.json").read_text())}
    assert list(rows) == [f"paper.5.{name}.{n}" for name in MODELS for n in (1000, 100_000)]
    assert rows["paper.5.poly-64.100000"]["peer"] == 692
    assert rows["paper.5.cross.100000"]["ours"] == 100 * rows["paper.5.cross.1000"]["ours"]
    assert all(row["ours"] > 0 and row["unit"] == "ms" for row in rows.values())
    curves = {name: row["detail"].get("curve") for name, row in rows.items()}
    ms = {name: row["ours"] for name, row in rows.items()}
    points = [[1000, ms["paper.5.bi.1000"]], [100_000, ms["paper.5.bi.100000"]]]
    assert curves["paper.5.bi.100000"] == {"x": "candidates", "y": "ms", "points": points}
    points = [[m, ms[f"paper.5.poly-{m}.100000"]] for m in (16, 64, 360)]
    assert curves["paper.5.poly-360.100000"]["points"] == points
    assert curves["paper.5.cross.100000"] is None
    # Each is asked twice: to warm up, and to be timed.
    dual = [("PreparedDual", n, n) for n in (1000, 1000, 100_000, 100_000)]
    assert asked == [*dual * 4, *[("PreparedCross", 1000, 1000)] * 2]


@pytest.mark.parametrize(
    ("option", "missing"), [("--encoder", "corpus: ()"), ("--corpus", "encoder: ()")]
)
def test_what_is_needed_is_asked_for(run_job_here, option, missing, tmp_path):
    done = run_job_here("benchmark", "--name", "paper", option, "somewhere", "--work", tmp_path)
    assert f"{missing} is not allowed; allowed: its URI, for paper" in done.refusal
