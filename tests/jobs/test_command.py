"""`polyrank`, one command for all jobs: its list of verbs, its messages, and that it stays thin."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from jobs import __main__ as command
from jobs import program
from tests.helpers import job_command

ROOT = Path(__file__).parents[2]
JOBS = {file.stem for file in (ROOT / "jobs").glob("*.py") if "program.main(" in file.read_text()}


@pytest.fixture
def polyrank(monkeypatch, capsys):
    """`polyrank("finetune", "--help")`: (exit code, standard output, standard error)."""

    def run(*arguments: str, typed: str = "/usr/bin/polyrank"):
        monkeypatch.setattr(program, "command_of_verb", program.command_of_verb)
        monkeypatch.setattr(sys, "argv", [typed, *arguments])
        code = 0
        try:
            command.main()
        except SystemExit as stop:
            code = stop.code or 0
        return code, *capsys.readouterr()

    return run


def test_a_reader_that_leaves_early_is_no_fault():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "jobs", "--help"]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_every_job_is_a_verb_and_has_a_line_of_help():
    assert set(command.VERBS) == JOBS
    for verb in command.VERBS:
        assert 10 < len(command.first_sentence(verb)) <= 100, verb


def test_the_verbs_are_in_the_order_of_the_path():
    path = ["prepare_corpus", "inspect", "clean_corpus", "train_tokenizer", "tokenize_corpus",
            "pretrain", "finetune", "evaluate", "embed_pool", "search", "promote", "submit"]  # fmt: skip
    assert [verb for verb in command.VERBS if verb in path] == path


def test_help_lists_the_verbs_each_by_its_own_help(polyrank):
    code, out, _ = polyrank()
    assert polyrank("--help")[1] == out
    assert code == 0
    for verb in command.VERBS:
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [verb]]
        _, own, _ = polyrank(verb, "--help")
        assert line.split(maxsplit=1)[1] in " ".join(own.split())


def test_help_loads_no_job_and_no_slow_library():
    code = (
        "import sys, jobs.__main__ as c; sys.argv = ['polyrank', '--help']; c.main();"
        "print(sorted({'ray', 'torch', 'mlflow', 'transformers', 'jobs.finetune'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_messages_have_the_name_that_was_typed(polyrank):
    for typed, name in (("/bin/polyrank", "polyrank"), ("/jobs/__main__.py", "python -m jobs")):
        _, out, _ = polyrank("search", "--help", typed=typed)
        assert out.startswith(f"usage: {name} search ")
        code, _, error = polyrank("search", "--pol", "p", typed=typed)
        assert code == 2
        assert error == f"{name} search: --pol: unknown option; did you mean --pool?\n"


def test_an_unknown_verb_is_refused_with_the_nearest_one(polyrank):
    code, _, error = polyrank("finetun")
    assert (code, error) == (
        2, "polyrank: 'finetun' is no verb; did you mean finetune? polyrank --help lists them\n"
    )  # fmt: skip
    assert polyrank("xyz")[2] == "polyrank: 'xyz' is no verb; polyrank --help lists them\n"


def test_dashes_in_a_verb_and_what_stands_after_two_dashes(polyrank):
    code, out, _ = polyrank("submit", "--dry-run", "--", "inspect", "--pool", "x")
    assert code == 0
    assert json.loads(out.splitlines()[-1])["entrypoint"] == "python -m jobs.inspect --pool x"
    help_of_job = polyrank("submit", "--", "inspect", "--help")[1]
    assert "Shows what a corpus or a pool holds." in help_of_job
    assert polyrank("submit", "inspect", "--pool", "x")[2] == (
        "polyrank submit: inspect: what is passed on stands after --, as in: "
        "polyrank submit -- inspect --pool x\n"
    )
    assert polyrank("embed-pool", "--help")[1].startswith("usage: polyrank embed_pool ")


def test_the_version_is_that_of_the_project(polyrank):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert polyrank("--version")[1] == f"polyrank {project['version']}\n"
    assert project["scripts"] == {"polyrank": "jobs.__main__:main"}


def test_a_job_is_run(polyrank, tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    arguments = ("--format", "pairs", "--input", f"{tmp_path}/a.csv", "--output", f"{tmp_path}/out")
    code, _, error = polyrank("prepare_corpus", *arguments)
    assert code == 2
    assert (
        "pairs.context_column: 'context' and pairs.response_column: 'response' are not allowed"
        in error
    )


def in_terminal(*words: object) -> tuple[int, str]:
    """(exit code, what a person sees)"""
    person, terminal = pty.openpty()
    process = subprocess.Popen([*map(str, words)], stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    seen = b""
    with suppress(OSError):  # Linux says so when the last writer has left
        while data := os.read(person, 4096):
            seen += data
    os.close(person)
    return process.wait(), seen.decode()


@pytest.fixture
def saying(tmp_path) -> list[str]:
    """A job that says something."""
    (tmp_path / "steps.yaml").write_text("steps: {say: echo hello}")
    return job_command("workflow", tmp_path / "steps.yaml")


def test_a_person_reads_words_and_a_program_json(saying, tmp_path):
    code, seen = in_terminal(*saying)
    assert code == 0
    assert seen.splitlines()[-1] == "workflow: done"
    assert "hello" in seen and '{"job"' not in seen
    code, seen = in_terminal(*job_command("workflow", tmp_path / "none.yaml"))
    assert code == 2
    assert len(seen.splitlines()) == 1 and seen.startswith("python -m jobs.workflow: ")
    again = subprocess.run(saying, capture_output=True)
    assert json.loads(again.stdout.splitlines()[-1])["job"] == "workflow"


@pytest.mark.parametrize(
    ("summary", "words"),
    [
        ({"job": "embed_pool", "output": "p/v-1", "already_done": False, "seconds": 1234.5,
          "counts": {"candidates": 1200, "files.written": 3}, "dropped": {"no text": 0}},
         "embed_pool: done in 1,234.5 s: p/v-1 (1,200 candidates)"),
        ({"job": "embed_pool", "output": "p", "dropped": {"a": 1, "b": 2000, "c": 3, "d": 4, "e": 0}},
         "embed_pool: done: p; left out: 2,000 b, 4 d, 3 c, 1 for other reasons"),
        ({"job": "finetune", "output": "r", "already_done": True, "seconds": 3.0, "counts": {}},
         "finetune: already done: r"),
        ({"job": "x", "exit_code": 2, "error": "why"}, "x: failed (exit code 2): why"),
    ],
)  # fmt: skip
def test_summaries_in_words(summary, words):
    assert program.in_words(summary) == words
