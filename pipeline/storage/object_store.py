"""S3, GCS and Azure as a file system of pyarrow, by obstore.

All requests of a store have one chain of credentials and one way to try again. For S3 the credentials are
those that botocore finds, and renews: roles of nodes, variables, and profiles with keys, SSO, `role_arn` or
`credential_process`. A failed request, and an answer that ends early, is asked for again by obstore.

obstore makes a file that only one of many can make: the store itself (S3: `If-None-Match: *`; GCS and Azure:
their preconditions) answers one writer with success and all others with a refusal.
"""

from __future__ import annotations

import functools
import io
import os
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import pyarrow as pa
import pyarrow.fs as pafs

from pipeline.config import BadInput
from pipeline.storage.failures import with_retries

if TYPE_CHECKING:
    from obstore.store import S3Credential

SCHEMES = ("s3", "gs", "gcs", "az", "abfs", "abfss")
_PART_BYTES = 8 << 20  # of an upload in parts
# botocore renews credentials 10 minutes before they end at the latest; obstore asks 5 minutes before that.
_ASK_AGAIN = timedelta(minutes=10)
# 6 more tries take some 10 s. `timeout` is of a whole request, by default 30 s: too short for gigabytes.
_RETRIES: Any = {"max_retries": 6, "retry_timeout": timedelta(seconds=60)}
# obstore does not send again what may have been done where a connection is reset: deletions, and creations.
_AFTER_A_RESET_S = (1.0,)
# http:// is allowed where an endpoint names it.
_CLIENT: Any = {"connect_timeout": "5s", "read_timeout": "30s", "timeout": "1h", "allow_http": True}


class ObjectStore(pafs.FileSystemHandler):  # type: ignore[misc]
    """A bucket or container. Paths are those of its objects; a folder is there while objects are below it.

    It can be pickled: each process has connections and credentials of its own.
    """

    def __init__(self, root: str, query: str) -> None:
        self.root, self.query = root, query

    @property
    def store(self) -> Any:
        return _store(self.root, self.query)

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        """obstore's errors as OSError, in one line."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError) as error:  # some are both
            text = " ".join(str(error).partition("\n\nDebug source")[0].split())
            if re.search("<Code>(NoSuchBucket|ContainerNotFound|ResourceNotFound)</Code>", text):
                raise _no_bucket(self.root, path) from None
            kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
            raise kind(f"{self.root}/{path}: {text[:1000]}") from None

    def read(self, path: str) -> bytes:
        with self._errors(path):
            return bytes(self.store.get(path).bytes())

    def read_range(self, path: str, start: int, length: int) -> bytes:
        with self._errors(path):
            data = self.store.get_range(path, start=start, length=length) if length else b""
            if len(data) != length:
                raise OSError(f"{len(data):,} bytes came of {length:,}")
        return bytes(data)

    def read_ranges(self, path: str, starts: Sequence[int], ends: Sequence[int]) -> list[Any]:
        """Buffers. Ranges that lie close together come by one request, and several requests at a time."""
        with self._errors(path):
            return list(self.store.get_ranges(path, starts=starts, ends=ends))

    def open_ranges(self, path: str) -> RangedInput:
        with self._errors(path):
            size = self.store.head(path)["size"]
        read_range = functools.partial(self.read_range, path)
        return RangedInput(size, read_range, functools.partial(self.read_ranges, path))

    def create(self, path: str, data: bytes) -> bool:
        """Writes an object; False where it is there already, also by a try whose answer was lost."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        def put() -> bool:
            with self._errors(path):
                try:
                    self.store.put(path, data, mode="create", use_multipart=False)
                except (AlreadyExistsError, PreconditionError):
                    return False
            return True

        return with_retries(put, _AFTER_A_RESET_S)

    # What pyarrow asks for

    def get_type_name(self) -> str:
        return self.root.partition(":")[0]

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: Sequence[str]) -> list[pafs.FileInfo]:
        return [self._file(path) or self._folder(path) for path in paths]

    def _file(self, path: str) -> pafs.FileInfo | None:
        if not path:
            return None
        try:
            with self._errors(path):
                return _info(self.store.head(path))
        except FileNotFoundError:
            return None

    def _folder(self, path: str) -> pafs.FileInfo:
        def ask() -> bool:
            with self._errors(path):  # the first page of its objects, not all of them
                return not path or any(self.store.list(path, chunk_size=1))

        is_there = with_retries(ask)
        return pafs.FileInfo(path, pafs.FileType.Directory if is_there else pafs.FileType.NotFound)

    def _list(self, folder: str, recursive: bool) -> tuple[Sequence[str], Sequence[Any]]:
        """(folders, objects) in a folder; recursive: ([], all objects below)"""

        def ask() -> tuple[Sequence[str], Sequence[Any]]:
            with self._errors(folder):
                if recursive:
                    return [], self.store.list(folder or None).collect()
                listed = self.store.list_with_delimiter(folder or None)
                return listed["common_prefixes"], listed["objects"]

        return with_retries(ask)  # obstore does not, where the answer ends early

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        folders, objects = self._list(selector.base_dir, selector.recursive)
        if selector.recursive:
            level = {posixpath.dirname(found["path"]) for found in objects}
            while level := {folder for folder in level if len(folder) > len(selector.base_dir)}:
                folders = [*folders, *sorted(level)]
                level = {posixpath.dirname(folder) for folder in level}
        infos = [pafs.FileInfo(folder, pafs.FileType.Directory) for folder in folders]
        # Consoles mark a folder by an empty object whose name ends with a slash, which obstore leaves out.
        return infos + [_info(o) for o in objects if o["size"] or self._file(o["path"])]

    def create_dir(self, path: str, recursive: bool) -> None:
        pass

    def delete_dir(self, path: str) -> None:
        def delete_all() -> None:
            with self._errors(path):
                paths = [found["path"] for found in self.store.list(path).collect()]
                try:
                    self.store.delete(paths)
                except FileNotFoundError:  # GCS and Azure, where another has removed one meanwhile
                    for each in paths:
                        with suppress(FileNotFoundError):
                            self.store.delete(each)

        with_retries(delete_all, _AFTER_A_RESET_S)

    def delete_file(self, path: str) -> None:
        def delete() -> None:
            with self._errors(path):
                self.store.delete(path)

        with_retries(delete, _AFTER_A_RESET_S)

    def open_input_file(self, path: str) -> pa.PythonFile:
        return pa.PythonFile(self.open_ranges(path), "r")

    open_input_stream = open_input_file

    def open_output_stream(self, path: str, metadata: Mapping[str, str]) -> pa.PythonFile:
        return pa.PythonFile(_Output(self, path), "w")

    def _missing(self, *_: object) -> None:
        raise NotImplementedError(f"{self.root}: nobody asks an object store for this")

    delete_dir_contents = delete_root_dir_contents = move = copy_file = open_append_stream = (
        _missing
    )


class RangedInput(io.RawIOBase):
    """A file of which each read is a request, but for the ranges that are held."""

    def __init__(
        self,
        size: int,
        read_range: Callable[[int, int], bytes],
        read_ranges: Callable[[Sequence[int], Sequence[int]], list[Any]] | None = None,
    ) -> None:
        self._size, self._position = size, 0
        self._read_range, self._read_ranges = read_range, read_ranges
        self._held = dict[int, Any]()
        self.error: Exception | None = None
        """Tells a store that fails from a broken file, for parsers that raise OSError for both."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def read(self, size: int = -1) -> Any:
        rest = max(0, self._size - self._position)
        start, length = self._position, rest if size < 0 else min(size, rest)
        self._position += length
        for held_start, data in self._held.items():
            offset = start - held_start
            if offset >= 0 and offset + length <= len(data):
                return memoryview(data)[offset : offset + length]
        return self._noting_errors(self._read_range, start, length)

    def hold(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Reads these ranges of an object at once, and holds them in place of the earlier ones."""
        self._held.clear()  # before the next ones take their memory
        if self._read_ranges:
            # obstore refuses empty ones, such as of a row group without rows.
            ranges = [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
            starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
            data = self._noting_errors(self._read_ranges, starts, ends)
            self._held = dict(zip(starts, data, strict=True))

    def _noting_errors(self, read: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return read(*arguments)
        except OSError as error:
            self.error = error
            raise


class _Output(io.RawIOBase):
    """An object that is there once it is closed; above 8 MiB it is uploaded in parts."""

    def __init__(self, store: ObjectStore, path: str) -> None:
        import obstore

        self._errors = functools.partial(store._errors, path)
        with self._errors():
            self._writer = obstore.open_writer(store.store, path, buffer_size=_PART_BYTES)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with self._errors():
            return self._writer.write(memoryview(data).cast("B"))

    def close(self) -> None:
        if not self.closed:
            super().close()
            with self._errors():
                self._writer.close()


def _info(found: Mapping[str, Any]) -> pafs.FileInfo:
    return pafs.FileInfo(
        found["path"], pafs.FileType.File, size=found["size"], mtime=found["last_modified"]
    )


def _no_bucket(root: str, path: str = "") -> BadInput:
    return BadInput(f"{root}/{path}: there is no bucket {root.rpartition('/')[2]!r}")


@functools.cache
def file_system(root: str, query: str) -> pafs.PyFileSystem:
    """The file system of a bucket, such as s3://bucket. `query`: of the URI, such as ?endpoint_override=…"""
    return pafs.PyFileSystem(ObjectStore(root.replace("gcs://", "gs://"), query))


@functools.cache
def _store(root: str, query: str) -> Any:
    from obstore.store import from_url

    if not root.startswith("s3:"):
        return from_url(root, client_options=_CLIENT, retry_config=_RETRIES)
    options = {name: values[0] for name, values in parse_qs(query.removeprefix("?")).items()}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    if override := options.get("endpoint_override"):
        has_scheme = "://" in override
        endpoint = override if has_scheme else f"{options.get('scheme', 'https')}://{override}"
    config: Any = {"endpoint": endpoint} if endpoint else {}
    if region := options.get("region"):
        config["region"] = region
    elif not endpoint:
        try:
            config["region"] = pafs.resolve_s3_region(root.removeprefix("s3://"))
        except OSError as error:
            raise _no_bucket(root) if "not found" in str(error) else error from None
    provider: Any = _s3_credentials
    if _botocore_credentials() is None:
        config["skip_signature"], provider = True, None  # as for public buckets
    return from_url(root, config=config, client_options=_CLIENT, retry_config=_RETRIES,
                    credential_provider=provider)  # fmt: skip


@functools.cache
def _botocore_credentials() -> Any:
    """The credentials that botocore finds for this process; None: there are none."""
    import botocore.session
    from botocore.exceptions import BotoCoreError

    try:
        return botocore.session.get_session().get_credentials()
    except BotoCoreError as error:
        raise BadInput(f"no credentials for S3: {error}") from None


def _s3_credentials() -> S3Credential:
    """What botocore has now. It renews what is about to end."""
    frozen = _botocore_credentials().get_frozen_credentials()
    return {
        "access_key_id": frozen.access_key,
        "secret_access_key": frozen.secret_key,
        "token": frozen.token,
        "expires_at": datetime.now(UTC) + _ASK_AGAIN,
    }
