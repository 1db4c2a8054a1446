"""Which files the demo takes from a folder, and what it refuses. `make demo` is the rest."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from jobs import demo
from pipeline.config import BadInput
from tests.helpers import free_port

REAL = (
    "reddit_dump/RC_2006-01.bz2",
    "reddit_dump/RC_2006-07.zst",
    "reddit_dump/RS_2006-01.zst",
    "convai2/derived/train_self_original.txt",
    "convai2/derived/train_self_original_no_cands.txt",
    "convai2/derived/valid_self_original.first500.txt",
    "convai2/original/valid_self_original_no_cands.first500.txt",
    "wikipedia/extracted_good/AA/wiki_00",
    "wikipedia/extracted_good/AB/wiki_00",
    "wikipedia/extracted_stubs_2018/AA/wiki_00",
    "wikipedia/enwiki-sample.xml.bz2",
)


@pytest.fixture
def layout(tmp_path: Path):
    """Empty files of the given names below a folder."""

    def make(*names: str) -> Path:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        return tmp_path

    return make


def found(folder: Path) -> dict[str, list[str]]:
    """The files by format, relative to the folder."""
    data = vars(demo.find(folder))
    return {name: [str(Path(p).relative_to(folder)) for p in paths] for name, paths in data.items()}


def test_the_sample_files_are_found(sample_files):
    assert found(sample_files) == {
        "reddit": ["reddit_dump/RC_2011-01.zst", "reddit_dump/RC_2011-02.bz2"],
        "convai2": [
            "convai2/train_self_original.sample_no_cands.txt", "convai2/valid_self_original.sample.txt"
        ],
        "wikipedia": ["wikipedia/extracted/AA/wiki_00", "wikipedia/extracted/AA/wiki_01"],
    }  # fmt: skip


def test_of_real_data_the_whole_files_with_candidates_and_the_good_articles_are_taken(layout):
    assert found(layout(*REAL)) == {
        "reddit": ["reddit_dump/RC_2006-01.bz2", "reddit_dump/RC_2006-07.zst"],
        "convai2": [
            "convai2/derived/train_self_original.txt",
            "convai2/derived/valid_self_original.first500.txt",
        ],
        "wikipedia": ["wikipedia/extracted_good/AA/wiki_00", "wikipedia/extracted_good/AB/wiki_00"],
    }


@pytest.mark.shared
def test_the_real_data_is_found(real_data):
    names = found(real_data)
    assert names["convai2"] == [
        "convai2/derived/train_self_original.txt",
        "convai2/derived/valid_self_original.first500.txt",
    ]
    assert all(Path(name).name.startswith("RC_") for name in names["reddit"])
    assert all(name.startswith("wikipedia/extracted_good/") for name in names["wikipedia"])
    assert names["reddit"] and names["wikipedia"]


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        ("reddit_dump/RC_", "no Reddit dumps RC_* there"),
        ("convai2/derived/train", "no ConvAI2's train_self_original*.txt there"),
        ("convai2/derived/valid", "valid_self_original*.txt with candidates there"),
        ("wikipedia/extracted", "no WikiExtractor's wiki_* there"),
    ],
)
def test_a_format_that_is_missing_is_named(layout, prefix, said):
    folder = layout(*(name for name in REAL if not name.startswith(prefix)))
    with pytest.raises(BadInput) as caught:
        demo.find(folder)
    assert str(folder) in str(caught.value) and said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_refused_before_any_work(run_job_here, tmp_path):
    refusal = run_job_here(
        "demo", "--data", tmp_path / "none", "--work", tmp_path / "work", "--port", free_port()
    ).refusal
    assert f"--data {tmp_path}/none: no such folder" in refusal


def test_a_port_in_use_is_refused_before_any_work(run_job_here, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refusal = run_job_here("demo", "--work", tmp_path / "work", "--port", port).refusal
    assert f"--port {port}: in use" in refusal
    assert list(tmp_path.iterdir()) == []
