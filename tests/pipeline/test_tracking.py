from __future__ import annotations

import json
import math
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import mlflow
import pytest
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from pipeline import tracking
from pipeline.artifact import Artifact
from pipeline.config import NOT_IDENTITY, BadInput, Stopped
from pipeline.engine.draft import Draft, draft


@dataclass(frozen=True)
class Loop:
    max_steps: int = 3


@dataclass(frozen=True)
class Config:
    output: str = field(default="", metadata=NOT_IDENTITY)
    name: str = "x"
    loop: Loop = field(default_factory=Loop)


SOURCE = {"uri": "raw/dump.zst", "kind": "raw", "fingerprint": "f00d"}


def begin(folder: Path, config: Config | None = None, **inputs: object) -> Draft:
    out = draft(str(folder), "thing", config or Config(), inputs or {"input": SOURCE})
    assert isinstance(out, Draft)
    return out


def make(folder: Path, text: bytes = b"one", **inputs: object) -> Artifact:
    """A job from its start to the end of its run."""
    out = begin(folder, **inputs)
    with tracking.start("make_thing", out) as run:
        file = out.write_file("x", text)
        made = out.publish([file], {"rows": 5}, {"field a(b) is no string": 2}, run.run_id)
        tracking.finish(run, made, delivered={"R@1/20": 0.5, "loss": math.nan})
    return made


def run_of(artifact: Artifact) -> mlflow.entities.Run:
    return mlflow.MlflowClient().get_run(artifact.manifest["run_id"])


def test_a_run_holds_settings_counts_drops_and_metrics(tmp_path):
    run = run_of(make(tmp_path / "a"))
    assert run.info.status == "FINISHED"
    assert run.data.params["loop.max_steps"] == "3"
    assert run.data.params["name"] == "x"
    assert run.data.metrics["count.rows"] == 5
    assert run.data.metrics["dropped.field a_b_ is no string"] == 2
    assert "delivered_loss" not in run.data.metrics
    assert run.data.metrics["delivered_R_1/20"] == 0.5


def test_a_run_names_its_inputs_its_code_and_what_came_out(tmp_path):
    made = make(tmp_path / "a")
    tags = run_of(made).data.tags
    assert tags["job"] == "make_thing"
    assert tags["output_uri"] == str(tmp_path / "a")
    assert tags["output_fingerprint"] == made.fingerprint
    assert tags["git_revision"] == (made.manifest["git_revision"] or "unknown")
    assert tags["input.input.uri"] == SOURCE["uri"]
    assert tags["input.input.fingerprint"] == SOURCE["fingerprint"]
    assert "input.input.run_id" not in tags  # no run made it


def test_a_run_shows_the_whole_ancestry_with_the_runs_that_made_it(tmp_path):
    parent = make(tmp_path / "parent")
    child = make(tmp_path / "child", corpus=parent)
    tags = run_of(child).data.tags
    assert tags["input.corpus.run_id"] == parent.manifest["run_id"]
    note = tags["mlflow.note.content"]
    link = rf"\* corpus: \[parent\]\(#/experiments/\d+/runs/{parent.manifest['run_id']}\)"
    assert re.search(link, note)
    assert f"* input: {Path(SOURCE['uri']).name} {SOURCE['fingerprint']}" in note
    assert str(tmp_path) not in note


def test_an_evaluation_is_noted_on_the_registered_versions_of_the_model(tmp_path):
    model, other, corpus = (make(tmp_path / name, name.encode()) for name in ("a", "b", "faq"))
    for artifact in (model, other):
        tracking.register("quality", artifact, "candidate")
    numbers = {"R_at_1/20": 0.5, "MRR": 0.6, "R_at_1/20.low": 0.4321, "R_at_1/20.high": 0.6}
    tracking.note_quality(model, corpus, numbers)
    versions = mlflow.MlflowClient().search_model_versions("name = 'quality'")
    noted = {str(version.version): version.tags.get("R_at_1/20 on faq") for version in versions}
    assert noted == {"1": "0.500 (0.432 to 0.600)", "2": None}


def test_a_run_keeps_the_manifest(tmp_path):
    made = make(tmp_path / "a")
    file = mlflow.artifacts.download_artifacts(
        run_id=made.manifest["run_id"], artifact_path="manifest.json", dst_path=str(tmp_path)
    )
    assert json.loads(Path(file).read_text()) == made.manifest


def test_a_run_takes_any_number_of_input_files_and_long_settings(tmp_path):
    many = {**SOURCE, "uri": " ".join(f"s3://bucket/RC_{n:06d}.zst" for n in range(5000))}
    out = begin(tmp_path / "a", Config(name="y" * 10_000), input=many)
    with tracking.start("make_thing", out) as run:
        pass
    data = mlflow.MlflowClient().get_run(run.run_id).data
    assert data.tags["input.input.uri"].startswith("s3://bucket/RC_000000.zst")
    assert data.params["name"].startswith("yyy")


def test_a_failed_job_ends_its_run_as_failed(tmp_path):
    with pytest.raises(ZeroDivisionError), tracking.start("bad", begin(tmp_path / "a")) as run:
        raise ZeroDivisionError
    assert mlflow.MlflowClient().get_run(run.run_id).info.status == "FAILED"
    assert mlflow.active_run() is None


@pytest.mark.slow
def test_another_process_can_log_to_the_run_by_its_id(tmp_path):
    with tracking.start("train", begin(tmp_path / "a")) as run:
        elsewhere = tracking.Run(run.run_id, run.tracking_uri)
        for step in range(3):
            elsewhere.log({"loss": 1 / (step + 1), "bad": math.inf}, step)
        elsewhere.flush()
    history = mlflow.MlflowClient().get_metric_history(run.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(0, 1.0), (1, 0.5), (2, 1 / 3)]
    assert "bad" not in mlflow.MlflowClient().get_run(run.run_id).data.metrics


def test_a_registered_model_points_to_where_it_lies_and_to_its_run(tmp_path):
    made = make(tmp_path / "a")
    version = tracking.register("points", made, "candidate")
    found = mlflow.MlflowClient().get_model_version_by_alias("points", "candidate")
    assert (str(found.version), found.source) == (version, made.uri)
    assert found.run_id == made.manifest["run_id"]
    assert found.tags["fingerprint"] == made.fingerprint


def test_an_alias_moves_to_the_model_registered_last(tmp_path):
    first, second = make(tmp_path / "a"), make(tmp_path / "b", b"two")
    old = tracking.register("moves", first, "candidate")
    new = tracking.register("moves", second, "candidate")
    assert old != new
    client = mlflow.MlflowClient()
    assert client.get_model_version_by_alias("moves", "candidate").source == second.uri


def test_the_same_model_is_registered_once_whatever_its_aliases(tmp_path):
    made = make(tmp_path / "a")
    versions = {tracking.register("once", made, alias) for alias in ("candidate", "champion")}
    assert len(versions) == 1
    found = mlflow.MlflowClient().get_model_version("once", versions.pop())
    assert set(found.aliases) == {"candidate", "champion"}


def test_a_model_made_anew_in_the_same_place_is_another_version(tmp_path):
    first = make(tmp_path / "a")
    old = tracking.register("anew", first, "candidate")
    shutil.rmtree(tmp_path / "a")
    second = make(tmp_path / "a", b"two")
    assert tracking.register("anew", second, "candidate") != old
    found = mlflow.MlflowClient().get_model_version_by_alias("anew", "candidate")
    assert found.tags["fingerprint"] == second.fingerprint


def test_a_relative_sqlite_path_means_the_same_file_in_every_process(
    tmp_path, tracking_uri, other_store, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    other_store(tmp_path / "here.db")
    mlflow.set_tracking_uri("sqlite:///here.db")
    try:
        with tracking.start("make_thing", begin(tmp_path / "a")) as run:
            pass
    finally:
        mlflow.set_tracking_uri(tracking_uri)
    assert run.tracking_uri == f"sqlite:///{tmp_path}/here.db"


FIRST_RUN = """
import sys
import time
import mlflow
from pipeline import tracking
mlflow.set_tracking_uri(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
with tracking._open("benchmark", "x", {}, {}) as run:
    print(run.run_id)
"""


def test_jobs_that_start_at_once_make_one_data_base(tmp_path):
    """MLflow itself: "table alembic_version already exists", or the like, for all but one."""
    uri = f"sqlite:///{tmp_path}/new.db"
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", FIRST_RUN, uri],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    for job in jobs:
        assert job.stdout.readline() == "ready\n"
    for job in jobs:
        job.stdin.write("\n")
        job.stdin.flush()
    runs = [job.communicate(timeout=120)[0].strip() for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert {mlflow.MlflowClient(uri).get_run(run).info.status for run in runs} == {"FINISHED"}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("folder", "unable to open database file"),
        ("text", "file is not a database"),
        ("locked", "database is locked"),
        ("newer", "Can't locate revision .*another version of MLflow made this data base"),
    ],
)
def test_a_data_base_that_cannot_be_used_is_refused_in_seconds(
    tmp_path, monkeypatch, kind, message
):
    """MLflow tries for 100 s."""
    base = tmp_path / "runs.db"
    if kind == "folder":
        base.mkdir()
    elif kind == "text":
        base.write_text("this is no data base, but a text\n" * 100)
    else:
        other = sqlite3.connect(base)
        other.execute("create table alembic_version (version_num varchar(32))")
        other.execute("insert into alembic_version values ('0000')")
        other.commit()
        if kind == "locked":
            other.execute("begin exclusive")
    monkeypatch.setattr(tracking, "server", lambda: f"sqlite:///{base}")
    before = time.monotonic()
    usual = mlflow.get_tracking_uri()
    with pytest.raises((BadInput, Stopped), match=message):
        tracking.connect()
    mlflow.set_tracking_uri(usual)
    assert time.monotonic() - before < 20


KILLED_ATTEMPTS = """
import os, signal, sys, threading
from pathlib import Path
from tests.pipeline.test_tracking import begin
from pipeline import tracking

begun = threading.Semaphore(0)

def attempt(folder):
    with tracking.start("train", begin(Path(folder))) as run:
        run.log({"loss": 2.0}, step=1, wait=True)
        begun.release()
        threading.Event().wait()

for folder in sys.argv[1:]:
    threading.Thread(target=attempt, args=[folder], daemon=True).start()
    begun.acquire()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def killed(tracking_uri: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders that one killed process was making, each in a run of its own."""
    root = tmp_path_factory.mktemp("killed")
    folders = {name: root / name for name in ("resumed", "failed", "deleted", "elsewhere")}
    command = [sys.executable, "-c", KILLED_ATTEMPTS, *map(str, folders.values())]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return folders


def left_run(folder: Path) -> mlflow.entities.Run:
    """The run that the killed process left behind."""
    (left,) = runs_of(folder)
    assert left.info.status == "RUNNING"
    return left


def runs_of(folder: Path) -> list[mlflow.entities.Run]:
    """All runs that made the folder, newest first."""
    experiment = mlflow.get_experiment_by_name("polyrank").experiment_id
    client = mlflow.MlflowClient()
    return client.search_runs(
        [experiment], f"tags.output_uri = '{folder}'", order_by=["start_time DESC"]
    )


def finish_attempt(folder: Path) -> tuple[tracking.Run, Artifact]:
    out = begin(folder)
    with tracking.start("train", out) as run:
        assert mlflow.get_run(run.run_id).info.status == "RUNNING"
        run.log({"loss": 1.0}, step=2, wait=True)
        made = out.publish([], {}, run_id=run.run_id)
        tracking.finish(run, made)
    return run, made


def test_a_job_that_resumes_after_a_kill_continues_its_run(killed):
    folder = killed["resumed"]
    left = left_run(folder)
    run, made = finish_attempt(folder)
    assert run.run_id == left.info.run_id == made.manifest["run_id"]
    (only,) = runs_of(folder)
    assert only.info.status == "FINISHED"
    history = mlflow.MlflowClient().get_metric_history(run.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 2.0), (2, 1.0)]
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]


def test_a_resumed_job_that_fails_ends_its_run_as_failed(killed):
    folder = killed["failed"]
    left = left_run(folder)
    with pytest.raises(ZeroDivisionError), tracking.start("train", begin(folder)):
        raise ZeroDivisionError
    (only,) = runs_of(folder)
    assert (only.info.run_id, only.info.status) == (left.info.run_id, "FAILED")


def test_a_resumed_job_may_have_other_settings_that_do_not_change_the_output(tmp_path):
    with tracking.start("train", begin(tmp_path / "a", Config(output="first"))) as first:
        pass
    with tracking.start("train", begin(tmp_path / "a", Config(output="second"))) as second:
        pass
    assert first == second
    assert mlflow.get_run(first.run_id).data.params["output"] == "first"


def test_a_run_that_was_deleted_is_not_continued(killed):
    folder = killed["deleted"]
    left = left_run(folder)
    mlflow.delete_run(left.info.run_id)
    run, _ = finish_attempt(folder)
    assert run.run_id != left.info.run_id
    assert mlflow.get_run(run.run_id).info.status == "FINISHED"


def test_a_server_that_does_not_know_the_run_gets_a_new_one(
    killed, tmp_path, tracking_uri, other_store
):
    folder = killed["elsewhere"]
    left = left_run(folder)
    try:
        mlflow.set_tracking_uri(other_store(tmp_path / "other.db"))
        run, _ = finish_attempt(folder)
        assert mlflow.get_run(run.run_id).info.status == "FINISHED"
    finally:
        mlflow.set_tracking_uri(tracking_uri)
    assert run.run_id != left.info.run_id


def test_another_job_in_the_place_of_a_refused_one_has_a_run_of_its_own(tmp_path):
    with pytest.raises(BadInput), tracking.start("train", begin(tmp_path / "a")) as refused:
        raise BadInput("name: 'x' is not allowed")
    with tracking.start("train", begin(tmp_path / "a", Config(name="y"))) as run:
        pass
    assert run.run_id != refused.run_id
    assert mlflow.get_run(run.run_id).data.params["name"] == "y"


def test_numbers_that_are_logged_at_once_are_sent_together(
    tmp_path, tracking_uri, other_store, monkeypatch
):
    sent: list[int] = []
    log_batch = SqlAlchemyStore.log_batch

    def count(store, run_id, metrics, params, tags):
        sent.append(len(metrics))
        return log_batch(store, run_id, metrics, params, tags)

    monkeypatch.setattr(SqlAlchemyStore, "log_batch", count)
    try:
        mlflow.set_tracking_uri(other_store(tmp_path / "other.db"))
        with tracking.start("train", begin(tmp_path / "a")) as run:
            sent.clear()
            for step in range(20):
                run.log({"loss": 1.0 / (step + 1)}, step)
            curves = run.histories(["loss", "rate"])
    finally:
        mlflow.set_tracking_uri(tracking_uri)
    assert curves == {"loss": [(step, 1.0 / (step + 1)) for step in range(20)], "rate": []}
    assert sum(sent) == 20 and len(sent) <= 3
