"""Tells which code makes an artifact: its revision, and the versions of the libraries."""

from __future__ import annotations

import functools
import os
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def git_revision() -> str | None:
    """The code's revision, with "+" where the tree has changes; None outside a checkout.

    Code that was sent to a cluster is no checkout: jobs.submit says what it was.
    """
    return os.environ.get("POLYRANK_GIT_REVISION") or _revision_of_checkout()


@functools.cache
def _revision_of_checkout() -> str | None:
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        run = subprocess.run(
            ("git", *arguments), cwd=folder, capture_output=True, text=True, check=True
        )
        return run.stdout.strip()

    try:
        # A virtual environment may lie in the checkout of another project.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "--short=12", "HEAD") + (
            "+" if git("status", "--porcelain") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return None


@functools.cache
def library_versions() -> dict[str, str]:
    """Their metadata takes 30 ms to read, and a process may publish many artifacts."""
    versions = {}
    for name in ("polyrank", "ray", "torch", "transformers", "tokenizers", "pyarrow", "mlflow"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions
