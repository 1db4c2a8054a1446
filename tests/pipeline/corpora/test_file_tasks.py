"""Examples of files, one task each."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.config import BadInput
from pipeline.corpora import file_tasks, raw
from pipeline.corpora.formats import convai2, dstc7, opensubtitles, ubuntu
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.schema import EXAMPLE
from pipeline.engine import executors
from pipeline.engine.draft import Draft

ROOT = Path(__file__).parents[3]


def test_a_shard_of_long_texts_has_fewer_rows(out, monkeypatch, actors_in_process):
    """50,000 rows of 50 kB each are more than the 2 GiB that an Arrow column of text holds."""
    monkeypatch.setattr(file_tasks, "_CHARACTERS_PER_SHARD", 100)

    def parse(uri, reading, report):
        for number, length in enumerate([10, 10, 70, 99, 1, 5, 200]):
            yield {
                "example_id": str(number), "group_id": "g", "context": ["c" * (length // 2)],
                "response": "r" * (length - length // 2), "source": "made", "split": "train",
                "candidates": ["x" * 10] if number == 2 else None,
            }  # fmt: skip
            report.records += 1

    privacy = Privacy(redact=False, authors="plain", salt="")
    (record,) = file_tasks.prepare(
        out, ["a"], parse, EXAMPLE, raw.Reading(), privacy, "made", rows_per_shard=3
    )
    shards = [pq.read_table(out.path(file["path"]))["example_id"] for file in record.files]
    ids = [sorted(shard.to_pylist()) for shard in shards]
    assert ids == [["0", "1", "2"], ["3", "4"], ["5", "6"]]


# Places that make one array of several, and why its texts stay below the 2 GiB of a column of text.
COMBINED = {
    "jobs/sample_data/dump_text.py": (1, "a block of comments that are made up"),
    "pipeline/corpora/buckets.py": (
        2,
        "tables: Arrow leaves several chunks where one is too small",
    ),
    "pipeline/corpora/dedup/decontaminate.py": (3, "tables of hashes and ids"),
    "pipeline/corpora/dedup/exact.py": (1, "a table of hashes and ids"),
    "pipeline/corpora/dedup/examples.py": (1, "a table of hashes and ids"),
    "pipeline/corpora/dedup/near.py": (1, "a table of hashes"),
    "pipeline/corpora/file_tasks.py": (1, "a shard, of up to 2^28 characters"),
    "pipeline/corpora/formats/amazonqa.py": (2, "a bucket of pairs, each once"),
    "pipeline/corpora/formats/pairs.py": (1, "ids or groups of a shard"),
    "pipeline/corpora/reddit/comments.py": (9, "a block of up to 256 MiB"),
    "pipeline/corpora/reddit/lines.py": (4, "a block of up to 256 MiB"),
    "pipeline/corpora/reddit/partition.py": (1, "a block of up to 256 MiB"),
    "pipeline/corpora/reddit/threads.py": (1, "ids of a bucket; its bodies are large_string"),
    "pipeline/corpora/report/survey.py": (4, "2,048 rows"),
    "pipeline/pools/embedder.py": (2, "a table of a shard, and its ids"),
    "pipeline/training/pretraining_data.py": (1, "numbers"),
    "pipeline/training/tokenized_corpus.py": (1, "numbers"),
}


def test_each_place_where_arrays_are_combined_is_named_with_its_bound():
    """`count_distinct` combines its chunks, too: of 70 million ids it raised ArrowCapacityError."""
    found = {}
    for folder in ("pipeline", "jobs", "serve"):
        for file in (ROOT / folder).rglob("*.py"):
            calls = re.findall(
                r"(?:combine_chunks|concat_arrays|count_distinct)\(", file.read_text()
            )
            if calls:
                found[file.relative_to(ROOT).as_posix()] = len(calls)
    assert found == {file: count for file, (count, _) in COMBINED.items()}


def prepare_files(folder: Path, files: dict[str, list[str]], split: str = "train") -> list[str]:
    """The notes."""

    def parse(uri, reading, report):
        for number, text in enumerate(files[uri]):
            report.records += 1
            yield {
                "example_id": f"{uri}/{number}", "group_id": "g", "context": [text], "response": "yes",
                "source": "made", "split": uri if split == "file" else split,
            }  # fmt: skip

    out = Draft(str(folder), str(folder), "corpus", {}, {}, "")
    privacy = Privacy(redact=False, authors="plain", salt="")
    with executors.in_this_process():
        records = file_tasks.prepare(
            out, list(files), parse, EXAMPLE, raw.Reading(), privacy, "made"
        )
    return [note for record in records for note in record.notes]


TEXTS = [f"text {number}" for number in range(2000)]


@pytest.mark.parametrize(
    "other",
    [TEXTS[::-1], TEXTS * 2, [*TEXTS[:1950], *(f"new {number}" for number in range(50))]],
)
def test_copies_are_refused_whatever_their_names_say(tmp_path, other):
    message = (
        "--input: a.csv and old.bak are copies of the same texts, [0-9]+% of the examples are in"
    )
    with pytest.raises(BadInput, match=message):
        prepare_files(tmp_path, {"a.csv": TEXTS, "new.csv": ["new text"] * 90, "old.bak": other})


@pytest.mark.parametrize(
    ("other", "share"),
    [
        (TEXTS[:40], "100%"),
        ([*TEXTS[:80], *(f"new {number}" for number in range(20))], "[78][0-9]%"),
        (TEXTS[:300] * 2, "100%"),
    ],
)
def test_files_that_share_examples_are_noted(tmp_path, other, share):
    (note,) = prepare_files(tmp_path, {"a.csv": TEXTS, "new.csv": ["new text"], "old.bak": other})
    assert re.match(f"a.csv and old.bak: {share} of the smaller file's examples are in both", note)


@pytest.mark.parametrize(
    "other", [[], TEXTS[:4], [*TEXTS[:40], *(f"new {number}" for number in range(50))]]
)
def test_files_with_a_few_equal_examples_are_read(tmp_path, other):
    notes = prepare_files(tmp_path, {"a.csv": TEXTS, "b.csv": other})
    assert notes == ([] if other else ["b.csv: holds no records"])


def test_a_split_may_hold_the_texts_of_another(tmp_path):
    prepare_files(tmp_path, {"train": TEXTS, "test": TEXTS}, split="file")


@pytest.mark.parametrize("module", [convai2, dstc7, opensubtitles, ubuntu])
def test_two_files_of_one_name_are_refused_however_they_are_packed(prepare_here, tmp_path, module):
    """Ids of examples begin with the name."""
    files = [tmp_path / "a" / "train.txt", tmp_path / "b" / "train.txt.gz"]
    with pytest.raises(BadInput, match=r"2 files are named train\.txt"):
        prepare_here(module.prepare, files, module.Options())
