"""Fingerprints of raw input files, which are part of a job's identity."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from pipeline import storage

_PIECE_BYTES = 1 << 16
_WHOLE_BYTES = 1 << 24
_FILES_AT_ONCE = 16


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
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        sorted_uris = sorted(uris, key=input_name)
        for text in pool.map(
            lambda uri: f"{input_name(uri)} {_describe_contents(uri, whole)}", sorted_uris
        ):
            total.update(text.encode())
    return total.hexdigest()


def _describe_contents(uri: str, whole: bool) -> str:
    filesystem, path = storage.locate(uri)
    info = filesystem.get_file_info(path)
    size, digest, mtime_text = int(info.size or 0), hashlib.sha256(), ""
    if whole or size <= _WHOLE_BYTES:
        for piece in storage.read_ahead(uri, 0, size):
            digest.update(piece)
    else:
        mtime_text = f" {info.mtime_ns}"
        with storage.open_input(uri) as stream:
            for number in range(16):
                offset = (size - _PIECE_BYTES) * number // 15
                digest.update(stream.read_at(_PIECE_BYTES, offset))
    return f"{size} {digest.hexdigest()}{mtime_text}\n"
