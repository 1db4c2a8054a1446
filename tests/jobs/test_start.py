"""What a job says before it starts: help and refusals, without the libraries that take seconds to load."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jobs import cluster
from jobs.__main__ import VERBS
from pipeline.config import BadInput
from pipeline.engine.draft import Draft, draft

ROOT = Path(__file__).parents[2]
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


def test_help_and_wrong_options_load_no_slow_library():
    helps = [(verb, "--help") for verb in VERBS]
    refusals = [(verb, "--nope", 1) for verb in VERBS]
    ended = run_jobs(*helps, *refusals)
    for verb, helped, refused in zip(VERBS, ended, ended[len(VERBS) :], strict=False):
        assert (helped["code"], helped["loaded"]) == (0, []), verb
        assert helped["text"].startswith(f"usage: python -m jobs.{verb} ")
        assert (refused["code"], refused["loaded"]) == (2, []), verb
        assert refused["text"].startswith(f"python -m jobs.{verb}: ")
        assert "--nope" in refused["text"]


@pytest.fixture
def empty(tmp_path):
    """`empty("corpus")`: the URI of a published artifact without files."""

    def publish(kind: str) -> str:
        made = draft(str(tmp_path / kind), kind, Nothing(), {})
        assert isinstance(made, Draft)
        return made.publish([], {}).uri

    return publish


def test_input_that_is_wrong_is_refused_without_a_slow_library(tmp_path, empty, tiny_ranker):
    gone, output = tmp_path / "gone", ("--output", tmp_path / "out")
    corpus, work = ("--corpus", empty("corpus")), ("--work", tmp_path / "work")
    texts, table, lines = (tmp_path / f"rows.{name}" for name in ("csv", "table.csv", "jsonl"))
    texts.write_text("text,label\n" + "".join(f"{at},{at % 2}\n" for at in range(8)))
    table.write_text("frage,antwort\nhow?,so\n")
    lines.write_text('{"id": "a", "words": "b"}\n')
    draft(str(tmp_path / "begun"), "corpus", Nothing(), {})
    begun, model = ("--corpus", tmp_path / "begun"), tiny_ranker("bi").uri
    pool = ("embed_pool", "--pools", tmp_path, "--name", "x", "--model")
    pairs = ("prepare_corpus", "--corpus", "pairs", *output)
    no_text = "embed.text_column: 'text' is not allowed; allowed: the columns of"
    tokenizer = ("finetune", *corpus, "--encoder", empty("tokenizer"), *output)
    refusals = {
        ("benchmark", "finetune", "--encoder", f"{gone}/x", "--corpus", gone, *work): gone,
        ("benchmark", "search", "--model", gone, "--corpus", gone, *work): gone,
        ("classify_intents", "--encoder", gone, "--input", gone, *output): gone,
        ("classify_intents", "--encoder", gone, "--input", texts, *output): gone,
        ("clean_corpus", "--corpus", gone, *output): gone,
        ("clean_corpus", *corpus, "--evaluation", gone, *output): gone,
        ("convert_model", "--model", gone, *output): gone,
        ("demo", "--data", gone, "--work", tmp_path / "demo", "--port", 1): gone,
        (*pool, gone, "--candidates", gone): gone,
        ("evaluate", "--model", gone, *corpus): gone,
        ("evaluate", "--model", gone, "--corpus", gone): gone,
        ("finetune", "--corpus", gone, "--encoder", gone, *output): gone,
        ("finetune", *corpus, "--encoder", gone, *output): gone,
        ("inspect", "--corpus", gone): gone,
        ("inspect", "--pool", gone): gone,
        ("prepare_corpus", "--corpus", "reddit", "--input", gone, *output): gone,
        ("pretrain", "--corpus", gone, "--tokenizer", gone, *output): gone,
        ("pretrain", *corpus, "--tokenizer", gone, *output): gone,
        ("score_candidates", "--corpus", gone, "--teacher", gone, *output): gone,
        ("score_candidates", *corpus, "--teacher", gone, *output): gone,
        ("search", "--pool", gone, "--model", gone, "--context", "hi"): gone,
        ("train_tokenizer", "--corpus", gone, *output): gone,
        # An unfinished corpus, one without examples, a wrong column, and a tokenizer in place of an encoder.
        ("clean_corpus", *begun, *output): "unfinished",
        ("inspect", *begun): "unfinished",
        ("score_candidates", *begun, "--teacher", "t", *output): "unfinished",
        ("train_tokenizer", *begun, *output): "unfinished",
        ("evaluate", "--model", model, *corpus, "--split", "test"): "no examples in test/",
        (*pairs, "--input", table): "pairs.context_column: 'context' and pairs.response_column",
        (*pool, model, "--candidates", lines): no_text,
        (*pool, model, "--dry-run", "--candidates", lines): no_text,
        tokenizer: "is a tokenizer; allowed: ",
    }
    for (command, said), end in zip(refusals.items(), run_jobs(*refusals), strict=True):
        assert (end["code"], end["loaded"]) == (2, []), (command, end["text"])
        assert str(said) in end["text"], command
    assert "--ranker.architecture convert" in end["text"]  # which starts from a tokenizer
    assert [path.name for path in tmp_path.rglob("*.partial")] == ["begun.partial"]


@pytest.mark.parametrize("file", ["pipeline.py", "serve.py", "jobs/__init__.py"])
def test_a_module_that_hides_a_package_from_rays_processes_is_refused(tmp_path, monkeypatch, file):
    cluster.require_visible_packages()  # in the checkout the packages are ours
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline").mkdir()  # a folder of files hides nothing
    cluster.require_visible_packages()
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    name = file.partition("/")[0].removesuffix(".py")
    with pytest.raises(BadInput, match=rf"^{file}: in the working directory hides .* {name} from"):
        cluster.require_visible_packages()
