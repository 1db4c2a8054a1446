"""Every command of the page on pre-training, run in its order, on small inputs and a tiny encoder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from jobs import pretrain
from pipeline.config import parse
from pipeline.training import estimate

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "pipeline" / "training" / "PRETRAINING.md"

pytestmark = pytest.mark.timeout(900)  # five trainings, each of which starts workers

_WORKER = ("--resources.workers", 1, "--resources.gpu", "false", "--resources.cpus-per-worker", 1,
           "--loop.precision", "fp32")  # fmt: skip
_PRETRAIN = (
    "--pretrain.batch-tokens", 800, "--pretrain.micro-batch-tokens", 400,
    "--pretrain.max-context-tokens", 48, "--pretrain.max-response-tokens", 32, *_WORKER,
)  # fmt: skip
_SHAPE = ("--encoder.layers", 1, "--encoder.width", 16, "--encoder.heads", 2,
          "--encoder.positions", 96)  # fmt: skip
_FINETUNE = ("--finetune.max-steps", 2, "--finetune.batch-examples", 8, *_WORKER,
             "--ranker.max-context-tokens", 48, "--ranker.max-candidate-tokens", 32)  # fmt: skip


def commands() -> list[list[str]]:
    """Those of the page, without `python -m`."""
    lines = PAGE.read_text().replace("\\\n", " ").splitlines()
    found = [re.fullmatch(r" {4,}python -m jobs\.(\w+ .*)", line) for line in lines]
    return [shlex.split(line[1]) for line in found if line]


def smaller(verb: str, argv: list[str]) -> list[object]:
    """Options that make a command small; what the page says besides stays."""
    if verb == "finetune":
        return [*_FINETUNE]
    if verb != "pretrain":
        return []
    steps = 4 if "--continue-from" in argv else 2
    shape = () if "--start" in argv else _SHAPE
    return [*_PRETRAIN, *shape, "--pretrain.steps", steps]


@pytest.mark.parametrize("recipe", ["modern-base", "reddit-base", "wikipedia-base"])
def test_each_machine_of_a_long_run_may_die_more_than_once(recipe):
    """Ray Train counts the deaths over the whole run, and a run of 14 days on 32 machines has many."""
    file = ROOT / "jobs" / "configs" / "pretrain" / f"{recipe}.yaml"
    argv = ["--config", str(file), "--corpus", "tokens", "--output", "encoder"]
    resources = parse(pretrain.Config, argv, "pretrain").resources
    assert resources.max_restarts > 2 * resources.workers


@pytest.fixture
def home(tmp_path, sample_files, convai2_corpus, tiny_ranker, monkeypatch) -> Path:
    """A folder where the paths of the page lead to samples."""
    for name, target in {
        "jobs/configs": ROOT / "jobs" / "configs",
        "dumps/RC_2015-01.zst": sample_files / "reddit_dump" / "RC_2011-01.zst",
        "dumps/RC_2015-02.bz2": sample_files / "reddit_dump" / "RC_2011-02.bz2",
        "dumps/wikipedia": sample_files / "wikipedia" / "extracted",
        "corpora/convai2": Path(convai2_corpus.uri),
        "models/bert-base-uncased": tiny_ranker("bi").local() / "context_encoder",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(target)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(estimate, "_MEASURED_SECONDS", 0.1)
    return tmp_path


def test_a_dry_run_of_the_smallest_recipe(home, run_job_here):
    run_job_here("tokenize_corpus", "--corpus", "corpora/convai2", "--tokenizer",
            "models/bert-base-uncased", "--output", "tokens")  # fmt: skip
    done = run_job_here("pretrain", "--config", "jobs/configs/pretrain/tiny-cpu.yaml",
                   "--corpus", "tokens", "--output", "encoder", "--dry-run")  # fmt: skip
    found = done.summary
    assert (found["estimate"]["steps"], found["batch_tokens"], found["micro_batches_per_step"]) == (
        1000,
        1024,
        2,
    )
    assert found["tokens_to_train"] == 1000 * 1024
    assert found["epochs"] == pytest.approx(1000 * 1024 / found["corpus_tokens"], abs=0.01)
    vocabulary = len(AutoTokenizer.from_pretrained(home / "tokens" / "tokenizer"))
    assert found["parameters"] > 64 * vocabulary and found["tokens_per_s_per_worker"] > 0
    assert not (home / "encoder").exists()


@pytest.mark.long
def test_every_command_of_the_page_works_as_written(home, run_job_here):
    summaries = []
    for verb, *argv in commands():
        done = run_job_here(verb, *argv, *smaller(verb, argv))
        assert done.code == 0, (verb, argv, done.stderr[-2000:])
        summaries.append((verb, argv, done.summary))
    dry = next(summary for _, argv, summary in summaries if "--dry-run" in argv)
    assert {"parameters", "epochs", "memory_gib_per_worker", "hours"} <= set(dry)
    steps = [made["counts"]["steps"] for verb, argv, made in summaries
             if verb == "pretrain" and "--dry-run" not in argv]  # fmt: skip
    assert sorted(steps) == [2, 2, 2, 4]
    encoder = home / "encoders" / "reddit"
    assert AutoModel.from_pretrained(encoder).config.hidden_size == 16
    assert AutoModelForMaskedLM.from_pretrained(encoder).config.num_hidden_layers == 1
    files = re.findall(
        r"^\| (`.*`) \| ", PAGE.read_text().partition("then holds:")[2], re.MULTILINE
    )
    named = [name.strip("`") for row in files[:5] for name in row.split(", ")]
    assert [name for name in named if not (encoder / name).exists()] == [] and len(named) == 7
    assert (home / "rankers" / "poly" / "ranker.json").is_file()
