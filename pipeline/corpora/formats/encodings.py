"""Lines of text files whose encoding the user names, or that turn out not to be UTF-8.

Text that is decoded by the wrong encoding is corrupt, and no count shows it. So a file that is not UTF-8 is
refused, with a guess at its encoding. A file whose first letter beyond ASCII is valid UTF-8 counts as UTF-8:
what is not UTF-8 behind it is damage, which is marked so that the reader sets it aside (see `is_damaged`).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

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

    A line over 10 MiB is replaced by `raw.OVERLONG` and its beginning. `option` sets the encoding; "":
    nothing does. Raises BadInput for a file in another encoding, and as `raw.read_lines` for a truncated
    stream.
    """
    number = 0
    try:
        for number, line in enumerate(_split_lines(pieces(uri, encoding, option)), start=1):
            yield number, line.lstrip("\ufeff").removesuffix("\r")
    except raw.Truncated as error:
        raw.accept_truncated(error, reading, notes, number)


def _split_lines(text_pieces: Iterable[str]) -> Iterator[str]:
    text, skips_line = "", False
    for piece in text_pieces:
        *whole_lines, text = (text + piece).split("\n")
        if skips_line:  # the rest of a line that is too long
            text, skips_line = (text, False) if whole_lines else ("", True)
            whole_lines = whole_lines[1:]
        yield from whole_lines
        if len(text) > raw.MAX_LINE_BYTES:
            yield raw.OVERLONG.decode() + text[: raw.MAX_SAMPLE_CHARACTERS]
            text, skips_line = "", True
    if text := text.rstrip("\0"):  # as behind a compressed stream
        yield text


def pieces(uri: str, encoding: str, option: str) -> Iterator[str]:
    """A whole file's text, some at a time; bytes that are not UTF-8 are marked.

    Raises BadInput for a file in another encoding, and Truncated as `raw.read_decompressed`.
    """
    number, is_sure = 1, codecs.lookup(encoding).name != "utf-8"
    try:
        for text in raw.with_line_feeds(_decoded(uri, encoding, option)):
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
    except UnicodeError as error:
        raise BadInput(f"{uri}: line {number} and what follows is not in --{option} {encoding} "
                       f"({error})") from None  # fmt: skip


def _decoded(uri: str, encoding: str, option: str) -> Iterator[str]:
    name = codecs.lookup(encoding).name
    errors = "surrogateescape" if name == "utf-8" else "strict"
    decoder = codecs.getincrementaldecoder(encoding)(errors)
    for place, data in enumerate(raw.slices(raw.read_decompressed(uri))):
        if place == 0 and name == "utf-8":
            file_kinds.require_narrow(uri, data, option)
        elif place == 0 and not name.startswith("utf"):
            _require_other(uri, data, option)
        yield decoder.decode(data)
    yield decoder.decode(b"", final=True)


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
