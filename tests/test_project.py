"""The files around the code: they say what is there, and what they say works."""

from __future__ import annotations

import copy
import json
import re
import shlex
import tomllib
from importlib import import_module
from pathlib import Path

import jsonschema
import pytest
import ray.autoscaler
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ray.autoscaler._private.util import prepare_config, validate_config

import jobs
from pipeline.config import BadInput, parse

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERBS = sorted(
    file.stem for file in (ROOT / "jobs").glob("*.py") if "program.main(" in file.read_text()
)
RECIPES = sorted((ROOT / "jobs" / "configs").rglob("*.yaml"))
KINDS = ("bi", "poly", "cross")


def config_of(verb: str) -> type:
    return import_module(f"jobs.{verb}").Config


# The command line


def test_the_verbs_are_those_of_the_design():
    assert set(VERBS) >= {
        "demo", "embed_pool", "evaluate", "finetune", "prepare_corpus", "pretrain", "search",
        "train_tokenizer",
    }  # fmt: skip
    assert Path(jobs.__file__).parent == ROOT / "jobs"


@pytest.mark.parametrize("verb", VERBS)
def test_help_lists_every_option_with_its_meaning(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(config_of(verb), ["--help"], f"python -m jobs.{verb}")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m jobs.{verb} ")
    for name in config_of(verb).__dataclass_fields__:
        assert f"--{name}" in text
    for option in re.split(r"\n  (?=--)", text)[1:]:
        name, _, meaning = " ".join(option.split()).replace(" ", "\n", 1).partition(" ")
        assert meaning and not meaning.startswith("("), f"{name} has no meaning"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_is_a_config_of_its_job(recipe):
    verb = "pretrain" if recipe.stem == "demo-pretrain" else "finetune"
    start = "tokenizer" if verb == "pretrain" else "encoder"
    required = ["--corpus", "c", f"--{start}", "s", "--output", "o"]
    config = parse(config_of(verb), ["--config", str(recipe), *required], "test")
    written = yaml.safe_load(recipe.read_text())
    for group, values in written.items():
        found = vars(getattr(config, group))
        for name, value in values.items():
            assert found[name] == (tuple(value) if isinstance(value, list) else value)


def test_every_recipe_is_used_or_documented():
    demo = (ROOT / "jobs" / "demo.py").read_text()
    assert "demo-pretrain" in demo
    demos = {"demo-pretrain", *(f"demo-{name}" for name in ("bi", "poly", "cross", "articles"))}
    tasks, sizes = ("convai2", "dstc7", "ubuntu", "wikipedia"), ("", "-small")
    each = {f"{task}-{kind}{size}" for task in tasks for kind in KINDS for size in sizes}
    assert {recipe.stem for recipe in RECIPES} == demos | each


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.parent.name == "finetune"],
                         ids=lambda file: file.stem)  # fmt: skip
def test_recipes_are_what_their_names_say(recipe):
    """The paper's: its batches, epochs, rates and decay."""
    task, kind, *small = recipe.stem.split("-")
    required = ["--corpus", "c", "--encoder", "e", "--output", "o"]
    config = parse(config_of("finetune"), ["--config", str(recipe), *required], "test")
    assert config.ranker.architecture == kind
    if small:
        assert not config.resources.gpu and config.finetune.epochs <= 1
        return
    batches = {"bi": 512 if task == "convai2" else 256, "poly": 256, "cross": 16}
    assert config.finetune.batch_examples == batches[kind]
    assert config.finetune.epochs == {"bi": 10, "poly": 8, "cross": 12}[kind]
    assert (config.loop.learning_rate, config.loop.plateau_decay) == (5e-5, 0.4)
    assert (config.loop.schedule, config.loop.validate_every_epochs) == ("plateau", 0.5)
    if kind == "cross":
        assert config.finetune.negatives == (19 if task == "convai2" else 15)


# README


def readme_commands() -> list[str]:
    lines = README.replace("\\\n", " ").splitlines()
    return [line.split("#")[0] for line in lines if re.match(r"\s{4}.*python -m jobs\.\w+ ", line)]


@pytest.mark.parametrize("line", readme_commands())
def test_the_commands_of_the_readme_are_commands(line, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    program, *argv = shlex.split(line.partition("python -m jobs.")[2])
    assert program in VERBS
    parse(config_of(program), argv, program)


def test_the_readme_names_a_command_of_every_job_but_the_demo():
    named = set(re.findall(r"python -m jobs\.(\w+)", README))
    assert named | {"demo"} == set(VERBS)


def test_the_readme_names_only_files_that_exist():
    tree = README.partition("What is where:")[2].partition("\n## ")[0]
    folder = ROOT
    named = 0
    for line in tree.splitlines():
        entry = re.match(r"(    |      )(\S+)  +\S", line)
        if entry is None:
            continue
        indent, name = entry.groups()
        path = (ROOT if len(indent) == 4 else folder) / name
        assert path.is_dir() if name.endswith("/") else path.is_file(), f"{name} is not there"
        folder = path if len(indent) == 4 else folder
        named += 1
    assert named >= 15
    for target in ("demo", "test"):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


# The cluster


CLUSTER = yaml.safe_load((ROOT / "cluster.yaml").read_text())


def test_cluster_yaml_is_a_config_of_ray_up():
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(CLUSTER, schema)
    validate_config(prepare_config(copy.deepcopy(CLUSTER)))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**CLUSTER, "max_worker": 3}, schema)


def test_nodes_get_the_lock_and_the_token_that_clients_need():
    mounts = CLUSTER["file_mounts"]
    assert (ROOT / mounts["~/polyrank.lock"]).is_file()
    assert any("polyrank.lock" in command for command in CLUSTER["setup_commands"])
    assert mounts["~/.ray/auth_token"] == "~/.ray/auth_token"
    for which in ("head", "worker"):
        (start,) = [line for line in CLUSTER[f"{which}_start_ray_commands"] if "ray start" in line]
        assert start.startswith("RAY_AUTH_MODE=token ")
    assert CLUSTER["head_node_type"] in CLUSTER["available_node_types"]


# Dependencies

LOCK = {
    canonicalize_name(name): version
    for name, _, version in (
        line.split("#")[0].strip().partition("==")
        for line in (ROOT / "requirements.lock").read_text().splitlines()
    )
    if version
}


def test_the_lock_pins_every_line_to_one_version():
    text = (ROOT / "requirements.lock").read_text()
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    wanted = [line for line in lines if line and not line.startswith("--")]
    assert [line for line in wanted if not re.fullmatch(r"[\w.-]+==[\w.!+-]+", line)] == []
    assert len(LOCK) == len(wanted)
    assert LOCK["torch"] == "2.13.0"


@pytest.mark.parametrize(
    "line", [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
)
def test_the_lock_has_every_dependency_in_a_version_that_is_allowed(line):
    requirement = Requirement(line)
    version = LOCK[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version)


def test_an_unknown_option_of_any_job_is_refused():
    for verb in VERBS:
        with pytest.raises(BadInput, match="--nope"):
            parse(config_of(verb), ["--nope", "1"], verb)
