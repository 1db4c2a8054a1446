"""A cluster on this machine, by the files and pages that a real one is set up with.

It starts an object store, the MLflow server of CLUSTER.md, and a head and a worker by the commands of
cluster.onpremise.yaml. Then it types what the pages say: the workflow from dumps to a service, the nightly
line of jobs/schedules/crontab, promotion and rollback. A command is changed only where `_Machine` says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from jobs import cluster, demo_data, program
from jobs.demo_stages import SECONDS, timed
from pipeline import storage
from pipeline.config import BadInput, Stopped, require

_ROOT = Path(__file__).parents[1]
_PORTS = {
    "Ray": 6379,
    "dashboard": 8265,
    "service": 8000,
    "MLflow": 5000,
    "S3": 9000,
    "statistics": 8404,  # of HAProxy; a port more for the second node
    "metrics": 9101,
}
_HEAD, _WORKER = "127.0.0.2", "127.0.0.3"  # two addresses, as two machines have
_START_S = 300.0  # a server that does not answer by then has failed
_SWAP_S = 120.0  # a service follows a new version within seconds

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Starts a cluster on this machine by the shipped files, and takes the whole path on it.

    Corpora, training, a pool, a deployed service, the nightly job, promotion, rollback, and a job beside the
    service. It stops all that it started.
    """

    work: str = field(default=".cluster-demo", metadata=program.OUTPUT)
    """Folder for logs and settings, below the working directory. What an earlier demo left is removed."""
    ports_from: int = 0
    """Added to each port (Ray 6379, dashboard 8265, service 8000, MLflow 5000, S3 9000, HAProxy 8404, 9101),
    for a machine on which others use them."""
    keep: bool = False
    """Leave the cluster and the service up until Ctrl-C."""

    def __post_init__(self) -> None:
        most = 65535 - max(_PORTS.values())
        require(0 <= self.ports_from <= most, "ports_from", self.ports_from, f"0 to {most}")


def run(config: Config) -> program.Summary:
    began = time.monotonic()
    if not (_ROOT / "cluster.onpremise.yaml").exists():
        raise BadInput(
            "cluster_demo: an installed package lacks the files of a cluster; run it in a checkout"
        )
    machine = _Machine(Path(config.work), config.ports_from)
    with machine.running():
        sample = machine.work / "sample"
        demo_data.sample(sample)
        with _step("Sample dumps to s3://lake"):
            storage.upload(sample / "reddit_dump", "s3://lake/dumps")
            for name in ("convai2", "wikipedia"):
                storage.upload(sample / name, f"s3://lake/raw/{name}")
        answers = _walk(machine)
        minutes = round((time.monotonic() - began) / 60, 1)
        print(f"\n== Done in {minutes} minutes. Logs: {machine.work}", flush=True)
        if config.keep:
            print(machine.how_to_look(), flush=True)
            with suppress(KeyboardInterrupt):
                signal.pause()
    return {"work": config.work, "minutes": minutes, "seconds": SECONDS, "answers": answers}


# -------------------------------------------------------------------------------------------------
# The path


def _walk(machine: _Machine) -> list[dict[str, Any]]:
    """Types the commands of the pages; returns the service's answers."""
    sizes = {
        "lake": "s3://lake",
        "dumps": "s3://lake/dumps",
        "vocabulary": "2000",
        "gpu": "false",
        "pretrain": "jobs/configs/pretrain/tiny-cpu.yaml --pretrain.steps 200",
        "finetune": "jobs/configs/demo-poly.yaml --finetune.max-steps 100",
        "deploy": f"python -m jobs.deploy {machine.deployed_file}",
    }
    settings = [f"{name}={value}" for name, value in sizes.items()]
    workflow = machine.page_command("CLUSTER.md", "jobs.submit", "-- workflow", "dialogue.yaml")
    with _step("Dumps to a deployed service: jobs/workflows/dialogue.yaml"):
        machine.type([*workflow[: workflow.index("--set")], "--set", *settings])
    with _step("Ask the service"):
        answers = [machine.ask()]

    with _step("A job beside the service takes the cores that are free"):
        machine.submit("prepare_corpus", "--format", "wikipedia", "--input", "s3://lake/raw/wikipedia",
                       "--wikipedia.task", "search", "--wikipedia.queries", "1", "--wikipedia.others", "0",
                       "--output", "s3://lake/articles")  # fmt: skip
        machine.submit("finetune", "--config", "jobs/configs/demo-articles.yaml", "--corpus",
                       "s3://lake/articles", "--encoder", "s3://lake/encoder", "--output",
                       "s3://lake/rankers/articles", "--finetune.max-steps", "50")  # fmt: skip
    with _step("The nightly line of jobs/schedules/crontab, twice"):
        _export("s3://lake/articles/train", "group_id", "s3://lake/exports/articles/articles.jsonl")
        canaries = b"a town by the river\nthe first railway\n"
        storage.write_bytes("s3://lake/exports/canaries.txt", canaries)
        line, environment = _nightly_line()
        machine.shell(line, environment)
        machine.shell(line, environment)  # the night has succeeded: it is not sent again

    with _step("A new ranker is promoted, and the service follows"):
        machine.submit("finetune", "--config", "jobs/configs/demo-poly.yaml", "--corpus", "s3://lake/convai2",
                       "--encoder", "s3://lake/encoder", "--output", "s3://lake/rankers/new", "--register-as",
                       "dialogue", "--finetune.max-steps", "120")  # fmt: skip
        _export("s3://lake/convai2/train", "example_id", "s3://lake/exports/replies/replies.jsonl")
        machine.page_job("OPERATING.md", "jobs.embed_pool", "--publish-only")
        # A ranker of two minutes need not be significantly better than one of a minute and a half.
        any_difference = ("--min-difference", "-1")
        machine.page_job("OPERATING.md", "jobs.promote", "--corpus", more=any_difference)
        answers.append(machine.ask(other_than=answers[-1]))
    with _step("Rollback, and the service follows"):
        machine.page_job("OPERATING.md", "jobs.promote", "--rollback")
        answers.append(machine.ask(other_than=answers[-1]))
    return answers


def _export(corpus: str, id_column: str, uri: str) -> None:
    """Writes each response of a corpus once, with the columns id and text, as a product team exports them."""
    import pyarrow.parquet as pq

    rows: dict[str, str] = {}
    for file in storage.list_files(corpus):
        with storage.open_input(file) as source:
            table = pq.read_table(source, columns=[id_column, "response"])
        rows |= dict(zip(*(column.to_pylist() for column in table.columns), strict=True))
    lines = (json.dumps({"id": id, "text": text}) for id, text in rows.items())
    storage.write_bytes(uri, "\n".join(lines).encode())


def _nightly_line() -> tuple[str, dict[str, str]]:
    """The command of the crontab and its variables, as cron reads them: % is written \\%."""
    environment, command = dict[str, str](), ""
    for line in (_ROOT / "jobs/schedules/crontab").read_text().splitlines():
        if re.match(r"[A-Z_]+=", line):
            name, _, value = line.partition("=")
            environment[name] = value
        elif line and not line.startswith("#"):
            command = line.split(maxsplit=5)[5].replace("\\%", "%")
    return command, environment


# -------------------------------------------------------------------------------------------------
# The machine


class _Machine:
    """This machine in the part of all machines of cluster.onpremise.yaml.

    A folder is the home of their user. What is changed in a shipped command:

    - the name `mlflow` and addresses of servers become 127.0.0.1, ports as `--ports-from` says;
    - folders that need root (/mnt/scratch, /srv, /run/lock) lie in the work folder;
    - `ray stop` is left out, as it would end every Ray of this machine, and so is the head's autoscaler,
      which would look for the other machines by ssh;
    - the worker says that it has 10 cores and a GPU, so that two replicas of 4 cores and a job fit;
    - the HAProxy of each node has ports and files of its own;
    - MLflow keeps its runs in sqlite, not PostgreSQL.
    """

    def __init__(self, work: Path, ports_from: int) -> None:
        self.work = work
        self._ports = {name: port + ports_from for name, port in _PORTS.items()}
        self._home = (work / "home").absolute()
        self._token = secrets.token_hex(16)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._temp = ""

    @property
    def deployed_file(self) -> Path:
        """serve/config.cluster.yaml with the addresses and the token of this machine."""
        return self.work / "config.cluster.yaml"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Starts the servers and the nodes, and ends them."""
        if not self.work.absolute().is_relative_to(Path.cwd()):
            raise BadInput(f"--work {self.work}: not below the working directory, whose files travel with a "
                           "job")  # fmt: skip
        for server, port in self._ports.items():
            if cluster.is_open("127.0.0.1", port):
                raise BadInput(f"port {port} ({server}) is in use: --ports-from 10000 takes others")
        for path in self.work.iterdir() if self.work.exists() else ():
            if path != self.work / "sample":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._make_home()
        self._temp = tempfile.mkdtemp(prefix="prd", dir="/tmp")  # paths of sockets are short
        try:
            with _step("An object store: moto's server, with the bucket lake"):
                self._start_store()
            with _step("An MLflow server, by CLUSTER.md's command"):
                self._start_mlflow()
            with _step("A head and a worker, by cluster.onpremise.yaml"):
                self._start_nodes()
            yield
        finally:
            self._stop()

    def how_to_look(self) -> str:
        ports = self._ports
        return (
            f"   the service     http://127.0.0.1:{ports['service']}/  (token {self._token})\n"
            f"   MLflow          http://127.0.0.1:{ports['MLflow']}/\n"
            f"   Ray's dashboard http://127.0.0.1:{ports['dashboard']}/\nCtrl-C ends the cluster."
        )

    # Commands

    def type(self, words: list[str]) -> None:
        """Runs a command in a shell of the user. Raises Stopped if it fails."""
        self._run([sys.executable, *words[1:]] if words[0] == "python" else words)

    def submit(self, *words: str) -> None:
        self.type(["python", "-m", "jobs.submit", "--wait", "--", *words])

    def page_job(self, page: str, *parts: str, more: tuple[str, ...] = ()) -> None:
        """Submits the job of a page's command."""
        words = self.page_command(page, *parts)
        self.submit(words[2].removeprefix("jobs."), *words[3:], *more)

    def page_command(self, page: str, *parts: str) -> list[str]:
        """The first command of a page that has all the parts, in words."""
        for line in (_ROOT / page).read_text().replace("\\\n", " ").splitlines():
            has_all = line.startswith("    ") and all(part in line for part in parts)
            if has_all and "--dry-run" not in line:
                return shlex.split(self._here(line))
        raise Stopped(f"{page}: no command with {' '.join(parts)}")

    def shell(self, line: str, environment: dict[str, str]) -> None:
        """Runs a line as cron does, by sh and with few variables. Raises Stopped if it fails."""
        here = {name: self._here(value) for name, value in environment.items()}
        self._run(["sh", "-c", self._here(line)], here)

    def ask(self, other_than: dict[str, Any] | None = None) -> dict[str, Any]:
        """The service's answer; with `other_than`, the first one of another model."""
        from serve.client import Client

        with Client(f"http://127.0.0.1:{self._ports['service']}", token=self._token) as client:

            def answer() -> dict[str, Any] | None:
                ranking = client.rank("how is work going ?", pool="replies", top_k=3)
                is_new = other_than is None or ranking.model != other_than["model"]
                texts = [result.text for result in ranking.results]
                facts = {"model": ranking.model, "pool": ranking.pool_version, "replies": texts}
                return facts if is_new else None

            found = _await("an answer of the service by another model", answer, _SWAP_S)
        print(f"   {found['replies'][0]}   ({found['model']}, {found['pool']})", flush=True)
        return found

    # Servers and nodes

    def _make_home(self) -> None:
        """The user's home on each node: the environment, the token, and the files that `ray up` copies."""
        (self._home / "scratch").mkdir(parents=True)
        (self._home / "lock").mkdir()
        (self._home / "venv").symlink_to(sys.prefix)
        (self._home / ".bashrc").write_text("# of the user of all nodes\n")
        for target, source in self._cluster()["file_mounts"].items():
            if not source.startswith("~"):
                copy = shutil.copytree if (_ROOT / source).is_dir() else shutil.copyfile
                Path(self._here(target)).parent.mkdir(exist_ok=True)
                copy(_ROOT / source, self._here(target))
        of_user = "RAY_ADDRESS RAY_AUTH_TOKEN RAY_AUTH_TOKEN_PATH MLFLOW_EXPERIMENT_NAME"
        for name in of_user.split():
            os.environ.pop(name, None)
        os.environ |= self._variables()

    def _variables(self) -> dict[str, str]:
        """Of every process: addresses, and keys that a cloud's roles would stand for."""
        dashboard = f"http://127.0.0.1:{self._ports['dashboard']}"
        return {
            "HOME": str(self._home),
            "PATH": f"{self._home}/venv/bin:{os.environ['PATH']}",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._ports['S3']}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{self._ports['MLflow']}",
            # Four workers and the runners of its own jobs take a minute of a core to start.
            "MLFLOW_WORKERS": "1",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "POLYRANK_AUTHOR_SALT": secrets.token_hex(16),
            "RAY_API_SERVER_ADDRESS": dashboard,
            "RAY_DASHBOARD_ADDRESS": dashboard,
            "RAY_AUTH_MODE": "token",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # jobs/__init__.py says 0, for a Ray of one node
            "RAY_HEAD_IP": _HEAD,
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def _start_store(self) -> None:
        url = f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/"
        self._start("store", f"moto_server -H 127.0.0.1 -p {self._ports['S3']}")
        _await("moto's server (pip install -e '.[dev]')", partial(cluster.answers, url), _START_S)
        import boto3

        boto3.client("s3").create_bucket(Bucket="lake")

    def _start_mlflow(self) -> None:
        words = self.page_command("CLUSTER.md", "mlflow server")
        self._start("mlflow", shlex.join(words))
        url = f"{os.environ['MLFLOW_TRACKING_URI']}/health"
        _await("MLflow", partial(cluster.answers, url), _START_S)

    def _start_nodes(self) -> None:
        file = self._cluster()
        self._run(["ray", "get-auth-token", "--generate"], quiet=True)
        for command in file["setup_commands"]:
            if ".bashrc" in command:  # the rest installs what is here
                self._run(["bash", "-c", self._here(command)], quiet=True)
        here = "--block --object-store-memory=300000000"
        roles = {
            "head": f"--node-ip-address={_HEAD} --dashboard-port={self._ports['dashboard']} "
            f"--temp-dir={self._temp}",
            "worker": f"--node-ip-address={_WORKER} --num-cpus=10 --num-gpus=1",
        }
        for role, options in roles.items():
            *_, command = file[f"{role}_start_ray_commands"]  # the one before it is `ray stop`
            command = re.sub(r" --autoscaling-config=\S+", "", self._here(command))
            variables, start = command.rsplit("; ", 1)
            own = shlex.join(f"{name}={value}" for name, value in self._haproxy(role).items())
            setup = f"source ~/.bashrc; {variables}; export {own};"
            self._start(role, f"{start} {here} {options}", setup)
            _await(f"Ray's {role}", partial(_has_started, self.work / f"{role}.log"), _START_S)
        text = (_ROOT / "serve/config.cluster.yaml").read_text()
        hashed = hashlib.sha256(self._token.encode()).hexdigest()
        self.deployed_file.write_text(self._here(text).replace("HASH,HASH", hashed))

    def _haproxy(self, role: str) -> dict[str, str | int]:
        """Ports and files of a node's HAProxy, which are for one in a machine."""
        folder, offset = f"{self._temp}/haproxy-{role}", int(role == "worker")
        values: dict[str, str | int] = {
            "STATS_PORT": self._ports["statistics"] + offset,
            "METRICS_PORT": self._ports["metrics"] + offset,
            "CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
            "SOCKET_PATH": f"{folder}/admin.sock",
            "SERVER_STATE_BASE": folder,
            "SERVER_STATE_FILE": f"{folder}/server-state",
        }
        return {f"RAY_SERVE_HAPROXY_{name}": value for name, value in values.items()}

    def _cluster(self) -> dict[str, Any]:
        settings: dict[str, Any] = yaml.safe_load((_ROOT / "cluster.onpremise.yaml").read_text())
        return settings

    def _here(self, text: str) -> str:
        """A shipped text with the addresses, ports and folders of this machine."""
        folders = {
            "mlflow:5000": "127.0.0.1:5000",
            "0.0.0.0": "127.0.0.1",
            "~/": f"{self._home}/",
            "$HOME": str(self._home),
            "/mnt/scratch": f"{self._home}/scratch",
            "/srv/polyrank": str(_ROOT),
            "/run/lock": f"{self._home}/lock",
            "postgresql://HOST/mlflow": f"sqlite:///{self._home}/mlflow.db",
        }
        for shipped, here in folders.items():
            text = text.replace(shipped, here)
        moved = {str(port): str(self._ports[name]) for name, port in _PORTS.items()}
        return re.sub(rf"\b({'|'.join(moved)})\b", lambda match: moved[match[0]], text)

    def _start(self, name: str, command: str, setup: str = "") -> None:
        """Starts a server, whose output goes to a file of its name."""
        with (self.work / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"{setup} exec {command}"], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)

    def _run(
        self,
        command: list[str],
        more: Mapping[str, str] | None = None,
        quiet: bool = False,
    ) -> None:
        """`more`: variables of its environment."""
        if not quiet:
            print(f"   $ {shlex.join(command)}", flush=True)
        result = subprocess.run(command, env={**os.environ, **(more or {})}, capture_output=quiet)
        if result.returncode:
            raise Stopped(f"exit code {result.returncode}: {shlex.join(command)}")

    def _stop(self) -> None:
        for process in reversed(self._processes):  # a node says good-bye to the head
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(self._temp, ignore_errors=True)


@contextmanager
def _step(title: str) -> Iterator[None]:
    print(f"\n== {title}", flush=True)
    with timed(title):
        yield
    print(f"   {SECONDS[title]:.1f} s", flush=True)


def _await(what: str, look: Callable[[], ResultT | None], seconds: float) -> ResultT:
    """The first true result of `look`. Raises Stopped after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (result := look()):
        if time.monotonic() > deadline:
            raise Stopped(f"{what}: not there after {seconds:.0f} s")
        time.sleep(0.5)
    return result


def _has_started(log: Path) -> bool:
    return "Ray runtime started" in log.read_text()


if __name__ == "__main__":
    program.main(Config, run, "cluster_demo")
