"""Candidates on their way into a pool, and the files of the version before."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from pipeline import storage
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.raw import Reading
from pipeline.engine.draft import Draft, draft
from pipeline.pools import candidates
from pipeline.pools.settings import EmbedConfig

PRIVACY = Privacy(redact=False, authors="hash", salt="")


def stage_rows(
    folder: Path, rows: Iterable[tuple[str, ...]], kept: tuple[str, ...] = ()
) -> tuple[Draft, list[tuple[str, int]]]:
    """(the draft of a pool, its staged parts of candidates) from rows of (id, text, values of `kept`)."""
    out = draft(str(folder / "out"), "pool", EmbedConfig(), {})
    assert isinstance(out, Draft)
    file = folder / "rows.jsonl"
    columns = ("id", "text", *kept)
    records = (dict(zip(columns, row, strict=True)) for row in rows)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = EmbedConfig(filter_columns=kept)
    pieces = [(str(file), None)]
    record = candidates._stage_pieces(out, "file-00000", pieces, config, Reading(), PRIVACY)
    return out, [(name, count) for name, count in record.parts]


def write_version_before(folder: Path, shards: Iterable[pa.Table]) -> list[tuple[str, int]]:
    """(file, number of rows) of each shard's rows."""
    files = []
    for number, rows in enumerate(shards):
        file = str(folder / f"before-{number}.arrow")
        storage.write_bytes(file, candidates.arrow_file(rows))
        files.append((file, len(rows)))
    return files
