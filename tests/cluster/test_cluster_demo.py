"""The cluster of `make cluster-demo`: the shipped files and the pages' commands, from dumps to a rollback."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers import free_port, job_command

ROOT = Path(__file__).parents[2]


def test_only_what_runs_here_is_replaced_in_the_shipped_commands():
    from jobs.cluster_demo import _nightly_line

    command, environment = _nightly_line()
    assert command.startswith("cd ") and "$(date +%Y%m%dT%H)" in command
    assert environment["RAY_AUTH_MODE"] == "token"


@pytest.fixture
def work():
    """A folder below the working directory, as jobs are sent from it."""
    folder = ROOT / f".cluster-demo-{free_port()}"
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def _left_of(work: Path) -> list[list[str]]:
    return [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline"])
        if any(str(work) in word for word in process.info["cmdline"] or ())
    ]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_whole_path_on_a_cluster_of_the_shipped_files(work):
    command = job_command("cluster_demo", "--work", work.name, "--ports-from", 20000)
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    summary = json.loads(finished.stdout.splitlines()[-1])
    first, promoted, rolled_back = summary["answers"]
    assert promoted["model"] != first["model"]
    assert rolled_back["model"] == first["model"]
    assert all(answer["replies"] for answer in summary["answers"])
    assert _left_of(work) == []


@pytest.mark.long
def test_a_demo_that_is_ended_stops_what_it_started(work):
    command = job_command("cluster_demo", "--work", work.name, "--ports-from", 21000)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, text=True) as process:
        deadline = time.monotonic() + 120
        while not (work / "mlflow.log").exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 128 + signal.SIGTERM
    assert _left_of(work) == []
