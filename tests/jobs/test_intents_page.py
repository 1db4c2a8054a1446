"""Every command of the page on intents, run in its order, on small inputs and tiny encoders."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from jobs import serve
from pipeline.config import parse
from serve.engine import Engine

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "pipeline" / "classification" / "README.md"

_FEW = ("--head.epochs", 5, "--encode.precision", "fp32")
LINES = PAGE.read_text().replace("\\\n", " ").splitlines()


def commands(program: str) -> list[list[str]]:
    """Those of the page, without the program's name."""
    found = [re.fullmatch(rf" {{4,}}{re.escape(program)}(.*)", line) for line in LINES]
    return [shlex.split(line[1]) for line in found if line]


@pytest.fixture
def home(tmp_path: Path, tiny_ranker, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where the paths of the page lead to samples."""
    for name, target in {
        "models/all-MiniLM-L6-v2": tiny_ranker("bi").local() / "context_encoder",
        "rankers/poly": tiny_ranker("poly").local(),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).symlink_to(target)
    rows = "".join(f"text {at} of {name},{name}\n" for at in range(20) for name in ("pay", "block"))
    (tmp_path / "messages.csv").write_text(f"text,label\n{rows}")
    (tmp_path / "banking77").mkdir()
    (tmp_path / "banking77" / "train.csv").write_text(f"text,category\n{rows}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_run(home: Path, run_job_here):
    *jobs, (serves, *given) = commands("python -m jobs.")
    assert len(jobs) == 3 and serves == "serve"
    for verb, *argv in jobs:
        assert run_job_here(verb, *argv, *_FEW).code == 0, argv
    assert (home / "numbers.json").exists()
    args = serve._arguments(parse(serve.Config, given, "serve"))
    engine = Engine(args.model, args.pools, "fp32", classifier=args.classifier)
    assert engine.intents is not None
    assert engine.intents.encoder.ranker is engine.ranker
    engine.close()


def test_the_options_of_the_page_exist(run_job_here):
    shown = "".join(
        run_job_here(verb, "--help", "all").stdout for verb in ("classify_intents", "serve")
    )
    for option in set(re.findall(r"--([a-z][\w.-]*[a-z])", "\n".join(LINES))):
        assert f"--{option.replace('_', '-')}" in shown, option
