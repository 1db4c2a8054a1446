"""Files behind a URI: a local path, s3://, gs://, hdfs:// or whatever else pyarrow or fsspec reads.

A local file is published by a rename and an object by its upload, so nobody sees half of one.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from pipeline.config import BadInput

_PIECE_BYTES = 1 << 16
_WHOLE_BYTES = 1 << 24


def is_local(uri: str) -> bool:
    return re.match(r"^[a-zA-Z][a-zA-Z0-9+.-]+://", uri) is None or uri.startswith("file://")


def locate(uri: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a URI and the path in it.

    Raises BadInput where the scheme is unknown.
    """
    if is_local(uri):
        return pafs.LocalFileSystem(), str(
            Path(uri.removeprefix("file://")).expanduser().absolute()
        )
    try:
        filesystem, path = pafs.FileSystem.from_uri(uri)
        return filesystem, path
    except pa.ArrowInvalid:
        pass
    try:
        import fsspec  # type: ignore[import-untyped]

        other, path = fsspec.core.url_to_fs(uri)
        return pafs.PyFileSystem(pafs.FSSpecHandler(other)), str(path)
    except (ImportError, ValueError) as error:
        raise BadInput(f"{uri}: no file system for this URI ({error})") from None


def absolute(uri: str) -> str:
    """The URI as every process means it: a worker's directory is not the driver's."""
    return locate(uri)[1] if is_local(uri) else uri


def join(uri: str, *parts: str) -> str:
    return posixpath.join(uri, *parts)


def name_of(uri: str) -> str:
    return posixpath.basename(uri.rstrip("/"))


def exists(uri: str) -> bool:
    filesystem, path = locate(uri)
    return bool(filesystem.get_file_info(path).type != pafs.FileType.NotFound)


def size_of(uri: str) -> int:
    filesystem, path = locate(uri)
    return int(filesystem.get_file_info(path).size or 0)


def list_files(uri: str) -> list[str]:
    """Every file below a folder, sorted; [] where the folder does not exist.

    Names that begin with "." or "_" are passed over, as every Parquet reader does.
    """
    below = sizes_below(uri)
    return [
        join(uri, name) for name in below if not any(part[:1] in "._" for part in name.split("/"))
    ]


def sizes_below(uri: str) -> dict[str, int]:
    """The bytes of every file below a folder, hidden or not, by its path there, sorted."""
    filesystem, root = locate(uri)
    selector = pafs.FileSelector(root, recursive=True, allow_not_found=True)
    infos = filesystem.get_file_info(selector)
    files = (info for info in infos if info.type == pafs.FileType.File)
    return dict(sorted((info.path[len(root) :].lstrip("/"), int(info.size or 0)) for info in files))


def names_in(uri: str) -> list[str]:
    """Everything right in a folder, hidden or not."""
    filesystem, path = locate(uri)
    return sorted(name_of(info.path) for info in filesystem.get_file_info(pafs.FileSelector(path)))


def list_folders(uri: str) -> list[str]:
    """The folders right in a folder, sorted; [] where it does not exist."""
    filesystem, root = locate(uri)
    infos = filesystem.get_file_info(pafs.FileSelector(root, allow_not_found=True))
    found = (info.path for info in infos if info.type == pafs.FileType.Directory)
    return sorted(join(uri, posixpath.basename(path.rstrip("/"))) for path in found)


def is_occupied(uri: str) -> bool:
    """Whether a file is there, or a folder that holds anything, hidden or not."""
    filesystem, path = locate(uri)
    kind = filesystem.get_file_info(path).type
    if kind == pafs.FileType.Directory:
        return bool(filesystem.get_file_info(pafs.FileSelector(path)))
    return bool(kind != pafs.FileType.NotFound)


def expand(uris: Sequence[str], option: str = "input") -> list[str]:
    """The files that the URIs name: a file itself, or all files below a folder.

    Raises BadInput for a URI that is not there, a folder without files, or no URI at all.
    """
    files: list[str] = []
    for uri in uris:
        filesystem, path = locate(uri)
        kind = filesystem.get_file_info(path).type
        if kind == pafs.FileType.NotFound:
            raise BadInput(f"--{option} {uri}: no such file or folder")
        found = [uri] if kind == pafs.FileType.File else list_files(uri)
        if not found:
            raise BadInput(f"--{option} {uri}: the folder holds no files")
        files += map(absolute, found)
    if not files:
        raise BadInput(f"--{option}: no file is named")
    return list(dict.fromkeys(files))


def open_input(uri: str) -> Any:
    """A binary, seekable stream (pyarrow.NativeFile) of the stored bytes, not decompressed."""
    filesystem, path = locate(uri)
    return filesystem.open_input_file(path)


def read_bytes(uri: str) -> bytes:
    with open_input(uri) as stream:
        data = stream.read()
    assert isinstance(data, bytes)
    return data


def write_bytes(uri: str, data: bytes | pa.Buffer) -> None:
    """Writes a whole file, atomically."""
    filesystem, path = locate(uri)
    if isinstance(filesystem, pafs.LocalFileSystem):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        beside = _write_beside(Path(path), data)
        beside.replace(path)
    else:
        with filesystem.open_output_stream(path) as stream:
            stream.write(data)


def create_bytes(uri: str, data: bytes) -> bool:
    """Writes a file that is not there; False where there is one, which stays as it is.

    Atomic locally. Of two that write to an object store at the same moment, the later one wins, and
    the earlier one may not notice.
    """
    filesystem, path = locate(uri)
    if isinstance(filesystem, pafs.LocalFileSystem):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        beside = _write_beside(Path(path), data)
        try:
            Path(path).hardlink_to(beside)
        except FileExistsError:
            return False
        finally:
            beside.unlink()
        return True
    if exists(uri):
        return False
    write_bytes(uri, data)
    return read_bytes(uri) == data


def _write_beside(path: Path, data: bytes | pa.Buffer) -> Path:
    """A file next to `path`. Its name is hidden: a write that is killed leaves it behind."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with beside.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError:  # a full disk, which half a file should not fill further
        beside.unlink(missing_ok=True)
        raise
    return beside


def delete(uri: str) -> None:
    """Removes a file or a folder with all below it, if it is there."""
    filesystem, path = locate(uri)
    kind = filesystem.get_file_info(path).type
    if kind == pafs.FileType.Directory:
        filesystem.delete_dir(path)
    elif kind == pafs.FileType.File:
        filesystem.delete_file(path)


def upload(folder: Path, uri: str) -> None:
    """Copies a local folder's files to `uri`, which may be local too."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            write_bytes(join(uri, file.relative_to(folder).as_posix()), file.read_bytes())


def download(uri: str, folder: Path) -> None:
    """Copies the files of `uri`, which may be local too, into a local folder."""
    for file in list_files(uri):
        write_bytes(str(folder / file[len(uri) :].lstrip("/")), read_bytes(file))


def local_folder(uri: str, version: str) -> Path:
    """A local folder with the files of `uri`: itself if it is local, else a cached copy.

    `version` names the contents (a fingerprint), so that a copy is never taken for another version.
    """
    if is_local(uri):
        return Path(locate(uri)[1])
    name = hashlib.sha256(f"{uri} {version}".encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"polyrank-cache-{os.getuid()}" / name
    if not folder.exists():
        beside = folder.with_name(f"{name}.{uuid.uuid4().hex}")
        download(uri, beside)
        try:
            beside.rename(folder)
        except OSError:  # another process of this node was faster
            delete(str(beside))
    return folder


def file_digest(data: bytes | pa.Buffer) -> str:
    return hashlib.sha256(data).hexdigest()


def raw_fingerprint(uris: Sequence[str], whole: bool = False, purpose: str = "") -> str:
    """Names the contents of raw input files, wherever they lie: by name, size and pieces.

    Files of up to 16 MiB count with every byte; of larger ones, dumps of terabytes among them, 16
    pieces of 64 KiB, the first and the last too. `whole`: every byte of all files. `purpose` makes
    another name of the same contents.
    """
    total = hashlib.sha256(purpose.encode())
    for uri in sorted(uris, key=name_of):
        size = size_of(uri)
        digest = hashlib.sha256()
        with open_input(uri) as stream:
            if whole or size <= _WHOLE_BYTES:
                while piece := stream.read(1 << 20):
                    digest.update(piece)
            else:
                for number in range(16):
                    stream.seek((size - _PIECE_BYTES) * number // 15)
                    digest.update(stream.read(_PIECE_BYTES))
        total.update(f"{name_of(uri)} {size} {digest.hexdigest()}\n".encode())
    return total.hexdigest()


def walk_json(uri: str) -> Iterator[str]:
    """The JSON files right in a folder, also where their names are hidden from `list_files`."""
    filesystem, root = locate(uri)
    selector = pafs.FileSelector(root, recursive=False, allow_not_found=True)
    for info in sorted(filesystem.get_file_info(selector), key=lambda info: str(info.path)):
        if info.type == pafs.FileType.File and info.path.endswith(".json"):
            yield join(uri, posixpath.basename(info.path))
