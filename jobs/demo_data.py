"""What the demo is made from: generated sample dumps, or the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jobs.demo_stages import SECONDS, timed
from pipeline.config import BadInput
from pipeline.corpora.made_up import sample as made_up


@dataclass(frozen=True)
class Data:
    """Raw files of each format."""

    reddit: list[str]
    convai2: list[str]
    wikipedia: list[str]


def find(folder: Path) -> Data:
    """The files of the three formats below a folder.

    Raises BadInput for a format that is not there.
    """
    if not folder.is_dir():
        raise BadInput(f"--data {folder}: no such folder")
    reddit = sorted(folder.rglob("RC_*"))
    train = _first(folder, "train_self_original.txt", "train_self_original*.txt")
    valid = _first(folder, "valid_self_original.txt", "valid_self_original.*.txt")
    # One folder of them: beside it may lie others, of stubs for instance.
    beneath = ("wikipedia/extracted/**", "wikipedia/extracted_good/**", "**")
    globs = (sorted(folder.glob(f"{name}/wiki_*")) for name in beneath)
    wikipedia = next((found for found in globs if found), [])
    for what, found in (
        ("Reddit dumps RC_*", reddit),
        ("ConvAI2's train_self_original*.txt", train),
        ("ConvAI2's valid_self_original*.txt with candidates", valid),
        ("WikiExtractor's wiki_*", wikipedia),
    ):
        if not found:
            raise BadInput(f"--data {folder}: no {what} there")
    names = [[str(path) for path in paths] for paths in (reddit, train + valid, wikipedia)]
    return Data(*names)


def _first(folder: Path, *patterns: str) -> list[Path]:
    """The first file that the first fitting pattern finds."""
    return next((found[:1] for name in patterns if (found := sorted(folder.rglob(name)))), [])


def sample(folder: Path) -> Data:
    """The generated files, made once: people who talk about what they do, and articles about towns."""
    print("\n== Sample corpora: people who talk about what they do, and articles about towns")
    if (folder / "DONE").exists():
        print("   already done")
    else:
        with timed("Sample corpora"):
            made_up.generate(folder)
        (folder / "DONE").touch()
        print(f"   {SECONDS['Sample corpora']:.1f} s")
    for file in sorted(folder.rglob("*.*")):
        print(f"   {file}  {file.stat().st_size / 1e6:.1f} MB")
    return find(folder)
