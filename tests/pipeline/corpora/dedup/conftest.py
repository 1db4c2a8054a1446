from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from pipeline.artifact import Artifact
from pipeline.corpora import dedup
from pipeline.corpora.dedup import decontaminate
from pipeline.corpora.dedup.evaluation_sets import EvaluationSet
from pipeline.corpora.dedup.options import Options
from pipeline.corpora.schema import EXAMPLE
from pipeline.engine.draft import draft
from pipeline.engine.records import sum_counts
from tests.helpers import rows_of

Row = dict[str, Any]


@pytest.fixture
def corpus_of(tmp_path: Path) -> Callable[..., Artifact]:
    """`corpus_of(rows, shards=3)`: a published corpus. Rows name an `example_id`, a `context`, a
    `response`, and a `split` other than train; they are dealt out to the shards of their split."""
    folders = (tmp_path / f"corpus-{number}" for number in itertools.count())

    def publish(rows: Sequence[Row], shards: int = 1) -> Artifact:
        uri = str(next(folders))
        out = draft(uri, "corpus", Options(), {})
        files = []
        for split in ("train", "valid", "test"):
            found = [row for row in rows if row.get("split", "train") == split]
            for number in range(min(shards, len(found))):
                part = [
                    {"group_id": row["example_id"], "source": "test", "split": split, **row}
                    for row in found[number::shards]
                ]
                table = pa.Table.from_pylist(part, schema=EXAMPLE)
                files.append(out.write_table(f"{split}/part-{number:05d}.parquet", table))
        return out.publish(files, {"examples": len(rows)})

    return publish


@pytest.fixture
def clean(tmp_path: Path, actors_in_process: list[str]) -> Callable[..., Any]:
    """`clean(corpus, options, sharing, sets)`: the stages in this process, without Ray.

    Returns `rows`, what is left by id, `dropped`, the reasons, and `counts`.
    """
    names = itertools.count()

    def run(
        corpus: Artifact,
        options: Options | None = None,
        sharing: decontaminate.Options | None = None,
        sets: Sequence[EvaluationSet] = (),
    ) -> SimpleNamespace:
        out = draft(str(tmp_path / f"clean-{next(names)}"), "corpus", Options(), {})
        records = dedup.clean(
            out, corpus, list(sets), options or Options(), sharing or decontaminate.Options()
        )
        counts = sum_counts(record.counts for record in records)
        dropped = sum_counts(record.dropped for record in records)
        files = [file for record in records for file in record.files]
        made = out.publish(files, counts, dropped)
        rows = rows_of(made)
        assert counts["records"] == corpus.rows()
        assert counts["records"] == len(rows) + sum(dropped.values())
        assert counts["examples"] == len(rows)
        found = {row["example_id"]: row for row in rows}
        return SimpleNamespace(rows=found, dropped=dropped, counts=counts, uri=made.uri)

    return run
