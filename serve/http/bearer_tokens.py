"""The bearer tokens that a service accepts. It knows their SHA-256 hashes only."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import BadInput

HASHES = "POLYRANK_TOKENS_SHA256"
"""Environment variable: hashes of accepted tokens, in hex, separated by commas or white space. NAME=HASH
names the sender in the log."""
FILE = "POLYRANK_TOKENS_FILE"
"""Environment variable: a local file of such hashes. Without both variables nobody needs a token."""

_NAME = r"[A-Za-z0-9._-]{0,40}"
_log = logging.getLogger("polyrank.serve")


class BearerTokens:
    """Accepts tokens by their hashes, which are given or stand in a file.

    The file is read again when it changes, so that tokens come and go without a restart. If it is missing or
    wrong then, the log says so and the tokens stay as they were.
    """

    def __init__(self, hashes: Sequence[str] = (), file: Path | None = None) -> None:
        """Raises BadInput for a hash that is none, and for a file that cannot be used."""
        self._senders, self._file = _parse(" ".join(hashes), HASHES), file
        self._version = _version(file) if file else None
        self._senders_of_file = _read(file) if file else {}

    @classmethod
    def of_environment(cls) -> BearerTokens:
        """Raises BadInput for a hash that is none, and for a file that cannot be used."""
        file = os.environ.get(FILE)
        return cls([os.environ.get(HASHES, "")], Path(file) if file else None)

    def sender(self, authorization: str) -> str | None:
        """The sender of a request with this header: the name of its token, or 16 digits of its hash. "":
        nobody needs one. None: the request may not be answered."""
        self._follow_file()
        if not (senders := self._senders | self._senders_of_file):
            return ""
        scheme, _, token = authorization.partition(" ")
        # Whoever measures the time of this search learns of hashes, which are no tokens.
        token_hash = hashlib.sha256(token.strip().encode()).hexdigest()
        return senders.get(token_hash) if scheme.lower() == "bearer" else None

    def _follow_file(self) -> None:
        if self._file is None or (version := _version(self._file)) == self._version:
            return
        self._version = version  # of a wrong file, too: each change has one line in the log
        try:
            self._senders_of_file = _read(self._file)
            _log.warning(
                "%d tokens are accepted now: %s has changed", len(self._senders_of_file), FILE
            )
        except BadInput as error:
            _log.error("%s; the accepted tokens stay as they were", error)


def _version(file: Path) -> tuple[int, ...] | None:
    """Differs after each change of a file. None: there is no file."""
    try:
        about = file.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_ino, about.st_size


def _read(file: Path) -> dict[str, str]:
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{FILE}: {file} cannot be read: {error}") from None
    if not (senders := _parse(text, FILE)):
        raise BadInput(f"{FILE}: {file} has no hash, so nobody would need a token")
    return senders


def _parse(text: str, variable: str) -> dict[str, str]:
    """The sender of each hash: its name, or the first 16 digits."""
    senders = dict[str, str]()
    for entry in text.replace(",", " ").split():
        name, _, token_hash = entry.rpartition("=")
        token_hash = token_hash.lower()
        if not (re.fullmatch(r"[0-9a-f]{64}", token_hash) and re.fullmatch(_NAME, name)):
            raise BadInput(
                f"{variable}: allowed: SHA-256 in hex, 64 digits each, or NAME=HASH with a name of letters, "
                "digits, . _ and -, separated by commas or lines"
            )
        senders[token_hash] = name or token_hash[:16]
    return senders
