"""`python -m jobs.submit` and `jobs.deploy` against a real head with a job server."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen
from zipfile import ZipFile

import pytest

from jobs import dashboard, packages, submit
from pipeline.config import BadInput, Stopped
from tests.helpers import Finished

from .conftest import free_port, head

Submit = Callable[..., Finished]


@pytest.fixture(scope="module")
def job_server() -> Iterator[str]:
    port = free_port()
    with head(jobs_port=port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def send(job_server, run_job_here, tmp_path, monkeypatch) -> Submit:
    """`send("--wait", "--", "inspect", …)` in an empty folder, from this process."""

    def run(*arguments: str, address: str = job_server) -> Finished:
        monkeypatch.chdir(tmp_path)
        return run_job_here("submit", "--address", address, *arguments)

    return run


def refusal(done: Finished) -> str:
    return done.refusal.removeprefix("python -m jobs.submit: ")


def dump(folder: Path) -> tuple[str, ...]:
    """A job that takes seconds, with a settings file of this folder."""
    (folder / "small.yaml").write_text("comments: 20\n")
    return ("generate_dump", "--config", "small.yaml", "--output", str(folder / "dump"))


def test_a_job_is_sent_with_its_settings_and_what_it_prints_comes_back(send, tmp_path):
    """The job is one that starts no Ray task."""
    (tmp_path / "steps.yaml").write_text("steps: {say: echo hello}")
    job = ("workflow", "steps.yaml")
    done = send("--wait", "--name", "first", "--", *job)
    assert done.code == 0, done.stderr
    *said, theirs, ours = done.stdout.splitlines()
    assert "hello" in said
    assert json.loads(theirs)["steps"][0]["step"] == "say"
    assert json.loads(ours) | {"files": 0, "bytes": 0} == {
        "job": "submit", "name": "first", "submitted": True, "status": "SUCCEEDED", "files": 0, "bytes": 0,
        "entrypoint": "python -m jobs.workflow steps.yaml", "environment": ["POLYRANK_GIT_REVISION"],
    }  # fmt: skip
    again = send("--name", "first", "--", *job).summary
    assert (again["name"], again["submitted"], again["status"]) == ("first", False, "SUCCEEDED")


@pytest.mark.long  # 35 s on two slow cores
def test_the_exit_code_is_the_job_s_and_a_failed_one_is_resumed(send, tmp_path):
    gone = ("inspect", "--corpus", str(tmp_path / "gone"))
    failed = send("--wait", "--name", "broken", "--", *gone)
    assert failed.code == 2
    assert f"python -m jobs.inspect: {tmp_path}/gone: not a corpus" in failed.stdout
    assert "python -m jobs.submit: broken: FAILED" in failed.stderr
    again = send("--wait", "--name", "broken", "--", *gone)
    assert again.code == 2
    assert "broken-2 resumes broken" in again.stderr


@pytest.mark.long  # 24 s
def test_a_job_whose_process_dies_is_sent_again(send, dies, tmp_path):
    deaths = dies("generate_dump", 2, -11)
    done = send("--env", *deaths, "--wait", "--name", "dying", "--", *dump(tmp_path))
    assert done.code == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("python -m jobs.submit")]
    assert len(lines) == 2
    assert "dying: FAILED, its process died (exit code 2, start 1 of 3)" in lines[0]
    assert "dying-2: FAILED, its process died (exit code " in lines[1]
    assert json.loads(done.stdout.splitlines()[-1])["name"] == "dying-3"


def test_a_wrong_address_and_another_ray_are_one_line_each(send, monkeypatch):
    job = ("--", "inspect", "--corpus", "s3://lake/x")
    nobody = f"http://127.0.0.1:{free_port()}"
    alone = send(*job, address=nobody)
    assert f"--address {nobody}: no cluster answers" in alone.stderr and alone.code == 1
    assert refusal(send(*job, address="head:8265")).startswith("--address head:8265: ")
    monkeypatch.setattr("ray.__version__", "9.9.9")
    assert "this machine 9.9.9; allowed: the same version" in refusal(send(*job))


def test_only_what_must_travel_is_sent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.yaml").write_text("name: articles\n")
    (tmp_path / "model.safetensors").write_bytes(b"0" * 100)
    command = ("embed_pool", "--config", "more.yaml", "--pools=s3://lake/pools",
               "--model", "s3://lake/ranker", "--candidates", "s3://lake/articles.csv")  # fmt: skip
    sent = submit._pack(submit.Config(command=command)).files
    some = {"more.yaml", "jobs/embed_pool.py", "pipeline/artifact.py", "serve/openapi.json"}
    assert some <= set(sent)
    assert {path.partition("/")[0] for path in sent} == {"more.yaml", "jobs", "pipeline", "serve"}


def test_the_settings_that_a_workflow_names_travel_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "poly.yaml").write_text("loop:\n  seed: 1\n")
    (tmp_path / "own" / "secret.pem").write_text("key")
    command = (
        "steps: {a: python -m jobs.finetune --config own/poly.yaml --corpus own/secret.pem"
        " --encoder own --output s3://lake/ranker}"
    )
    (tmp_path / "own" / "w.yaml").write_text(command)
    sent = submit._pack(submit.Config(command=("workflow", "own/w.yaml"))).files
    assert {path for path in sent if path.startswith("own")} == {"own/w.yaml", "own/poly.yaml"}
    assert "jobs/workflows/dialogue.yaml" in sent


def test_settings_that_set_names_travel_and_those_that_it_replaces_do_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.yaml", "theirs.yaml", "words.txt"):
        (tmp_path / name).write_text("loop: {seed: 1}\n")
    (tmp_path / "w.yaml").write_text(
        "variables: {finetune: theirs.yaml, name: words}\n"
        "steps:\n  a: polyrank finetune --config=${finetune} --corpus s3://c --encoder s3://e --output s3://r\n"
        "  b: cat ${name}.txt\n"
    )
    outer = "steps: {all: python -m jobs.workflow w.yaml --set finetune=mine.yaml}"
    (tmp_path / "outer.yaml").write_text(outer)
    for command in (("w.yaml", "--set", "finetune=mine.yaml"), ("outer.yaml",)):
        sent = submit._pack(submit.Config(command=("workflow", *command))).files
        own_files = {path for path in sent if "/" not in path}
        assert own_files == {"mine.yaml", "w.yaml", "words.txt", command[0]}


@pytest.mark.parametrize("split", [("--split", "test"), ("--split=test",)])
def test_one_of_fixed_values_is_no_folder_though_one_is_called_so(tmp_path, monkeypatch, split):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test").mkdir()
    command = ("evaluate", "--model", "s3://m", "--corpus", "s3://c", *split)
    sent = submit._pack(submit.Config(command=command)).files
    assert {path.partition("/")[0] for path in sent} == {"jobs", "pipeline", "serve"}


def test_a_text_may_be_longer_than_the_name_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "who sang? " * 100
    command = ("search", "--model", "s3://m", "--pool", "s3://p", "--context", text)
    assert text in submit._pack(submit.Config(command=command)).entrypoint


def test_pools_that_a_job_reads_may_be_several(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ("serve", "--model", "s3://m", "--pools", "s3://a", "s3://b")
    assert submit._pack(submit.Config(command=command)).entrypoint.endswith("s3://a s3://b")


@pytest.mark.parametrize(("command", "settings", "message"), [
    ((), {}, "--: '' is not allowed; allowed: a job: benchmark, "),
    (("submit",), {}, "--: 'submit' is not allowed"),
    (("embed_pool", "--candidates", "folder"), {}, "folder: a folder of this machine; allowed: a URI"),
    (("embed_pool", "--candidates", "big.csv"), {"max_upload_mib": 3},
     r"the upload has \d.\d MiB \(largest: big.csv\), more than --max-upload-mib 3"),
    (("train_tokenizer", "--corpus", "s3://lake/c", "--output", "tokenizer"), {},
     "output: 'tokenizer' is not allowed; allowed: a URI that all nodes reach"),
    (("workflow", "flow.yaml", "--set", "lake=lake"), {}, "output: 'lake/tokenizer' is not allowed"),
    (("inspect", "--corpse", "s3://c"), {}, "--corpse: unknown option"),
    (("inspect",), {"env": ("NOT_THERE",)}, "--env NOT_THERE: no such variable"),
])  # fmt: skip
def test_what_cannot_travel_is_refused(tmp_path, monkeypatch, command, settings, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "flow.yaml").write_text(
        "variables: {lake: s3://lake}\n"
        "steps: {a: 'python -m jobs.train_tokenizer --corpus s3://c --output ${lake}/tokenizer'}\n"
    )
    (tmp_path / "big.csv").write_bytes(b"0" * (3 << 20))
    with pytest.raises(BadInput, match=f"^{message}"):
        submit._pack(submit.Config(command=command, **settings))


def test_tracking_travels_unless_it_is_a_file_of_this_machine(monkeypatch, capsys):
    monkeypatch.setenv("SECRET", "s")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow")
    found = submit.environment(("SECRET",))
    assert (found["MLFLOW_TRACKING_URI"], found["SECRET"]) == ("https://mlflow", "s")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    assert "MLFLOW_TRACKING_URI" not in submit.environment(())
    assert "is a file of this machine" in capsys.readouterr().err


def test_the_job_uses_the_registry_the_store_and_the_hub_that_the_command_means(
    monkeypatch, capsys
):
    meant = {
        "MLFLOW_TRACKING_URI": "https://mlflow",
        "MLFLOW_REGISTRY_URI": "https://registry",
        "MLFLOW_EXPERIMENT_NAME": "/Users/me",
        "AWS_ENDPOINT_URL": "https://store",
        "AZURE_STORAGE_ACCOUNT_NAME": "lake",
        "HF_ENDPOINT": "https://hub",
    }
    secrets = "AWS_SECRET_ACCESS_KEY MLFLOW_TRACKING_PASSWORD MLFLOW_TRACKING_TOKEN HF_TOKEN"
    for name, value in (meant | dict.fromkeys(secrets.split(), "hidden")).items():
        monkeypatch.setenv(name, value)
    sent = submit.environment()
    sent.pop("POLYRANK_GIT_REVISION", None)
    assert sent == meant
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:9000")
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "/srv/registry.db")
    assert {"AWS_ENDPOINT_URL", "MLFLOW_REGISTRY_URI"}.isdisjoint(submit.environment())
    said = capsys.readouterr().err
    assert "AWS_ENDPOINT_URL is not sent: http://localhost:9000 is a port of this machine" in said
    assert "MLFLOW_REGISTRY_URI is not sent: /srv/registry.db is a file of this machine" in said


def test_a_password_in_an_address_travels_only_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow")
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "postgresql://me:hidden@host/models")
    with pytest.raises(BadInput, match=r"^MLFLOW_REGISTRY_URI: has a password") as refusal:
        submit.environment()
    assert "hidden" not in str(refusal.value)
    assert submit.environment(("MLFLOW_REGISTRY_URI",))["MLFLOW_REGISTRY_URI"].endswith("models")


class Cluster:
    """A cluster that answers as it is told to, while a job runs, and then that the job has ended."""

    OUTPUT = "first line\nsecond line\nthird line\n"
    CODE = 0

    def __init__(self, *answers: int | Exception, status: str = "SUCCEEDED") -> None:
        self._answers = list(answers)
        """To each question: how many characters of the output are there, or an error."""
        self._status = status

    def job(self, url, name):
        answer = self._answers.pop(0) if self._answers else None
        if isinstance(answer, Exception):
            raise answer
        status = self._status if answer is None else "RUNNING"
        facts = {"status": status, "driver_exit_code": self.CODE, "message": ""}
        return facts, self.OUTPUT[:answer]


NIGHT = submit.Config(command=("inspect", "--corpus", "s3://c"), name="night", wait=True)
COMMAND = "python -m jobs.inspect --corpus s3://c"


@pytest.fixture
def joined(monkeypatch) -> Callable[..., None]:
    """`joined(client, (id, status, command), …)`: jobs.submit finds this cluster, with these jobs."""

    def join(client: Cluster, *jobs: tuple[str, str, str]) -> None:
        client.list_jobs = lambda: [
            SimpleNamespace(submission_id=job_id, status=SimpleNamespace(value=status), entrypoint=command)
            for job_id, status, command in jobs
        ]  # fmt: skip
        monkeypatch.setattr(submit, "_connect", lambda url: client)
        monkeypatch.setattr(dashboard, "job", client.job)

    return join


@pytest.mark.parametrize(
    ("statuses", "job_id", "output"),
    [
        (["RUNNING"], "night", Cluster.OUTPUT),
        (["FAILED", "PENDING"], "night-2", Cluster.OUTPUT),
        (["SUCCEEDED"], "night", ""),
    ],
)
def test_another_try_of_a_scheduler_sends_no_run_twice(joined, capsys, statuses, job_id, output):
    """Such as of a pod that was evicted, while its run went on."""
    ids = ("night", "night-2")
    joined(
        Cluster(), *((name, status, COMMAND) for name, status in zip(ids, statuses, strict=False))
    )
    summary = submit.run(NIGHT)
    assert (summary["name"], summary["submitted"], summary["status"]) == (
        job_id,
        False,
        "SUCCEEDED",
    )
    assert capsys.readouterr().out == output


def test_the_id_of_another_command_is_refused(joined):
    joined(Cluster(), ("night", "RUNNING", "python -m jobs.inspect --corpus s3://other"))
    with pytest.raises(BadInput, match=r"night is RUNNING, and is `.*s3://other`; choose another"):
        submit.run(NIGHT)


@pytest.mark.parametrize(
    ("output", "code", "said", "exit_code"),
    [
        ('{"job": "inspect", "exit_code": 2, "error": "s3://c: not a corpus"}\n', 2,
         "night: FAILED: s3://c: not a corpus", 2),
        ("Killed\n", 137, "night: FAILED, its process died (exit code 137, start 3 of 3)", 1),
    ],
)  # fmt: skip
def test_the_last_line_of_a_scheduler_s_log_says_why(joined, output, code, said, exit_code):
    class Failing(Cluster):
        OUTPUT, CODE = output, code

        def submit_job(self, **_):
            pass

    joined(Failing(status="FAILED"))
    with pytest.raises(Stopped) as failed:
        submit.run(NIGHT)
    assert (str(failed.value), failed.value.exit_code) == (said, exit_code)


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The time in seconds; only pauses and tests move it on."""
    time = [0.0]

    def sleep(seconds: float) -> None:
        time[0] += seconds

    monkeypatch.setattr(submit, "time", SimpleNamespace(monotonic=lambda: time[0], sleep=sleep))
    return time


@pytest.fixture
def follow(monkeypatch, now) -> Callable[[Cluster], int | None]:
    def run(cluster: Cluster) -> int | None:
        monkeypatch.setattr(dashboard, "job", cluster.job)
        return submit._follow("http://head:8265", "night", "inspect")

    return run


@pytest.mark.parametrize(
    ("answers", "losses"),
    [
        ([15, RuntimeError("close code 1006"), ConnectionError("cut"), 20, OSError("cut")], 2),
        ([15, 15, 15], 0),  # nothing is printed for long
    ],
)
def test_a_lost_connection_ends_neither_the_job_nor_its_output(follow, capsys, answers, losses):
    assert follow(Cluster(*answers)) is None
    printed = capsys.readouterr()
    assert printed.out == Cluster.OUTPUT
    lines = printed.err.splitlines()
    assert len(lines) == losses
    assert all(line.startswith("the connection to night is lost (c") for line in lines)


def test_a_connection_that_dies_without_a_sign_is_given_up(monkeypatch):
    monkeypatch.setattr(dashboard, "_ANSWER_S", 0.05)
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as silent,
        pytest.raises(dashboard.LOST, match="timed out"),
    ):
        dashboard.job(f"http://127.0.0.1:{silent.getsockname()[1]}", "night")


def test_the_minutes_without_an_answer_begin_when_none_comes(follow, now):
    """Not when the job printed something for the last time."""

    class Slow(Cluster):
        def job(self, url, name):
            answer = super().job(url, name)
            now[0] += 900
            return answer

    assert follow(Slow(0, 0, ConnectionError("refused"))) is None


def test_a_cluster_that_does_not_answer_is_given_up(follow, now):
    said = r"^night: the cluster has not answered for 10 minutes \(no r"
    with pytest.raises(Stopped, match=said):
        follow(Cluster(*[ConnectionError("no route to host")] * 999))
    assert 600 < now[0] < 640


_HELLO = """
import os
from ray import serve

@serve.deployment
class Hello:
    async def __call__(self, request):
        return os.getcwd()

app = Hello.bind()
"""


def deploy(run_job_here, address: str, folder: Path, **application: object) -> Finished:
    """`jobs.deploy` of one application, one that says hello if nothing else is wanted."""
    about = {"name": "hello", "route_prefix": "/", "import_path": "hello:app",
             "runtime_env": {"env_vars": {"PYTHONPATH": str(folder)}}}  # fmt: skip
    (folder / "hello.py").write_text(_HELLO)
    http = {"host": "127.0.0.1", "port": free_port()}
    file = folder / "service.yaml"
    file.write_text(json.dumps({"http_options": http, "applications": [{**about, **application}]}))
    return run_job_here("deploy", file, "--address", address)


@pytest.mark.long  # 61 s on two slow cores
def test_a_deployment_ends_when_the_service_runs_or_has_failed(job_server, run_job_here, tmp_path):
    """Its code is this checkout's, from an archive in a folder that every node reads."""
    folder = f"file://{tmp_path}/code/"
    variables = {"PYTHONPATH": str(tmp_path)}
    environment = {"working_dir": folder, "env_vars": variables}
    done = deploy(run_job_here, job_server, tmp_path, runtime_env=environment)
    assert done.summary["applications"] == ["hello"]
    assert "hello: RUNNING" in done.stdout
    port = json.loads((tmp_path / "service.yaml").read_text())["http_options"]["port"]
    with urlopen(f"http://127.0.0.1:{port}/") as answer:
        working_dir = Path(answer.read().decode())
    (archive,) = (tmp_path / "code").iterdir()
    with ZipFile(archive) as zipped:
        assert sorted(zipped.namelist()) == sorted(packages.files())
    for name, file in packages.files().items():
        assert (working_dir / name).read_bytes() == file.read_bytes()

    done = deploy(run_job_here, job_server, tmp_path, import_path="no_such_module:app")
    assert done.code not in (0, 2)
    assert "hello: DEPLOY_FAILED: " in done.stderr
    assert "no_such_module" in done.stderr


@pytest.mark.parametrize(("text", "message"), [
    ("{", "service.yaml: "),
    ("applications: [{import_path: serve.app:build}]", "no `applications` with names"),
    (None, "service.yaml: cannot be read: "),
])  # fmt: skip
def test_a_file_without_applications_is_refused(run_job_here, tmp_path, text, message):
    if text:
        (tmp_path / "service.yaml").write_text(text)
    assert message in run_job_here("deploy", tmp_path / "service.yaml").refusal


@pytest.mark.parametrize(("refusals", "is_taken"), [(3, True), (400, False)])
def test_a_head_in_its_first_seconds_is_asked_again(now, refusals, is_taken):
    """It answers before it has a process that starts jobs."""
    taken: list[str] = []
    left = [RuntimeError("status code 500: No available agent to submit job, …")] * refusals

    def submit_job(submission_id, **_):
        if left:
            raise left.pop()
        taken.append(submission_id)

    head = SimpleNamespace(submit_job=submit_job)
    parcel = submit._Parcel("python -m jobs.inspect", {}, {})
    if is_taken:
        submit._submit(head, "night", parcel)
        assert taken == ["night"]
    else:
        with pytest.raises(Stopped, match=r"--name night: not taken .*No available agent"):
            submit._submit(head, "night", parcel)
        assert 300 <= now[0] < 305
