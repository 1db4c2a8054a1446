from __future__ import annotations

import errno
import os
import resource
import shutil
from pathlib import Path

import fsspec
import obstore
import pytest
from obstore.store import MemoryStore

from pipeline import storage
from pipeline.artifact import open_artifact
from pipeline.config import BadInput
from pipeline.storage import failures, node_cache
from pipeline.storage.object_store import RangedInput


def write(folder: Path, *names: str) -> list[str]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name}")
    return [str(folder / name) for name in names]


@pytest.fixture
def memory():
    """An object store in this process."""
    yield "memory://bucket"
    fsspec.filesystem("memory").store.clear()


def test_a_folder_stands_for_the_files_below_it_without_hidden_ones(tmp_path):
    b, a = write(tmp_path, "x/b", "x/deep/a")
    hidden, *_ = write(tmp_path, "x/.hidden", "x/_tasks/c", "x/.git/d")
    # What is named twice is read once, and what is named by itself may be hidden.
    assert storage.expand([str(tmp_path / "x"), a, hidden]) == [b, a, hidden]


def test_a_file_with_several_names_by_links_comes_once(tmp_path):
    (a,) = write(tmp_path, "2026-11-27/a")
    (tmp_path / "latest").symlink_to(tmp_path / "2026-11-27")
    (tmp_path / "2026-11-27" / "all").symlink_to(tmp_path)  # a circle
    assert storage.expand([str(tmp_path)]) == [a]
    linked = str(tmp_path / "latest" / "a")
    assert storage.expand([linked, str(tmp_path)]) == [linked]


def test_a_link_to_itself_is_no_file(tmp_path):
    (a,) = write(tmp_path, "a")
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    assert storage.expand([str(tmp_path)]) == [a]


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    """A network disk that is away for a moment would leave files out of a corpus. What lies in a hidden
    folder is not read, such as the trash of another user."""
    (a,) = write(tmp_path, "x/a", "x/deep/b", "x/.Trash/c")[:1]
    scandir, away = os.scandir, {str(tmp_path / "x" / ".Trash")}

    def refusing(folder):
        if str(folder) in away:
            raise OSError(errno.EIO, "Input/output error", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refusing)
    assert a in storage.expand([str(tmp_path / "x")])
    for folder in ("x/deep", "x"):
        away.add(str(tmp_path / folder))
        with pytest.raises(OSError, match=f"Input/output error: '{tmp_path / folder}'$"):
            storage.expand([str(tmp_path / "x")])


@pytest.mark.parametrize("root", ["file://", "file:", "file://localhost"])
def test_a_file_uri_has_percent_escapes_and_the_name_of_a_file_has_none(tmp_path, root):
    names = write(tmp_path, "a b/100%.csv", "a b/a%20b.csv", "a b/ü#1?.csv")
    escaped = (tmp_path / "a b").as_uri().removeprefix("file://")
    assert storage.expand([root + escaped]) == names
    assert storage.expand([f"{root}{escaped}/%C3%BC%231%3F.csv"]) == names[-1:]
    assert storage.expand([f"{root}{tmp_path}/a b/100%.csv"]) == names[:1]


def test_a_name_in_another_encoding_is_refused():
    with pytest.raises(BadInput, match=r"^'b\\udcfcch.csv': not UTF-8; allowed: names"):
        storage.expand([os.fsdecode(b"b\xfcch.csv")])


def test_a_uri_with_a_password_is_refused_and_not_shown():
    for uri in ("s3://KEY:hidden@bucket/a", "sftp://me:hidden@host/a?b=c"):
        with pytest.raises(BadInput, match="has a password, which manifests") as refused:
            storage.expand([uri])
        assert "hidden" not in str(refused.value)
    abfss = "abfss://container@account.dfs.core.windows.net/a"
    assert storage.locate(abfss)[1] == "a"


def test_a_file_that_cannot_be_written_is_refused_before(tmp_path):
    write(tmp_path, "file", "folder/file")
    for name in ("file", "folder/new/deep/file"):
        storage.require_file("json", str(tmp_path / name))
    for name in ("folder", "file/below"):
        with pytest.raises(
            BadInput, match=f"^json: '{tmp_path / name}' is not allowed; allowed: a file"
        ):
            storage.require_file("json", str(tmp_path / name))


def test_input_without_files_is_refused(tmp_path):
    with pytest.raises(BadInput, match=f"^--input {tmp_path}/none: no such file or folder$"):
        storage.expand([str(tmp_path / "none")])
    with pytest.raises(BadInput, match=f"^--input {tmp_path}: the folder holds no files$"):
        storage.expand([str(tmp_path)])
    with pytest.raises(BadInput, match=r"^--input: no file is named$"):
        storage.expand([])
    with pytest.raises(BadInput, match=r"^input: '' is not allowed; allowed: a file or a folder$"):
        storage.expand(
            [""]
        )  # "$DATA" of a shell without DATA; pathlib takes it for the current folder
    with pytest.raises(
        BadInput, match=r"\*\.csv: no such file or folder; patterns are not expanded$"
    ):
        storage.expand([str(tmp_path / "*.csv")])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match=r"pipe: a pipe or a device; allowed: a file or a folder$"):
        storage.expand([str(tmp_path / "pipe")])
    with pytest.raises(BadInput, match=r"^nope://x/y: no file system for this URI"):
        storage.expand(["nope://x/y"])


def test_a_folder_that_somebody_else_is_removing_is_removed(tmp_path, monkeypatch):
    """Such as a dry run that removes its plan while a night removes all plans of dead jobs."""
    write(tmp_path, "x/a", "x/deep/b")
    disk, path = storage.locate(str(tmp_path / "x"))

    class RacedDisk:
        get_file_info = disk.get_file_info

        def delete_dir(self, path):
            shutil.rmtree(path)
            disk.delete_dir(path)

    monkeypatch.setattr(storage, "locate", lambda uri: (RacedDisk(), path))
    storage.delete(path)
    assert not (tmp_path / "x").exists()


def test_a_query_stays_at_the_end_of_a_uri():
    query = "?region=eu-1&endpoint_override=http://store:9000/x"
    folder = f"s3://bucket/pools{query}"
    file = storage.join(folder, "p", "CURRENT")
    assert file == f"s3://bucket/pools/p/CURRENT{query}"
    assert storage.name_of(file) == "CURRENT"
    assert storage.name_of(folder) == "pools"
    assert storage.parent_of(file) == storage.join(folder, "p")
    assert storage.without_query(file) == "s3://bucket/pools/p/CURRENT"
    local = storage.join("/data/why?", "a")  # a local name may hold a question mark
    assert (local, storage.parent_of(local)) == ("/data/why?/a", "/data/why?")


def test_files_below_a_uri_with_a_query_are_listed_read_and_copied(tmp_path, memory, monkeypatch):
    plain = storage.locate

    def locate(uri):
        path, _, query = uri.partition("?")
        assert not uri.startswith("memory") or query == "region=eu"
        return plain(path)

    monkeypatch.setattr(storage, "locate", locate)
    folder = f"{memory}/x?region=eu"
    storage.write_bytes(storage.join(folder, "deep", "a"), b"1")
    assert storage.list_files(folder) == [f"{memory}/x/deep/a?region=eu"]
    assert storage.read_bytes(storage.list_files(folder)[0]) == b"1"
    node_cache.download(folder, tmp_path)
    assert (tmp_path / "deep" / "a").read_bytes() == b"1"
    with pytest.raises(BadInput, match="not a corpus"):
        open_artifact(folder, "corpus")


@pytest.mark.parametrize("scheme", ["local", "file", "memory"])
def test_files_are_written_listed_read_and_deleted_alike_everywhere(scheme, tmp_path, memory):
    root = {"local": str(tmp_path), "file": f"file://{tmp_path}", "memory": memory}[scheme]
    uri = storage.join(root, "a", "b.txt")
    assert not storage.exists(uri)
    storage.write_bytes(uri, b"one")
    storage.write_bytes(uri, b"three")
    assert storage.read_bytes(uri) == b"three"
    assert (storage.size_of(uri), storage.name_of(uri)) == (5, "b.txt")
    assert storage.list_files(root) == [uri]
    assert storage.expand([root]) == [storage.absolute(uri)]
    storage.delete(storage.join(root, "a"))
    assert not storage.exists(uri)
    assert storage.list_files(root) == []


def test_a_full_disk_is_named_by_the_file(tmp_path, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/a.txt'"):
        storage.write_bytes(str(tmp_path / "a.txt"), b"x")
    assert list(tmp_path.iterdir()) == []


def test_a_copy_that_the_disk_has_half_of_the_room_for_is_none(memory, tmp_path, monkeypatch):
    """A system writes as much as there is room for, and a file has its size from the start."""
    monkeypatch.setenv("POLYRANK_CACHE", str(tmp_path))
    storage.write_bytes(storage.join(memory, "model", "weights"), b"." * 100_000)
    lay_out, limits = node_cache._lay_out, resource.getrlimit(resource.RLIMIT_FSIZE)

    def lay_out_then_fill_the_disk(*arguments):
        lay_out(*arguments)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))

    monkeypatch.setattr(node_cache, "_lay_out", lay_out_then_fill_the_disk)
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}.*/weights'$"):
            node_cache.local_folder(storage.join(memory, "model"), "v")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.suffix for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_file_that_ends_before_what_is_read_is_an_error(tmp_path, memory):
    """It was replaced by a shorter one meanwhile."""
    for uri in (str(tmp_path / "a"), f"{memory}/a"):
        storage.write_bytes(uri, b"0123456789")
        assert b"".join(storage.read_ahead(uri, 2, 9)) == b"2345678"
        with pytest.raises(OSError, match=f"^{uri}: 4 bytes came of 10$"):
            storage.read_range(uri, 6, 10)


def test_an_interrupted_write_leaves_the_old_file_and_nothing_new_to_read(tmp_path, monkeypatch):
    (uri,) = write(tmp_path, "a")

    def power_cut(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", power_cut)
    with pytest.raises(KeyboardInterrupt):
        storage.write_bytes(uri, b"new")
    assert storage.read_bytes(uri) == b"text of a"
    assert storage.list_files(str(tmp_path)) == [uri]


def test_a_remote_folder_is_copied_once_for_each_version(memory, tmp_path, monkeypatch):
    monkeypatch.setattr(node_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    uri = storage.join(memory, "model")
    storage.write_bytes(storage.join(uri, "deep", "a"), b"1")
    first = node_cache.local_folder(uri, "v1")
    assert (first / "deep" / "a").read_bytes() == b"1"
    storage.write_bytes(storage.join(uri, "deep", "a"), b"2")
    assert node_cache.local_folder(uri, "v1") == first
    assert (node_cache.local_folder(uri, "v2") / "deep" / "a").read_bytes() == b"2"


def test_a_copy_stays_until_its_last_user_releases_it(memory, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYRANK_CACHE", str(tmp_path))
    monkeypatch.setenv("POLYRANK_CACHE_GIB", str(1.5 / 1024))  # one of them
    for name in ("one", "two", "three"):
        storage.write_bytes(storage.join(memory, name, "x"), b"." * (1 << 20))
    one, _ = (node_cache.local_folder(storage.join(memory, "one"), "v") for _ in range(2))
    node_cache.release(one)
    node_cache.local_folder(storage.join(memory, "two"), "v")
    assert one.exists()
    node_cache.release(one)
    node_cache.local_folder(storage.join(memory, "three"), "v")
    assert not one.exists()


def test_downloads_that_meet_in_a_full_cache_keep_its_limit(memory, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYRANK_CACHE", str(tmp_path))
    monkeypatch.setenv("POLYRANK_CACHE_GIB", str(2.5 / 1024))  # two of them
    for name in ("unused", "one", "two"):
        storage.write_bytes(storage.join(memory, name, "x"), b"." * (1 << 20))
    unused = node_cache.local_folder(storage.join(memory, "unused"), "v")
    node_cache.release(unused)
    folders, read_range = list[Path](), storage.read_range

    def download_another_first(*arguments):
        monkeypatch.setattr(storage, "read_range", read_range)
        folders.append(node_cache.local_folder(storage.join(memory, "two"), "v"))
        return read_range(*arguments)

    monkeypatch.setattr(storage, "read_range", download_another_first)
    folders.append(node_cache.local_folder(storage.join(memory, "one"), "v"))
    assert [(folder / "x").stat().st_size for folder in folders] == [1 << 20] * 2
    assert not unused.exists()


def test_a_download_that_fails_is_no_use_of_the_copy(memory, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYRANK_CACHE", str(tmp_path))
    monkeypatch.setenv("POLYRANK_CACHE_GIB", str(1 / 2**30))
    for name in ("one", "two"):
        storage.write_bytes(storage.join(memory, name, "x"), b".")
    one = storage.join(memory, "one")
    with monkeypatch.context() as patch:
        patch.setattr(storage, "read_range", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            node_cache.local_folder(one, "v")
    copy = node_cache.local_folder(one, "v")
    node_cache.release(copy)
    node_cache.local_folder(storage.join(memory, "two"), "v")
    assert not copy.exists()


def test_a_local_folder_is_its_own_copy(tmp_path):
    assert node_cache.local_folder(str(tmp_path), "v1") == tmp_path
    assert node_cache.local_folder(f"file://{tmp_path}", "v1") == tmp_path


def test_a_hub_that_cannot_be_reached_is_one_line(memory, monkeypatch):
    """Its client raises errors of its own, which are no OSError."""

    def away(*_: object, **__: object) -> None:
        raise RuntimeError("no route\nto the hub")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", away)
    with pytest.raises(OSError, match=r"^memory://bucket/a: Could not connect") as raised:
        storage.exists(f"{memory}/a")
    said = failures.store_failure(raised.value)
    assert said.startswith("the object store cannot be reached: memory://bucket/a: ")
    assert said.endswith("(RuntimeError: no route)")


def test_a_library_or_a_server_that_is_missing_is_refused():
    with pytest.raises(
        BadInput, match=r"^hdfs://host/a: no file system for this URI .*libjvm.*$"
    ) as said:
        storage.exists("hdfs://host/a")
    assert "\n" not in str(said.value)
    with pytest.raises(BadInput, match=r"^https://host/a: its storage can only be read$"):
        storage.write_bytes("https://host/a", b"")
    with pytest.raises(BadInput, match=r"no file system for this URI \(.*No such file"):
        storage.exists("zip://a.csv::/nowhere/a.zip")


def test_google_s_store_is_given_up_after_a_minute():
    store = storage.locate("gcs://bucket/a")[0].handler.store
    assert store.retry_config["retry_timeout"].total_seconds() == 60


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        ("RequestTimeTooSkewed", "this machine's clock and the object store's differ by too much"),
        ("ExpiredToken", "the object store does not accept the credentials"),
        ("AccessDenied", "the object store refuses access: no credentials, or a role without this"),
        ("Of a proxy", "the object store refuses access: no credentials, or a role without this"),
    ],
)
def test_the_refusal_of_a_lock_says_what_its_code_means(code, meaning):
    """As obstore says it, whose own words come before the store's code."""
    said = (
        "s3://b/a/lock: The operation lacked the necessary privileges to complete for path a/lock: Error "
        "performing PUT http://store/b/a/lock in 1.2ms - Server returned non-2xx status code: 403 "
        f"Forbidden: <?xml version='1.0'?><Error><Code>{code}</Code></Error>"
    )
    assert failures.store_refusal(OSError(said)).startswith(f"s3://b/a/lock: {meaning}")


def test_azure_without_an_account_is_refused_at_once(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_USE_EMULATOR", raising=False)
    for act in (storage.exists, storage.list_files, lambda uri: storage.write_bytes(uri, b"x")):
        with pytest.raises(OSError, match=r"^az://no-account/a: [^\n]+$") as error:
            act("az://no-account/a")
        said = failures.store_refusal(error.value)
        assert said and "or AZURE_STORAGE_ACCOUNT_NAME in the environment" in said


@pytest.mark.parametrize(
    ("answer", "is_refusal"),
    [
        ("HTTP error: error sending request", True),  # nobody is there
        ("Server returned non-2xx status code: 404 Not Found: ", True),  # a node without a role
        ("Server returned non-2xx status code: 503 Service Unavailable: ", False),
    ],
)
def test_a_machine_without_credentials_is_told_so_and_an_overloaded_node_tries_again(
    answer, is_refusal
):
    error = OSError(
        "gs://b/a: Generic GCS error: Error performing token request: Error performing GET "
        f"http://169.254.169.254/computeMetadata/v1/token in 8.2s, after 6 retries - {answer}"
    )
    said = failures.store_refusal(error) or ""
    assert said.startswith("gs://b/a: no credentials in the environment") == is_refusal
    assert failures.is_transient(error) != is_refusal


def test_ranges_that_are_held_are_read_without_the_store_and_may_be_empty():
    store, data = MemoryStore(), bytes(range(100))
    obstore.put(store, "a", data)
    asked = list[tuple[int, int]]()

    def read_range(start: int, length: int) -> bytes:
        asked.append((start, length))
        return data[start : start + length]

    file = RangedInput(
        len(data),
        read_range,
        lambda starts, ends: obstore.get_ranges(store, "a", starts=starts, ends=ends),
    )
    file.hold([10, 30, 50], [20, 30, 60])
    for start, length in ((10, 10), (52, 3), (58, 4)):
        file.seek(start)
        assert bytes(file.read(length)) == data[start : start + length]
    assert asked == [(58, 4)]
