"""Ray's own commands, which pages, alerts and messages tell people to type, in the shells that they name."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.helpers import free_port

from .conftest import ROOT, end_processes_of

TOLD = re.compile(r"\b(?:ray status|serve status|ray job [a-z]+(?: --follow)?(?: \{name\})?)")


def told_commands() -> set[str]:
    files = [*ROOT.glob("*.md"), ROOT / "kuberay" / "alerts.yaml", *(ROOT / "serve").glob("*.md")]
    folders = (ROOT / name for name in ("jobs", "pipeline", "serve"))
    files += [path for folder in folders for path in folder.rglob("*.py")]
    texts = [" ".join(path.read_text().split()) for path in files]
    commands = {match[0] for text in texts for match in TOLD.finditer(text)}
    # jobs.submit does what `ray job submit` does.
    return {command.replace("{name}", "NAME") for command in commands} - {"ray job submit"}


@dataclass
class Head:
    """A head that the commands of cluster.onpremise.yaml have started, for a user of its own."""

    home: Path
    port: int
    jobs_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.jobs_port}"

    def run(
        self, shell: list[str], command: str, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in a shell that has nothing but what its profile gives.

        Other Rays run on this machine: the addresses say which one is meant.
        """
        addresses = {"RAY_ADDRESS": f"127.0.0.1:{self.port}", "RAY_API_SERVER_ADDRESS": self.url,
                     "RAY_DASHBOARD_ADDRESS": self.url, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # fmt: skip
        environment = {"HOME": str(self.home), "PATH": "/usr/bin:/bin", **addresses, **variables}
        return subprocess.run(
            [*shell, command], env=environment, cwd=self.home, capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip


@pytest.fixture(scope="module")
def started() -> Iterator[Head]:
    cluster = yaml.safe_load((ROOT / "cluster.onpremise.yaml").read_text())
    home = Path(tempfile.mkdtemp(prefix="prh", dir="/tmp"))  # paths of sockets are short
    head = Head(home, free_port(), free_port())
    (home / "polyrank").mkdir()
    (home / ".bashrc").write_text("# Ubuntu's own\n")
    (home / "venv").symlink_to(Path(sys.executable).parents[1])
    for name in ("pipeline", "serve"):
        (home / "polyrank" / name).symlink_to(ROOT / name)
    scratch = str(home / "scratch")
    settings = (ROOT / "ray.env").read_text().replace("/mnt/scratch", scratch)
    (home / "polyrank" / "ray.env").write_text(settings)
    profile = [line for line in cluster["setup_commands"] if ".bashrc" in line]
    stop, start = cluster["head_start_ray_commands"]
    assert stop == "~/venv/bin/ray stop"  # it would end every Ray of this machine
    start = start.replace("--port=6379", f"--port={head.port} --dashboard-port={head.jobs_port}")
    start = start.replace("/mnt/scratch", scratch).replace("ulimit -n 65536", "true")
    start = start.replace("10.0.0.10", "127.0.0.1")
    start = start.replace(" --autoscaling-config=~/ray_bootstrap_config.yaml", "")
    start += f" --temp-dir={home}/t --dashboard-agent-listen-port={free_port()}"
    start += f" --object-store-memory={100 << 20}"
    try:
        shell = ["bash", "-i", "-c"]  # `ray up` runs each command in one that reads .bashrc
        for command in ("~/venv/bin/ray get-auth-token --generate", *profile, *profile, start):
            done = head.run(shell, command, RAY_worker_niceness="0")
            assert done.returncode == 0, (command, done.stdout, done.stderr)
        yield head
    finally:
        end_processes_of(home)
        shutil.rmtree(home, ignore_errors=True)


@pytest.mark.long  # a head of its own
def test_the_commands_that_people_are_told_to_type_work_on_the_head(started):
    login = ["bash", "-i", "-c"]  # reads .bashrc, as `ray attach` and `ray exec` do
    done = started.run(login, "ray job submit --submission-id NAME -- python --version")
    assert done.returncode == 0, done.stdout + done.stderr
    commands = told_commands()
    job = {"ray job stop NAME", "ray job logs --follow NAME"}
    assert commands >= {"ray status", "serve status", *job}
    script = "; ".join(f"{command} || echo FAILED: '{command}'" for command in sorted(commands))
    done = started.run(login, script)
    assert "FAILED" not in done.stdout, done.stdout + done.stderr


@pytest.mark.long  # a head of its own
def test_they_work_in_the_shell_from_which_jobs_are_sent(started):
    page = (ROOT / "CLUSTER.md").read_text().partition("## Send a job")[0]
    (export,) = re.findall(r"^    export (.*)$", page, re.MULTILINE)
    assert export.split()[0] == "RAY_AUTH_MODE=token"
    shell = ["bash", "-c"]
    export = export.replace("http://127.0.0.1:8265", started.url)
    done = started.run(shell, f"export {export}; ~/venv/bin/ray job list")
    assert done.returncode == 0, done.stdout + done.stderr


def test_both_files_give_the_same_profile():
    names = ("cluster.yaml", "cluster.onpremise.yaml")
    files = [yaml.safe_load((ROOT / name).read_text()) for name in names]
    aws, own = ([line for line in file["setup_commands"] if ".bashrc" in line] for file in files)
    assert aws == own and len(own) == 1
