"""Checks that the files of a pool, and what a node downloads of any artifact, are those that were published.

Sizes are compared whenever files are opened. Checksums are computed `once`: by the first process of a
node that opens these files, and again only when a file's size, time or inode has changed. A note in the
node's cache folder says which files have passed. `always` ignores the notes, for disks that decay in silence.
`never` is for the process that has just written the pool.

`once` compares CRC-32, which finds damage by accident in half the time, and `always` compares SHA-256. An
opening ends when all checksums are compared, so no answer comes from a byte that was not: a service opens a
version beside the one that answers, and goes on with that one where the new one is damaged. All cores compute
checksums while the files are mapped.
"""

from __future__ import annotations

import functools
import hashlib
import os
import zlib
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from pipeline import storage
from pipeline.config import BadInput, digest, require
from pipeline.storage import node_cache

Check = Literal["once", "always", "never"]
_BUFFER_BYTES = 1 << 17  # stays in a core's cache


@contextmanager
def checking(
    uri: str,
    manifest: Mapping[str, Any],
    folder: Path,
    check: Check,
    only: Collection[str] | None = None,
) -> Iterator[None]:
    """Checks the files in `folder` in other threads, on all cores, while the caller does something else, such
    as opening them. At the end raises BadInput, naming the first file with another checksum than the manifest
    of the artifact at `uri` says.

    `only`: paths of the files to check; None: all. Ids are not compared: the plan of a pool refuses an id of
    several texts, and among 70 million ids that takes a minute.
    """
    require(check in ("once", "always", "never"), "check", check, "once, always, never")
    if check == "never":
        yield
        return
    entries = [e for e in manifest["files"] if only is None or e["path"] in only]
    facts: list[Any] = [manifest["fingerprint"], str(folder)]
    for entry in entries:
        stat = (folder / entry["path"]).stat()
        facts.append([entry["sha256"], stat.st_size, stat.st_mtime_ns, stat.st_ino])
    note = node_cache.cache_folder() / "checked" / digest(facts)
    if check == "once" and note.exists():
        yield
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing lets other threads run
        results = pool.map(functools.partial(_is_whole, folder, check), entries)
        try:
            yield
            for entry, is_whole in zip(entries, results, strict=True):
                if not is_whole:
                    file = storage.join(uri, entry["path"])
                    raise BadInput(f"{file}: damaged (its checksum is not the manifest's)")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    with suppress(OSError):  # of a full or read-only disk; the next process computes them again
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()


def _is_whole(folder: Path, check: Check, entry: Mapping[str, Any]) -> bool:
    """Whether a file has the checksum of its entry in the manifest."""
    crc32, buffer = 0, memoryview(bytearray(_BUFFER_BYTES))
    with (folder / entry["path"]).open("rb", buffering=0) as file:
        if check == "always" or "crc32" not in entry:
            return bool(entry["sha256"] == hashlib.file_digest(file, "sha256").hexdigest())
        while size := file.readinto(buffer):
            crc32 = zlib.crc32(buffer[:size], crc32)
    return bool(crc32 == entry["crc32"])
