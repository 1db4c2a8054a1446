"""The image and compose.yaml of kuberay/, as far as no Docker is needed: the files, and the commands as
written, run in a folder that holds what the image holds."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.helpers import free_port, wait_until

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "kuberay" / "Dockerfile").read_text()
INSTRUCTIONS = re.findall(r"(?m)^([A-Z]+) (.*)$", DOCKERFILE)
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "kuberay" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
MAPPED_PORTS = {"service": "8000", "mlflow": "5000"}


# A remount with bind changes the mount of this namespace alone.
READ_ONLY = """
mount --bind "$1" "$1"; mount --bind "$2" "$2"
mount -o remount,bind,ro /; mount -o remount,bind,ro "$2"
shift 2; exec "$@"
"""


def only(instruction: str) -> str:
    (value,) = [value for name, value in INSTRUCTIONS if name == instruction]
    return value


def copied() -> list[str]:
    """The names of the checkout that the image copies."""
    return [name for kind, words in INSTRUCTIONS if kind == "COPY" for name in words.split()[:-1]]


def test_the_build_gets_what_the_image_copies_and_nothing_else():
    ignore = (ROOT / "kuberay" / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in ignore if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert sorted(rules[1:-1]) == sorted(f"!{name}" for name in copied())
    assert all((ROOT / name).exists() for name in copied())
    assert fnmatch("pipeline/files/__pycache__", rules[-1])


def test_the_image_is_a_program_of_nobody_special():
    names = [name for name, _ in INSTRUCTIONS]
    assert only("USER") == "ray" and names.index("USER") < names.index("ENTRYPOINT")
    assert json.loads(only("ENTRYPOINT")) == ["tini", "--", "polyrank"]
    assert "POLYRANK_HOST=0.0.0.0" in only("ENV") and only("EXPOSE") == "8000"
    # A user of `docker run --user` has no entry in passwd: HOME would be /, and getpass.getuser() would fail.
    assert {"HOME=/home/ray", "USER=ray"} < set(only("ENV").split())
    assert "chmod 1777 /home/ray" in DOCKERFILE
    # PyTorch's index of CPU builds, without which pip installs CUDA's libraries.
    assert DOCKERFILE.index("ARG PIP_EXTRA_INDEX_URL\n") < DOCKERFILE.index("RUN pip")
    (packages,) = re.findall(r"--no-install-recommends ([\w ]+) &&", DOCKERFILE)
    assert {"tini", "wget"} == set(packages.split())


def test_compose_yaml_is_of_known_keys_and_reaches_this_machine_alone():
    assert COMPOSE.keys() == {"name", "services", "volumes"}
    known = {
        "build", "command", "depends_on", "entrypoint", "environment", "healthcheck", "image", "ports",
        "restart", "shm_size", "stop_grace_period", "volumes",
    }  # fmt: skip
    for name, service in SERVICES.items():
        assert service.keys() <= known
        assert service["image"] == "polyrank"
        port = MAPPED_PORTS[name]
        assert service["ports"] == [f"127.0.0.1:{port}:{port}"]
    build = SERVICES["service"]["build"]
    assert (ROOT / "kuberay" / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    assert build["args"] == ["PIP_EXTRA_INDEX_URL"]
    # In the short form a name without "/" is a volume's, and Docker makes a folder that is missing.
    (my,) = SERVICES["service"]["volumes"]
    assert my["type"] == "bind" and my["read_only"] and not my["bind"]["create_host_path"]
    assert SERVICES["service"]["depends_on"].keys() <= SERVICES.keys()
    (volume,) = SERVICES["mlflow"]["volumes"]
    name, folder = volume.split(":")
    # Docker gives a new volume the owner that the folder has in the image.
    assert name in COMPOSE["volumes"] and f"mkdir {folder} && chown ray" in DOCKERFILE


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    """A folder with the files that the image has in /srv/polyrank."""
    folder = tmp_path_factory.mktemp("image")
    for name in copied():
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, folder)
    return folder


@contextmanager
def container(
    image: Path, home: Path, service: str, mounts: dict[str, Path], port: int
) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """Runs a service's entrypoint and command with paths and the port mapped; where it may, as process 1 of a
    namespace in which only the folder for temporary files, which has the home, can be written, as kuberay/
    has it. Yields (what was started, the process that Docker would send SIGTERM to)."""
    entrypoint = SERVICES[service].get("entrypoint") or json.loads(only("ENTRYPOINT"))
    text = SERVICES[service]["command"].replace("${MODEL:-ranker}", "ranker")
    words = [*entrypoint[2:], *shlex.split(text)]
    assert entrypoint[:2] == ["tini", "--"]
    for path, folder in mounts.items():
        words = [
            re.sub(rf"(?<![\w/]){path}|(?<=sqlite:///){path}", str(folder), word) for word in words
        ]
    if service == "mlflow":
        words[words.index("--port") + 1] = str(port)
        words = [sys.executable, "-m", *words]
    else:
        words = [str(Path(sys.executable).with_name("polyrank")), *words[1:], "--port", str(port)]
    isolate = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-ec", READ_ONLY, "sh",
               tempfile.gettempdir(), str(image)]  # fmt: skip
    is_isolated = os.geteuid() == 0 and not subprocess.run([*isolate, "true"]).returncode
    if is_isolated:
        assert subprocess.run([*isolate, "touch", str(image / "written")]).returncode
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(image),
        **SERVICES["mlflow"]["environment"],
        "MLFLOW_WORKERS": "1",  # fewer processes, as on a small machine
        **dict(setting.split("=", 1) for setting in only("ENV").split()),
        "HOME": str(home),
    }
    process = subprocess.Popen(
        [*(isolate if is_isolated else []), *words],
        cwd=image,
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        inner = psutil.Process(process.pid)
        if is_isolated:
            wait_until(inner.children, process)
            (inner,) = inner.children()
        yield process, inner
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def is_healthy(check: str, port: int) -> bool:
    done = subprocess.run(re.sub(r":\d{4}/", f":{port}/", check), shell=True)
    return done.returncode == 0


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_the_service_answers_outside_and_ends_on_sigterm_as_process_1(
    image, tiny_ranker, tiny_pool, tmp_path
):
    model = tiny_ranker("bi")
    shutil.copytree(model.uri, tmp_path / "my" / "ranker")
    shutil.copytree(Path(tiny_pool(model, "answers")).parent, tmp_path / "my" / "pools")
    port = free_port()
    mounts = {"/my": tmp_path / "my"}
    with container(image, tmp_path, "service", mounts, port) as (process, inner):
        lines = []
        for line in process.stdout or ():
            lines.append(line)
            if line.startswith("Ctrl-C ends it"):
                break
        said = "".join(lines)
        assert f"the playground:  http://127.0.0.1:{port}/\n" in said
        assert is_healthy(only("HEALTHCHECK").partition(" CMD ")[2], port)
        listening = [
            at.laddr.ip for at in psutil.net_connections("tcp")
            if at.laddr.port == port and at.status == psutil.CONN_LISTEN
        ]  # fmt: skip
        assert set(listening) == {"0.0.0.0"}
        url = f"http://127.0.0.1:{port}/info"
        with urllib.request.urlopen(url, timeout=60) as answer:
            info = json.load(answer)
        assert [pool["name"] for pool in info["pools"]] == ["answers"]
        inner.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        summary = json.loads(rest.splitlines()[-1])
        assert summary == {"job": "serve", "served": f"http://127.0.0.1:{port}"}


@pytest.mark.long  # 27 s on two slow cores; tests/cluster/test_mlflow_server.py starts it, too
@pytest.mark.timeout(300)
def test_mlflow_starts_as_written_and_ends_on_sigterm(image, tmp_path):
    (tmp_path / "mlflow").mkdir()
    port = free_port()
    assert SERVICES["mlflow"]["environment"] == {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with container(image, tmp_path, "mlflow", {"/mlflow": tmp_path / "mlflow"}, port) as started:
        process, inner = started
        check = SERVICES["mlflow"]["healthcheck"]["test"]
        wait_until(lambda: is_healthy(check, port), process)
        assert (tmp_path / "mlflow" / "mlflow.db").is_file()
        for host, code in (("mlflow:5000", 200), ("localhost:5000", 200), ("elsewhere:5000", 403)):
            url = f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/search?max_results=1"
            words = [
                "curl",
                "-s",
                "-o",
                "/dev/null",
                "-w",
                "%{http_code}",
                "-H",
                f"host: {host}",
                url,
            ]
            answer = subprocess.run(words, capture_output=True, text=True)
            assert answer.stdout == str(code), host
        inner.send_signal(signal.SIGTERM)
        process.wait(60)
