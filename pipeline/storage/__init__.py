"""Reads and writes files at URIs: local paths, s3://, gs://, az:// and abfss:// by obstore, others by fsspec.

A local file is published by a rename and an object by its upload, so nobody sees half of one.

failures       which failures another try may mend, and trying again
object_store   S3, GCS and Azure
locks          files that their owners keep fresh
node_cache     copies of remote folders on a node
fingerprints   of raw input files
npy, prefetch  arrays as files; reading ahead
"""

from __future__ import annotations

import errno
import functools
import os
import posixpath
import re
import stat
import uuid
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from pipeline.config import BadInput, require
from pipeline.storage import object_store
from pipeline.storage.prefetch import map_prefetched

# An object store answers in some 20 to 100 ms and then sends some 80 MB/s: 3 ranges of 8 MiB at a time hide
# the wait, and bring three times what one stream does.
_AHEAD_BYTES = 8 << 20
_RANGES_AHEAD = 3
_TEMPORARY_SUFFIX = ".tmp"
_LEADS_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_URI = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://([^/?]*)([^?]*)(\?.*)?")
_FILE_URI = re.compile(r"file:(?://(?:localhost)?)?(?=/)")


def is_local(uri: str) -> bool:
    return re.match(r"^[a-zA-Z][a-zA-Z0-9+.-]+://", uri) is None or uri.startswith("file://")


def locate(uri: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a URI and the path in it.

    Raises BadInput where the scheme is unknown, and for a URI with a password in it, or with bytes that are
    not UTF-8, which pyarrow and manifests cannot name.
    """
    try:
        uri.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{uri!r}: not UTF-8; allowed: names of files in UTF-8") from None
    if is_local(uri):
        return pafs.LocalFileSystem(), str(_local_path(uri).expanduser().absolute())
    parts = _URI.fullmatch(uri)
    if parts and re.match("[^@]*:[^@]*@", parts[2]):
        shown = f"{parts[1]}://…@{parts[2].rpartition('@')[2]}{parts[3]}"
        raise BadInput(f"{shown}: has a password, which manifests, logs and MLflow would show; allowed: "
                       "a URI without one, and credentials in the environment")  # fmt: skip
    if parts and parts[1] in object_store.SCHEMES:
        root = f"{parts[1]}://{parts[2]}"
        return object_store.file_system(root, parts[4] or ""), parts[3].strip("/")
    try:
        import fsspec  # type: ignore[import-untyped]

        fsspec_system, path = fsspec.core.url_to_fs(uri)
        return pafs.PyFileSystem(pafs.FSSpecHandler(fsspec_system)), str(path)
    except (ImportError, ValueError, OSError) as error:
        reason = (str(error).splitlines() or [""])[0]  # of a missing libjvm there are six
        raise BadInput(f"{uri}: no file system for this URI ({reason})") from None


def _local_path(uri: str) -> Path:
    """The path of a local URI: as it is, or by RFC 8089, where file:/a%20b and file:///a%20b are /a b."""
    if root := _FILE_URI.match(uri):
        return Path(unquote(uri[root.end() :]))
    return Path(uri.removeprefix("file://"))  # file://~/a


def absolute(uri: str) -> str:
    """The URI in a form that all processes understand: a worker has another directory than the driver."""
    return locate(uri)[1] if is_local(uri) else uri


def join(uri: str, *parts: str) -> str:
    """The URI of a path below `uri`, with the query of `uri`, such as `?region=…`, at its end."""
    path, query = _split_query(uri)
    return posixpath.join(path, *parts) + query


def name_of(uri: str) -> str:
    return posixpath.basename(without_query(uri).rstrip("/"))


def parent_of(uri: str) -> str:
    """The URI of the folder that `uri` lies in."""
    path, query = _split_query(uri)
    return posixpath.dirname(path.rstrip("/")) + query


def without_query(uri: str) -> str:
    return _split_query(uri)[0]


def _split_query(uri: str) -> tuple[str, str]:
    """(the path, "" or the query with its question mark, which local paths do not have)"""
    path, mark, query = (uri, "", "") if is_local(uri) else uri.partition("?")
    return path, mark + query


def _type_of(uri: str) -> pafs.FileType:
    """What is at a URI. Raises BadInput where its bucket does not exist."""
    filesystem, path = locate(uri)
    try:
        return filesystem.get_file_info(path).type
    except Exception as error:
        if not _is_of_fsspec(filesystem):
            raise  # its own words say what has failed
        # The client of a hub raises errors of its own.
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise OSError(f"{uri}: Could not connect to server ({reason})") from None


def _is_of_fsspec(filesystem: pafs.FileSystem) -> bool:
    return isinstance(getattr(filesystem, "handler", None), pafs.FSSpecHandler)


def _store_of(filesystem: pafs.FileSystem) -> object_store.ObjectStore | None:
    handler = getattr(filesystem, "handler", None)
    return handler if isinstance(handler, object_store.ObjectStore) else None


def exists(uri: str) -> bool:
    return bool(_type_of(uri) != pafs.FileType.NotFound)


def size_of(uri: str) -> int:
    """Bytes of a file. Raises FileNotFoundError where there is none, OSError where its store does not say."""
    filesystem, path = locate(uri)
    info = filesystem.get_file_info(path)
    if not info.is_file:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), uri)
    if info.size is None:
        raise OSError(f"{uri}: its storage does not say how long it is")
    return int(info.size)


def modified_at(uri: str) -> float:
    """When a file was written, by the clock of its storage, in seconds since 1970.

    Raises FileNotFoundError, and BadInput for a storage that does not say it.
    """
    filesystem, path = locate(uri)
    if _is_of_fsspec(filesystem):  # pyarrow does not pass on the time
        try:
            return float(filesystem.handler.fs.modified(path).timestamp())
        except NotImplementedError:
            raise BadInput(f"{uri}: its storage has no times of files, which locks need") from None
    info = filesystem.get_file_info(path)
    if info.mtime_ns is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), uri)
    return float(info.mtime_ns / 1e9)


def list_files(uri: str) -> list[str]:
    """Every file below a folder, sorted; [] if the folder does not exist.

    Names that begin with "." or "_" are passed over, as every Parquet reader does.
    """
    return [join(uri, path) for path in sizes_below(uri) if not is_hidden(path)]


def is_hidden(path: str) -> bool:
    return any(part[:1] in "._" for part in path.split("/"))


def sizes_below(uri: str) -> dict[str, int]:
    """The bytes of every file below a folder, hidden or not, by its path there, sorted. A folder that several
    symbolic links lead to comes once."""
    if is_local(uri):
        return dict(sorted(_local_sizes(absolute(uri))))
    root, infos = _infos_below(uri, recursive=True)
    files = (info for info in infos if info.type == pafs.FileType.File)
    return dict(sorted((info.path[len(root) :].lstrip("/"), int(info.size or 0)) for info in files))


def _local_sizes(root: str) -> Iterator[tuple[str, int]]:
    """(path, bytes). pyarrow would follow links that lead in a circle, up to 2^40 times."""
    visited = set[str]()

    def fail(error: OSError) -> None:
        # Else a folder that may not be read, or a network disk that is away, would count as empty.
        path = str(error.filename).removeprefix(root).strip("/")
        if error.errno not in _LEADS_NOWHERE and not (path and is_hidden(path)):
            raise error

    for folder, folders, names in os.walk(root, onerror=fail, followlinks=True):
        if (place := os.path.realpath(folder)) in visited:
            folders.clear()
            continue
        visited.add(place)
        folders.sort()
        for path in (f"{folder}/{name}" for name in names):  # Path would take three times as long
            try:
                info = os.stat(path)  # noqa: PTH116
            except OSError as error:  # a link may lead nowhere, and a file may be removed meanwhile
                if error.errno not in _LEADS_NOWHERE:
                    raise
            else:
                if stat.S_ISREG(info.st_mode):
                    yield path.removeprefix(root).lstrip("/"), info.st_size


def _infos_below(uri: str, recursive: bool = False) -> tuple[str, list[pafs.FileInfo]]:
    """(the path of a folder, what is right in it, or below it); nothing where it does not exist."""
    filesystem, root = locate(uri)
    selector = pafs.FileSelector(root, recursive=recursive, allow_not_found=True)
    return root, filesystem.get_file_info(selector)


def names_in(uri: str) -> list[str]:
    """Everything right in a folder, hidden or not."""
    return sorted(name_of(info.path) for info in _infos_below(uri)[1])


def is_folder(uri: str) -> bool:
    return bool(_type_of(uri) == pafs.FileType.Directory)


def list_folders(uri: str) -> list[str]:
    """The folders right in a folder, sorted; [] where it does not exist."""
    infos = _infos_below(uri)[1]
    paths = (info.path for info in infos if info.type == pafs.FileType.Directory)
    return sorted(join(uri, posixpath.basename(path.rstrip("/"))) for path in paths)


def is_occupied(uri: str) -> bool:
    """Whether a file is there, or a folder that holds anything, hidden or not."""
    kind = _type_of(uri)
    if kind == pafs.FileType.Directory:
        return bool(_infos_below(uri)[1])
    return bool(kind != pafs.FileType.NotFound)


def require_file(option: str, uri: str) -> None:
    """Raises BadInput where no file can be written, as far as that can be told without writing one."""
    is_possible = not is_folder(uri)
    if is_local(uri):
        nearest = next(place for place in Path(absolute(uri)).parents if place.exists())
        is_possible &= nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    require(is_possible, option, uri, "a file in a folder that may be written to")


def expand(uris: Sequence[str], option: str = "input") -> list[str]:
    """The files that the URIs name: a file itself, or all files below a folder. A file that has several
    names, by symbolic links, comes once.

    Raises BadInput for a URI that is empty or not there, a pipe, a folder without files, or no URI at all.
    """
    files: list[str] = []
    for uri in uris:
        require(uri != "", option, uri, "a file or a folder")
        kind = _type_of(uri)
        if kind == pafs.FileType.NotFound:
            hint = "; patterns are not expanded" if re.search(r"[*?\[]", uri) else ""
            raise BadInput(f"--{option} {uri}: no such file or folder{hint}")
        if kind == pafs.FileType.Unknown:
            raise BadInput(f"--{option} {uri}: a pipe or a device; allowed: a file or a folder")
        # By their paths, because names of files have no percent escapes.
        folder_or_file = absolute(uri)
        is_file = kind == pafs.FileType.File
        uri_files = [folder_or_file] if is_file else list_files(folder_or_file)
        if not uri_files:
            raise BadInput(f"--{option} {uri}: the folder holds no files")
        files += uri_files
    if not files:
        raise BadInput(f"--{option}: no file is named")
    real_folder = functools.cache(os.path.realpath)  # which takes 20 µs
    uri_of_file = dict[str, str]()
    for uri in files:
        if not is_local(uri):
            real = uri
        elif os.path.islink(uri):  # noqa: PTH114
            real = os.path.realpath(uri)
        else:
            folder, name = posixpath.split(uri)
            real = posixpath.join(real_folder(folder), name)
        uri_of_file.setdefault(real, uri)
    return list(uri_of_file.values())


def open_input(uri: str) -> Any:
    """A binary, seekable stream (pyarrow.NativeFile) of the stored bytes, not decompressed."""
    filesystem, path = locate(uri)
    return filesystem.open_input_file(path)


def open_ranges(uri: str) -> object_store.RangedInput:
    """A file that can hold some of its ranges, if it is an object. It need not be closed."""
    filesystem, path = locate(uri)
    if store := _store_of(filesystem):
        return store.open_ranges(path)
    stream = open_input(uri)
    return object_store.RangedInput(
        int(stream.size()), lambda start, length: stream.read_at(length, start)
    )


def read_range(uri: str, start: int, length: int) -> bytes:
    """So many bytes of a file. Raises OSError where it ends before them."""
    filesystem, path = locate(uri)
    if store := _store_of(filesystem):
        return store.read_range(path, start, length)
    with open_input(uri) as stream:
        data: bytes = stream.read_at(length, start)
    if len(data) != length:
        raise OSError(f"{uri}: {len(data):,} bytes came of {length:,}")
    return data


def read_ahead(uri: str, start: int = 0, end: int | None = None) -> Generator[bytes, None, None]:
    """The stored bytes from `start` to `end` in pieces of up to 8 MiB; from a remote store, the next ones
    are on their way while one is used."""
    end = size_of(uri) if end is None else end
    starts = range(start, end, _AHEAD_BYTES)

    def read(offset: int) -> bytes:
        return read_range(uri, offset, min(_AHEAD_BYTES, end - offset))

    if is_local(uri):
        yield from map(read, starts)
    else:
        yield from map_prefetched(read, starts, _RANGES_AHEAD, _RANGES_AHEAD)


def read_bytes(uri: str) -> bytes:
    filesystem, path = locate(uri)
    if store := _store_of(filesystem):
        return store.read(path)  # one request; `open_input` asks for the size first
    with open_input(uri) as stream:
        return bytes(stream.read())


def write_bytes(uri: str, data: bytes | pa.Buffer) -> None:
    """Writes a whole file, atomically."""
    write_pieces(uri, (data,))


def write_pieces(uri: str, pieces: Iterable[bytes | pa.Buffer]) -> None:
    """Writes a file that need not fit into memory. Locally it is there when it is whole; in an object store
    a write that fails may leave its beginning."""
    filesystem, path = locate(uri)
    if isinstance(filesystem, pafs.LocalFileSystem):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        _write_temporary(Path(path), pieces).replace(path)
        return
    # By default pyarrow compresses what is called .zst, .gz or .bz2, also where it is that already.
    open_stream = functools.partial(filesystem.open_output_stream, path, compression=None)
    try:
        stream = open_stream()
    except FileNotFoundError:  # a store with folders, such as sftp://
        filesystem.create_dir(posixpath.dirname(path), recursive=True)
        stream = open_stream()
    except NotImplementedError:  # such as https://
        raise BadInput(f"{uri}: its storage can only be read") from None
    with stream:
        for piece in pieces:
            stream.write(piece)


def create_bytes(uri: str, data: bytes) -> bool:
    """Creates a file. False: there is one already, which stays as it is.

    One atomic step, locally and in S3, GCS and Azure. In other stores, which only fsspec knows, the later
    one of two that write at the same moment wins, and the earlier one may not notice.
    """
    filesystem, path = locate(uri)
    if isinstance(filesystem, pafs.LocalFileSystem):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        temporary = _write_temporary(Path(path), (data,))
        try:
            Path(path).hardlink_to(temporary)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True
    if store := _store_of(filesystem):
        return store.create(path, data)
    if exists(uri):
        return False
    write_bytes(uri, data)
    return read_bytes(uri) == data


def _write_temporary(path: Path, pieces: Iterable[bytes | pa.Buffer]) -> Path:
    """A file next to `path`. Its name is hidden: a write that is killed leaves it behind, until
    `remove_unfinished`."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{_TEMPORARY_SUFFIX}")
    try:
        with naming(path), temporary.open("wb") as stream:
            for piece in pieces:
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:  # such as a full disk, which half a file should not fill further
        temporary.unlink(missing_ok=True)
        raise
    return temporary


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of the system that names no file, such as that of a full disk, names this one."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:  # without a number the text would be lost
            error.filename = str(path)  # it says which disk
        raise


def remove_unfinished(uri: str, deep: bool = True) -> None:
    """Removes what writes that were killed have left in a local folder, and `deep` below it.

    Nobody else may be writing there. In an object store there is nothing: an upload that ends early is no
    object.
    """
    if is_local(uri):
        folder = Path(absolute(uri))
        for file in (folder.rglob if deep else folder.glob)(f".*{_TEMPORARY_SUFFIX}"):
            file.unlink(missing_ok=True)


def delete(uri: str) -> None:
    """Removes a file or a folder with all below it, if it is there and nobody else is removing it."""
    filesystem, path = locate(uri)
    kind = filesystem.get_file_info(path).type
    with suppress(FileNotFoundError):
        if kind == pafs.FileType.Directory:
            filesystem.delete_dir(path)
        elif kind == pafs.FileType.File:
            filesystem.delete_file(path)


def upload(folder: Path, uri: str) -> None:
    """Copies a local folder's files to `uri`, which may be local too."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())

    def copy(file: Path) -> None:
        with file.open("rb") as source:
            pieces = iter(lambda: source.read(_AHEAD_BYTES), b"")
            write_pieces(join(uri, file.relative_to(folder).as_posix()), pieces)

    for _ in map_prefetched(copy, files):
        pass


def walk_json(uri: str) -> Iterator[str]:
    """The JSON files right in a folder, also where their names are hidden from `list_files`."""
    for info in sorted(_infos_below(uri)[1], key=lambda info: str(info.path)):
        if info.type == pafs.FileType.File and info.path.endswith(".json"):
            yield join(uri, posixpath.basename(info.path))
