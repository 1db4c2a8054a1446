"""Copies of remote folders on the disk of a node, which all processes of the node share.

    <cache>/3f…/          the files of one version of one folder
    <cache>/3f….lock      held while it is downloaded: the other processes wait instead of downloading too
    <cache>/room.lock     held while room is made for a download, and its files get their sizes
    <cache>/3f….used      held (shared) by every process that uses it; its time is that of the last use

The cache lies in POLYRANK_CACHE (by default in the temporary folder) and takes POLYRANK_CACHE_GIB (by default
half of that disk). The folders that have not been used for the longest time go first; one that a process
uses stays, until the process ends or calls `release`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from pipeline import storage
from pipeline.config import require

_ROOM = "room.lock"
_RANGE_BYTES = 16 << 20
_RANGES_AT_ONCE = 16  # a stream from S3 brings some 80 MB/s, a node's network 1 to 10 GB/s


@dataclass
class _Use:
    """A folder that this process uses."""

    descriptor: int
    """The descriptor of the open file that is locked."""
    users: int = 0


_in_use: dict[Path, _Use] = {}
_counting = threading.Lock()
_collected: ContextVar[list[Path] | None] = ContextVar("collected uses", default=None)


def local_folder(
    uri: str,
    version: str,
    only: Collection[str] | None = None,
    is_whole: Callable[[Path], bool] = Path.exists,
) -> Path:
    """A local folder with the files of `uri`: itself if it is local, else a cached copy.

    `version` names the contents (a fingerprint), so that a copy is never taken for another version.
    `only`: the paths below `uri` that the copy needs; None: all. Copies of different parts are different.
    `is_whole`: whether a copy has its files; one that has not is made again. It is asked under the copy's
    lock: of two that find a damaged copy, the second would delete what the first has made.
    """
    if storage.is_local(uri):
        return Path(storage.locate(uri)[1])
    part = "" if only is None else f" {sorted(only)}"
    name = hashlib.sha256(f"{uri} {version}{part}".encode()).hexdigest()[:24]
    folder = cache_folder() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    _use(folder)
    try:
        with _locked(folder.with_suffix(".lock")):
            for _ in range(2):  # a broken proxy may cut an answer in silence
                if is_whole(folder):
                    break
                shutil.rmtree(folder, ignore_errors=True)
                _download_version(uri, folder, only)
    except BaseException:
        release(folder)  # the caller has got no folder to release
        raise
    return folder


def _download_version(uri: str, folder: Path, only: Collection[str] | None) -> None:
    """Makes the cached copy `folder`, which appears when it is complete."""
    cache = folder.parent
    for leftover in _partial_folders(folder):  # of a killed process
        shutil.rmtree(leftover)
    partial_folder = _partial_folder(folder)
    try:
        sizes = _sizes(uri, only)
        with _locked(cache / _ROOM):
            _make_room(cache, sum(sizes.values()))
            _lay_out(partial_folder, sizes)
        _fill(uri, partial_folder, sizes)
        with _locked(cache / _ROOM):
            partial_folder.rename(folder)
    except BaseException:
        shutil.rmtree(partial_folder, ignore_errors=True)
        raise


def download(uri: str, folder: Path) -> None:
    """Copies the files of `uri`, which may be local too, into a local folder, many ranges at a time."""
    sizes = _sizes(uri)
    _lay_out(folder, sizes)
    _fill(uri, folder, sizes)


def _sizes(uri: str, only: Collection[str] | None = None) -> dict[str, int]:
    """Bytes of each file that is copied, by its path. `only`: these paths; None: all."""
    return {
        name: size
        for name, size in storage.sizes_below(uri).items()
        if not storage.is_hidden(name) and (only is None or name in only)
    }


def _lay_out(folder: Path, sizes: Mapping[str, int]) -> None:
    """Makes the files with their sizes, and without their contents."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in sizes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.truncate(path, size)


def _fill(uri: str, folder: Path, sizes: Mapping[str, int]) -> None:
    with ThreadPoolExecutor(_RANGES_AT_ONCE) as pool:
        futures = [
            pool.submit(_copy, storage.join(uri, name), folder / name, start, min(_RANGE_BYTES, size - start))
            for name, size in sizes.items()
            for start in range(0, size, _RANGE_BYTES)
        ]  # fmt: skip
        for future in futures:
            future.result()


def _copy(uri: str, path: Path, start: int, length: int) -> None:
    data = storage.read_range(uri, start, length)
    with storage.naming(path), path.open("r+b") as file:
        file.seek(start)
        file.write(data)  # all of it, where os.pwrite writes what there is room for


def cache_folder() -> Path:
    """The folder of this node for copies of artifacts and for notes about them."""
    default = Path(tempfile.gettempdir()) / f"polyrank-cache-{os.getuid()}"
    return Path(os.environ.get("POLYRANK_CACHE") or default)


def _use(folder: Path) -> None:
    """Keeps the folder from being removed, until each user has released it or this process ends."""
    mark = folder.with_suffix(".used")
    with _counting:
        if folder not in _in_use:
            mark.touch()
            use = _Use(os.open(mark, os.O_RDONLY))
            fcntl.flock(use.descriptor, fcntl.LOCK_SH)
            _in_use[folder] = use
        _in_use[folder].users += 1
    if (collected := _collected.get()) is not None:
        collected.append(folder)
    os.utime(mark)


def release(folder: Path) -> None:
    """Ends one use of a folder of `local_folder`; those that are no copies need no release."""
    collected = _collected.get()
    if collected is not None and folder in collected:
        collected.remove(folder)
    with _counting:
        if (use := _in_use.get(folder)) is None:
            return
        use.users -= 1
        if not use.users:
            os.close(_in_use.pop(folder).descriptor)


@contextmanager
def collect_uses() -> Iterator[list[Path]]:
    """A list of the folders that this thread uses inside, one entry for each use that is not released there.

    A loader of several models releases their copies with it: one call of `release` for each entry."""
    folders: list[Path] = []
    token = _collected.set(folders)
    try:
        yield folders
    finally:
        _collected.reset(token)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Waits for other processes of the node that hold this lock; one that dies lets go."""
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _make_room(cache: Path, needed_bytes: int) -> None:
    """Removes unused folders, the longest unused first, until the others and `needed_bytes` fit.

    Called with the lock `_ROOM`: of two that look at one time, each would remove a folder for the other's.
    """
    limit = _limit(cache)
    marks = sorted(cache.glob("*.used"), key=lambda mark: mark.stat().st_mtime)
    folders = [mark.with_suffix("") for mark in marks]
    sizes = [sum(map(_size, [folder, *_partial_folders(folder)])) for folder in folders]
    cached_bytes = sum(sizes)
    for mark, folder, size in zip(marks, folders, sizes, strict=True):
        if cached_bytes + needed_bytes <= limit:
            return
        with mark.open("rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if folder.exists():  # renamed first, so that nobody finds a part of it
                folder.rename(_partial_folder(folder))
            for leftover in _partial_folders(folder):
                shutil.rmtree(leftover)
            cached_bytes -= size


def _partial_folder(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")


def _partial_folders(folder: Path) -> list[Path]:
    """What processes download for a folder, and what killed ones have left."""
    return list(folder.parent.glob(f"{folder.name}.{'[0-9a-f]' * 32}"))


def _limit(cache: Path) -> float:
    if not (text := os.environ.get("POLYRANK_CACHE_GIB")):
        return shutil.disk_usage(cache).total / 2
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    require(limit > 0, "POLYRANK_CACHE_GIB", text, "a number of GiB above 0")
    return limit * 2**30


def _size(folder: Path) -> int:
    """Bytes of the files. Where a download has failed, they are removed meanwhile."""
    sizes = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            sizes += file.stat().st_size
    return sizes
