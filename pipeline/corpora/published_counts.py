"""The published numbers of examples and dialogues of public files, compared with a corpus's own.

A part of a file, another edition or a damaged download may have the right format, but it has other numbers.
Files are known by their names. A corpus of many files is compared only if all of them are given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.config import BadInput
from pipeline.corpora import raw
from pipeline.corpora.file_tasks import FileRecord
from pipeline.engine.records import TaskRecord, sum_counts

Expect = Literal["report", "published"]


@dataclass(frozen=True)
class _Size:
    corpus: str
    name: str
    """A regular expression for the names of files, decompressed."""
    counts: dict[str, int]
    """Counts by their names in the manifest: `examples.train`, `dialogues`, …"""
    source: str
    files: int = 1
    """Files in the corpus; 1: each matching file is a corpus of its own."""


_POLY = "Humeau et al. 2020, table 1"
_PARLAI = "ParlAI's regression files"
_POLYAI = "PolyAI-LDN/conversational-datasets"

# ConvAI2's persona variants are the same dialogues. The hidden test file was never released.
_PERSONAS = r"_(self|other|both|none)_(original|revised)(_no_cands)?\.txt"
_SIZES = (
    _Size("convai2", f"train{_PERSONAS}", {"examples.train": 131_438, "dialogues": 17_878}, _POLY),
    _Size("convai2", f"valid{_PERSONAS}", {"examples.valid": 7_801, "dialogues": 1_000}, _POLY),
    # The paper's table says 10,000 and 5,000 for valid and test; the files hold these. Dialogues are
    # what `augment` leaves as it is.
    _Size("dstc7", r"ubuntu_train_subtask_1\.json", {"dialogues": 100_000}, _POLY),
    _Size("dstc7", r"ubuntu_dev_subtask_1\.json", {"dialogues": 5_000}, _PARLAI),
    _Size("dstc7", r"ubuntu_test_subtask_1\.json", {"dialogues": 1_000}, _PARLAI),
    # Of ParlAI's file, all right answers; one made by the script holds half of them.
    _Size("ubuntu", r"train\.csv", {"examples.train": 1_000_000}, _POLY),
    _Size("ubuntu", r"valid\.csv", {"examples.valid": 19_560}, _POLY),
    _Size("ubuntu", r"test\.csv", {"examples.test": 18_920}, _POLY),
    _Size("starspace", r"wikipedia_(shuf_)?train5M\.txt", {"examples.train": 5_035_182}, _POLY),
    _Size("starspace", r"wikipedia_(shuf_)?test10k\.txt", {"examples.test": 9_925}, _POLY),
    _Size("reddit", r"RC_201[5-8]-\d\d",
          {"examples.train": 654_396_778, "examples.test": 72_616_937}, _POLYAI, files=48),
    _Size("amazonqa", r"(?i)qa_.*\.json",
          {"examples.train": 3_316_905, "examples.test": 373_007}, _POLYAI, files=38),
    _Size("opensubtitles", r"lines-[a-z]{3}",
          {"examples.train": 283_651_561, "examples.test": 33_240_156}, _POLYAI, files=4_415),
)  # fmt: skip


def compare(corpus: str, uris: list[str], records: Sequence[TaskRecord]) -> list[dict[str, Any]]:
    """{files, count, found, published, source} for each published count of the files given.

    `records` are those of the tasks; a `FileRecord` is of its file alone.
    """
    comparisons = []
    for size in (size for size in _SIZES if size.corpus == corpus):
        matching_uris = [uri for uri in uris if re.fullmatch(size.name, raw.plain_name(uri))]
        if size.files == 1:
            records_of_file = {r.input: [r] for r in records if isinstance(r, FileRecord)}
            parts: list[tuple[str, Sequence[TaskRecord]]] = [
                (raw.plain_name(uri), records_of_file[uri]) for uri in matching_uris
            ]
        else:
            parts = [(f"{size.files:,} files", records)] if len(matching_uris) == size.files else []
        for name, part in parts:
            counts = sum_counts(record.counts for record in part)
            comparisons += [
                {"files": name, "count": count, "found": counts.get(count, 0), "published": number,
                 "source": size.source}
                for count, number in size.counts.items()
            ]  # fmt: skip
    return comparisons


def differences(comparisons: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each count that is not the published one."""
    return [
        "{files}: {found:,} {count}; published: {published:,} ({source})".format(**row)
        for row in comparisons
        if row["found"] != row["published"]
    ]


def check(comparisons: Sequence[Mapping[str, Any]], expect: Expect) -> None:
    """Raises BadInput if the published counts are expected and the corpus has others."""
    if expect == "report":
        return
    if not comparisons:
        raise BadInput(
            "--expect published: no size is published for files of these names and number"
        )
    if mismatches := differences(comparisons):
        raise BadInput(f"--expect published: {'; '.join(mismatches)}")
