"""`jobs.benchmark finetune`: sentence-transformers learns from the same pairs, and is asked the same."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch

from jobs import convert_model, finetune
from jobs.benchmarks import finetune as benchmark
from jobs.benchmarks.measure import Run
from pipeline import storage
from pipeline.artifact import Artifact, folder_entries, open_artifact
from pipeline.config import parse
from pipeline.engine.draft import draft
from pipeline.models.ranker import load_ranker, new_ranker
from pipeline.models.tokens import Tokenizer, set_template

pytest.importorskip("sentence_transformers")
SHORT = ("--ranker.max-context-tokens", 48, "--ranker.max-candidate-tokens", 32,
         "--finetune.batch-examples", 8, "--finetune.dropout", 0)  # fmt: skip


@pytest.fixture
def encoder(tiny_ranker, tmp_path):
    """sentence-transformers puts [CLS] and [SEP] where the tokenizer says."""
    folder = tmp_path / "encoder"
    shutil.copytree(tiny_ranker("bi").local() / "context_encoder", folder)
    tokenizer = Tokenizer.load(folder)
    set_template(tokenizer.hf)
    tokenizer.save(folder)
    return folder


@pytest.fixture
def ours(encoder, monkeypatch, run_job_here) -> list[finetune.Config]:
    """Instead of jobs.finetune: its output without training, at 2 steps a second."""
    asked: list[finetune.Config] = []

    def run(verb, *options):
        if verb == "convert_model":
            config = parse(convert_model.Config, list(map(str, options)), "test")
            return Run(convert_model.run(config), 1.0, 1.0)
        if verb == "evaluate":
            return Run(run_job_here(verb, *options).summary, 1.0, 1.0)
        config = parse(finetune.Config, list(map(str, options)), "test")
        asked.append(config)
        out = draft(config.output, "ranker", config, {})
        assert not isinstance(out, Artifact)
        folder = encoder.parent / "files"
        new_ranker(config.ranker, encoder, seed=0).save(folder)
        storage.upload(folder, out.staging)
        out.publish(folder_entries(folder), {"steps": 0})
        return Run({"metrics": {"mean_steps_per_s": 2.0}}, 1.0, 1.0)

    monkeypatch.setattr(benchmark, "run_job", run)
    return asked


def test_both_train_alike_and_are_asked_alike(
    run_job_here, ours, encoder, convai2_corpus, tmp_path
):
    done = run_job_here(
        "benchmark", "finetune", "--corpus", convai2_corpus.uri, "--encoder", encoder, "--work", tmp_path,
        "--json", tmp_path / "rows.json", *SHORT, "--finetune.max-steps", 2, "--loop.learning-rate", 0.01,
    )  # fmt: skip
    assert done.code == 0, done.stderr
    rows = {row["row"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert list(rows) == [
        "finetune.vs_sentence_transformers",
        "finetune.quality_vs_sentence_transformers",
    ]
    speed = rows["finetune.vs_sentence_transformers"]
    assert speed["ours"] == 16  # batches of 8
    assert speed["peer"] > 0
    assert speed["ratio"] == pytest.approx(16 / speed["peer"])
    [settings] = ours
    assert (settings.loop.precision, settings.loop.validate_every_epochs) == ("bf16", 0)
    quality = rows["finetune.quality_vs_sentence_transformers"]
    assert quality["ratio"] == pytest.approx(quality["ours"] / quality["peer"])
    note = quality["detail"]["note"]
    numbers = re.search(r"difference (\S+) \((\S+) to (\S+)\), p = (\S+)\.$", note)
    difference, low, high, p = map(float, numbers.groups())
    assert difference == pytest.approx(quality["ours"] - quality["peer"], abs=6e-4)
    assert low <= difference <= high
    assert 0 < p <= 1
    folder = tmp_path / "finetune"
    start = load_ranker(open_artifact(str(folder / "ours"), "ranker").local())
    model = load_ranker(open_artifact(str(folder / "theirs"), "ranker").local())
    assert model.config.share_towers
    assert (model.config.max_context_tokens, model.config.max_candidate_tokens) == (48, 32)
    old, new = (next(ranker.dual.context_encoder.parameters()) for ranker in (start, model))
    assert not torch.allclose(old, new)  # it has learnt something


def test_their_pairs_are_ours(convai2_corpus):
    pairs = benchmark._pairs(convai2_corpus)
    assert len(pairs) == convai2_corpus.counts["examples.train"]
    assert pairs[0][0].startswith("your persona: ")
    assert "\n" in pairs[0][0]


@pytest.mark.parametrize(("options", "message"), [
    (("--encoder", "e"), "corpus: () is not allowed; allowed: its URI, for finetune"),
    (("--encoder", "e", "--corpus", "a", "b"), "allowed: one, but for"),
])  # fmt: skip
def test_what_is_missing_is_named(run_job_here, tmp_path, options, message):
    assert message in run_job_here("benchmark", "finetune", *options, "--work", tmp_path).refusal
