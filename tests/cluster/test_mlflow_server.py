"""CLUSTER.md's MLflow server: it starts as the page says, and jobs bear that it goes away or breaks."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import mlflow
import pytest

from jobs import finetune
from pipeline import registry, storage, tracking
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import NOT_IDENTITY, Stopped, parse
from pipeline.engine import executors
from pipeline.engine.draft import Draft, draft
from tests.helpers import free_port, wait_until

ROOT = Path(__file__).parents[2]
_POSTGRESQL = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"))), Path("/usr/bin"))


def page_command(port: int, database: str, artifacts: str) -> list[str]:
    """The server's command on the page, with another port, database and artifact store."""
    page = (ROOT / "CLUSTER.md").read_text().replace("\\\n", " ")
    (line,) = [line for line in page.splitlines() if line.startswith("    mlflow server ")]
    placeholders = {
        "5000": str(port),
        "postgresql://HOST/mlflow": database,
        "s3://lake/mlflow": artifacts,
    }
    words = shlex.split(line)
    assert set(placeholders) < set(words)
    return [sys.executable, "-m", *(placeholders.get(word, word) for word in words)]


@contextmanager
def server(database: str, artifacts: str, folder: Path, **env: str) -> Iterator[str]:
    """Starts the page's command; yields the server's address."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    fewer_processes = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_WORKERS": "1"}
    env = {**os.environ, **fewer_processes, **env}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            page_command(port, database, artifacts), cwd=folder, env=env,
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        wait_until(lambda: answers(address), process)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(address: str) -> bool:
    try:
        return httpx2.get(f"{address}/health", timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False


def log_run(address: str) -> mlflow.entities.Run:
    """Logs a run with a metric and an artifact, and returns it as the server tells it."""
    client = mlflow.MlflowClient(address)
    run_id = client.create_run(client.create_experiment("page")).info.run_id
    client.log_metric(run_id, "loss", 0.5)
    client.log_text(run_id, "kept", "note.txt")
    return client.get_run(run_id)


def read_note(address: str, run: mlflow.entities.Run) -> str:
    uri = f"{run.info.artifact_uri}/note.txt"
    return Path(mlflow.artifacts.download_artifacts(uri, tracking_uri=address)).read_text()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server with SQLite and a local folder."""
    folder = tmp_path_factory.mktemp("server")
    with server(f"sqlite:///{folder}/mlflow.db", str(folder / "artifacts"), folder) as address:
        yield address


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "status"),
    [("mlflow:5000", 200), ("localhost:5000", 200), ("10.1.2.3:5000", 200), ("a.example", 403)],
)
def test_the_server_answers_at_the_address_of_the_shipped_files(address, host, status):
    url = f"{address}/api/2.0/mlflow/experiments/search"
    answer = httpx2.post(url, json={"max_results": 1}, headers={"Host": host}, timeout=60)
    assert answer.status_code == status, answer.text


@pytest.mark.slow
def test_the_server_keeps_a_run_and_its_files(address):
    run = log_run(address)
    assert run.data.metrics == {"loss": 0.5}
    assert read_note(address, run) == "kept"


@contextmanager
def postgresql(user: str, password: str) -> Iterator[int]:
    """A PostgreSQL of its own with the data base `mlflow`; yields its port."""
    if not (_POSTGRESQL / "initdb").exists():
        pytest.skip("PostgreSQL is not installed")
    owner: dict[str, object] = {}
    folder = Path(tempfile.mkdtemp(prefix="polyrank-pg-"))
    (folder / "password").write_text(password)
    if os.getuid() == 0:  # PostgreSQL refuses to run as root
        account = pwd.getpwnam("nobody")
        owner = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        for path in (folder, folder / "password"):
            os.chown(path, account.pw_uid, account.pw_gid)
    port, data = free_port(), str(folder / "data")
    login = [f"--username={user}", f"--pwfile={folder}/password", "--auth=scram-sha-256"]
    start = ["-w", "-l", f"{folder}/log", "-o", f"-p {port} -k {folder} -h 127.0.0.1", "start"]

    def run(program: str, *options: str, **env: str) -> None:
        subprocess.run(
            [_POSTGRESQL / program, *options], cwd=folder, env={**os.environ, **env}, check=True,
            stdout=subprocess.DEVNULL, **owner,
        )  # fmt: skip

    try:
        run("initdb", "-D", data, *login)
        run("pg_ctl", "-D", data, *start)
        try:
            run("createdb", "-h", "127.0.0.1", "-p", str(port), "mlflow",
                PGUSER=user, PGPASSWORD=password)  # fmt: skip
            yield port
        finally:
            run("pg_ctl", "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_server_keeps_runs_in_postgresql_and_files_in_s3(s3, tmp_path):
    login: Mapping[str, str] = {"PGUSER": "keeper", "PGPASSWORD": "a b@c"}
    s3.bucket("lake")
    with postgresql(*login.values()) as port:
        database = f"postgresql://127.0.0.1:{port}/mlflow"
        with server(database, "s3://lake/mlflow", tmp_path, **login) as address:
            run = log_run(address)
            assert read_note(address, run) == "kept"
        (file,) = storage.list_files("s3://lake/mlflow")
        assert file.endswith(f"{run.info.run_id}/artifacts/note.txt")
        with server(database, "s3://lake/mlflow", tmp_path, **login) as address:
            again = mlflow.MlflowClient(address).get_run(run.info.run_id)
            assert again.data.metrics == {"loss": 0.5}


# Jobs on that server


@dataclass
class Door:
    """A way to a server on this machine that can be shut."""

    port: int
    state: str = "open"
    """open; closed: connections break; silent: requests get no answer; broken: they get a 500."""
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def serve(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                threading.Thread(
                    target=self._pass, args=self.listener.accept(), daemon=True
                ).start()

    def _pass(self, client: socket.socket, _: object) -> None:
        refusal = b"HTTP/1.1 500 Broken\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        with (
            client,
            socket.create_connection(("127.0.0.1", self.port)) as server,
            suppress(OSError),
        ):
            threading.Thread(target=self._answer, args=(server, client), daemon=True).start()
            while data := client.recv(1 << 16):
                if self.state == "open":
                    server.sendall(data)
                elif self.state != "silent":
                    client.sendall(refusal if self.state == "broken" else b"")
                    break

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)


@pytest.fixture
def door(address, tracking_uri, monkeypatch) -> Iterator[Door]:
    """The way to the server that this process takes."""
    made = Door(int(address.rpartition(":")[2]))
    threading.Thread(target=made.serve, daemon=True).start()
    reopen(made, monkeypatch)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    mlflow.set_tracking_uri(made.address)
    yield made
    mlflow.set_tracking_uri(tracking_uri)
    # Else its thread still waits, and may accept what comes for the next listener with this number.
    made.listener.shutdown(socket.SHUT_RDWR)
    made.listener.close()


@dataclass(frozen=True)
class Config:
    output: str = field(default="", metadata=NOT_IDENTITY)


def begin(folder: Path) -> Draft:
    out = draft(str(folder), "thing", Config(), {})
    assert isinstance(out, Draft)
    return out


def publish(out: Draft, run: tracking.Run) -> Artifact:
    made = out.publish([out.write_file("x", out.uri.encode())], {"rows": 5}, run_id=run.run_id)
    tracking.finish(run, made)
    return made


def shut(door: Door, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs then wait for an answer for a second."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    door.state = state


def reopen(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")  # this machine may be busy
    door.state = "open"


def test_a_model_at_a_path_is_registered_where_it_lies(door, tmp_path):
    """The server refuses paths as sources: the version's source is a file of the run."""
    out = begin(tmp_path / "mounted")
    with tracking.start("thing", out) as run:
        made = publish(out, run)
    version = tracking.register("mounted", made, "candidate")
    assert tracking.register("mounted", made, "champion") == version
    assert registry.model_uri("models:/mounted@champion") == made.uri == str(tmp_path / "mounted")
    shutil.copytree(tmp_path / "mounted", tmp_path / "copy")
    copy = open_artifact(str(tmp_path / "copy"), "thing")
    assert tracking.register("mounted", copy, "candidate") != version
    assert registry.model_uri("models:/mounted@candidate") == copy.uri


@pytest.mark.parametrize("state", ["closed", "silent", "broken"])
def test_a_server_that_fails_meanwhile_costs_a_line(door, tmp_path, monkeypatch, capsys, state):
    out = begin(tmp_path / "a")
    with tracking.start("thing", out) as run:
        run.log({"loss": 3.0}, step=1, wait=True)
        shut(door, state, monkeypatch)
        run.log({"loss": 2.0}, step=2, wait=True)
        run.attach({"note.txt": b"note"})
        assert run.histories(["loss"]) == {"loss": []}
        publish(out, run)
    assert open_artifact(str(tmp_path / "a"), "thing").manifest["run_id"] == run.run_id
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"MLflow at {door.address}: ")
    reopen(door, monkeypatch)
    assert mlflow.get_run(run.run_id).data.metrics == {"loss": 3.0}


def test_numbers_wait_until_the_server_is_back(door, tmp_path, monkeypatch, capsys):
    with tracking.start("thing", begin(tmp_path / "a")) as run:
        shut(door, "closed", monkeypatch)
        for step in range(3):
            run.log({"loss": float(step)}, step)
        run.flush()
        reopen(door, monkeypatch)
        run.log({"loss": 3.0}, step=3)
    assert run.histories(["loss"]) == {"loss": [(step, float(step)) for step in range(4)]}
    assert mlflow.get_run(run.run_id).info.status == "FINISHED"


def test_an_evaluation_without_its_server_keeps_its_numbers(
    door, convai2_corpus, tiny_ranker, monkeypatch, capsys
):
    shut(door, "closed", monkeypatch)
    inputs = {"model": tiny_ranker("bi"), "corpus": convai2_corpus}
    with tracking.start_without_artifact("evaluate", "bi", inputs, {"split": "test"}) as run:
        run.log({"r1": 0.5}, wait=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert "nothing is logged" in line and door.address in line


def test_a_finished_ranker_is_registered_by_the_same_command(
    door, convai2_corpus, tiny_ranker, tmp_path, monkeypatch, run_job_here
):
    """The server goes away in the last step of the training."""
    argv = [
        "--corpus", convai2_corpus.uri, "--encoder", str(tiny_ranker("bi").local() / "context_encoder"),
        "--output", str(tmp_path / "ranker"), "--ranker.architecture", "bi", "--finetune.max-steps", "2",
        "--finetune.batch-examples", "8", "--ranker.max-context-tokens", "48",
        "--ranker.max-candidate-tokens", "32", "--register-as", "answers",
    ]  # fmt: skip

    def watch(step: int, steps: int) -> None:
        if step == steps:
            shut(door, "closed", monkeypatch)

    with executors.in_this_process(), pytest.raises(Stopped) as stopped:
        finetune.run(parse(finetune.Config, argv, "test"), watch)
    assert "is complete, but not registered as answers: " in str(stopped.value)
    assert str(stopped.value).endswith("the same command registers it")
    ranker = open_artifact(str(tmp_path / "ranker"), "ranker")
    failed = run_job_here("finetune", *argv)
    assert (failed.code, failed.stderr.count("\n")) == (1, 1)
    reopen(door, monkeypatch)
    assert run_job_here("finetune", *argv).summary["already_done"]
    assert registry.model_uri("models:/answers@candidate") == ranker.uri
