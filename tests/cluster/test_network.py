"""Hosts with a network between them, each with a name, interfaces and processes of its own, on this machine.

python -m pytest -m long tests/cluster/test_network.py

It needs root, and `unshare`, `nsenter` and `ip` of Linux. In /etc/hosts a host's own name is 127.0.1.1, as on
Ubuntu, and no host knows the name of another.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.helpers import job_command, wait_until

from .conftest import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
_HEAD = "10.99.0.1"
# A host that is cut off counts as dead after some 5 s. By default each of five questions to it takes 10 s.
_HEALTH = {"RAY_health_check_timeout_ms": "500", "RAY_health_check_period_ms": "500"}


@dataclass(frozen=True)
class Host:
    name: str
    process: int
    """The first one in its namespaces."""

    def command(self, *words: str) -> list[str]:
        """A command that runs on this host."""
        enter = ["nsenter", "--target", str(self.process), "--net", "--mount", "--uts", "--pid"]
        return [*enter, *words]

    def connect(self, script: str) -> None:
        """Runs commands of `ip` in its network."""
        enter = ["nsenter", "--target", str(self.process), "--net"]
        subprocess.run([*enter, "sh", "-ec", script], check=True)

    def start_ray(self, *options: str) -> None:
        """At the address that Ray chooses."""
        command = (sys.executable, "-m", "ray.scripts.scripts", "start")
        environment = {**os.environ, **_HEALTH, "RAY_USAGE_STATS_ENABLED": "0"}
        done = subprocess.run(
            self.command(*command, f"--object-store-memory={80 << 20}", *options),
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def _host(name: str, folder: Path) -> Iterator[Host]:
    """A host without a network. All of its processes end with it."""
    names = folder / f"hosts-{name}"
    names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    Path("/tmp/ray").mkdir(exist_ok=True)
    script = (
        f"hostname {name}; mount --bind {names} /etc/hosts; mount -t tmpfs none /tmp/ray; "
        "ip link set lo up; echo ready; exec sleep infinity"
    )
    spaces = ["--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command = ["unshare", *spaces, "sh", "-ec", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if not process.stdout or process.stdout.readline() != "ready\n":
                pytest.skip("no right to make namespaces")
            (child,) = psutil.Process(process.pid).children()
            yield Host(name, child.pid)
        finally:
            process.kill()


@pytest.fixture
def hosts(tmp_path, monkeypatch) -> Iterator[tuple[Host, Host, Host]]:
    """A head without cores, which is the switch, too, and two workers of one core."""
    if os.geteuid() or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("no root, or no unshare, nsenter and ip")
    for name, value in {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1", "RAY_AUTH_MODE": "token"}.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as stack:
        names = ("head", "first", "second")
        head, *workers = (stack.enter_context(_host(name, tmp_path)) for name in names)
        head.connect(
            f"ip link add switch type bridge; ip addr add {_HEAD}/24 dev switch; ip link set switch up"
        )
        head.start_ray(
            "--head", "--num-cpus=0", "--port=6379", "--include-dashboard=false",
            f"--node-ip-address={_HEAD}",
        )  # fmt: skip
        for number, worker in enumerate(workers, 2):
            head.connect(
                f"ip link add {worker.name} type veth peer name eth0 netns {worker.process}; "
                f"ip link set {worker.name} master switch up"
            )
            worker.connect(f"ip addr add 10.99.0.{number}/24 dev eth0; ip link set eth0 up")
            worker.start_ray("--num-cpus=1", f"--address={_HEAD}:6379")
        yield head, workers[0], workers[1]


@contextmanager
def driver(head: Host, command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A job whose driver runs on the head."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": f"{_HEAD}:6379"}
    with log.open("w") as stream:
        yield subprocess.Popen(
            head.command(*command),
            cwd=ROOT,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )


def test_workers_on_two_hosts_train_together(hosts, tiny_ranker, convai2_corpus, tmp_path):
    """gloo would listen at the address of the host's name, where the other worker does not find it."""
    command = job_command(
        "finetune", "--corpus", convai2_corpus.uri, "--encoder", tiny_ranker("bi").uri,
        "--output", tmp_path / "ranker", "--ranker.architecture", "bi", "--ranker.max-context-tokens", 48,
        "--finetune.batch-examples", 8, "--finetune.max-steps", 3, "--loop.precision", "fp32",
        "--loop.validate-every-epochs", 0, "--resources.workers", 2,
    )  # fmt: skip
    with driver(hosts[0], command, tmp_path / "log") as process:
        assert process.wait(timeout=300) == 0, (tmp_path / "log").read_text()


def test_a_host_that_is_cut_off_changes_nothing_in_a_pool(hosts, tiny_ranker, run_job, tmp_path):
    """Its packets are lost, and nothing tells the others. They do its tasks."""
    head, _, second = hosts
    candidates, log = tmp_path / "candidates.jsonl", tmp_path / "log"
    rows = ({"id": str(number), "text": f"text {number} " * 5} for number in range(6000))
    candidates.write_text("\n".join(map(json.dumps, rows)))
    options = (
        "--model", tiny_ranker("bi").uri, "--candidates", candidates, "--name", "texts",
        "--embed.rows-per-shard", 100, "--resources.cpus-per-actor", 1, "--progress", "json",
    )  # fmt: skip
    command = job_command(
        "embed_pool", *options, "--pools", tmp_path / "cut", "--resources.actors", 2
    )
    with driver(head, command, log) as process:
        begun = re.compile(r'"stage": "embed candidates".*"done": [1-9]')
        wait_until(lambda: begun.search(log.read_text()), process)
        head.connect(f"ip link set {second.name} down")
        assert process.wait(timeout=300) == 0, log.read_text()
    fingerprint = json.loads(log.read_text().splitlines()[-1])["fingerprint"]
    alone = run_job("embed_pool", *options, "--pools", tmp_path / "alone")
    assert alone.summary["fingerprint"] == fingerprint
