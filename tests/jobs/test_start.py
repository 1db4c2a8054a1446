"""What a job says before it starts: help and refusals, without the libraries that take seconds to load."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.engine.draft import Draft, draft

ROOT = Path(__file__).parents[2]
VERBS = sorted(
    file.stem for file in (ROOT / "jobs").glob("*.py") if "program.main(" in file.read_text()
)
RUN_JOBS = """
import contextlib, importlib, io, json, sys
SLOW = {"ray", "torch", "mlflow", "transformers", "sklearn", "matplotlib"}
ended = []
for verb, *arguments in json.load(sys.stdin):
    sys.argv = [verb, *arguments]
    before, text = set(sys.modules), io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            job = importlib.import_module(f"jobs.{verb}")
            job.program.main(job.Config, job.run, verb)
            code = 0
        except SystemExit as stop:
            code = stop.code
    loaded = sorted(SLOW & set(sys.modules) - before)
    ended.append({"code": code, "text": text.getvalue(), "loaded": loaded})
print(json.dumps(ended))
"""


@dataclass(frozen=True)
class Nothing:
    output: str = ""


def run_jobs(*commands: tuple[object, ...]) -> list[dict[str, Any]]:
    """Runs `jobs.<verb>` with arguments, one after the other in one new process.

    Returns each one's exit code, what it printed, and which slow libraries it was the first to load.
    """
    process = subprocess.run(
        [sys.executable, "-c", RUN_JOBS],
        input=json.dumps([[str(word) for word in command] for command in commands]),
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    ended: list[dict[str, Any]] = json.loads(process.stdout)
    return ended


def test_help_loads_no_slow_library():
    ended = dict(zip(VERBS, run_jobs(*((verb, "--help") for verb in VERBS)), strict=True))
    for verb, end in ended.items():
        assert (end["code"], end["loaded"]) == (0, []), verb
        assert end["text"].startswith(f"usage: python -m jobs.{verb} ")


def test_a_wrong_option_is_refused_without_a_slow_library():
    ended = dict(zip(VERBS, run_jobs(*((verb, "--nope", 1) for verb in VERBS)), strict=True))
    for verb, end in ended.items():
        assert (end["code"], end["loaded"]) == (2, []), verb
        assert end["text"].startswith(f"python -m jobs.{verb}: ") and "--nope" in end["text"]


def test_input_that_is_not_there_is_refused_without_a_slow_library(tmp_path):
    gone, output = tmp_path / "gone", ("--output", tmp_path / "out")
    empty = draft(str(tmp_path / "corpus"), "corpus", Nothing(), {})
    assert isinstance(empty, Draft)
    empty.publish([], {})
    corpus = ("--corpus", tmp_path / "corpus")
    work = ("--work", tmp_path / "work")
    texts = tmp_path / "texts.csv"
    texts.write_text("text,label\n" + "".join(f"{at},{at % 2}\n" for at in range(8)))
    commands = [
        ("benchmark", "finetune", "--encoder", f"{gone}/x", "--corpus", gone, *work),
        ("benchmark", "search", "--model", gone, "--corpus", gone, *work),
        ("classify_intents", "--encoder", gone, "--input", gone, *output),
        ("classify_intents", "--encoder", gone, "--input", texts, *output),
        ("clean_corpus", "--corpus", gone, *output),
        ("clean_corpus", *corpus, "--evaluation", gone, *output),
        ("convert_model", "--model", gone, *output),
        ("demo", "--data", gone, "--work", tmp_path / "demo", "--port", 1),
        ("embed_pool", "--model", gone, "--candidates", gone, "--pools", gone, "--name", "x"),
        ("evaluate", "--model", gone, *corpus),
        ("evaluate", "--model", gone, "--corpus", gone),
        ("finetune", "--corpus", gone, "--encoder", gone, *output),
        ("finetune", *corpus, "--encoder", gone, *output),
        ("inspect", "--corpus", gone),
        ("inspect", "--pool", gone),
        ("prepare_corpus", "--corpus", "reddit", "--input", gone, *output),
        ("pretrain", "--corpus", gone, "--tokenizer", gone, *output),
        ("pretrain", *corpus, "--tokenizer", gone, *output),
        ("score_candidates", "--corpus", gone, "--teacher", gone, *output),
        ("score_candidates", *corpus, "--teacher", gone, *output),
        ("search", "--pool", gone, "--model", gone, "--context", "hi"),
        ("train_tokenizer", "--corpus", gone, *output),
    ]
    for command, end in zip(commands, run_jobs(*commands), strict=True):
        assert (end["code"], end["loaded"]) == (2, []), (command, end["text"])
        assert str(gone) in end["text"]


def test_a_tokenizer_is_no_encoder_and_the_refusal_says_who_starts_from_one(tmp_path):
    for kind in ("corpus", "tokenizer"):
        empty = draft(str(tmp_path / kind), kind, Nothing(), {})
        assert isinstance(empty, Draft)
        empty.publish([], {})
    (end,) = run_jobs(
        ("finetune", "--corpus", tmp_path / "corpus", "--encoder", tmp_path / "tokenizer",
         "--output", tmp_path / "out")
    )  # fmt: skip
    assert (end["code"], end["loaded"]) == (2, [])
    assert "is a tokenizer; allowed: " in end["text"]
    assert "--ranker.architecture convert" in end["text"]


@pytest.mark.parametrize("verb", ["clean_corpus", "inspect", "score_candidates", "train_tokenizer"])
def test_an_unfinished_corpus_is_refused_without_a_slow_library(tmp_path, verb):
    draft(str(tmp_path / "corpus"), "corpus", Nothing(), {})
    more = {"inspect": (), "score_candidates": ("--teacher", "t", "--output", tmp_path / "out")}
    arguments = more.get(verb, ("--output", tmp_path / "out"))
    (end,) = run_jobs((verb, "--corpus", tmp_path / "corpus", *arguments))
    assert (end["code"], end["loaded"]) == (2, [])
    assert "unfinished" in end["text"]


def test_a_wrong_column_is_refused_without_a_slow_library(tmp_path, tiny_ranker):
    (tmp_path / "rows.csv").write_text("frage,antwort\nhow?,so\n")
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "words": "b"}\n')
    pairs = ("prepare_corpus", "--corpus", "pairs", "--output", tmp_path / "out")
    pool = ("embed_pool", "--model", tiny_ranker("bi").uri, "--pools", tmp_path, "--name", "x")
    commands = [
        (*pairs, "--input", tmp_path / "rows.csv"),
        (*pool, "--candidates", tmp_path / "rows.jsonl"),
        (*pool, "--candidates", tmp_path / "rows.jsonl", "--dry-run"),
    ]
    refusals = [
        "pairs.context_column: 'context' is not allowed; allowed: the columns of",
        *["embed.text_column: 'text' is not allowed; allowed: the columns of"] * 2,
    ]
    for refusal, end in zip(refusals, run_jobs(*commands), strict=True):
        assert (end["code"], end["loaded"]) == (2, []), end["text"]
        assert refusal in end["text"]
    assert not list(tmp_path.rglob("*.partial"))


def test_a_split_without_examples_is_refused_without_a_slow_library(tmp_path, tiny_ranker):
    empty = draft(str(tmp_path / "corpus"), "corpus", Nothing(), {})
    assert isinstance(empty, Draft)
    empty.publish([], {})
    model = tiny_ranker("bi").uri
    (end,) = run_jobs(("evaluate", "--model", model, "--corpus", empty.uri, "--split", "test"))
    assert (end["code"], end["loaded"]) == (2, [])
    assert "no examples in test/" in end["text"]
