"""The bearer tokens that a service accepts. It knows their SHA-256 hashes only."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import BadInput

HASHES = "POLYRANK_TOKENS_SHA256"
"""Environment variable: hashes of accepted tokens, in hex, separated by commas or white space."""
FILE = "POLYRANK_TOKENS_FILE"
"""Environment variable: a local file of such hashes. Without both variables nobody needs a token."""

_log = logging.getLogger("polyrank.serve")


class BearerTokens:
    """Accepts tokens by their hashes, which are given or stand in a file.

    The file is read again when it changes, so that tokens come and go without a restart. If it is missing or
    wrong then, the log says so and the tokens stay as they were.
    """

    def __init__(self, hashes: Sequence[str] = (), file: Path | None = None) -> None:
        """Raises BadInput for a file that cannot be used."""
        self._hashes, self._file = tuple(hashes), file
        self._hashes_of_file: tuple[str, ...] = ()
        self._version: tuple[int, ...] | None = None
        if file is not None:
            self._version = _version(file)
            self._hashes_of_file = _read(file)

    @classmethod
    def of_environment(cls) -> BearerTokens:
        """Raises BadInput for a hash that is none, and for a file that cannot be used."""
        file = os.environ.get(FILE)
        return cls(_parse(os.environ.get(HASHES, ""), HASHES), Path(file) if file else None)

    def sender(self, authorization: str) -> str | None:
        """The sender of a request with this header: the hash of its token. "": nobody needs one. None: the
        request may not be answered."""
        self._follow_file()
        hashes = self._hashes + self._hashes_of_file
        scheme, _, token = authorization.partition(" ")
        token_hash = hashlib.sha256(token.strip().encode()).hexdigest()
        # All are compared, so the time is the same for any token.
        matches = [hmac.compare_digest(token_hash, accepted_hash) for accepted_hash in hashes]
        if not hashes:
            return ""
        return token_hash if scheme.lower() == "bearer" and any(matches) else None

    def _follow_file(self) -> None:
        if self._file is None or (version := _version(self._file)) == self._version:
            return
        self._version = version  # of a wrong file, too: each change has one line in the log
        try:
            self._hashes_of_file = _read(self._file)
            _log.warning(
                "%d tokens are accepted now: %s has changed", len(self._hashes_of_file), FILE
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


def _read(file: Path) -> tuple[str, ...]:
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{FILE}: {file} cannot be read: {error}") from None
    if not (hashes := _parse(text, FILE)):
        raise BadInput(f"{FILE}: {file} has no hash, so nobody would need a token")
    return hashes


def _parse(text: str, name: str) -> tuple[str, ...]:
    hashes = tuple(text.lower().replace(",", " ").split())
    if not all(re.fullmatch(r"[0-9a-f]{64}", token_hash) for token_hash in hashes):
        raise BadInput(
            f"{name}: allowed: SHA-256 in hex, 64 digits each, separated by commas or lines"
        )
    return hashes
