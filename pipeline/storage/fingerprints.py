"""Fingerprints of raw input files, which are part of a job's identity."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline import storage
from pipeline.config import Stopped
from pipeline.storage.prefetch import map_prefetched

_PIECE_BYTES = 1 << 16
_WHOLE_BYTES = 1 << 24


def raw_fingerprint(
    uris: Sequence[str], whole: bool = False, input_name: Callable[[str], str] = storage.name_of
) -> str:
    """Names the contents of raw input files, wherever they lie: by name, size and pieces.

    `input_name`: what a job reads of a file's URI, by default the last part; also folders, where they decide
    something.

    Files of up to 16 MiB count with every byte. Larger ones, dumps of terabytes among them, count with 16
    pieces of 64 KiB, the first and the last too, and with the time of their last change: an edit that the
    pieces miss is noticed, and a copy with a new time counts as another file. `whole`: every byte of all
    files, and no time.
    """
    total = hashlib.sha256()
    for text in map_prefetched(
        lambda uri: f"{input_name(uri)} {_describe_contents(uri, whole)}",
        sorted(uris, key=input_name),
    ):
        total.update(text.encode())
    return total.hexdigest()


@dataclass(frozen=True)
class Stamps:
    """Sizes and times of files before a job names their contents. Checked after the job has read them, they
    tell that it has read what it named, and no export that was still being written."""

    stamp_of_file: dict[str, tuple[int, int | None]]

    @classmethod
    def of(cls, uris: Sequence[str]) -> Stamps:
        def stamp(uri: str) -> tuple[int, int | None]:
            filesystem, path = storage.locate(uri)
            info = filesystem.get_file_info(path)
            return int(info.size or 0), info.mtime_ns

        return cls(dict(zip(uris, map_prefetched(stamp, uris), strict=True)))

    def check(self, option: str, staging: str) -> None:
        """Raises Stopped, naming the first file that has changed, and removes what was made of it."""
        now = Stamps.of(list(self.stamp_of_file)).stamp_of_file
        for uri, stamp in self.stamp_of_file.items():
            if now[uri] != stamp:
                storage.delete(staging)
                changed = f"--{option} {uri}: has changed while it was read"
                raise Stopped(f"{changed}; the same command begins anew")


def _describe_contents(uri: str, whole: bool) -> str:
    filesystem, path = storage.locate(uri)
    info = filesystem.get_file_info(path)
    size, digest, mtime_text = int(info.size or 0), hashlib.sha256(), ""
    if whole or size <= _WHOLE_BYTES:
        for piece in storage.read_ahead(uri, 0, size):
            digest.update(piece)
    else:
        mtime_text = f" {info.mtime_ns}"
        for number in range(16):
            offset = (size - _PIECE_BYTES) * number // 15
            digest.update(storage.read_range(uri, offset, _PIECE_BYTES))
    return f"{size} {digest.hexdigest()}{mtime_text}\n"
