from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pipeline.storage import fingerprints


def write(folder: Path, *names: str) -> list[str]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name}")
    return [str(folder / name) for name in names]


def test_raw_files_have_the_same_fingerprint_wherever_they_lie_and_in_any_order(tmp_path):
    here = write(tmp_path / "here", "a", "b")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    there = [str(tmp_path / "there" / name) for name in ("b", "a")]
    os.utime(there[0], (1, 1))
    assert fingerprints.raw_fingerprint(here) == fingerprints.raw_fingerprint(there)


@pytest.mark.parametrize("change", ["head", "tail", "size", "name", "another file"])
def test_raw_files_that_differ_have_another_fingerprint(tmp_path, change):
    data = os.urandom(1 << 18)
    file = tmp_path / "a"
    file.write_bytes(data)
    files = [str(file)]
    before = fingerprints.raw_fingerprint(files)
    if change == "head":
        file.write_bytes(b"%c" % (data[0] ^ 1) + data[1:])
    elif change == "tail":
        file.write_bytes(data[:-1] + b"%c" % (data[-1] ^ 1))
    elif change == "size":
        file.write_bytes(data[: 1 << 17] + data[: 1 << 16] + data[1 << 17 :])
    elif change == "name":
        files = [str(file.rename(tmp_path / "b"))]
    else:
        files += write(tmp_path, "b")
    assert fingerprints.raw_fingerprint(files) != before


def test_an_edit_of_a_large_file_is_noticed_by_its_time(tmp_path):
    """16 pieces of 64 KiB are looked at, of a dump of terabytes."""
    file = tmp_path / "large"
    data = bytearray(17 << 20)
    file.write_bytes(data)
    os.utime(file, (1, 1))
    before = fingerprints.raw_fingerprint([str(file)])
    data[100_000] = 1  # between two pieces
    file.write_bytes(data)
    assert fingerprints.raw_fingerprint([str(file)]) != before
    os.utime(file, (1, 1))
    assert fingerprints.raw_fingerprint([str(file)]) == before
    assert fingerprints.raw_fingerprint([str(file)], whole=True) != fingerprints.raw_fingerprint(
        [str(file)]
    )
