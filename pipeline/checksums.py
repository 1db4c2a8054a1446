"""Checks that the files of a pool, and what a node downloads of any artifact, are those that were published.

Sizes are compared whenever files are opened. Checksums are computed `once`: by the first process of a
node that opens these files, and again only when a file's size, time or inode has changed. A note in the
node's cache folder says which files have passed. `always` ignores the notes, for disks that decay in silence.
`never` is for the process that has just written the pool.

An opening ends when all checksums are compared, so no answer comes from a byte that was not: a service opens
a version beside the one that answers, and goes on with that one where the new one is damaged. All cores
compute checksums, at some 1.5 GB a second each, while the files are mapped.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from pipeline import storage
from pipeline.config import BadInput, digest, require
from pipeline.storage import node_cache

Check = Literal["once", "always", "never"]


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
        digests = pool.map(_sha256, [folder / entry["path"] for entry in entries])
        try:
            yield
            for entry, sha256 in zip(entries, digests, strict=True):
                if sha256 != entry["sha256"]:
                    file = storage.join(uri, entry["path"])
                    raise BadInput(f"{file}: damaged (its checksum is not the manifest's)")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    with suppress(OSError):  # of a full or read-only disk; the next process computes them again
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
