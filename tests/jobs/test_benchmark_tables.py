"""The paper's table as a sweep: its rows, what a trial is, resuming, failures, what is written."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ray.exceptions import OutOfMemoryError

from jobs import benchmark, finetune
from jobs.benchmarks import paper as table
from jobs.benchmarks.paper import TRIALS
from pipeline import storage
from pipeline.artifact import Artifact, folder_entries, open_artifact
from pipeline.config import BadInput
from pipeline.engine.draft import draft
from pipeline.models.ranker import load_ranker, new_ranker

SHORT = ("--ranker.max-context-tokens", 48, "--ranker.max-candidate-tokens", 32)
# The paper's numbers on ConvAI2, typed in once more.
PUBLISHED = {"bi": 81.7, "poly-16": 83.2, "poly-64": 83.7, "poly-360": 83.7, "cross": 84.8}


@pytest.fixture
def encoder(tiny_ranker) -> Path:
    return tiny_ranker("bi").local() / "context_encoder"


@pytest.fixture
def setting(encoder, tmp_path) -> benchmark.Config:
    overrides = tuple(map(str, SHORT))
    return benchmark.Config(part="paper", encoder=str(encoder), corpus=("c",), max_examples=50,
                            overrides=overrides, work=str(tmp_path / "work"))  # fmt: skip


@pytest.fixture
def plan(convai2_corpus, setting):
    """`plan("bi", seed=1)`: the job of a row on the sample corpus."""

    def make(name, seed=0, task="convai2", setting=setting):
        (trial,) = (trial for trial in TRIALS if trial.name == name)
        return table.plan(trial, convai2_corpus, task, seed, setting)

    return make


# Which trials there are


def test_the_rows_are_the_papers():
    found = {trial.name: trial.published["convai2"] for trial in TRIALS}
    assert {name: round(100 * value, 1) for name, value in found.items()} == PUBLISHED
    poly, cross = TRIALS[2], TRIALS[-1]
    tasks = ("dstc7", "ubuntu", "wikipedia", "starspace", "reddit")
    found = [poly.published.get(table.paper_task(task)) for task in tasks]
    assert found == [0.670, 0.813, 0.713, 0.713, None]
    assert [task for task in tasks if not cross.ranks(task)] == ["wikipedia", "starspace"]
    assert all(poly.ranks(task) for task in tasks)


def test_the_task_and_the_size_choose_recipe_and_protocol(plan, setting, convai2_corpus):
    def described(task):
        job = plan("poly-16", task=task)
        rules = job.ask.rules(convai2_corpus)
        return job.train.ranker.max_context_tokens, rules.source, rules.candidates

    free = replace(setting, overrides=())
    assert plan("bi", task="dstc7", setting=free).train.ranker.max_context_tokens == 128
    assert plan("bi", task="starspace", setting=free).train.ranker.max_context_tokens == 96
    full = replace(setting, overrides=(), size="full")
    assert plan("bi", setting=full).train.resources.workers == 8
    assert described("dstc7") == (48, "given", 100)
    assert described("wikipedia") == (48, "others", 10_001)
    assert described("reddit") == (48, "blocks", 100)


def test_a_trial_is_known_by_all_that_decides_what_comes_out(plan, setting):
    own, longer = plan("bi").evaluation, (*setting.overrides, "--finetune.epochs", "2")
    others = (replace(setting, overrides=longer), replace(setting, max_examples=49))
    changed = [plan("bi", seed=1), plan("poly-16"), plan("cross")]
    changed += [plan("bi", setting=other) for other in others]
    assert len({own, *(job.evaluation for job in changed)}) == 6
    assert changed[-1].train.output == plan("bi").train.output  # asked less, trained the same
    assert changed[3].train.finetune.epochs == 2


# What is done


@pytest.fixture
def trained(monkeypatch) -> list[str]:
    """Trials in this process, without training: the labels of those that are not there yet."""
    done: list[str] = []

    def train(config: finetune.Config) -> None:
        corpus = open_artifact(config.corpus, "corpus")
        encoder, reference = table._open_encoder(config.encoder)
        out = draft(config.output, "ranker", config, {"corpus": corpus, "encoder": reference})
        assert not isinstance(out, Artifact)
        folder = Path(out.staging) / "_files"
        new_ranker(config.ranker, encoder.local(), config.loop.seed).save(folder)
        storage.upload(folder, out.staging)
        out.publish(folder_entries(folder), {"steps": 30}, precision="bf16")

    train_and_evaluate = table.train_and_evaluate

    def run(job):
        done.append(job.label)
        if getattr(job.train.ranker, "m", 0) == 360:
            raise RuntimeError("out of memory")
        train_and_evaluate(job)

    monkeypatch.setattr(table.finetune, "run", train)
    monkeypatch.setattr(table, "train_and_evaluate", run)
    return done


@pytest.fixture
def paper(run_job_here, encoder, convai2_corpus, tmp_path):
    def run(*options, corpora=(convai2_corpus.uri,)):
        return run_job_here(
            "benchmark", "--name", "paper", "--corpus", *corpora, "--encoder", encoder, "--work",
            tmp_path / "work", "--json", tmp_path / "rows.json", *SHORT, "--max-examples", 50, *options,
        )  # fmt: skip

    return run


def test_a_sweep_goes_on_where_it_was(paper, trained, tmp_path):
    first = paper("--only", "bi", "poly-64")
    assert first.code == 0, first.stderr
    assert trained == ["convai2 bi seed 0", "convai2 poly-64 seed 0"]
    rows = json.loads((tmp_path / "rows.json").read_text())
    trained.clear()
    paper("--only", "bi", "poly-64", "--seeds", 2)
    more = json.loads((tmp_path / "rows.json").read_text())
    assert trained == ["convai2 bi seed 1", "convai2 poly-64 seed 1"]
    trained.clear()
    again = paper("--only", "bi", "poly-64")
    assert trained == []
    assert again.summary["rows"] == first.summary["rows"]
    assert [len(row["detail"]["seeds"]) for row in (rows[0], more[0])] == [1, 2]
    assert [row["row"] for row in rows] == [
        "paper.4.convai2.bi", "paper.4.convai2.poly-64", "paper.4.convai2.poly-64_less_bi"
    ]  # fmt: skip


def test_what_is_written(paper, trained, tmp_path):
    paper("--only", "bi", "poly-64", "poly-360", "--seeds", 2)
    rows = {row["row"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    bi = rows["paper.4.convai2.bi"]
    values = bi["detail"]["seeds"]
    assert bi["ours"] == pytest.approx(np.mean(values))
    assert (bi["peer"], bi["unit"]) == (0.817, "R@1/20")
    note = re.fullmatch(
        r"± (\S+) over 2 seeds; 95 % over \d+ questions: (\S+) to (\S+); small recipes\.",
        bi["detail"]["note"],
    )
    deviation, low, high = map(float, note.groups())
    assert deviation == pytest.approx(np.std(values, ddof=1), abs=5e-4)
    assert 0 <= low <= bi["ours"] <= high <= 1
    failed = rows["paper.4.convai2.poly-360"]
    assert failed["ours"] is None
    assert failed["detail"]["failed"] == ["out of memory"] * 2
    difference = rows["paper.4.convai2.poly-64_less_bi"]["ours"]
    assert difference == pytest.approx(rows["paper.4.convai2.poly-64"]["ours"] - bi["ours"])
    assert all(row["source"]["size"] == "small" for row in rows.values())


def test_a_sweep_without_any_success_fails(paper, trained):
    done = paper("--only", "poly-360")
    assert done.code == 1
    assert "no trial ended well; paper.4.convai2.poly-360: out of memory" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_trial_that_fails_ends_alone(paper, tmp_path):
    """For real: Ray, training, evaluation; more tokens than the encoder has positions are refused."""
    done = paper(
        "--only", "bi", "cross", "--finetune.max-steps", 2,
        "--finetune.batch-examples", 8, "--ranker.max-context-tokens", 90,
    )  # fmt: skip
    rows = {row["row"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    bi = rows["paper.4.convai2.bi"]
    assert 0 <= bi["ours"] <= 1
    assert "121 is not allowed" in rows["paper.4.convai2.cross"]["detail"]["failed"][0]
    folder = next((tmp_path / "work" / "trials").glob("convai2-bi-*"))
    assert load_ranker(folder / "ranker").config.max_context_tokens == 90
    assert open_artifact(str(folder / "ranker"), "ranker").counts["steps"] == 2
    assert "convai2 bi seed 0: done" in done.stderr
    assert done.code == 0


# What is made of it


def test_a_cross_encoder_ranks_no_articles(paper, monkeypatch):
    monkeypatch.setattr(table, "task_of", lambda corpus: "starspace")
    done = paper("--only", "cross")  # 10,001 pairs for each question
    assert "allowed: a trial that there is for these corpora" in done.refusal


@pytest.mark.parametrize(("options", "message"), [
    (("--only", "poly-17"), "only: 'poly-17' is not allowed; allowed: bi, poly-16"),
    (("--seeds", 0), "seeds: 0 is not allowed"),
    (("--split", "test"), "the corpus has no examples in test/"),
    (("--only", "poly-16", "--ranker.m", 32), "allowed: 16 in row poly-16"),
    (("--ranker.architecture", "poly"), "allowed: 'bi' in row bi"),
    (("--loop.seed", 3), "loop.seed: 3 is not allowed; allowed: none: --seeds"),
])  # fmt: skip
def test_what_cannot_be_done_is_refused_in_one_line(paper, tmp_path, options, message):
    done = paper(*options)
    assert message in done.refusal
    assert not (tmp_path / "work" / "trials").exists()


def test_two_corpora_of_one_task_are_refused(paper, convai2_corpus):
    done = paper(corpora=(convai2_corpus.uri, convai2_corpus.uri))
    assert "allowed: one of each task" in done.refusal


def test_options_of_trainings_are_refused_where_nothing_is_trained(run_job_here, tmp_path):
    done = run_job_here("benchmark", "corpora", "--finetune.epochs", 2, "--work", tmp_path)
    refusal = "part: 'corpora' is not allowed; allowed: finetune, paper, pretrain, with --finetune"
    assert refusal in done.refusal


def test_a_reason_is_one_line():
    assert table._reason(BadInput("m: too many")) == "m: too many"
    assert table._reason(RuntimeError("trace\n  at x\nValueError: odd\n")) == "ValueError: odd"
    assert table._reason(MemoryError()) == "MemoryError"
    low = OutOfMemoryError("Task was killed: the node is low on memory.\nMemory: 22 GB\nSee docs")
    assert table._reason(low) == "Task was killed: the node is low on memory."


def test_rows_cannot_be_chosen_where_nothing_reads_the_choice(run_job_here):
    refusal = run_job_here("benchmark", "corpora", "--only", "bi").refusal
    assert "only: 'bi' is not allowed; allowed: none, but for paper, embed" in refusal
