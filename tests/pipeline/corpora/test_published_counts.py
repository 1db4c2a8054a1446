from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.artifact import open_artifact
from pipeline.config import BadInput
from pipeline.corpora import published_counts
from pipeline.corpora.file_tasks import FileRecord
from pipeline.engine.records import TaskRecord

CONVAI2 = "valid_self_original.txt"


def records_of(counts: dict[str, dict[str, int]]) -> tuple[list[str], list[FileRecord]]:
    """URIs, and the tasks' records, of files with these counts."""
    uris = [f"s3://lake/{name}" for name in counts]
    return uris, [FileRecord(input=u, counts=c) for u, c in zip(uris, counts.values(), strict=True)]


def compare(corpus: str, counts: dict[str, dict[str, int]]) -> list[tuple]:
    compared = published_counts.compare(corpus, *records_of(counts))
    return [(row["files"], row["count"], row["found"], row["published"]) for row in compared]


@pytest.mark.parametrize(
    ("corpus", "name", "count", "number"),
    [
        ("convai2", "train_self_original.txt", "examples.train", 131_438),
        ("convai2", "valid_none_original.txt.gz", "examples.valid", 7_801),
        ("dstc7", "ubuntu_train_subtask_1.json", "dialogues", 100_000),
        ("dstc7", "ubuntu_test_subtask_1.json", "dialogues", 1_000),
        ("ubuntu", "train.csv", "examples.train", 1_000_000),
        ("ubuntu", "test.csv.zst", "examples.test", 18_920),
        ("starspace", "wikipedia_shuf_train5M.txt", "examples.train", 5_035_182),
    ],
)
def test_a_public_file_is_known_by_its_name(corpus, name, count, number):
    assert (name.removesuffix(".gz").removesuffix(".zst"), count, 3, number) in compare(
        corpus, {name: {count: 3}}
    )
    differences = published_counts.differences(
        published_counts.compare(corpus, *records_of({name: {count: 3}}))
    )
    assert any(f"3 {count}; published: {number:,}" in line for line in differences)


@pytest.mark.parametrize(
    ("corpus", "name"),
    [
        ("convai2", "valid_self_original.first500.txt"),
        ("convai2", "train.csv"),
        ("dstc7", "ubuntu_train_subtask_4.json"),
        ("wikipedia", "train.csv"),
    ],
)
def test_a_file_of_another_name_is_none_of_them(corpus, name):
    assert compare(corpus, {name: {"examples.train": 3}}) == []


def test_each_file_is_compared_alone():
    counts = {CONVAI2: {"examples.valid": 7_801, "dialogues": 1_000},
              CONVAI2.replace("self", "both"): {"examples.valid": 7_000, "dialogues": 1_000},
              "more.txt": {"examples.valid": 1}}  # fmt: skip
    assert [row[2] for row in compare("convai2", counts)] == [7_801, 1_000, 7_000, 1_000]
    (line,) = published_counts.differences(published_counts.compare("convai2", *records_of(counts)))
    assert line.startswith(
        "valid_both_original.txt: 7,000 examples.valid; published: 7,801 (Humeau"
    )


MONTHS = [f"RC_{year}-{month:02d}" for year in range(2015, 2019) for month in range(1, 13)]


def test_a_corpus_of_many_files_is_compared_when_all_are_given():
    uris = [f"s3://lake/{month}.zst" for month in MONTHS]
    counts = ("train", 300_000_000), ("train", 354_396_778), ("test", 72_616_937)
    records = [TaskRecord(counts={f"examples.{split}": number}) for split, number in counts]
    compared = published_counts.compare("reddit", uris, records)
    assert [(row["found"], row["published"]) for row in compared] == [
        (654_396_778, 654_396_778),
        (72_616_937, 72_616_937),
    ]
    assert published_counts.differences(compared) == []
    assert published_counts.compare("reddit", uris[:-1], records) == []


def test_published_counts_are_found_or_the_job_is_refused():
    whole, part = (
        published_counts.compare("ubuntu", *records_of({"valid.csv": {"examples.valid": number}}))
        for number in (19_560, 19_559)
    )
    published_counts.check(whole, "published")
    published_counts.check(part, "report")
    published_counts.check([], "report")
    with pytest.raises(BadInput, match=r"^--expect published: valid.csv: 19,559 .* 19,560"):
        published_counts.check(part, "published")
    with pytest.raises(BadInput, match="--expect published: no size is published for files"):
        published_counts.check([], "published")


# The job


@pytest.fixture
def prepare(run_job_here, sample_files: Path, tmp_path: Path):
    """The job on the sample's validation file under the name of a public one."""

    def run(*options: str):
        file = tmp_path / CONVAI2
        shutil.copy(sample_files / "convai2" / "valid_self_original.sample.txt", file)
        return run_job_here("prepare_corpus", "--corpus", "convai2", "--input", file, "--output",
                       tmp_path / "out", *options)  # fmt: skip

    return run


def test_another_size_is_said_in_the_summary_the_manifest_and_for_a_person(prepare, tmp_path):
    done = prepare()
    counts = done.summary["counts"]
    rows = {row["count"]: (row["found"], row["published"]) for row in done.summary["published"]}
    assert rows == {
        "examples.valid": (counts["examples"], 7_801),
        "dialogues": (counts["dialogues"], 1_000),
    }
    manifest = open_artifact(str(tmp_path / "out"), "corpus").manifest
    assert manifest["published"] == done.summary["published"]
    lines = [line for line in done.stderr.splitlines() if "published: " in line]
    assert len(lines) == 2 and all(line.startswith(CONVAI2) for line in lines)


def test_another_size_is_refused_when_the_published_one_is_expected(prepare, tmp_path):
    assert "examples.valid; published: 7,801" in prepare("--expect", "published").refusal
    assert not (tmp_path / "out").exists()
    (task,) = (tmp_path / "out.partial" / "_tasks").iterdir()
    record = json.loads(task.read_text())
    task.write_text(json.dumps({**record, "notes": ["done before"]}))
    assert prepare().summary["notes"] == ["done before"]  # published as it is, without more work
    assert "published: 7,801" in prepare("--expect", "published").refusal
    assert prepare().summary["already_done"] is True
