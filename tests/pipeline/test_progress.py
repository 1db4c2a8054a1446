"""Progress for a person and for a machine."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from dataclasses import dataclass

import pytest

from pipeline import progress
from pipeline.config import BadInput, parse


@dataclass(frozen=True, kw_only=True)
class Config:
    """A job."""

    a: int = 1
    """A number."""


@pytest.fixture
def as_json(monkeypatch):
    monkeypatch.setenv(progress.VARIABLE, "json")


def events(capsys) -> list[dict]:
    lines = capsys.readouterr().err.splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_a_terminal_that_does_not_know_its_width_shows_bars():
    """As that of `script` and of `docker run -t`: nothing was seen of a training of 18 minutes."""
    shows = """if True:
        from pipeline import progress
        progress._SILENT_SECONDS = 0
        with progress.bar("finetune", 2) as bar:
            bar.update(2)
    """
    ours, terminal = pty.openpty()  # its width is 0
    subprocess.run([sys.executable, "-c", shows], stderr=terminal, check=True)
    os.close(terminal)
    assert b"finetune: 100%" in os.read(ours, 10_000)
    os.close(ours)


def test_a_machine_hears_the_first_and_the_last_of_a_stage(as_json, capsys):
    with progress.bar("embed", 10, 2, unit="row") as bar:
        bar.set_postfix_str("loss 0.5")
        for _ in range(8):
            bar.update()
    first, *_, last = events(capsys)
    assert (first["event"], first["stage"], first["done"], first["total"]) == (
        "progress",
        "embed",
        2,
        10,
    )
    assert (last["done"], last["unit"], last["text"]) == (10, "row", "loss 0.5")


def test_a_stage_that_breaks_off_says_how_far_it_came(as_json, capsys):
    with pytest.raises(ArithmeticError), progress.bar("embed", 10) as bar:
        bar.update(3)
        raise ArithmeticError
    assert events(capsys)[-1]["done"] == 3


def test_a_person_sees_bars_and_no_events(monkeypatch, capsys):
    monkeypatch.setenv(progress.VARIABLE, "bar")
    with progress.bar("embed", 2) as bar:
        bar.update(2)
    progress.event("task_failed", task="a")
    text = capsys.readouterr().err
    assert "embed: 100%" in text and "{" not in text


@pytest.mark.parametrize(("seconds", "is_shown"), [(1.0, False), (30.0, True)])
def test_short_work_shows_no_bar(monkeypatch, capsys, seconds, is_shown):
    """Four bars of a small pool's plan, which takes half a second, told a newcomer of verdicts."""
    monkeypatch.setattr(progress, "_SILENT_SECONDS", 2.0)
    now = [0.0]
    with progress.bar("plan: verdicts", 1) as bar:
        bar._time = lambda: now[0]
        bar.start_t = bar.last_print_t = now[0]
        now[0] = seconds
        bar.update()
    assert ("plan: verdicts" in capsys.readouterr().err) == is_shown


def test_every_job_takes_the_option_and_hands_it_on(monkeypatch):
    monkeypatch.setenv(progress.VARIABLE, "bar")
    assert parse(Config, ["--progress", "json", "--a", "2"], "job") == Config(a=2)
    assert progress.mode() == "json"
    assert parse(Config, [], "job") == Config()
    assert progress.mode() == "json"
    with pytest.raises(BadInput, match="progress"):
        parse(Config, ["--progress", "loud"], "job")


def test_a_job_tells_a_machine_of_its_stages(run_job_here, sample_files, tmp_path, monkeypatch):
    monkeypatch.setenv(progress.VARIABLE, "bar")
    files = ("--input", sample_files / "convai2", "--output", tmp_path / "out")
    done = run_job_here("prepare_corpus", "--progress", "json", "--corpus", "convai2", *files)
    told = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    (stage,) = [event for event in told if event["event"] == "stage"]
    assert stage["rows"] == done.summary["counts"]["examples"]
    assert [event for event in told if event["event"] == "progress"][-1]["done"] == stage["tasks"]
    assert "%|" not in done.stderr
