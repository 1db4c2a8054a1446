"""The key of authors' hashes. Whoever has the key and a list of names can tell whose hash is whose."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from pipeline import storage
from pipeline.config import BadInput

VARIABLE = "POLYRANK_AUTHOR_SALT"


def author_key(output: str) -> str:
    """The value of POLYRANK_AUTHOR_SALT; without it, for a local output, a random key of the user.

    That key is made once, in `polyrank/author_key` below the user's configuration ($XDG_CONFIG_HOME or
    ~/.config), readable by its owner alone. It never lies beside a corpus, and nothing public tells it.

    Raises BadInput as `require_author_key`.
    """
    if key := os.environ.get(VARIABLE):
        return key
    require_author_key(output)
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    file = config / "polyrank" / "author_key"
    if storage.create_bytes(str(file), secrets.token_hex(32).encode()):
        print(f"authors are hashed with a new random key, {file}", file=sys.stderr, flush=True)
    file.chmod(0o600)
    return file.read_text()


def require_author_key(output: str) -> None:
    """Raises BadInput for a remote output without POLYRANK_AUTHOR_SALT: the machine that runs the job may be
    gone tomorrow, and a key of its own with it."""
    if not os.environ.get(VARIABLE) and not storage.is_local(output):
        raise BadInput(
            f"{VARIABLE} is not set: authors of {output} need a secret of yours, the same for all corpora "
            f"that are to be joined; with jobs.submit: --env {VARIABLE}; or --authors plain"
        )
