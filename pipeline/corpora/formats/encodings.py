"""Lines of text files whose encoding the user names, or that turn out not to be UTF-8.

Text that is decoded by the wrong encoding is corrupt, and no count shows it. So a file that is not UTF-8 is
refused, with a guess at its encoding. A file with letters beyond ASCII in valid UTF-8 counts as UTF-8: a
later line that is not UTF-8 is damage, which is marked so that the reader sets it aside (see `is_damaged`).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from pipeline.config import BadInput
from pipeline.corpora import raw

_HEAD_BYTES = 4096
_SHOWN_CHARACTERS = 20  # before and after the first letter that is not ASCII
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


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
            yield number, (line.removeprefix("\ufeff") if number == 1 else line).removesuffix("\r")
    except raw.Truncated as error:
        if reading.truncated == "stop":
            raise raw.truncated_input(error, number) from None
        notes.append(raw.truncation_note(error, number))


def is_damaged(line: str) -> bool:
    """Whether the line has bytes that are not UTF-8."""
    return not line.isascii() and not raw.is_text(line)


def _utf8_lines(uri: str, option: str) -> Iterator[str]:
    number, is_utf8 = 0, False
    for block in raw.line_blocks(uri, 1 << 24):
        if number == 0 and (guess := _wide_encoding(block[:_HEAD_BYTES])):
            raise _refusal(uri, 1, block[:_HEAD_BYTES], guess, option)
        for data in block.removesuffix(b"\n").split(b"\n"):
            number += 1
            try:
                line = data.decode()
                is_utf8 = is_utf8 or not line.isascii()
            except UnicodeDecodeError:
                if not is_utf8:
                    raise _refusal(uri, number, data, _western_encoding(data), option) from None
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


def _wide_encoding(head: bytes) -> str:
    """The encoding of a file in UTF-16 or UTF-32; "" for other files."""
    for mark, encoding in _BYTE_ORDER_MARKS:
        if head.startswith(mark):
            return encoding
    zeros = [head[start::2].count(0) for start in (0, 1)]
    if sum(zeros) < len(head) / 4:
        return ""
    return "utf-16-le" if zeros[1] > zeros[0] else "utf-16-be"


def _western_encoding(data: bytes) -> str:
    """cp1252 (Windows), which is Latin-1 with more letters, or "" for bytes that it lacks."""
    try:
        data.decode("cp1252")
    except UnicodeDecodeError:
        return ""
    return "cp1252"


def _refusal(uri: str, number: int, data: bytes, guess: str, option: str) -> BadInput:
    if number == 1 and data.startswith(b"PK\x03\x04"):
        return BadInput(
            f"{uri}: an Excel workbook, or another ZIP archive; save the table as CSV in UTF-8"
        )
    if not guess:
        advice = f"; name its encoding by --{option}" if option else "; convert it to UTF-8"
        return BadInput(f"{uri}, line {number}: not UTF-8{advice}")
    text = data.decode(guess, errors="ignore").removeprefix("\ufeff").split("\n")[0]
    first = next((place for place, letter in enumerate(text) if not letter.isascii()), 0)
    excerpt = text[max(0, first - _SHOWN_CHARACTERS) : first + _SHOWN_CHARACTERS]
    name = "Latin-1 (Windows-1252)" if guess == "cp1252" else guess.upper()
    advice = (
        f"--{option} {guess} reads it so" if option else f"convert it: iconv -f {guess} -t utf-8"
    )
    return BadInput(f"{uri}, line {number}: not UTF-8; a guess is {name}: {excerpt!r}; {advice}")
