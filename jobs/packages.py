"""The code that a cluster gets: the packages of this checkout."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PACKAGES = ("pipeline", "jobs", "serve")
_NO_CODE = {".md", ".png"}
_RESULTS = "jobs/benchmarks/results"  # of this project's machines: a quarter of all bytes, with the pictures
_SAME_TIME = (1980, 1, 1, 0, 0, 0)  # in every archive, so that equal code has equal bytes


def files() -> dict[str, Path]:
    """The files of the packages by their path, without pages, pictures and results of benchmarks."""
    file_of_path = {
        file.relative_to(ROOT).as_posix(): file
        for package in _PACKAGES
        for file in sorted((ROOT / package).rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    }
    return {
        path: file
        for path, file in file_of_path.items()
        if file.suffix not in _NO_CODE and not path.startswith(_RESULTS)
    }


def archive() -> bytes:
    """These files as a zip archive, which Ray unpacks as the working directory of a replica."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, file in files().items():
            zipped.writestr(
                zipfile.ZipInfo(name, _SAME_TIME), file.read_bytes(), zipfile.ZIP_DEFLATED
            )
    return buffer.getvalue()
