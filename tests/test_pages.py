"""Every command of every page is read by the parser that will read it; every link leads somewhere.

Here all of them are parsed, on all pages. What runs them: tests/jobs/test_page_commands.py (five pages),
test_readme.py, test_convert.py, test_pretraining_page.py and test_intents_page.py there, and
tests/serve/test_page.py.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from jobs.benchmarks import report
from pipeline.config import parse
from serve import api, app

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()
)  # fmt: skip
VERBS = {file.stem for file in (ROOT / "jobs").glob("*.py") if "program.main(" in file.read_text()}
_PROGRAMS = (
    "python",
    "polyrank",
    "make",
    "serve",
    "curl",
    "ray",
    "kubectl",
    "export",
    "pip",
    "split",
)
_VERB = re.compile(r"^(?:\.venv/bin/)?(?:python -m jobs\.|polyrank )(\w[\w-]*)(.*)$", re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def commands(page: Path) -> Iterator[str]:
    """The lines of the page's indented code that start a program; a command may go over several lines."""
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text()).replace("\\\n", " ")
    started = ""
    for line in text.splitlines():
        code = line.strip() if line.startswith("    ") else ""
        if started:  # inside of a quoted body
            started += f"\n{code}"
        elif code.split(" ")[0] in _PROGRAMS or code.startswith(".venv/bin/"):
            started = code
        if started and started.count("'") % 2 == 0:
            yield started
            started = ""
    assert not started, f"{name_of(page)}: {started[:60]} does not end"


# BENCHMARKS.md names what made each row; some of it is a corpus and a model by name only.
COMMANDS = [(name_of(page), command) for page in PAGES for command in commands(page)]


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_is_one_of_its_program(page, command, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(ROOT)
    if found := _VERB.match(command):
        job(found[1], shlex.split(found[2], comments=True))
        return
    for part in re.split(r" && ", command):
        words = shlex.split(part, comments=True)
        CHECKS[words[0]](words[1:])


def job(verb: str, argv: list[str]) -> None:
    verb = verb.replace("-", "_")
    assert verb in VERBS, verb
    config_class = import_module(f"jobs.{verb}").Config
    if "--help" in argv:
        with pytest.raises(SystemExit) as stop:
            parse(config_class, argv, verb)
        assert stop.value.code == 0
        return
    config = parse(config_class, argv, verb)
    if verb == "submit":
        job(config.command[0], list(config.command[1:]))


def serving(words: list[str]) -> None:
    if words[0] == "run":
        target, *given = words[1:]
        assert target == "serve.app:build"
        app.Args.model_validate(dict(one.split("=", 1) for one in given))
    else:
        assert words[0] == "deploy"
        ServeDeploySchema.model_validate(yaml.safe_load((ROOT / words[1]).read_text()))


def asking(words: list[str]) -> None:
    path = next(word for word in words if "localhost:8000" in word).partition("localhost:8000")[2]
    assert path in api.create_app(None).openapi()["paths"], path
    if "-d" in words:
        assert json.loads(words[words.index("-d") + 1])


def making(words: list[str]) -> None:
    for target in [word for word in words if "=" not in word]:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def python(words: list[str]) -> None:
    if words[0] == "-c":
        ast.parse(words[1])
    else:
        assert words[0] == "-m"
        import_module(words[1])


def files_exist(words: list[str]) -> None:
    for word in words:
        if word.endswith((".yaml", ".py")) and "://" not in word:
            assert (ROOT / word).is_file(), word


def exporting(words: list[str]) -> None:
    assert all(re.fullmatch(r"[A-Z_][A-Z0-9_]*=.+", word) for word in words)


CHECKS = {
    "serve": serving,
    "curl": asking,
    "make": making,
    "python": python,
    "ray": files_exist,
    "kubectl": files_exist,
    "export": exporting,
    "pip": lambda words: None,
    "split": lambda words: None,
}


def test_the_pages_name_a_command_of_every_job():
    named = {
        found[1].replace("-", "_") for _, command in COMMANDS if (found := _VERB.match(command))
    }
    inline = re.findall(r"python -m jobs\.(\w+)", "\n".join(page.read_text() for page in PAGES))
    assert VERBS - named - set(inline) - {"demo"} == set()


def test_every_option_in_the_text_is_one_of_a_job():
    """`--finetune.epochs` in a sentence counts as much as in a command."""
    known = {"help", "command"}
    for verb in VERBS:
        config_class = import_module(f"jobs.{verb}").Config
        known |= options(config_class, verb)
    known |= {name.rpartition(".")[0] for name in known}  # a group, inner ones too
    known |= {name.partition(".")[0] for name in known}
    missing = []
    for page in PAGES:
        text = re.sub(r"(?m)^    (?!.*(?:jobs\.|polyrank ))[^\n]*$", "", page.read_text())
        for option in re.findall(r"(?<![\w-])--([a-z][a-z0-9_.-]*[a-z0-9])", text):
            if option.replace("_", "-") not in known and option not in _OTHERS:
                missing.append(f"{name_of(page)}: --{option}")
    assert missing == []


# Options of other programs: ray, mlflow, pip-compile.
_OTHERS = {"generate", "backend-store-uri", "generate-hashes"}


def options(config_class: type, verb: str) -> set[str]:
    """The names of a job's options, at any depth, from its own help."""
    found: set[str] = set()
    for more in ARCHITECTURES if verb == "finetune" else ([],):
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            parse(config_class, [*more, "--help", "all"], verb)
        found |= set(re.findall(r"--([a-z][\w.-]*)", shown.getvalue()))
    return found


ARCHITECTURES = [["--ranker.architecture", name] for name in ("bi", "poly", "cross", "convert")]


# Links


def anchors(page: Path) -> set[str]:
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
    titles = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(page):
    for text, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), f"[{text}]({target})"
        if anchor:
            assert anchor in anchors(there), f"[{text}]({target})"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_on_a_page_is_python(page):
    for block in re.findall(r"(?ms)^```python\n(.*?)^```$", page.read_text()):
        ast.parse(block)


def test_measurements_are_in_one_place():
    """The how-to pages name no milliseconds or rates beside others; BENCHMARKS.md has them."""
    where = {"README.md", "BENCHMARKS.md", "CHANGELOG.md", "pipeline/training/experiments.md"}
    for page in PAGES:
        if name_of(page) not in where:
            assert not re.search(
                r"\b\d[\d.,]* (times as fast|samples/s|articles/s|R@1)", page.read_text()
            )


# README


README = (ROOT / "README.md").read_text()


def test_the_readme_is_short_and_begins_with_what_to_type():
    assert len(README.splitlines()) <= 120
    first = README.splitlines()[:30]
    for wanted in ("make demo", "make test", "```python", "screenshot.png"):
        assert any(wanted in line for line in first), wanted


def test_the_tree_of_the_readme_is_that_of_the_repository():
    """Its names exist; and no folder of code, and no file beside the README, is missing."""
    tree = README.partition("## What is where")[2].partition("\n## ")[0]
    named, folder = set(), ""
    for indent, name in re.findall(r"(?m)^(    |      )(\S+)  +\S", tree):
        folder = folder if len(indent) > 4 else name
        path = name if len(indent) == 4 else f"{folder}{name}"
        there = ROOT / path
        assert there.is_dir() if path.endswith("/") else there.is_file(), f"{path} is not there"
        named.add(path)
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    folders = {
        "/".join(parts[:depth]) + "/"
        for parts in (Path(name).parts for name in listed)
        for depth in (1, 2)
        if len(parts) > depth and not parts[0].startswith(".") and parts[:1] != ("tests",)
    }
    beside = {name for name in listed if "/" not in name and not name.startswith(".")}
    beside -= {name for name in beside if name.endswith(".md") or name == "LICENSE"}
    assert (folders | beside | {"tests/"}) - named == set()


def test_the_readme_leads_to_every_page():
    linked = set(re.findall(r"\]\(([^)#\s]+\.md)\)", README))
    assert {name_of(page) for page in PAGES} - linked - {"README.md"} == set()


def test_the_readme_s_numbers_are_those_of_the_results():
    rows = {row["row"]: row for rows in report.read(report.RESULTS).values() for row in rows}
    table = README.partition("## Which architecture when")[2].partition("\n## ")[0]
    for name in ("bi", "poly", "cross"):
        [line] = [line for line in table.splitlines() if line.startswith(f"| `{name}`")]
        demo = rows[f"demo.{name}"]
        assert f"{demo['ours']:.3f}, {demo['detail']['milliseconds']:.1f} ms" in line
    for row in ("paper.4.convai2.bi", "paper.4.convai2.poly-64", "paper.4.convai2.bi.2_layers"):
        assert f"{rows[row]['ours']:.3f}" in table
    assert f"{rows['search.exact_1m_m64.vs_plain_torch']['ours']:.0f} ms" in table
    speed = rows["convert.encode_vs_minilm_sentence_transformers"]
    assert f"encodes {speed['ours']:,.0f} texts/s" in table
    assert f"all-MiniLM {speed['peer']:.0f}" in table
    recall = rows["convert.reddit_1_of_100.points_over_bm25"]["detail"]["R@1/100"]
    assert (
        f"R@1/100 {recall['convert'] / 100:.3f}; TF-IDF has {recall['tf-idf'] / 100:.3f}" in table
    )
    assert f"({rows['convert.saved_megabytes']['ours']:.1f} MB)" in table
