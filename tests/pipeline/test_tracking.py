from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import mlflow
import pytest
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.utils.mlflow_tags import MLFLOW_GIT_REPO_URL

from pipeline import registry, tracking
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


@pytest.fixture(scope="module")
def parent(tracking_uri, tmp_path_factory) -> Artifact:
    return make(tmp_path_factory.mktemp("tracked") / "parent")


def test_a_run_holds_settings_counts_drops_metrics_and_the_manifest(parent, tmp_path):
    run = run_of(parent)
    assert run.info.status == "FINISHED"
    assert run.data.params["loop.max_steps"] == "3"
    assert run.data.params["name"] == "x"
    assert run.data.metrics["count.rows"] == 5
    assert run.data.metrics["dropped.field a_b_ is no string"] == 2
    assert "delivered_loss" not in run.data.metrics
    assert run.data.metrics["delivered_R_1/20"] == 0.5
    file = mlflow.artifacts.download_artifacts(
        run_id=run.info.run_id, artifact_path="manifest.json", dst_path=str(tmp_path)
    )
    assert json.loads(Path(file).read_text()) == parent.manifest


def test_a_run_names_its_inputs_its_code_and_what_came_out(parent):
    tags = run_of(parent).data.tags
    assert tags["job"] == "make_thing"
    assert tags["output_uri"] == parent.uri
    assert tags["output_fingerprint"] == parent.fingerprint
    assert tags["git_revision"] == (parent.manifest["git_revision"] or "unknown")
    assert tags["input.input.uri"] == SOURCE["uri"]
    assert tags["input.input.fingerprint"] == SOURCE["fingerprint"]
    assert "input.input.run_id" not in tags  # no run made it


def test_the_token_in_the_address_of_the_repository_is_not_logged(tmp_path, monkeypatch):
    """MLflow tags a run with the address that `git` fetches from."""
    address = {MLFLOW_GIT_REPO_URL: "https://ci:token@host/me/code.git"}
    monkeypatch.setattr(tracking, "resolve_tags", lambda tags: {**tags, **address})
    tags = run_of(make(tmp_path / "a")).data.tags
    assert tags[MLFLOW_GIT_REPO_URL] == "https://host/me/code.git"


def test_nothing_is_printed_about_git_where_it_is_not_installed(tmp_path):
    script = "from pipeline import tracking; tracking.resolve_tags()"
    environment = {**os.environ, "GIT_PYTHON_GIT_EXECUTABLE": str(tmp_path / "git")}
    environment.pop("GIT_PYTHON_REFRESH", None)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "git" not in done.stderr.lower()


def test_a_run_shows_the_whole_ancestry_with_the_runs_that_made_it(parent, tmp_path):
    tags = run_of(make(tmp_path / "child", corpus=parent)).data.tags
    assert tags["input.corpus.run_id"] == parent.manifest["run_id"]
    note = tags["mlflow.note.content"]
    link = rf"\* corpus: \[parent\]\(#/experiments/\d+/runs/{parent.manifest['run_id']}\)"
    assert re.search(link, note)
    assert f"* input: {Path(SOURCE['uri']).name} {SOURCE['fingerprint']}" in note
    assert str(Path(parent.uri).parent) not in note


def test_an_evaluation_is_noted_on_the_registered_versions_of_the_model(tmp_path):
    model, other, corpus = (make(tmp_path / name, name.encode()) for name in ("a", "b", "faq"))
    for artifact in (model, other):
        tracking.register("quality", artifact, "candidate")
    numbers = {"R_at_1/20": 0.5, "MRR": 0.6, "R_at_1/20.low": 0.4321, "R_at_1/20.high": 0.6}
    tracking.note_quality(model, corpus, numbers)
    versions = mlflow.MlflowClient().search_model_versions("name = 'quality'")
    noted = {str(version.version): version.tags.get("R_at_1/20 on faq") for version in versions}
    assert noted == {"1": "0.500 (0.432 to 0.600)", "2": None}


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


def test_a_registered_model_is_one_version_whatever_its_aliases_and_a_new_one_takes_the_alias(
    tmp_path,
):
    client = mlflow.MlflowClient()
    first = make(tmp_path / "a")
    old = tracking.register("quality of a", first, "candidate")
    assert tracking.register("quality of a", first, "champion") == old
    found = client.get_model_version("quality of a", old)
    assert set(found.aliases) == {"candidate", "champion"}
    assert (found.source, found.run_id) == (first.uri, first.manifest["run_id"])
    assert found.tags["fingerprint"] == first.fingerprint
    shutil.rmtree(tmp_path / "a")
    second = make(tmp_path / "a", b"two")  # in the same place
    new = tracking.register("quality of a", second, "candidate")
    moved = client.get_model_version_by_alias("quality of a", "candidate")
    assert str(moved.version) == new != old
    assert moved.tags["fingerprint"] == second.fingerprint
    assert client.get_model_version("quality of a", old).aliases == ["champion"]


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


def test_files_of_runs_lie_beside_their_data_base_whatever_its_folder_is_called(
    tmp_path, tracking_uri, other_store, monkeypatch
):
    folder = tmp_path / "a b%20c #ü"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of its own")
    other_store(folder / "mlflow.db")
    mlflow.set_tracking_uri("sqlite:///mlflow.db")  # as without MLFLOW_TRACKING_URI
    try:
        with tracking.start("make_thing", begin(tmp_path / "a")) as run:
            run.attach({"words.txt": b"words"})
    finally:
        mlflow.set_tracking_uri(tracking_uri)
    assert [file.read_bytes() for file in folder.glob("mlruns/**/words.txt")] == [b"words"]


def test_of_jobs_that_start_at_once_one_after_the_other_makes_the_data_base(
    tmp_path, tracking_uri, other_store, monkeypatch
):
    """MLflow itself: "table alembic_version already exists", or the like, for all but one."""
    seen = []

    def is_held(uri):
        with (tmp_path / "new.db.lock").open() as stream, pytest.raises(BlockingIOError):
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen.append(uri)

    monkeypatch.setattr(tracking, "_require_writable", is_held)
    uri = other_store(tmp_path / "new.db")
    try:
        mlflow.set_tracking_uri(uri)
        tracking.connect()
    finally:
        mlflow.set_tracking_uri(tracking_uri)
    assert seen == [uri]
    with (tmp_path / "new.db.lock").open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is free again


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


def kill_attempt(folder: Path) -> str:
    """Leaves what a killed job leaves: a draft that names a run, and the server takes it for running. Returns
    the run's id."""
    with tracking.start("train", begin(folder)) as run:
        run.log({"loss": 2.0}, step=1, wait=True)
    mlflow.MlflowClient().update_run(run.run_id, "RUNNING")
    return run.run_id


def finish_attempt(folder: Path) -> tuple[tracking.Run, Artifact]:
    out = begin(folder)
    with tracking.start("train", out) as run:
        assert mlflow.get_run(run.run_id).info.status == "RUNNING"
        run.log({"loss": 1.0}, step=2, wait=True)
        made = out.publish([], {}, run_id=run.run_id)
        tracking.finish(run, made)
    assert mlflow.get_run(run.run_id).info.status == "FINISHED"
    return run, made


def test_a_data_base_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "0")
    answer = threading.Event()
    with pytest.raises(TimeoutError, match="no whole answer within 0 s"):
        registry.bounded(answer.wait, server="postgresql://host/mlflow")
    answer.set()


def test_a_job_that_resumes_after_a_kill_continues_its_run(tmp_path):
    left = kill_attempt(tmp_path / "a")
    run, made = finish_attempt(tmp_path / "a")
    assert run.run_id == left == made.manifest["run_id"]
    history = mlflow.MlflowClient().get_metric_history(run.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 2.0), (2, 1.0)]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["manifest.json"]


def test_a_resumed_job_may_have_other_settings_that_do_not_change_the_output(tmp_path):
    with tracking.start("train", begin(tmp_path / "a", Config(output="first"))) as first:
        pass
    with tracking.start("train", begin(tmp_path / "a", Config(output="second"))) as second:
        pass
    assert first == second
    assert mlflow.get_run(first.run_id).data.params["output"] == "first"


def test_a_run_that_was_deleted_is_not_continued(tmp_path):
    left = kill_attempt(tmp_path / "a")
    mlflow.delete_run(left)
    assert finish_attempt(tmp_path / "a")[0].run_id != left


def test_a_server_that_does_not_know_the_run_gets_a_new_one(tmp_path, tracking_uri, other_store):
    left = kill_attempt(tmp_path / "a")
    try:
        mlflow.set_tracking_uri(other_store(tmp_path / "other.db"))
        run, _ = finish_attempt(tmp_path / "a")
    finally:
        mlflow.set_tracking_uri(tracking_uri)
    assert run.run_id != left


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
