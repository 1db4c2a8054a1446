"""The pages agree with the code: commands, options, files, environment variables, metrics, links.

tests/test_page_commands.py runs the commands. Here each is read by the parser of its program, also those that
are not run (tests/pages_not_run.md).
"""

from __future__ import annotations

import contextlib
import functools
import io
import mmap
import re
import shlex
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import click
import mlflow.environment_variables
import pytest
import ray
import yaml
from ray.scripts.scripts import cli as ray_program
from ray.serve.schema import ServeDeploySchema
from ray.serve.scripts import cli as serve_program

from jobs.benchmarks import report
from pipeline.config import parse
from serve import app, metrics
from serve.http import api, errors
from serve.limits import Limits
from tests.pages import (
    BLOCKS,
    FILES,
    NOT_RUN,
    PAGES,
    ROOT,
    TARGETS,
    name_of,
    not_run,
    program_of,
    spans,
    tracked,
)

VERBS = {file.stem for file in (ROOT / "jobs").glob("*.py") if "program.main(" in file.read_text()}
_VERB = re.compile(r"^(?:python -m jobs\.|jobs\.|polyrank )(\w[\w-]*)((?: .*)?)$", re.DOTALL)
COMMANDS = [(block.page, block.text) for block in BLOCKS if block.kind == "command"]
HOW_TO = [page for page in PAGES if name_of(page) != "CHANGELOG.md"]  # which tells of the past, too
SPANS = [(name_of(page), span) for page in HOW_TO for span in spans(page)]
CODE = [file for file in tracked("*.py", "Makefile") if file != Path(__file__)]


# Commands


@pytest.mark.parametrize("source", dict.fromkeys(page for page, _ in COMMANDS))
def test_a_command_is_one_of_its_program(source, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(ROOT)
    for page, command in COMMANDS:
        if page == source:
            for part in command.split(" && "):
                check(part)


def check(command: str) -> None:
    """Raises what the parser of the program raises."""
    command = command[command.index(program_of(command)) :]
    if found := _VERB.match(command):
        job(found[1], shlex.split(found[2], comments=True))
    else:
        program, *words = shlex.split(command, comments=True)
        CHECKS[program](words)


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


def of_click(group: click.Group, words: list[str]) -> None:
    command: click.Command = group
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(click.Context(command), name)
        assert found is not None, name
        command = found
    command.make_context(name, words)


def serving(words: list[str]) -> None:
    of_click(serve_program, words)
    if words[0] == "run" and ":" in words[1]:
        assert words[1] == "serve.app:build"
        app.Args.model_validate(dict(one.split("=", 1) for one in words[2:]))
    elif words[0] in ("run", "deploy"):
        ServeDeploySchema.model_validate(yaml.safe_load((ROOT / words[1]).read_text()))


def asking(words: list[str]) -> None:
    path = next(word for word in words if "localhost:8000" in word).partition("localhost:8000")[2]
    assert path in api.interface()["paths"], path


def making(words: list[str]) -> None:
    assert {word for word in words if "=" not in word} <= set(TARGETS)


def python(words: list[str]) -> None:
    if words[0] == "-m":
        assert (ROOT / words[1].replace(".", "/")).with_suffix(".py").is_file(), words[1]
    else:
        compile(words[1], "-c", "exec")


def files_exist(words: list[str]) -> None:
    for word in words:
        if word.startswith("kuberay/"):
            assert (ROOT / word).exists(), word
        elif word.endswith((".yaml", ".py", "crontab")) and "://" not in word:
            assert (ROOT / word).is_file(), word


def installing(words: list[str]) -> None:
    assert words[:2] == ["install", "-e"], "no package polyrank is on the index"
    extras = re.search(r"(?ms)^\[project.optional-dependencies\]\n(.*?)^\[", PYPROJECT)
    assert extras
    assert f"\n{words[2].removeprefix('.[').removesuffix(']')} = [" in f"\n{extras[1]}"


PYPROJECT = (ROOT / "pyproject.toml").read_text()
CHECKS = {
    "serve": serving,
    "ray": functools.partial(of_click, ray_program),
    "mlflow": lambda words: None,  # tests/cluster/test_mlflow_server.py starts it
    "curl": asking,
    "make": making,
    "python": python,
    "kubectl": files_exist,
    "docker": files_exist,
    "crontab": files_exist,
    "export": lambda words: None,
    "git": lambda words: None,
    "pip": installing,
}


def test_the_list_of_what_is_not_run_has_no_row_too_many():
    for row in not_run():
        assert any(row.covers(block) for block in BLOCKS), f"{row.page}: {row.start} is gone"
        for file in re.findall(r"`(tests/[^`]+)`", row.reason):
            assert list(ROOT.glob(file)), file
    rows = [line for line in NOT_RUN.read_text().splitlines() if line.startswith("|")]
    assert len(rows) - 2 == len(not_run()), "each row has a page, a start and a reason"


def test_the_pages_name_a_command_of_every_job():
    named = {found[1] for _, command in COMMANDS if (found := _VERB.match(command))}
    inline = {found[1] for _, span in SPANS if (found := _VERB.match(span))}
    assert VERBS - named - inline - {"demo", "cluster_demo"} == set()  # make types these


def test_a_command_in_a_sentence_is_one_of_its_program(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(ROOT)
    for page, span in SPANS:
        words = span.split()
        if re.search(r"[…<>]|\b[A-Z]{3,}\b", span):  # not to be typed as it stands: serve run FILE
            continue
        if found := _VERB.match(span):
            verb = found[1].replace("-", "_")
            given = set(re.findall(r"(?<![\w-])--([a-z][\w.-]*)", found[2].partition(" -- ")[0]))
            assert verb in VERBS or (ROOT / "jobs" / verb).is_dir() or not given, (page, span)
            assert given <= options(verb), (page, span)
        elif len(words) > 1 and words[0] in ("ray", "serve", "mlflow", "make", "kubectl", "pip"):
            with contextlib.suppress(SystemExit, click.MissingParameter):  # as `ray dashboard`
                CHECKS[words[0]](shlex.split(span)[1:])


def test_every_option_in_a_sentence_is_one_of_a_job():
    """`--finetune.epochs` counts as much as in a command. Or it is one of a command of the page."""
    commands = dict.fromkeys((page for page, _ in SPANS), "")
    for page, command in COMMANDS:
        commands[page] = f"{commands.get(page, '')} {command}"
    known = set[str]().union(*map(options, VERBS))
    known |= {"/".join(parts[:-1]) for parts in (name.split(".") for name in known)}
    unknown = [
        f"{page}: --{option}"
        for page, span in SPANS
        if span.split()[0] not in CHECKS and not span.startswith("uv ")
        for option in re.findall(r"(?<![\w-])--([a-z][a-z0-9_.-]*[a-z0-9])", span)
        if option.replace("_", "-") not in known and f"--{option} " not in commands[page]
    ]
    assert unknown == []


@functools.cache
def options(verb: str) -> set[str]:
    """The names of a job's options and of their groups, from its own help."""
    found = {"help", "config"}
    config_class = import_module(f"jobs.{verb}").Config
    for more in ARCHITECTURES if verb == "finetune" else ([],):
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            parse(config_class, [*more, "--help", "all"], verb)
        found |= set(re.findall(r"--([a-z][\w.-]*)", shown.getvalue()))
    groups = {name.rpartition(".")[0] for name in found}
    return found | groups | {name.partition(".")[0] for name in groups}


ARCHITECTURES = [["--ranker.architecture", name] for name in ("bi", "poly", "cross", "convert")]


# Names of the code


def test_every_file_that_a_page_names_is_there():
    names = {name_of(file) for file in tracked()}
    names |= {f"{parent}/" for name in names for parent in map(str, Path(name).parents)}
    code = "".join(file.read_text() for file in CODE)
    missing = []
    for page, span in SPANS:
        folder = Path(page).parent
        for path in re.findall(r"[\w.*-]+(?:/[\w.*-]+)*/?", span):
            top = path.partition("/")
            is_path = top[1] and top[0] in ("pipeline", "jobs", "serve", "tests", "kuberay")
            is_file = path.endswith((".py", ".yaml", ".lock", ".env", ".md", ".json"))
            is_own = is_file and " " not in span  # a command also names files of its reader
            if not (is_path or is_own):
                continue
            patterns = (path, f"{folder}/{path}", f"*/{path}", f"{path}/", f"{path}.py")
            is_there = any(fnmatch(name, pattern) for name in names for pattern in patterns)
            written = re.split(r"[*N]", Path(path).name)[0]  # N: a number
            if not is_there and written not in code:
                missing.append(f"{page}: {path}")
    assert missing == []


def test_every_environment_variable_is_read_by_the_code_or_by_its_library():
    ours = "".join(file.read_text() for file in CODE)
    text = {name_of(page): page.read_text() for page in (*HOW_TO, *FILES)}
    named = {
        (source, name)
        for source, content in text.items()
        for name in re.findall(r"\b(?:POLYRANK|RAY|MLFLOW)_\w*[A-Za-z0-9]\b(?!\*|…|_)", content)
    }
    unknown = []
    for source, name in sorted(named):
        if name.startswith("POLYRANK_"):
            is_read = name in ours
        elif name.startswith("MLFLOW_"):
            is_read = hasattr(mlflow.environment_variables, name)
        else:
            is_read = is_read_by_ray(name)
        if not is_read:
            unknown.append(f"{source}: {name}")
    assert unknown == []


@functools.cache
def is_read_by_ray(name: str) -> bool:
    """In its Python, or a setting of its processes in C++: RAY_<name>."""
    if name in python_of_ray():
        return True
    library = next(Path(ray.__file__).parent.glob("_raylet*.so"))
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(name.removeprefix("RAY_").encode()) >= 0


@functools.cache
def python_of_ray() -> str:
    files = Path(ray.__file__).parent.rglob("*.py")
    ours = (file for file in files if "thirdparty" not in str(file))
    return "".join(file.read_text(errors="replace") for file in ours)


COUNTED = {
    name
    for file in ("serve/metrics.py", "pipeline/engine/report.py")
    for name in re.findall(r'"(polyrank_\w+)"', (ROOT / file).read_text())
}


def test_the_metrics_of_the_pages_are_those_of_the_code():
    text = "".join(page.read_text() for page in (*HOW_TO, *FILES))
    found = re.findall(r"ray_(polyrank_\w+)", text)
    named = {re.sub("_(bucket|sum|count)$", "", name) for name in found}
    assert named - COUNTED == set()
    explained = SERVE + (ROOT / "OPERATING.md").read_text()
    assert {name for name in COUNTED if f"`ray_{name}`" not in explained} == set()


SERVE = (ROOT / "serve" / "REFERENCE.md").read_text()


def test_the_tables_of_arguments_and_limits_have_all_and_the_defaults_of_limits():
    """Who writes a file for a service need not read its code."""
    cells = re.findall(r"(?m)^\| ([^|]*) \| ([^|]*) \|", SERVE)
    named = set(re.findall(r"`(\w+)`", " ".join(first for first, _ in cells)))
    assert {*app.Args.model_fields} <= named
    assert {name: f"{limit.default:,}".removesuffix(".0") if limit.default else "none"
            for name, limit in Limits.model_fields.items()} == {
        first.strip("`"): second for first, second in cells if first.strip("`") in Limits.model_fields
    }  # fmt: skip


def test_the_table_of_errors_is_the_codes():
    rows = re.findall(r"(?m)^\| `(\w+)` \| (\d{3}) \| (.*) \|$", SERVE)
    expected = errors.CODES.items()
    assert rows == [(code, str(meaning.status), meaning.text) for code, meaning in expected]


def test_every_metric_of_the_service_is_in_its_table():
    names = re.findall(r'"(polyrank_\w+)"', Path(metrics.__file__).read_text())
    assert sorted(re.findall(r"(?m)^\| `ray_(\w+)` \|", SERVE)) == sorted(names)


def test_every_route_of_the_interface_is_on_the_page():
    for path in api.interface()["paths"]:
        assert f"{path}`" in SERVE, path


def test_nobody_is_told_to_install_polyrank_from_an_index():
    """There is no such package, and a stranger could take the name."""
    found = [
        f"{name_of(file)}: {line.strip()}"
        for file in tracked("*.md", "*.py", "*.yaml", "*Dockerfile", "Makefile", "*.toml")
        if file != Path(__file__)
        for line in file.read_text().splitlines()
        if re.search(r"(?:install|add|requires?)\b.*[\s'\"]polyrank(?:\[|['\"=]|\s*$)", line)
    ]
    assert found == []


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


def test_measurements_are_in_one_place():
    """The how-to pages name no milliseconds or rates beside others; BENCHMARKS.md has them."""
    where = {"README.md", "BENCHMARKS.md", "CHANGELOG.md", "pipeline/training/experiments.md"}
    for page in PAGES:
        if name_of(page) not in where:
            rates = r"\b\d[\d.,]* (times as fast|samples/s|articles/s|R@1)"
            assert not re.search(rates, page.read_text())


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
    listed = [name_of(file) for file in tracked()]
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
    own_data = README.partition("How often the right answer comes first")[2].partition("\n")[0]
    for dataset in ("banking77", "clinc150"):
        for way in ("untrained_texts_alone", "untrained", "trained"):
            assert f"{rows[f'tables.{dataset}.{way}']['ours']:.3f}" in own_data
    speed = rows["convert.encode_vs_minilm_sentence_transformers"]
    assert f"{speed['ours']:,.0f} texts/s, all-MiniLM {speed['peer']:.0f}" in table
    assert f"({rows['convert.saved_megabytes']['ours']:.1f} MB)" in table
