"""Recognises by their first bytes files that are no text in UTF-8: archives, workbooks, web pages, UTF-16.

A reader of lines would make texts of them.
"""

from __future__ import annotations

import codecs
import re

from pipeline.config import BadInput

_HEAD_BYTES = 4096
_SHOWN_CHARACTERS = 20  # before and after the first letter that is not ASCII

_KINDS: tuple[tuple[bytes, str], ...] = (
    (
        rb"PK(?:\x03\x04|\x05\x06|\x07\x08)",
        "an Excel workbook, or another ZIP archive; save the table as CSV in UTF-8, or unpack the archive",
    ),
    (rb"\xd0\xcf\x11\xe0", "an Excel or Word file of Office 97; save the table as CSV in UTF-8"),
    (rb"PARE", "encrypted Parquet; decrypt it"),
    (
        rb"PAR1",
        "Parquet, which only tables are read from, and only if it is not compressed once more",
    ),
    (rb"(?s:.{257})ustar", "a tar archive; unpack it"),
    (rb"7z\xbc\xaf|Rar!\x1a", "a 7z or RAR archive; unpack it"),
    (
        rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18|LZIP|\x1f\x9d|\x5d\0\0|\xff\x06\0\0sNaPpY|\x78[\x01\x9c\xda]",
        "compressed in another way than by gzip, bzip2, xz or Zstandard; decompress it",
    ),
    (rb"\x1f\x8b|BZh\d|\xfd7zXZ|\x28\xb5\x2f\xfd", "compressed twice; decompress it once"),
    (
        rb"ARROW1\0|\xff{4}.{3}\0",
        "an Arrow file (Feather, or save_to_disk of datasets); write Parquet, as by Dataset.to_parquet",
    ),
    (
        rb"Obj\x01|\x93NUMPY|\x89HDF|SQLite format 3\0|ORC[^ -~]|\x80[\x02-\x05]",
        "binary data; convert it to Parquet or JSON lines",
    ),
    (
        rb"%PDF-|\{\\rtf|\x89PNG|\xff\xd8\xff|GIF8",
        "a document or a picture; save its text in UTF-8",
    ),
    (rb"version https://git-lfs", "a pointer of Git LFS; fetch the file by: git lfs pull"),
    (
        rb"(?i)(?:\xef\xbb\xbf)?\s*(?:<!--.*?-->\s*)?<(?:!doctype html|html\b)",
        "a web page, such as the answer of a server that refused the download",
    ),
)
_CONTROL = re.compile(rb"[\0-\x08\x0e-\x1f]")
_TABLE_ENDINGS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".csv": "csv",
}
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def require_text(uri: str, head: bytes) -> None:
    """Raises BadInput for a file that begins, decompressed, like one of a kind that is no text."""
    for pattern, kind in _KINDS:
        if re.match(pattern, head[:_HEAD_BYTES]):
            raise BadInput(f"{uri}: {kind}")


def named_table(name: str) -> str:
    """json, tsv or csv, by a file's name without .gz and the like; "": its name is not that of a table."""
    kinds = (kind for ending, kind in _TABLE_ENDINGS.items() if name.lower().endswith(ending))
    return next(kinds, "")


def require_narrow(uri: str, data: bytes, option: str = "") -> None:
    """Raises BadInput for a file in UTF-16 or UTF-32 that begins with `data`."""
    if guess := _wide_encoding(data[:_HEAD_BYTES]):
        raise not_utf8(uri, 1, data[:_HEAD_BYTES], option, guess)


def is_in(data: bytes, encoding: str) -> bool:
    """Whether the bytes are text in this encoding."""
    try:
        data.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def not_utf8(uri: str, number: int, data: bytes, option: str, guess: str = "cp1252") -> BadInput:
    """The refusal of a line that is not UTF-8. `option` sets the encoding; "": nothing does.

    The usual guess is Windows' encoding, which is Latin-1 with more letters, unless it lacks these bytes, or
    four letters in a row would have accents: then it is a text in Chinese, Cyrillic or Arabic.
    """
    if number == 1 and guess == "cp1252" and _CONTROL.search(data):
        return BadInput(
            f"{uri}: no text; it may be compressed in an unknown way, encrypted or binary data"
        )
    if guess == "cp1252" and (not is_in(data, guess) or re.search(rb"[\x80-\xff]{4}", data)):
        known = ", such as gb18030 or cp1251"
        advice = f"; name its encoding by --{option}{known}" if option else "; convert it to UTF-8"
        return BadInput(f"{uri}, line {number}: not UTF-8{advice}")
    text = data.decode(guess, errors="ignore").removeprefix("\ufeff").split("\n")[0]
    first = next((place for place, letter in enumerate(text) if not letter.isascii()), 0)
    excerpt = text[max(0, first - _SHOWN_CHARACTERS) : first + _SHOWN_CHARACTERS]
    name = "Latin-1 (Windows-1252)" if guess == "cp1252" else guess.upper()
    advice = (
        f"--{option} {guess} reads it so" if option else f"convert it: iconv -f {guess} -t utf-8"
    )
    return BadInput(f"{uri}, line {number}: not UTF-8; a guess is {name}: {excerpt!r}; {advice}")


def _wide_encoding(head: bytes) -> str:
    """The encoding of a file in UTF-16 or UTF-32 that begins so; "" for other files."""
    for mark, encoding in _BYTE_ORDER_MARKS:
        if head.startswith(mark):
            return encoding
    head = head.rstrip(b"\0")  # a file that is filled up to a block is none
    zeros = [head[start::2].count(0) for start in (0, 1)]
    if sum(zeros) < len(head) / 4:
        return ""
    return "utf-16-le" if zeros[1] > zeros[0] else "utf-16-be"
