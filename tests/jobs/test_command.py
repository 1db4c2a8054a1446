"""`polyrank`, one command for all jobs: its list of verbs, its messages, and that it stays thin."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jobs import __main__ as command
from jobs import program

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


def test_every_job_is_a_verb_and_has_a_line_of_help():
    assert set(command.VERBS) == JOBS
    for verb in command.VERBS:
        assert 10 < len(command.first_sentence(verb)) <= 100, verb


def test_the_verbs_are_in_the_order_of_the_path():
    path = ["prepare_corpus", "inspect", "clean_corpus", "train_tokenizer", "tokenize_corpus",
            "pretrain", "finetune", "evaluate", "embed_pool", "search", "promote", "submit"]  # fmt: skip
    assert [verb for verb in command.VERBS if verb in path] == path


@pytest.mark.parametrize("arguments", [(), ("--help",), ("help",)])
def test_help_lists_the_verbs_each_by_its_own_help(polyrank, arguments):
    code, out, _ = polyrank(*arguments)
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
    for typed, name in (
        ("/bin/polyrank", "polyrank"),
        ("/jobs/__main__.py", "python -m jobs"),
    ):
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
    assert (
        "Shows what a corpus or a pool holds." in polyrank("submit", "--", "inspect", "--help")[1]
    )
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
    (tmp_path / "a.csv").write_text("x,y\n")
    arguments = ("--format", "pairs", "--input", f"{tmp_path}/a.csv", "--output", f"{tmp_path}/out")
    code, _, error = polyrank("prepare_corpus", *arguments)
    assert code == 2
    assert "pairs.context_column: 'context' is not allowed" in error
