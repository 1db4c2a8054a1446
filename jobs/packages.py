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
    all_files = (file for package in _PACKAGES for file in sorted((ROOT / package).rglob("*")))
    return {
        file.relative_to(ROOT).as_posix(): file
        for file in all_files
        if file.is_file()
        and file.suffix not in _NO_CODE
        and "__pycache__" not in file.parts
        and not file.is_relative_to(ROOT / _RESULTS)
    }


def archive() -> bytes:
    """These files as a zip archive, which Ray unpacks as the working directory of a replica."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, file in files().items():
            entry = zipfile.ZipInfo(name, _SAME_TIME)
            zipped.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
