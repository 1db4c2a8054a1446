"""Lines of text files whose encoding the user names, or that turn out not to be UTF-8.

Text that is decoded by the wrong encoding is corrupt, and no count shows it. So a file that is not UTF-8 is
refused, with a guess at its encoding. A file whose first letter beyond ASCII is valid UTF-8 counts as UTF-8:
what is not UTF-8 behind it is damage, which is marked so that the reader sets it aside (see `is_damaged`).
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
            yield number, line.lstrip("\ufeff").removesuffix("\r")
    except raw.Truncated as error:
        raw.accept_truncated(error, reading, notes, number)


def pieces(uri: str, encoding: str, option: str) -> Iterator[str]:
    """A whole file's text, some at a time; bytes that are not UTF-8 are marked.

    Raises BadInput for a file in another encoding, and Truncated as `raw.read_decompressed`.
    """
    name = codecs.lookup(encoding).name
    is_utf8 = name == "utf-8"
    decoder = codecs.getincrementaldecoder(encoding)("surrogateescape" if is_utf8 else "strict")
    number, is_sure = 1, not is_utf8
    try:
        for place, data in enumerate(raw.slices(raw.read_decompressed(uri))):
            if place == 0 and is_utf8:
                file_kinds.require_narrow(uri, data, option)
            elif place == 0 and not name.startswith("utf"):
                _require_other(uri, data, option)
            text = decoder.decode(data)
            if not is_sure and not text.isascii():
                first = _first_letter(text)
                if is_damaged(text[first]):
                    line = text[text.rfind("\n", 0, first) + 1 :].partition("\n")[0]
                    number += text.count("\n", 0, first)
                    data = line.encode(errors="surrogateescape")
                    raise file_kinds.not_utf8(uri, number, data, option)
                is_sure = True
            number += text.count("\n")
            yield text
        yield decoder.decode(b"", final=True)
    except UnicodeError as error:
        raise BadInput(f"{uri}: line {number} and what follows is not in --{option} {encoding} "
                       f"({error})") from None  # fmt: skip


def _require_other(uri: str, data: bytes, option: str) -> None:
    """Raises BadInput for a file in UTF-8 that begins with `data`: in cp1252 most bytes are letters."""
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
    if not text.isascii() and "\ufffd" not in text:
        letter = text[_first_letter(text)]
        raise BadInput(f"{uri}: is UTF-8, where {letter!r} is a letter; allowed: leave out --{option}, and "
                       "read files in several encodings one by one")  # fmt: skip


def _first_letter(text: str) -> int:
    """The place of the first letter that is not ASCII. If it is whole, the text counts as UTF-8."""
    return next(place for place, letter in enumerate(text) if not letter.isascii())


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
                line = data.decode(errors="surrogateescape")
                if not is_utf8 and is_damaged(line[_first_letter(line)]):
                    raise file_kinds.not_utf8(uri, number, data, option) from None
                is_utf8 = True
            yield line


def _decoded_lines(uri: str, encoding: str, option: str) -> Iterator[str]:
    text, number = "", 0
    for piece in raw.with_line_feeds(pieces(uri, encoding, option)):
        text += piece
        if len(text) > raw.MAX_LINE_BYTES and "\n" not in text:
            raise BadInput(
                f"{uri}: line {number + 1} is over 10 MiB; --{option} {encoding} may be wrong"
            )
        *lines, text = text.split("\n")
        number += len(lines)
        yield from lines
    if text:
        yield text
