"""What tests of formats share: a format's whole way in this process, without Ray."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline import storage
from pipeline.corpora.file_tasks import ParseReport
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.raw import Reading
from pipeline.corpora.schema import EXAMPLE
from pipeline.engine import executors
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord, sum_counts


@dataclass(frozen=True)
class Prepared:
    """What a format's `prepare` leaves."""

    rows: list[dict[str, Any]]
    counts: dict[str, int]
    dropped: dict[str, int]
    notes: list[str]


def parse_file(
    module: Any, file: Path, data: str | bytes | None = None, **options: Any
) -> tuple[list[dict[str, Any]], ParseReport]:
    """What a format makes of one file, which is written first where there is `data`."""
    if data is not None:
        file.write_bytes(data.encode() if isinstance(data, str) else data)
    report = ParseReport()
    return list(module.parse(str(file), Reading(), report, module.Options(**options))), report


@pytest.fixture
def out(tmp_path: Path) -> Draft:
    """An empty draft."""
    return Draft(str(tmp_path / "out"), str(tmp_path / "out"), "corpus", {}, {}, "")


@pytest.fixture(scope="session")
def prepare_here() -> Callable[..., Prepared]:
    """`prepare_here(prepare, files, options)`; checks what holds for every corpus."""

    def run(
        prepare: Callable[..., Sequence[TaskRecord]],
        files: list[Path],
        options: Any = None,
        reading: Reading | None = None,
        privacy: Privacy | None = None,
    ) -> Prepared:
        reading = reading or Reading(max_malformed_share=1)
        privacy = privacy or Privacy(redact=False, authors="plain", salt="")

        with tempfile.TemporaryDirectory() as folder, executors.in_this_process():
            draft = Draft(folder, folder, "corpus", {}, {}, "")
            uris = [str(file) for file in files]
            records = prepare(draft, uris, options, reading, privacy)
            rows = []
            for file in (file for record in records for file in record.files):
                table = pq.read_table(storage.join(folder, file["path"]), partitioning=None)
                assert table.schema.names[: len(EXAMPLE)] == EXAMPLE.names
                found = table.to_pylist()
                assert {row["split"] for row in found} == {file["path"].partition("/")[0]}
                rows += found
        counts = sum_counts(record.counts for record in records)
        dropped = sum_counts(record.dropped for record in records)
        assert len({row["example_id"] for row in rows}) == len(rows) == counts.get("examples", 0)
        assert counts["records"] == len(rows) + sum(dropped.values())
        groups = {(row["group_id"], row["split"]) for row in rows}
        assert len(groups) == len({group for group, _ in groups})
        notes = [note for record in records for note in record.notes]
        return Prepared(rows, counts, dropped, notes)

    return run
