"""Reads raw public files: decompresses them, yields whole lines, and counts every line that is no record.

A stream is recognised by its first bytes, not by its name: Zstandard (with the 2 GiB window of the
Reddit dumps), bzip2, gzip, xz, or plain.
"""

from __future__ import annotations

import bz2
import itertools
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, AnyStr, Literal, TypeGuard

import pyarrow as pa
import zstandard

from pipeline import storage
from pipeline.config import BadInput, require
from pipeline.corpora import file_kinds
from pipeline.corpora.privacy import Privacy
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord, sum_counts

_PIECE_BYTES = 1 << 18  # decompressed at once
_SAMPLED_BYTES = 4 << 20
MAX_SAMPLES = 20  # rejected lines kept per reason and task, for a person to look at
MAX_SAMPLE_CHARACTERS = 2000
MAX_LINE_BYTES = 10 << 20
# Stands for a longer line, before its first characters: the rest of it is never held in memory.
OVERLONG = b"\x00line too long: "


def _zstd() -> Any:
    return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()


_DECOMPRESSORS: tuple[tuple[bytes, Callable[[], Any]], ...] = (
    (b"\x28\xb5\x2f\xfd", _zstd),
    # Skippable frames, with which pzstd begins.
    *((bytes([0x50 + number]) + b"\x2a\x4d\x18", _zstd) for number in range(16)),
    (b"BZh", bz2.BZ2Decompressor),
    (b"\x1f\x8b", lambda: zlib.decompressobj(wbits=31)),
    (b"\xfd7zXZ\x00", lzma.LZMADecompressor),
)
_COMPRESSED_SUFFIX = re.compile(r"\.(zst|zstd|bz2|gz|xz)$", re.IGNORECASE)
_DECOMPRESSION_ERRORS = (zstandard.ZstdError, zlib.error, lzma.LZMAError, OSError, EOFError)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How much damage in the input is tolerated."""

    max_malformed_share: float = 0.01
    """Share of records that may be malformed. Above it the job stops and names the reason."""
    truncated: Literal["stop", "keep"] = "stop"
    """What to do with a truncated or broken compressed file or JSON array: stop, or keep the records
    before the break."""
    files_at_once: int = 0
    """Dump files that are decompressed at once (reddit). Each needs up to 2 GiB of memory and keeps some
    5 cores busy with parsing. 0: one for every 4 cores that are up at the start; a higher number lets a
    cluster grow."""

    def __post_init__(self) -> None:
        require(0 <= self.max_malformed_share <= 1, "reading.max_malformed_share",
                self.max_malformed_share, "0 to 1")  # fmt: skip
        require(self.files_at_once >= 0, "reading.files_at_once", self.files_at_once, ">= 0")


class Truncated(Exception):
    """The compressed stream ends or breaks before its end mark."""


def read_decompressed(uri: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Pieces of a file's contents, decompressed.

    `start`, `end`: only these stored bytes; a compressed stream has to begin at `start`.
    Raises Truncated after the last good piece of a broken stream, and BadInput for a file that is no text.
    """
    pieces = _decompressed(uri, start, end)
    head = next(pieces, b"")
    if not start:
        file_kinds.require_text(uri, head)
    yield from itertools.chain([head] if head else [], pieces)


def _decompressed(uri: str, start: int, end: int | None) -> Iterator[bytes]:
    with closing(storage.read_ahead(uri, start, end)) as stored_pieces:
        pieces = slices(stored_pieces, _PIECE_BYTES)
        first = next(pieces, b"")
        make = next((make for magic, make in _DECOMPRESSORS if first.startswith(magic)), None)
        if make is None:
            yield from itertools.chain([first] if first else [], pieces)
            return
        decompressor = None
        for piece in itertools.chain([first], pieces):
            while piece:  # a file may hold several frames, one after the other
                if decompressor is None:
                    # Behind a frame zeros may follow: xz writes them, and tapes fill blocks with them.
                    piece = piece.lstrip(b"\0")
                    if not piece:
                        break
                    decompressor = make()
                try:
                    data = decompressor.decompress(piece)
                except _DECOMPRESSION_ERRORS as error:
                    raise Truncated(f"{uri}: the compressed stream is broken ({error})") from None
                if data:
                    yield data
                piece = decompressor.unused_data if decompressor.eof else b""
                decompressor = None if decompressor.eof else decompressor
        if decompressor is not None:
            raise Truncated(f"{uri}: the compressed stream is cut off")


def expansion(uri: str) -> tuple[float, float]:
    """(bytes per stored byte, bytes per line) at the beginning of a file, measured by one short read."""
    stored_bytes = min(storage.size_of(uri), _SAMPLED_BYTES)
    size = lines = 0
    with suppress(Truncated):
        for piece in read_decompressed(uri, 0, stored_bytes):
            size += len(piece)
            lines += piece.count(b"\n")
    return size / max(stored_bytes, 1), size / max(lines, 1)


def line_blocks(uri: str, block_bytes: int) -> Iterator[bytes]:
    """The contents in blocks of whole lines, of about `block_bytes` each.

    Of a file without line feeds, carriage returns end the lines. A line over 10 MiB is replaced by
    `OVERLONG` and its beginning. Zeros at the end are left out. Raises Truncated after the last whole line.
    """
    block, skips_line = bytearray(), False  # whole lines, then the beginning of one

    def take(end: int) -> bytes:
        lines = bytes(memoryview(block)[:end])
        del block[:end]
        return lines

    try:
        for piece in with_line_feeds(slices(read_decompressed(uri))):
            if skips_line:  # the rest of a line that is too long
                _, feed, piece = piece.partition(b"\n")
                skips_line = not feed
            block += piece
            end = block.rfind(b"\n") + 1
            if len(block) - end > MAX_LINE_BYTES:
                yield take(end) + OVERLONG + block[:MAX_SAMPLE_CHARACTERS] + b"\n"
                block.clear()
                skips_line = True
            elif end and len(block) >= block_bytes:
                yield take(end)
    except Truncated:
        if end := block.rfind(b"\n") + 1:
            yield take(end)
        raise
    if data := bytes(block.rstrip(b"\0")):  # as behind a compressed stream
        yield data


def with_line_feeds(pieces: Iterable[AnyStr]) -> Iterator[AnyStr]:
    """The pieces; with line feeds for carriage returns where these alone end the lines of the first piece, as
    in files of old spreadsheets and of Excel for the Mac, whose cells in quotes hold line feeds."""
    old_lines: bool | None = None
    for piece in pieces:
        feed, carriage_return, quote = (
            (b"\n", b"\r", b'"') if isinstance(piece, bytes) else ("\n", "\r", '"')
        )
        if old_lines is None:
            before, first_feed, _ = piece.partition(feed)
            is_in_quotes = before.count(quote) % 2 == 1
            old_lines = carriage_return in before[:-1] and (not first_feed or is_in_quotes)
        yield piece.replace(carriage_return, feed) if old_lines else piece


def slices(pieces: Iterable[bytes], size: int = 1 << 20) -> Iterator[bytes]:
    """The same bytes, at most `size` at a time: 256 KiB of a dull stream may hold hundreds of MiB."""
    for piece in pieces:
        for start in range(0, len(piece), size):
            yield piece[start : start + size]


def read_lines(
    uri: str, reading: Reading, notes: list[str] | None = None
) -> Iterator[tuple[int, str]]:
    """(line number from 1, text without its line end) of a whole text file, blank lines too, without the
    mark that some programs begin UTF-8 with.

    Bytes that are no UTF-8 become U+FFFD, and `notes` say in how many lines. Lines end at \\n only: U+2028 is
    text. Raises BadInput for a truncated stream, unless `reading` keeps those: then `notes` say so; and for a
    file in another encoding, in which more lines are not UTF-8 than `reading` lets be malformed.
    """
    number = undecodable = 0
    try:
        for block in line_blocks(uri, 1 << 24):
            if number == 0:
                file_kinds.require_narrow(uri, block)
            damaged_lines = _undecodable_lines(block)
            undecodable += len(damaged_lines)
            lines = number + block.count(b"\n") + (not block.endswith(b"\n"))
            if undecodable > lines * reading.max_malformed_share:
                place, damaged_line = damaged_lines[0]
                raise file_kinds.not_utf8(uri, number + place, damaged_line, option="")
            for line in block.decode("utf-8", errors="replace").removesuffix("\n").split("\n"):
                number += 1
                yield number, line.lstrip("\ufeff").removesuffix("\r")
    except Truncated as error:
        accept_truncated(error, reading, notes if notes is not None else [], number)
    if undecodable and notes is not None:
        notes.append(f"{uri}: U+FFFD for bytes that are not UTF-8 in {undecodable:,} lines")


def _undecodable_lines(block: bytes) -> list[tuple[int, bytes]]:
    """(place from 1, line) of the lines that are not UTF-8."""
    if file_kinds.is_in(block, "utf-8"):
        return []
    lines = enumerate(block.split(b"\n"), start=1)
    return [(place, line) for place, line in lines if not file_kinds.is_in(line, "utf-8")]


def is_overlong(line: str) -> bool:
    """Whether the line stands for one that was too long to be read."""
    return line.startswith(OVERLONG.decode())


def is_text(value: object) -> TypeGuard[str]:
    """Whether it is a string that can be written: JSON may hold half of a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def plain_name(uri: str) -> str:
    """The file's name as it is when decompressed: `lines-aaa` for `lines-aaa.gz`."""
    return _COMPRESSED_SUFFIX.sub("", storage.name_of(uri))


def accept_truncated(
    error: Truncated, reading: Reading, notes: list[str], number: int, unit: str = "lines"
) -> None:
    """Notes that a file is used up to its last whole line. Raises BadInput unless `reading` keeps those."""
    if reading.truncated == "stop":
        advice = "--reading.truncated keep uses what is there"
        raise BadInput(f"{error} after {number:,} whole {unit}; {advice}") from None
    notes.append(f"{error}; its {number:,} whole {unit} are used")


@dataclass
class Rejects:
    """Counts rejected lines by reason, and keeps samples of each reason."""

    counts: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, reason: str, file: str, line: int, text: str) -> None:
        self.counts[reason] += 1
        if self.counts[reason] <= MAX_SAMPLES:
            excerpt = text[:MAX_SAMPLE_CHARACTERS].encode(errors="replace").decode()
            self.samples.append({"reason": reason, "file": file, "line": line, "text": excerpt})

    def save(self, draft: Draft, task: str, privacy: Privacy | None = None) -> None:
        """Writes the samples, redacted as `privacy` says."""
        if not self.samples:
            return
        texts = pa.array([sample["text"] for sample in self.samples], pa.string())
        texts = privacy.redacted_lines(texts) if privacy else texts
        lines = (
            json.dumps({**sample, "text": text}, ensure_ascii=False) + "\n"
            for sample, text in zip(self.samples, texts.to_pylist(), strict=True)
        )
        storage.write_bytes(draft.path("rejected", f"{task}.jsonl"), "".join(lines).encode())


def reasons_text(counts: Mapping[str, int]) -> str:
    """Counts by reason for a person: "3 not JSON, 12 text is empty"."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))


def check_share(draft: Draft, records: Iterable[TaskRecord], reading: Reading) -> None:
    """Raises BadInput for too many malformed records, and for none at all; then the draft is deleted."""
    records = list(records)
    total = sum(record.counts.get("records", 0) for record in records)
    malformed = sum_counts(record.malformed for record in records)
    malformed_count = sum(malformed.values())
    if total == 0:
        storage.delete(draft.staging)  # it has nothing of use
        notes = [note for record in records for note in record.notes]
        raise BadInput("; ".join(["--input: the files hold no records", *notes[:3]]))
    if malformed_count > total * reading.max_malformed_share:
        raise BadInput(
            f"{malformed_count:,} of {total:,} records ({malformed_count / total:.1%}) are malformed "
            f"({reasons_text(malformed)}), more than --reading.max-malformed-share "
            f"{reading.max_malformed_share:g}; see {draft.path('rejected')}"
        )
