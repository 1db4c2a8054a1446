"""Files and artifacts in S3, GCS and Azure, against servers on this machine."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from jobs import program
from pipeline import storage
from pipeline.artifact import MANIFEST, open_artifact
from pipeline.config import BadInput, Stopped
from pipeline.corpora import file_tasks
from pipeline.corpora.formats import parquet_fetches, tables
from pipeline.corpora.raw import Reading
from pipeline.engine.draft import Draft, draft
from pipeline.engine.records import TaskRecord
from pipeline.pools.lock import locked
from pipeline.storage import locks, node_cache
from serve.engine import Engine
from tests.helpers import free_port

ON_S3 = pytest.mark.parametrize("store", ["s3"], indirect=True)


@pytest.fixture
def bucket(store, request) -> str:
    return store.bucket("b" + hashlib.sha256(request.node.name.encode()).hexdigest()[:20])


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYRANK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", ["b c%20.txt", "ü+&=#'.txt", "год/文=1.txt"])
def test_files_are_written_listed_read_and_deleted_as_they_are_locally(bucket, name):
    uri = storage.join(bucket, "a", name)
    assert not storage.exists(uri)
    storage.write_bytes(uri, b"one")
    storage.write_bytes(uri, b"three")
    assert (storage.read_bytes(uri), storage.size_of(uri)) == (b"three", 5)
    assert storage.list_files(bucket) == storage.expand([bucket]) == [uri]
    assert storage.list_folders(bucket) == [storage.join(bucket, "a")]
    storage.delete(storage.join(bucket, "a"))
    assert storage.list_files(bucket) == []
    storage.delete(uri)  # what is not there


def intercept(store, monkeypatch, *methods, before=lambda: None, reset=False) -> None:
    """Calls `before` at the first request of these methods; `reset`: it is done, and its answer is lost."""
    serve = store.application

    def answer(environ, start_response):
        if environ["REQUEST_METHOD"] not in methods:
            return serve(environ, start_response)
        monkeypatch.setattr(store, "application", serve)
        before()
        answer = serve(environ, start_response)
        if reset:
            connection = environ["werkzeug.socket"]
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(connection.detach())
        return answer

    monkeypatch.setattr(store, "application", answer)


@pytest.mark.parametrize("fault", ["another removes a file", "a connection is reset"])
def test_a_folder_is_removed_also_where(store, bucket, monkeypatch, fault):
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: storage.write_bytes(f"{bucket}/many/{n}", b"1"), range(40)))
    if fault == "a connection is reset":
        intercept(store, monkeypatch, "DELETE", "POST", reset=True)
    else:
        remove = functools.partial(storage.delete, f"{bucket}/many/0")
        intercept(store, monkeypatch, "DELETE", "POST", before=remove)
    storage.delete(f"{bucket}/many")
    assert storage.list_files(bucket) == []


def test_a_lock_and_a_manifest_are_made_also_where_a_connection_is_reset(
    store, bucket, out, monkeypatch
):
    intercept(store, monkeypatch, "PUT", reset=True)
    with locked(bucket, "p", 60) as held:
        held.check()
    files = out.finished_tasks().record("task", TaskRecord).files
    intercept(store, monkeypatch, "PUT", reset=True)
    assert out.publish(files, {}) == open_artifact(out.uri, "corpus")


@pytest.mark.parametrize(
    ("verb", "option"), [("embed_pool", "--candidates"), ("promote", "--pools")]
)
def test_a_bucket_that_is_missing_is_named(
    store, run_job_here, tmp_path, tiny_ranker, verb, option
):
    model = {"--model": tiny_ranker("bi").uri, "--pools": tmp_path} if verb == "embed_pool" else {}
    options = {**model, "--name": "p", option: f"{store.scheme}://b-none/folder"}
    refusal = run_job_here(verb, *(word for pair in options.items() for word in pair)).refusal
    assert "there is no bucket 'b-none'" in refusal


@pytest.mark.parametrize("size", [0, 1_000_000])
def test_a_small_file_is_written_by_one_request(store, bucket, size):
    with store.counted() as requests:
        storage.write_bytes(storage.join(bucket, "a", "b"), b"x" * size)
    assert requests == {"PUT": 1}
    assert storage.read_bytes(storage.join(bucket, "a", "b")) == b"x" * size


def test_a_file_that_is_shorter_than_an_error_is_read_also_where_requests_fail(store, bucket):
    uri = storage.join(bucket, "CURRENT")
    storage.write_bytes(uri, b"v-2")
    with store.at_its_worst(fail_every=2, cut_every=0, delay_s=0.0):
        assert storage.read_bytes(uri) == b"v-2"


def test_what_is_called_compressed_is_stored_as_it_is(bucket, tmp_path):
    for name in ("RC_2011-01.zst", "a.gz", "a.bz2"):
        (tmp_path / name).write_bytes(b"bytes")
        storage.write_bytes(storage.join(bucket, "written", name), b"bytes")
        assert storage.read_bytes(storage.join(bucket, "written", name)) == b"bytes"
    storage.upload(tmp_path, storage.join(bucket, "uploaded"))
    assert storage.read_bytes(storage.join(bucket, "uploaded", "a.gz")) == b"bytes"


def test_a_process_has_one_file_system_for_a_bucket(bucket):
    first, _ = storage.locate(storage.join(bucket, "a"))
    second, path = storage.locate(storage.join(bucket, "b", "c"))
    assert first is second
    assert path == "b/c"


def test_of_many_that_make_a_file_at_one_moment_one_does(bucket):
    barrier = threading.Barrier(16)

    def make(number: int) -> bool:
        barrier.wait()
        return storage.create_bytes(storage.join(bucket, "lock"), b"%d" % number)

    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(make, range(16)))
    assert Counter(made) == {True: 1, False: 15}
    assert storage.read_bytes(storage.join(bucket, "lock")) == b"%d" % made.index(True)


def test_a_pool_is_locked_by_one_also_in_a_bucket(bucket):
    with locked(bucket, "p", 60) as held:
        held.check()
        assert not storage.create_bytes(held.lease_file.uri, b"{}")


def test_a_lock_that_has_expired_is_taken_over_by_one(bucket):
    facts = {
        "token": "t",
        "owner": "pid 1 on gone",
        "machine": "",
        "pid": 1,
        "since": 0,
        "expires_s": 0,
    }
    storage.write_bytes(f"{bucket}/_locks/p/00000001.json", json.dumps(facts).encode())
    barrier = threading.Barrier(8)

    def hold(_: int) -> int:
        barrier.wait()
        try:
            with locked(bucket, "p", 60) as held:
                barrier.wait()
                return held.number
        except Stopped:
            barrier.wait()
            return 0

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(hold, range(8))) == [0] * 7 + [2]


def test_a_lock_in_a_bucket_is_as_old_as_the_store_says(bucket, monkeypatch):
    """Of two hosts of which one's clock is 1,000 s ahead."""
    with locked(bucket, "p", 60):
        clock = SimpleNamespace(**{**vars(time), "time": lambda: time.time() + 1000})
        monkeypatch.setattr(locks, "time", clock)
        with pytest.raises(Stopped, match="works on it"), locked(bucket, "p", 60):
            pass


def test_a_store_that_refuses_is_not_a_lost_race(store, bucket):
    uri = f"{store.scheme}://not-there/lock"
    with pytest.raises(BadInput, match=rf"^{uri}: there is no bucket 'not-there'$"):
        storage.create_bytes(uri, b"")
    store.fail_every = 1
    try:
        with pytest.raises(OSError, match=rf"^{bucket}/lock: Generic .* error: .*(429|500|503)"):
            storage.create_bytes(f"{bucket}/lock", b"")
    finally:
        store.fail_every = 0


CHAIN = """
import pickle, sys
from pipeline import storage
filesystem, path = storage.locate(sys.argv[1])
storage.write_bytes(f"{sys.argv[1]}/a", b"a")
assert storage.create_bytes(f"{sys.argv[1]}/lock", b"")
assert storage.read_bytes(storage.list_files(sys.argv[1])[0]) == b"a"
there = pickle.loads(pickle.dumps(filesystem))  # as Ray Train gives it to its workers
assert there.get_file_info(f"{path}/a").size == 1
"""
KEYS = "aws_access_key_id = KEYS\naws_secret_access_key = s\n"
PROFILES = {
    "environment": "",
    "keys": f"[profile mine]\n{KEYS}",
    "process": "[profile mine]\ncredential_process = cat {home}/process.json\n",
    "role": f"[profile mine]\nrole_arn = arn:aws:iam::123456789012:role/data\nsource_profile = base\n"
    f"[profile base]\n{KEYS}",
    "sso": "[profile mine]\nsso_session = s\nsso_account_id = 1\nsso_role_name = data\n"
    "[sso-session s]\nsso_region = us-east-1\nsso_start_url = http://sso\n",
}


@ON_S3
@pytest.mark.parametrize("kind", PROFILES)
def test_data_and_locks_take_the_credentials_of_every_kind_of_profile(
    store, bucket, tmp_path, kind
):
    session = tmp_path / ".aws" / "sso" / "cache" / f"{hashlib.sha1(b's').hexdigest()}.json"
    session.parent.mkdir(parents=True)
    session.write_text(json.dumps({"accessToken": "t", "expiresAt": "2100-01-01T00:00:00Z"}))
    secret = {"Version": 1, "AccessKeyId": "PROCESS", "SecretAccessKey": "s"}
    (tmp_path / "process.json").write_text(json.dumps(secret))
    (tmp_path / ".aws" / "config").write_text(PROFILES[kind].replace("{home}", str(tmp_path)))
    environment = {**os.environ, "HOME": str(tmp_path)}
    if kind == "environment":
        environment["AWS_ACCESS_KEY_ID"] = "ENVIRONMENT"
    else:
        del environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]
        environment["AWS_PROFILE"] = "mine"
    store.access_keys.clear()
    subprocess.run([sys.executable, "-c", CHAIN, f"{bucket}/x"], env=environment, check=True)
    (key,) = store.access_keys
    assert key.startswith("ASIA") if kind == "role" else key == kind.upper()


@ON_S3
def test_the_endpoint_of_a_uri_counts(store, bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    query = f"?scheme=http&endpoint_override={store.endpoint.removeprefix('http://')}"
    assert storage.create_bytes(f"{bucket}/lock{query}", b"x")
    assert storage.list_files(bucket + query) == [f"{bucket}/lock{query}"]


def test_a_folder_is_copied_there_and_back_as_ray_train_copies_checkpoints(bucket, tmp_path):
    (tmp_path / "a" / "deep").mkdir(parents=True)
    data = os.urandom(1 << 20) * 20
    (tmp_path / "a" / "deep" / "state").write_bytes(data)
    filesystem, path = storage.locate(f"{bucket}/checkpoint")
    filesystem.create_dir(path)
    pafs.copy_files(str(tmp_path / "a"), path, destination_filesystem=filesystem)
    pafs.copy_files(path, str(tmp_path / "b"), source_filesystem=filesystem)
    assert (tmp_path / "b" / "deep" / "state").read_bytes() == data
    filesystem.delete_dir(path)
    assert not storage.exists(f"{bucket}/checkpoint")


@pytest.mark.long
def test_a_folder_of_many_files_is_found_by_one_page_of_them(store, bucket):
    with ThreadPoolExecutor(16) as pool:  # a page has 1,000
        list(pool.map(lambda n: storage.write_bytes(f"{bucket}/many/{n}", b"1"), range(1_001)))
    with store.counted() as requests:
        assert storage.exists(f"{bucket}/many") and not storage.exists(f"{bucket}/man")
    assert requests == {"HEAD": 2, "GET": 2}
    assert len(storage.list_files(f"{bucket}/many")) == 1_001


def test_a_folder_that_a_console_has_made_is_no_file(store, bucket):
    for key in ("a/", "a/b/", "a/b/empty", "a/c/"):
        store.put(bucket, key)
    assert storage.list_files(f"{bucket}/a") == [f"{bucket}/a/b/empty"]
    assert storage.names_in(f"{bucket}/a") == ["b", "c"]


def test_parquet_is_read_also_where_requests_fail_and_answers_are_cut(store, bucket):
    table = pa.table({"text": [f"text {number}" for number in range(5_000)]})
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, row_group_size=500)
    uri = storage.join(bucket, "candidates.parquet")
    storage.write_bytes(uri, buffer.getvalue())
    with store.at_its_worst(fail_every=3, cut_every=2, delay_s=0.0):
        rows = tables.read(uri, {"text": "text"}, Reading(), file_tasks.ParseReport())
        assert [row["text"] for _, row in rows] == table["text"].to_pylist()


@pytest.mark.parametrize(("start", "end"), [(0, None), ((8 << 20) + 5, (16 << 20) - 1)])
def test_reading_ahead_gives_the_same_bytes_in_few_requests(store, bucket, start, end):
    data = os.urandom(1 << 20) * 20
    uri = storage.join(bucket, "dump")
    storage.write_bytes(uri, data)
    with store.counted() as requests:
        assert b"".join(storage.read_ahead(uri, start, end)) == data[start:end]
    assert requests["GET"] <= 3
    assert list(storage.read_ahead(uri, 5, 5)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("held_bytes", "most_requests"), [(16 << 20, 3), (0, 24)])
def test_small_row_groups_are_fetched_together(
    store, bucket, monkeypatch, held_bytes, most_requests
):
    monkeypatch.setattr(parquet_fetches, "HELD_BYTES", held_bytes)
    random = np.random.default_rng(0)
    texts = [random.bytes(64).hex() for _ in range(20_000)]
    table = pa.table({"id": range(len(texts)), "text": texts, "more": texts[::-1]})
    uri = storage.join(bucket, "candidates.parquet")
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, row_group_size=2048, compression="zstd")
    storage.write_bytes(uri, buffer.getvalue())
    report = file_tasks.ParseReport()
    with store.counted() as requests:
        rows = dict(tables.read(uri, {"text": "text", "id": "id"}, Reading(), report))
    assert rows == {n + 1: {"id": n, "text": text} for n, text in enumerate(texts)}
    assert report.records == len(texts)
    assert requests["GET"] <= most_requests


def test_reading_ahead_may_be_given_up(bucket):
    storage.write_bytes(storage.join(bucket, "dump"), b"x" * (24 << 20))
    pieces = storage.read_ahead(storage.join(bucket, "dump"))
    assert len(next(pieces)) == 8 << 20
    pieces.close()


COPY = """
import sys
from pipeline.storage import node_cache
print(node_cache.local_folder(sys.argv[1], "v1"))
"""


def test_a_folder_is_downloaded_once_by_all_processes_of_a_node(store, bucket, cache, tmp_path):
    files = {"model/a.bin": os.urandom(40 << 20), "model/deep/b": b"b", "model/empty": b""}
    (tmp_path / "model" / "deep").mkdir(parents=True)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    storage.upload(tmp_path / "model", storage.join(bucket, "model"))
    command = [sys.executable, "-c", COPY, storage.join(bucket, "model")]
    with store.counted() as requests:
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        folders = {process.communicate()[0].strip() for process in running}
    assert len(folders) == 1
    assert requests["GET"] < 2 * 5  # 3 ranges, 1 file and listings: not twice that
    (folder,) = folders
    for name, data in files.items():
        assert Path(folder + name.removeprefix("model")).read_bytes() == data


def test_the_longest_unused_folders_leave_a_full_cache(bucket, cache, monkeypatch):
    for name in ("one", "two", "three"):
        storage.write_bytes(storage.join(bucket, name, "x"), b"." * (1 << 20))
    monkeypatch.setenv("POLYRANK_CACHE_GIB", str(2.5 / 1024))
    names = ("one", "two")
    folders = {name: node_cache.local_folder(storage.join(bucket, name), "v") for name in names}
    for number, name in enumerate(folders):
        os.utime(folders[name].with_suffix(".used"), (number, number))
    node_cache.release(folders["two"])
    third = node_cache.local_folder(storage.join(bucket, "three"), "v")
    assert (folders["one"].exists(), folders["two"].exists(), third.exists()) == (True, False, True)
    again = node_cache.local_folder(storage.join(bucket, "two"), "v")
    assert (again / "x").stat().st_size == 1 << 20


def test_half_a_download_of_a_process_that_was_killed_is_removed(bucket, cache):
    storage.write_bytes(storage.join(bucket, "model", "x"), b"whole")
    name = hashlib.sha256(f"{bucket}/model v".encode()).hexdigest()[:24]
    left = cache / f"{name}.{'0' * 32}"
    left.mkdir(parents=True)
    (left / "x").write_bytes(b"ha")
    folder = node_cache.local_folder(storage.join(bucket, "model"), "v")
    assert (folder.name, (folder / "x").read_bytes(), left.exists()) == (name, b"whole", False)


def test_a_cache_without_room_is_refused(bucket, cache, monkeypatch):
    for text in ("many", "0"):
        monkeypatch.setenv("POLYRANK_CACHE_GIB", text)
        with pytest.raises(Exception, match=f"^POLYRANK_CACHE_GIB: '{text}' is not allowed"):
            node_cache.local_folder(bucket, "v")


@dataclass(frozen=True)
class Config:
    output: str = ""


@pytest.fixture
def out(bucket) -> Draft:
    """The draft of an artifact, with a finished task."""
    made = draft(storage.join(bucket, "made"), "corpus", Config(), {})
    assert isinstance(made, Draft)
    made.mark("task", TaskRecord(files=[made.write_file("train/a", b"rows")]))
    return made


def test_a_kill_while_an_artifact_is_tidied_loses_nothing_and_leaves_nothing(out, monkeypatch):
    (record,) = [out.finished_tasks().record("task", TaskRecord)]

    def kill(uri: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(storage, "delete", kill)
        with pytest.raises(KeyboardInterrupt):
            out.publish(record.files, {"examples": 1})
    found = open_artifact(out.uri, "corpus")
    assert found.counts == {"examples": 1}
    assert "_tasks" in storage.names_in(out.uri)
    assert draft(out.uri, "corpus", Config(), {}) == found
    assert storage.names_in(out.uri) == [MANIFEST, "train"]


def test_a_kill_before_an_artifact_is_published_keeps_the_marks(out, monkeypatch):
    def kill(uri: str, data: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_bytes", kill)
        patch.setattr(storage, "create_bytes", kill)
        with pytest.raises(KeyboardInterrupt):
            out.publish([], {})
    again = draft(out.uri, "corpus", Config(), {})
    assert isinstance(again, Draft)
    assert set(again.finished_tasks()) == {"task"}


def test_two_jobs_do_not_make_one_artifact_at_a_time(out):
    with out.locked():
        said = rf"made: pid {os.getpid()} on .* works on it$"
        with pytest.raises(Stopped, match=said), out.locked():
            pass
        out.publish(out.finished_tasks().record("task", TaskRecord).files, {})
    with pytest.raises(Stopped, match="another job has published it meanwhile"), out.locked():
        pass


@pytest.mark.slow
def test_a_corpus_in_a_bucket_is_that_of_a_local_disk_also_where_requests_fail(
    store, bucket, cache, run_job_here, sample_files, convai2_corpus
):
    storage.upload(sample_files / "convai2", storage.join(bucket, "files"))
    options = ("--corpus", "convai2", "--input", f"{bucket}/files", "--output", f"{bucket}/out")
    with store.at_its_worst(fail_every=10, cut_every=0, delay_s=0.0):
        made = run_job_here("prepare_corpus", *options).summary
    assert made["fingerprint"] == convai2_corpus.fingerprint
    found = open_artifact(f"{bucket}/out", "corpus")
    assert {name[0] for name in storage.names_in(found.uri)}.isdisjoint("_")
    (cached,) = {found.local(), found.local()}
    names = sorted(file.name for file in cached.rglob("*.parquet"))
    assert names == sorted(map(storage.name_of, found.paths(suffix=".parquet")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "store",
    ["s3", pytest.param("gs", marks=pytest.mark.long), pytest.param("az", marks=pytest.mark.long)],
    indirect=True,
)
def test_models_pools_and_answers_are_those_of_local_files_also_where_the_store_is_at_its_worst(
    store, bucket, cache, run_job_here, tiny_ranker, convai2_corpus, tmp_path
):
    """Fine-tuning, embedding, search, and what a replica of the service opens."""
    encoder = tiny_ranker("bi")
    candidates = tmp_path / "texts.jsonl"
    rows = ({"id": str(number), "text": f"text {number} " * 5} for number in range(60))
    candidates.write_text("\n".join(map(json.dumps, rows)))
    for source, name in ((convai2_corpus.uri, "corpus"), (encoder.uri, "encoder")):
        storage.upload(Path(source), storage.join(bucket, name))
    storage.write_bytes(storage.join(bucket, "texts.jsonl"), candidates.read_bytes())

    def walk(lake: str, corpus: str, start: str, texts: object) -> tuple[list[str], ...]:
        """(fingerprints, the lines of the search, the pool's texts as a replica ranks them)"""
        ranker, pools = storage.join(lake, "ranker"), storage.join(lake, "pools")
        trained = run_job_here(
            "finetune", "--corpus", corpus, "--encoder", start, "--output", ranker,
            "--ranker.architecture", "poly", "--ranker.m", 3, "--ranker.max-context-tokens", 48,
            "--finetune.batch-examples", 8, "--finetune.max-steps", 3, "--loop.precision", "fp32",
            "--loop.checkpoint-every-steps", 2,
        ).summary  # fmt: skip
        embedded = run_job_here(
            "embed_pool", "--model", ranker, "--candidates", texts, "--pools", pools, "--name", "texts",
            "--embed.precision", "fp32", "--embed.rows-per-shard", 20,
        ).summary  # fmt: skip
        pool = storage.join(pools, "texts")
        found = run_job_here("search", "--model", ranker, "--pool", pool, "--context", "text 7",
                             "--precision", "fp32")  # fmt: skip
        with closing(Engine(ranker, [pool], "fp32")) as engine:
            (vectors,) = engine.contexts.run(list(engine.ranker.context_rows([["text 7"]])))
            (answer,) = engine.pools["texts"].stage.run([(engine.pool_query(*vectors, 10), None)])
            served = [result.text for result in answer.results]
        results = re.findall(r"(?m)^ +\d+\.\d+ .* text \d.*$", found.stdout)
        return [trained["fingerprint"], embedded["fingerprint"]], results, served

    local = walk(str(tmp_path / "lake"), convai2_corpus.uri, encoder.uri, candidates)
    with store.counted() as requests, store.at_its_worst(fail_every=40, cut_every=25, delay_s=0.02):
        names = ("corpus", "encoder", "texts.jsonl")
        stored = walk(bucket, *(storage.join(bucket, name) for name in names))
    assert requests["GET"] > 50  # so some failed, and some were cut
    assert stored == local
    assert [len(part) for part in local] == [2, 10, 10]


@dataclass(frozen=True, kw_only=True)
class ReadOrWrite:
    """A job that reads and writes."""

    uri: str
    """Where."""
    write: bool = False
    """Write there."""


@pytest.fixture
def refused_by_the_store(monkeypatch, capfd):
    """`refused_by_the_store("--uri", …)`: what a job says that reads or writes there."""

    def run(config: ReadOrWrite) -> program.Summary:
        if config.write:
            storage.write_bytes(config.uri, b"x")
        open_artifact(config.uri, "corpus")
        return {}

    def refusal(*arguments: str, code: int = 2) -> str:
        monkeypatch.setattr(sys, "argv", ["job", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            program.main(ReadOrWrite, run, "job")
        (line,) = capfd.readouterr().err.splitlines()
        assert ended.value.code == code and line.startswith("python -m jobs.job: ")
        return line.removeprefix("python -m jobs.job: ")

    return refusal


def test_a_bucket_that_is_not_there_is_one_line(store, refused_by_the_store):
    for more, file in ((("--write",), "a/b"), ((), "a/b/manifest.json")):
        bucket = f"{store.scheme}://not-there"
        said = refused_by_the_store("--uri", f"{bucket}/a/b", *more)
        assert said == f"{bucket}/{file}: there is no bucket 'not-there'"


@pytest.mark.slow
def test_a_store_that_cannot_be_reached_is_one_line(s3, refused_by_the_store, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    said = refused_by_the_store("--uri", "s3://out-of-reach/a", code=1)
    assert said.startswith("the object store cannot be reached: ")
    assert said.endswith("; the same command resumes when it can")


@pytest.mark.parametrize(
    ("answer", "meaning"),
    [
        ("403 Forbidden", "refuses access: no credentials, or a role without this right"),
        ("401 Unauthorized", "does not accept the credentials"),
        ("400 Bad Request", "does not take the request"),
    ],
)
def test_what_a_store_refuses_is_one_line(
    store, bucket, refused_by_the_store, monkeypatch, answer, meaning
):
    monkeypatch.setattr(store, "forbid", answer)
    for write in ((), ("--write",)):
        said = refused_by_the_store("--uri", f"{bucket}/a", *write)
        assert said.startswith(f"{bucket}/a") and f": the object store {meaning} (" in said
