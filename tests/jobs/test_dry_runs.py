"""`--dry-run` of the jobs that cost: what they would take, and nothing is written."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
import torch

from jobs import (
    clean_corpus,
    finetune,
    prepare_corpus,
    score_candidates,
    tokenize_corpus,
    train_tokenizer,
)
from pipeline import cost, progress
from pipeline.corpora import raw, reddit
from pipeline.evaluation import ranking
from pipeline.models.settings import ranker_config
from pipeline.training import estimate
from pipeline.training.settings import FinetuneConfig, TeachingConfig, TokenizerConfig
from tests.helpers import rows_of


@pytest.fixture
def nowhere(tmp_path):
    """An output folder that no dry run may make, or leave anything beside."""
    folder = tmp_path / "nowhere"
    folder.mkdir()
    yield str(folder / "out")
    assert list(folder.iterdir()) == []


def test_dumps_are_looked_at_by_one_short_read(sample_files, nowhere, capsys):
    files = sorted((sample_files / "reddit_dump").iterdir())
    dumps = (str(sample_files / "reddit_dump"),)
    config = prepare_corpus.Config(format="reddit", input=dumps, output=nowhere, dry_run=True)
    found = prepare_corpus.run(config)
    guess = found["estimate"]
    blocks = (block for file in files for block in raw.line_blocks(str(file), 1 << 20))
    comments = sum(block.count(b"\n") for block in blocks)
    assert found["dry_run"] and guess["input_files"] == len(files)
    assert guess["input_bytes"] == sum(file.stat().st_size for file in files)
    assert guess["rows"] == pytest.approx(comments, rel=0.3)
    text = capsys.readouterr().out
    assert "prepare_corpus: nothing is written" in text and "shuffle" in text
    assert "cpu_hours" not in guess  # no rate is measured here


def test_a_look_at_many_files_is_shown(sample_files, nowhere, monkeypatch, capsys):
    """In an object store each file takes a request, and 100,000 of them take minutes."""
    monkeypatch.setenv(progress.VARIABLE, "json")
    raw_files = (str(sample_files / "convai2"),)
    prepare_corpus.run(
        prepare_corpus.Config(format="convai2", input=raw_files, output=nowhere, dry_run=True)
    )
    assert '"stage": "sizes of the input"' in capsys.readouterr().err


def test_ten_times_the_dumps_are_ten_times_the_comments_and_more_requests():
    settings = {"comment_bytes": 600, "ratio": 10, "options": reddit.Options()}
    guess = functools.partial(reddit.estimate, **settings)
    one, ten = guess([10 << 30] * 40), guess([10 << 30] * 400)
    assert (ten.input_bytes, ten.rows) == (10 * one.input_bytes, pytest.approx(10 * one.rows))
    assert ten.requests > ten.tasks > one.tasks
    assert cost.reads([1, 8 << 20, (8 << 20) + 1]) == 4


def test_each_step_of_cleaning_reads_the_shards(convai2_corpus, nowhere):
    base = clean_corpus.Config(corpus=convai2_corpus.uri, output=nowhere, dry_run=True)
    found = clean_corpus.run(base)["estimate"]
    rows = convai2_corpus.rows("train/") + convai2_corpus.rows("valid/")
    assert found["rows"] == rows
    assert found["shuffle_bytes"] > 0 and found["tasks"] > 4
    assert "cpu_hours" not in found  # no rate is measured here
    exact = replace(base, dedup=replace(base.dedup, near=False))
    assert clean_corpus.run(exact)["estimate"]["requests"] < found["requests"]


def test_tokens_measure_some_rows_here(tiny_ranker, convai2_corpus, nowhere):
    tokenizer = str(tiny_ranker("bi").local() / "context_encoder")
    config = tokenize_corpus.Config(
        corpus=convai2_corpus.uri, tokenizer=tokenizer, output=nowhere, dry_run=True
    )
    found = tokenize_corpus.run(config)["estimate"]
    assert found["rows"] == convai2_corpus.rows("train/") + convai2_corpus.rows("valid/")
    assert found["tasks"] == found["input_files"] >= 2
    assert found["cpu_hours"] > 0 and "rows, measured here" in found["basis"]


def test_a_tokenizer_learns_from_train_as_far_as_it_is_told(convai2_corpus, nowhere):
    def estimate(examples: int) -> dict[str, object]:
        config = train_tokenizer.Config(
            corpus=(convai2_corpus.uri,), output=nowhere, dry_run=True,
            tokenizer=TokenizerConfig(max_examples=examples),
        )  # fmt: skip
        return train_tokenizer.run(config)["estimate"]

    assert estimate(1_000_000)["rows"] == convai2_corpus.rows("train/")
    assert estimate(31)["rows"] == 31


def test_an_evaluation_measures_a_few_questions_of_each_model(
    run_job_here, tiny_ranker, convai2_corpus, nowhere, monkeypatch
):
    monkeypatch.setattr(ranking, "_MEASURED_S", 0.02)
    models = [tiny_ranker(kind).uri for kind in ("poly", "cross")]
    said = run_job_here(
        "evaluate", "--model", *models, "--corpus", convai2_corpus.uri, "--dry-run", "true",
        "--json", nowhere,
    ).summary  # fmt: skip
    found, asked = said["estimate"], convai2_corpus.rows("valid/")
    assert (found["rows"], said["candidates"]) == (asked, 20)
    rates = dict(re.findall(r"(\w+) ([\d,]+) (?:texts|pairs) a second", found["basis"]))
    assert set(rates) == {"poly", "cross"}
    rows = rows_of(convai2_corpus, "valid")
    texts = len({text for row in rows for text in row["candidates"]}) + asked
    per_second = {name: int(rate.replace(",", "")) for name, rate in rates.items()}
    seconds = texts / per_second["poly"] + 20 * asked / per_second["cross"]
    assert found["cpu_hours"] == pytest.approx(torch.get_num_threads() * seconds / 3600, rel=0.01)


def test_intents_measure_the_vectors_of_some_texts(run_job_here, tiny_ranker, tmp_path, nowhere):
    texts = "".join(f"{intent} {n},{intent}\n" for intent in ("pay", "block") for n in range(20))
    (tmp_path / "mine.csv").write_text(f"text,label\n{texts}pay 1,pay\n")
    said = run_job_here(
        "classify_intents", "--encoder", tiny_ranker("bi").uri, "--input", tmp_path / "mine.csv",
        "--output", nowhere, "--dry-run", "true",
    ).summary  # fmt: skip
    assert said["estimate"]["rows"] == 36  # the tenth that would set a threshold is not needed
    assert said["estimate"]["cpu_hours"] > 0 and "texts a second" in said["estimate"]["basis"]


def test_a_training_measures_its_steps_here(tiny_ranker, convai2_corpus, nowhere):
    encoder = tiny_ranker("bi").uri
    config = finetune.Config(
        corpus=convai2_corpus.uri, encoder=encoder, output=nowhere, dry_run=True,
        ranker=ranker_config({"architecture": "bi", "max_context_tokens": 48}),
        finetune=FinetuneConfig(batch_examples=8, epochs=2.0),
    )  # fmt: skip
    said = finetune.run(config)
    found = said["estimate"]
    rows = convai2_corpus.rows("train/")
    assert found["steps"] == round(2 * rows / 8) or abs(found["steps"] - 2 * rows / 8) <= 2
    assert found["cpu_hours"] > 0 and "measured on cpu" in found["basis"]
    assert "activations come on top" in said["memory_is"]
    assert found["memory_bytes"] == 16 * said["parameters"]

    pytest.importorskip("peft")
    adapted = finetune.run(replace(config, finetune=replace(config.finetune, lora_rank=1)))
    trained = adapted["trained_parameters"]
    assert 0 < trained < adapted["parameters"] == said["parameters"] == said["trained_parameters"]
    weights = adapted["parameters"] + trained
    assert adapted["estimate"]["memory_bytes"] == 4 * weights + 12 * trained


def test_a_convert_model_is_trained_further_with_its_own_sizes(
    run_job_here, tiny_ranker, convai2_corpus, nowhere
):
    """They are not those of the recipe's defaults. A size that the command names has to be the model's."""
    recipes = [f"jobs/configs/finetune/convert_{name}.yaml" for name in ("further", "multi")]
    model = tiny_ranker("convert", earlier_turns=0)
    options = ("--config", *recipes, "--corpus", convai2_corpus.uri, "--encoder", model.uri,
               "--output", nowhere, "--dry-run", "true", "--finetune.batch-examples", 8,
               "--finetune.valid-examples", 20, "--loop.precision", "fp32")  # fmt: skip
    found = run_job_here("finetune", *options).summary
    assert found["parameters"] < 100_000  # of the default size: millions
    said = run_job_here("finetune", *options, "--ranker.width", 32).refusal
    assert "the settings need" in said and "[32" in said


def test_a_training_of_several_workers_measures_the_share_of_one(
    run_job_here, tiny_ranker, convai2_corpus, nowhere, monkeypatch
):
    measure, batches = estimate._measure, []

    def noted(task, *more):
        batches.append(task.batches)
        return measure(task, *more)

    monkeypatch.setattr(estimate, "_measure", noted)
    said = run_job_here(
        "finetune", "--corpus", convai2_corpus.uri, "--encoder", tiny_ranker("bi").uri,
        "--output", nowhere, "--dry-run", "true", "--ranker.architecture", "bi",
        "--ranker.max-context-tokens", 48, "--finetune.batch-examples", 8, "--resources.workers", 2,
        "--resources.cpus-per-worker", 1,
    ).summary  # fmt: skip
    assert [one.examples for one in batches] == [4]
    assert (said["examples_per_worker"], said["workers"]) == (4, 2)
    assert said["estimate"]["cpu_hours"] == pytest.approx(2 * said["hours"], abs=1e-3)


def test_a_pretraining_is_not_estimated_before_its_corpus_is_tokenized(
    run_job_here, tiny_ranker, convai2_corpus, nowhere
):
    tokenizer = tiny_ranker("bi").local() / "context_encoder"
    refusal = run_job_here("pretrain", "--corpus", convai2_corpus.uri, "--tokenizer", tokenizer,
                           "--output", nowhere, "--dry-run", "true").refusal  # fmt: skip
    assert "allowed: a corpus of jobs.tokenize_corpus" in refusal


def test_scores_measure_a_few_rows_here(tiny_ranker, convai2_corpus, nowhere):
    config = score_candidates.Config(
        corpus=convai2_corpus.uri, teacher=(tiny_ranker("bi").uri,), output=nowhere, dry_run=True,
        teaching=TeachingConfig(random_candidates=3),
    )  # fmt: skip
    found = score_candidates.run(config)["estimate"]
    assert found["rows"] == convai2_corpus.rows("train/")
    assert found["cpu_hours"] > 0 and "rows, measured on cpu" in found["basis"]


def test_numbers_are_printed_for_people(capsys):
    shown = cost.Estimate(input_bytes=1_500_000_000, tasks=12_000, cpu_hours=0.01, basis="b")
    assert cost.show("job", shown) == {"dry_run": True, "estimate": shown.as_json()}
    text = capsys.readouterr().out
    assert all(part in text for part in ("1.5 GB", "12,000", "0.0100", "rates from"))
