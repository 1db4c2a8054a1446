from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import provenance, storage
from pipeline.artifact import Artifact, open_artifact, read_artifact
from pipeline.config import NOT_IDENTITY, BadInput, Stopped, identity_with
from pipeline.corpora.raw import Reading
from pipeline.engine.draft import Draft, draft
from pipeline.engine.records import TaskRecord
from pipeline.storage import failures
from tests import helpers


@dataclass(frozen=True)
class Workers:
    workers: int = 1


@dataclass(frozen=True)
class Config:
    output: str = field(default="", metadata=NOT_IDENTITY)
    max_steps: int = 3
    names: tuple[str, ...] = ("a", "b")
    resources: Workers = field(default_factory=Workers, metadata=NOT_IDENTITY)


@dataclass(frozen=True)
class LaterConfig(Config):
    """With two options that a later version has added."""

    sorted: bool = field(default=False, metadata=identity_with("sorted"))
    descending: bool = field(default=True, metadata=identity_with("sorted"))


@dataclass(frozen=True)
class ReadingConfig:
    reading: Reading = field(default_factory=Reading, metadata=NOT_IDENTITY)


SOURCE = {"uri": "raw", "kind": "raw", "fingerprint": "f00d"}


@pytest.fixture
def memory_store():
    memory = fsspec.filesystem("memory")
    yield memory
    memory.store.clear()


def begin(uri: object, config: object = None, **inputs: object) -> Draft:
    found = draft(str(uri), "thing", config or Config(), inputs or {"input": SOURCE})
    assert isinstance(found, Draft)
    return found


def publish(uri: object, files: dict[str, bytes] | None = None, **inputs: object) -> Artifact:
    out = begin(uri, **inputs)
    entries = [out.write_file(name, data) for name, data in (files or {"x/1": b"one"}).items()]
    return out.publish(entries, {"rows": 1})


def refusal(uri: object, config: object = None, **inputs: object) -> str:
    given = inputs or {"input": SOURCE}
    return helpers.refusal(draft, str(uri), "thing", config or Config(), given)


def read_refusal(uri: object, kind: str = "thing") -> str:
    return helpers.refusal(open_artifact, str(uri), kind)


# Publishing


def test_a_published_artifact_opens_with_what_its_manifest_says(tmp_path):
    out = begin(tmp_path / "a")
    table = pa.table({"n": [1, 2, 3]})
    entries = [out.write_table("test/1.parquet", table), out.write_table("train/1.parquet", table)]
    made = out.publish(
        reversed(entries), {"rows": 6}, {"too short": 2, "deleted": 1}, "run", extra=[1]
    )
    found = open_artifact(str(tmp_path / "a"), "thing")
    assert found == made
    assert found.files() == [str(tmp_path / "a" / n) for n in ("test/1.parquet", "train/1.parquet")]
    assert found.files("train/", ".parquet") == [str(tmp_path / "a" / "train" / "1.parquet")]
    assert (found.rows(), found.rows("test/")) == (6, 3)
    assert pq.read_table(found.files()[0]) == table
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["counts"] == {"rows": 6}
    assert manifest["dropped"] == {"deleted": 1, "too short": 2}
    assert manifest["config"]["max_steps"] == 3
    assert manifest["inputs"]["input"]["fingerprint"] == "f00d"
    assert (manifest["run_id"], manifest["extra"]) == ("run", [1])
    assert {"format_version", "git_revision", "libraries", "seconds"} <= set(manifest)


def test_a_later_version_knows_what_was_made_and_begun_before_it_had_an_option(tmp_path):
    made, begun = publish(tmp_path / "a"), begin(tmp_path / "b")
    begun.mark("task", TaskRecord())
    assert draft(str(tmp_path / "a"), "thing", LaterConfig(), {"input": SOURCE}) == made
    assert begin(tmp_path / "b", LaterConfig()).is_marked("task")
    for folder in ("a", "b"):
        told = refusal(tmp_path / folder, LaterConfig(sorted=True))
        assert "sorted: None there, True here; descending: None there, True here" in told


def test_an_unpublished_draft_is_refused_as_unfinished(tmp_path):
    out = begin(tmp_path / "a")
    out.write_file("x", b"x")
    assert not (tmp_path / "a").exists()
    for uri in (tmp_path / "a", f"{tmp_path}/a/"):
        assert "unfinished" in read_refusal(uri)


def test_publishing_leaves_no_draft_and_nothing_that_only_a_resumed_run_needs(tmp_path):
    out = begin(tmp_path / "a")
    out.mark("task", TaskRecord())
    out.write_file("_scratch/1", b"x")
    out.publish([out.write_file("x/1", b"one")], {})
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"x", "manifest.json"}


def test_a_job_killed_right_before_the_last_step_leaves_nothing_and_can_be_run_again(
    tmp_path, monkeypatch
):
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            publish(tmp_path / "a")
    read_refusal(tmp_path / "a")
    assert publish(tmp_path / "a").fingerprint == publish(tmp_path / "b").fingerprint


def test_in_an_object_store_the_manifest_is_the_last_step(memory_store):
    out = begin("memory://bucket/a")
    out.mark("task", TaskRecord())
    entry = out.write_file("x/1", b"one")
    assert "unfinished" in read_refusal("memory://bucket/a")
    made = begin("memory://bucket/a").publish([entry], {})
    assert set(memory_store.find("/bucket/a")) == {"/bucket/a/manifest.json", "/bucket/a/x/1"}
    assert draft("memory://bucket/a", "thing", Config(), {"input": SOURCE}) == made


@pytest.mark.parametrize("uri", ["memory://bucket/a", "local"])
def test_a_job_that_lost_its_lock_while_it_slept_does_not_publish(memory_store, tmp_path, uri):
    out = begin(uri if "://" in uri else tmp_path / uri)
    later_lock = out.path("_lock", "00000002.json")
    owner = {"token": "later", "owner": "pid 1 on far", "machine": "far", "pid": 1}
    facts = {**owner, "since": 0, "expires_s": 9e9}
    with out.locked():
        storage.write_bytes(later_lock, json.dumps(facts).encode())
        with pytest.raises(Stopped, match="another job has taken over the lock of this one"):
            out.publish([], {})
    assert "unfinished" in read_refusal(out.uri)
    assert storage.exists(later_lock)
    storage.delete(later_lock)
    with out.locked():
        assert out.publish([], {}).uri == out.uri


@pytest.mark.parametrize("uri", ["memory://bucket/a", "local"])
def test_of_two_jobs_that_publish_at_one_moment_the_first_one_stays(
    memory_store, tmp_path, monkeypatch, uri
):
    """The other job publishes after this one has checked its lock."""
    uri = uri if "://" in uri else tmp_path / uri
    out = begin(uri)
    entry = out.write_file("x/1", b"one")

    def other_job(staging: str) -> None:
        monkeypatch.undo()
        begin(uri).publish([entry], {"by": 1})

    monkeypatch.setattr(storage, "remove_unfinished", other_job)
    with out.locked(), pytest.raises(Stopped, match="another job has published it meanwhile"):
        out.publish([entry], {"by": 2})
    assert open_artifact(out.uri, "thing").counts == {"by": 1}


@pytest.mark.parametrize("uri", ["memory://bucket/a", "local"])
@pytest.mark.parametrize("is_published", [False, True])
def test_of_two_hosts_that_begin_at_one_moment_none_is_refused(
    memory_store, tmp_path, monkeypatch, uri, is_published
):
    """The other one's files are not taken for somebody's own."""
    uri, is_occupied = uri if "://" in uri else str(tmp_path / uri), storage.is_occupied

    def other_host(asked: str) -> bool:
        monkeypatch.undo()
        begin(uri) if not is_published else publish(uri)
        return is_occupied(asked)

    monkeypatch.setattr(storage, "is_occupied", other_host)
    if is_published:
        with pytest.raises(Stopped, match="another job has published it meanwhile"):
            begin(uri)
    else:
        with begin(uri).locked():
            pass


def test_a_job_whose_request_was_answered_late_has_published(memory_store, monkeypatch):
    """The store had made the file; the client asked again, and was told that it is there."""
    out = begin("memory://bucket/a")
    create = storage.create_bytes
    monkeypatch.setattr(storage, "create_bytes", lambda uri, data: create(uri, data) and False)
    assert out.publish([], {}) == open_artifact(out.uri, "thing")


# Fingerprints


def test_the_fingerprint_is_the_same_wherever_the_files_lie(tmp_path):
    made = publish(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere")
    assert open_artifact(str(tmp_path / "elsewhere"), "thing").fingerprint == made.fingerprint
    assert publish(tmp_path / "again").fingerprint == made.fingerprint


@pytest.mark.parametrize(
    "files", [{"x/1": b"two"}, {"x/2": b"one"}, {"x/1": b"one", "x/2": b""}, {}]
)
def test_the_fingerprint_differs_when_the_contents_do(tmp_path, files):
    out = begin(tmp_path / "b")
    other = out.publish([out.write_file(name, data) for name, data in files.items()], {})
    assert other.fingerprint != publish(tmp_path / "a").fingerprint


def test_pictures_reports_and_training_states_are_no_part_of_the_fingerprint(tmp_path):
    """Two runs with the same weights drew other tokens a second."""
    weights = {"encoder/model.safetensors": b"1", "tokenizer.json": b"3"}
    fingerprints = set()
    for run, seconds in (("a", b"12"), ("b", b"13"), ("c", b"")):
        out = begin(tmp_path / run)
        beside = ["curves.png", "README.md", "report.json", "training_state/state.pt"]
        files = {**weights, **dict.fromkeys(beside if seconds else (), seconds)}
        made = out.publish([out.write_file(name, data) for name, data in files.items()], {})
        assert made.paths() == sorted(files)  # a copy without one of them is refused
        fingerprints.add(made.fingerprint)
    assert len(fingerprints) == 1


# Asking for the same output again


def test_the_same_job_again_gets_the_artifact_wherever_and_on_whatever_it_runs(tmp_path):
    made = publish(tmp_path / "a")
    config = Config(output="elsewhere", resources=Workers(8))
    moved = {**SOURCE, "uri": "moved"}
    assert draft(str(tmp_path / "a"), "thing", config, {"input": moved}) == made


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_and_other_input_are_refused_by_name(tmp_path, finished):
    publish(tmp_path / "a") if finished else begin(tmp_path / "a").mark("task", TaskRecord())
    message = refusal(tmp_path / "a", Config(max_steps=4))
    assert "max_steps: 3 there, 4 here" in message and "names" not in message
    message = refusal(tmp_path / "a", input={**SOURCE, "fingerprint": "beef"})
    assert "--input has other contents than it had" in message


def test_a_job_that_was_refused_before_it_did_anything_is_in_nobodys_way(tmp_path):
    begin(tmp_path / "a", Config(max_steps=3))
    out = begin(tmp_path / "a", Config(max_steps=4))
    assert out.publish([], {}).manifest["config"]["max_steps"] == 4


@pytest.mark.parametrize("uri", ["memory://bucket/a", "local"])
def test_a_job_that_is_refused_as_another_works_does_not_take_that_one_s_tasks(
    memory_store, tmp_path, uri
):
    """Two jobs with other settings and the same output begin at the same moment. One is killed."""
    uri = str(tmp_path / "a") if uri == "local" else uri
    with begin(uri, Config(max_steps=3)).locked():
        other = begin(uri, Config(max_steps=4))  # nothing is done yet
        with pytest.raises(Stopped, match="works on it"), other.locked():
            pass
        begin(uri, Config(max_steps=3)).mark("task", TaskRecord())
    assert "max_steps: 3 there, 4 here" in refusal(uri, Config(max_steps=4))
    with pytest.raises(BadInput, match="max_steps: 3 there, 4 here"), other.locked():
        pass
    assert list(begin(uri, Config(max_steps=3)).finished_tasks()) == ["task"]


def test_a_job_that_stopped_at_damaged_input_resumes_with_more_tolerance(tmp_path):
    begin(tmp_path / "a", ReadingConfig()).mark("task", TaskRecord(counts={"n": 1}))
    tolerant = ReadingConfig(Reading(truncated="keep", max_malformed_share=0.5))
    record = begin(tmp_path / "a", tolerant).finished_tasks().record("task", TaskRecord)
    assert record == TaskRecord(counts={"n": 1})


def test_an_output_that_is_a_link_to_itself_is_refused(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "a")
    assert refusal(tmp_path / "a").endswith(
        "a' is not allowed; allowed: a folder, not a link to itself"
    )


def test_an_output_whose_name_is_too_long_is_one_line(tmp_path):
    with pytest.raises(OSError) as raised:
        begin(tmp_path / ("a" * 300))
    assert failures.storage_failure(raised.value) is raised.value


def test_a_request_of_which_half_an_answer_comes_is_one_line(tmp_path):
    out = begin(tmp_path / "a")
    storage.write_bytes(out.path("_request.json"), b'{"kind": "th\0')
    with pytest.raises(
        Stopped, match=r"^.*/a.partial/_request.json: not JSON .*; the same command"
    ):
        begin(tmp_path / "a")


@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "deep/notes.txt"])
def test_files_that_no_job_made_are_refused_before_any_work(tmp_path, name):
    (tmp_path / "a" / name).parent.mkdir(parents=True)
    (tmp_path / "a" / name).write_text("mine")
    assert "no polyrank job made" in refusal(tmp_path / "a")
    assert not (tmp_path / "a.partial").exists()


@pytest.mark.parametrize("uri", ["", "/", "//"])
def test_an_output_without_a_name_is_refused(uri):
    with pytest.raises(BadInput, match=r"output: .* is not allowed; allowed: a folder"):
        draft(uri, "thing", Config(), {})


def test_a_file_in_the_place_of_the_output_is_refused(tmp_path):
    (tmp_path / "a").write_text("mine")
    assert str(tmp_path / "a") in refusal(tmp_path / "a")


def test_an_empty_folder_is_not_in_the_way(tmp_path):
    (tmp_path / "a").mkdir()
    assert publish(tmp_path / "a").files() == [str(tmp_path / "a" / "x" / "1")]


@pytest.mark.parametrize("is_there", [True, False])
def test_an_output_may_be_a_link_to_a_folder(tmp_path, is_there):
    (tmp_path / "a").symlink_to(tmp_path / "disk")
    if is_there:
        (tmp_path / "disk").mkdir()
    made = publish(tmp_path / "a")
    assert open_artifact(str(tmp_path / "a"), "thing").fingerprint == made.fingerprint
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "disk"]
    again = draft(str(tmp_path / "a"), "thing", Config(), {"input": SOURCE})
    assert isinstance(again, Artifact)


def test_a_mounted_folder_as_the_output_is_refused_before_any_work():
    assert refusal("/proc").startswith("output: '/proc' is not allowed; allowed: a folder in this")


# Reading


def test_a_folder_without_a_manifest_is_no_artifact(tmp_path):
    assert f"{tmp_path}: not a thing" in read_refusal(tmp_path)
    assert "not a thing" in read_refusal(tmp_path / "none")


def test_another_kind_is_refused(tmp_path):
    publish(tmp_path / "a")
    message = read_refusal(tmp_path / "a", kind="pool")
    assert "kind is 'thing'; needed here: pool" in message


@pytest.mark.parametrize("version", [2, None])
def test_another_format_version_is_refused(tmp_path, version):
    made = publish(tmp_path / "a")
    changed = {**made.manifest, "format_version": version}
    (tmp_path / "a" / "manifest.json").write_text(json.dumps(changed))
    message = read_refusal(tmp_path / "a")
    assert f"format_version is {version!r}" in message and "reads 1" in message


@pytest.mark.parametrize("text", ["{", "null", '{"kind": "thing"}'])
def test_a_manifest_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    assert "not a polyrank manifest" in read_refusal(tmp_path)


def test_an_artifact_that_is_removed_while_it_is_read_is_refused(tmp_path, monkeypatch):
    uri = publish(tmp_path / "a").uri
    read = storage.read_bytes

    def remove_and_read(file):
        storage.delete(uri)
        return read(file)

    monkeypatch.setattr(storage, "read_bytes", remove_and_read)
    assert read_refusal(uri) == f"{uri}: another job has removed it meanwhile"


@pytest.mark.parametrize(
    ("data", "state"), [(b"on", "has 2 bytes"), (b"ones", "has 4 bytes"), (None, "is missing")]
)
@pytest.mark.parametrize("store", ["local", "memory"])
def test_a_file_of_another_size_than_the_manifest_says_is_refused_by_name(
    tmp_path, memory_store, store, data, state
):
    uri = "memory://bucket/a" if store == "memory" else str(tmp_path / "a")
    publish(uri, {"x/0": b"", "x/1": b"one"})
    storage.delete(f"{uri}/x/1")
    if data is not None:
        storage.write_bytes(f"{uri}/x/1", data)
    assert f"{uri}/x/1: {state}; manifest.json says 3;" in read_refusal(uri)
    assert refusal(uri) == read_refusal(uri)  # who makes it again is not told that it is done
    assert read_artifact(uri, "thing").counts == {"rows": 1}


def test_a_copy_that_is_refused_may_leave_the_nodes_disk(tmp_path, memory_store, monkeypatch):
    monkeypatch.setenv("POLYRANK_CACHE", str(tmp_path))
    monkeypatch.setenv("POLYRANK_CACHE_GIB", str(1 / 2**30))
    made = publish("memory://bucket/a", {"x/1": b"one"})
    storage.write_bytes("memory://bucket/a/x/1", b"two bytes more")
    with pytest.raises(BadInput, match="has 14 bytes"):
        made.local()
    (refused,) = tmp_path.glob("*/x")
    publish("memory://bucket/b").local()
    assert not refused.exists()


def test_a_copy_that_lost_a_file_is_made_again(tmp_path, memory_store, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = publish("memory://bucket/a", {"x/1": b"one", "x/2": b"two"})
    (made.local() / "x" / "1").unlink()
    (made.local() / "x" / "2").write_bytes(b"t")
    assert sorted(file.read_bytes() for file in made.local().glob("x/*")) == [b"one", b"two"]
    storage.delete("memory://bucket/a/x/2")
    (made.local() / "x" / "1").unlink()
    with pytest.raises(BadInput, match="x/2: is missing"):
        made.local()


@pytest.mark.parametrize("damaged_answers", [1, 2])
def test_a_copy_that_came_damaged_is_made_again_once(
    tmp_path, memory_store, monkeypatch, damaged_answers
):
    """As behind a proxy that cuts an answer and its Content-Length: pyarrow pads it with other memory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made, open_input = publish("memory://bucket/a"), storage.open_input
    answers = [b"on\0"] * damaged_answers

    def answer(uri: str) -> pa.NativeFile:
        is_damaged = uri.endswith("/x/1") and answers
        return pa.BufferReader(answers.pop()) if is_damaged else open_input(uri)

    monkeypatch.setattr(storage, "open_input", answer)
    if damaged_answers == 1:
        assert (made.local() / "x" / "1").read_bytes() == b"one"
    else:
        with pytest.raises(BadInput, match=r"^memory://bucket/a/x/1: damaged \(its checksum is"):
            made.local()
        assert (made.local() / "x" / "1").read_bytes() == b"one"


def test_the_manifest_tells_the_whole_ancestry(tmp_path):
    child = publish(tmp_path / "child", input=publish(tmp_path / "parent"))
    reference = child.manifest["inputs"]["input"]
    assert reference["uri"] == str(tmp_path / "parent")
    assert reference["inputs"] == {"input": SOURCE}


def test_an_installed_package_does_not_take_the_revision_of_the_project_that_it_lies_in(
    tmp_path, monkeypatch
):
    installed = tmp_path / "project" / ".venv" / "pipeline" / "provenance.py"
    installed.parent.mkdir(parents=True)
    installed.touch()
    author = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    for words in (("init", "-q"), (*author, "commit", "-q", "--allow-empty", "-m", "theirs")):
        subprocess.run(("git", *words), cwd=tmp_path / "project", check=True)
    monkeypatch.setattr(provenance, "__file__", str(installed))
    monkeypatch.delenv("POLYRANK_GIT_REVISION", raising=False)
    provenance._revision_of_checkout.cache_clear()
    try:
        assert provenance.git_revision() is None
    finally:
        provenance._revision_of_checkout.cache_clear()


# Tasks


def test_the_mark_of_another_version_is_refused_in_one_line(tmp_path):
    out = begin(tmp_path / "a")
    out.mark("task", TaskRecord())
    storage.write_bytes(out.path("_tasks", "task.json"), b'{"embedded": {"rows": 1}}')
    with pytest.raises(BadInput, match=r"a\.partial: holds an unfinished job of another version"):
        out.finished_tasks().record("task", TaskRecord)
