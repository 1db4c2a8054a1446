"""Lines of text files whose encoding the user names, or that turn out not to be UTF-8.

Text that is decoded by the wrong encoding is corrupt, and no count shows it. So a file that is not UTF-8 is
refused, with a guess at its encoding. A file with letters beyond ASCII in valid UTF-8 counts as UTF-8: a
later line that is not UTF-8 is damage, which is marked so that the reader sets it aside (see `is_damaged`).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from pipeline.config import BadInput
from pipeline.corpora import file_kinds, raw


def is_known(encoding: str) -> bool:
    """Whether Python can decode the encoding to text."""
    try:
        return codecs.lookup(encoding)._is_text_encoding
    except LookupError:
        return False


def lines(
    uri: str, encoding: str, option: str, reading: raw.Reading, notes: list[str]
) -> Iterator[tuple[int, str]]:
    """(line number from 1, text without its line end) of a whole file, without a byte order mark.

    `option` sets the encoding; "": nothing does. Raises BadInput for a file in another encoding, and as
    `raw.read_lines` for a truncated stream.
    """
    utf8 = codecs.lookup(encoding).name == "utf-8"
    decoded_lines = _utf8_lines(uri, option) if utf8 else _decoded_lines(uri, encoding, option)
    number = 0
    try:
        for number, line in enumerate(decoded_lines, start=1):
            yield number, line.removeprefix("\ufeff").removesuffix("\r")
    except raw.Truncated as error:
        raw.accept_truncated(error, reading, notes, number)


def is_damaged(line: str) -> bool:
    """Whether the line has bytes that are not UTF-8."""
    return not line.isascii() and not raw.is_text(line)


def _utf8_lines(uri: str, option: str) -> Iterator[str]:
    number, is_utf8 = 0, False
    for block in raw.line_blocks(uri, 1 << 24):
        if number == 0:
            file_kinds.require_narrow(uri, block, option)
        for data in block.removesuffix(b"\n").split(b"\n"):
            number += 1
            try:
                line = data.decode()
                is_utf8 = is_utf8 or not line.isascii()
            except UnicodeDecodeError:
                if not is_utf8:
                    raise file_kinds.not_utf8(uri, number, data, option) from None
                line = data.decode(errors="surrogateescape")
            yield line


def _decoded_lines(uri: str, encoding: str, option: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder(encoding)()
    text, number = "", 0
    try:
        pieces = map(decoder.decode, raw.slices(raw.read_decompressed(uri)))
        for piece in raw.with_line_feeds(pieces):
            text += piece
            if len(text) > raw.MAX_LINE_BYTES and "\n" not in text:
                raise BadInput(
                    f"{uri}: line {number + 1} is over 10 MiB; --{option} {encoding} may be wrong"
                )
            *lines, text = text.split("\n")
            number += len(lines)
            yield from lines
        text += decoder.decode(b"", final=True)
    except UnicodeError as error:
        raise BadInput(f"{uri}: line {number + 1} and what follows is not in --{option} {encoding} "
                       f"({error})") from None  # fmt: skip
    if text:
        yield text
