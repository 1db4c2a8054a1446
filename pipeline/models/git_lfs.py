"""Files of which `git clone` without Git LFS has fetched the pointer only."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import BadInput

_POINTER = b"version https://git-lfs.github.com/spec/"


def require_fetched(path: Path) -> None:
    """Raises BadInput for a pointer."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise BadInput(f"{path}: a pointer of Git LFS; `git lfs pull` fetches the file itself")
