"""Input of the demo: generated sample dumps, or the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jobs.demo_stages import row, seconds, timed
from jobs.sample_data import sample as made_up
from pipeline.config import BadInput


@dataclass(frozen=True)
class Data:
    """Raw files of each format."""

    reddit: list[str]
    convai2: list[str]
    wikipedia: list[str]


def find_files(folder: Path) -> Data:
    """The files of the three formats below a folder.

    Raises BadInput for a format that is not there.
    """
    if not folder.is_dir():
        raise BadInput(f"--data {folder}: no such folder")
    reddit = sorted(folder.rglob("RC_*"))
    train = _first_match(folder, "train_self_original.txt", "train_self_original*.txt")
    valid = _first_match(folder, "valid_self_original.txt", "valid_self_original.*.txt")
    # Only one folder of articles: another one may hold stubs, for instance.
    subfolders = ("wikipedia/extracted/**", "wikipedia/extracted_good/**", "**")
    globs = (sorted(folder.glob(f"{name}/wiki_*")) for name in subfolders)
    wikipedia = next((paths for paths in globs if paths), [])
    for description, paths in (
        ("Reddit dumps RC_*", reddit),
        ("ConvAI2's train_self_original*.txt", train),
        ("ConvAI2's valid_self_original*.txt with candidates", valid),
        ("WikiExtractor's wiki_*", wikipedia),
    ):
        if not paths:
            raise BadInput(f"--data {folder}: no {description} there")
    names = [[str(path) for path in paths] for paths in (reddit, train + valid, wikipedia)]
    return Data(*names)


def _first_match(folder: Path, *patterns: str) -> list[Path]:
    """The first file that the first fitting pattern finds."""
    return next((paths[:1] for name in patterns if (paths := sorted(folder.rglob(name)))), [])


def sample(folder: Path) -> Data:
    """The generated files, made once: people who talk about what they do, and articles about towns."""
    print(row("", "Dialogues and articles, made up"), end="", flush=True)
    if (folder / "DONE").exists():
        print("already done")
    else:
        with timed("Sample corpora"):
            made_up.generate(folder)
        (folder / "DONE").touch()
        megabytes = sum(file.stat().st_size for file in folder.rglob("*.*")) / 1e6
        print(f"{seconds('Sample corpora')}   {megabytes:.1f} MB")
    return find_files(folder)
