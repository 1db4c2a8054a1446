"""Candidate texts to the shards of a pool: first the rows, then their vectors.

    rows/part-00000.arrow      id, text, content_hash of each row (Arrow IPC, memory-mappable)
    vectors/part-00000.npy     [rows, D] float32, in the same order

The plan streams the input once and drops what cannot be a candidate, so that the embedding, which
is what costs, knows its shards from the start and can be resumed by shard.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from pipeline import storage
from pipeline.artifact import Draft, sum_counts
from pipeline.config import BadInput, require
from pipeline.corpora import raw
from pipeline.models import inference
from pipeline.models.ranker import load_ranker
from pipeline.shards import Actors, Work, run_tasks_on_actors

ROWS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("content_hash", pa.string(), nullable=False),
    ]
)
_PLAN = "plan"
_STRICT = raw.Reading()
_HALF_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    """Which texts, and how they are cut into shards."""

    text_column: str = "text"
    """Column with the candidate's text."""
    id_column: str = "id"
    """Column with its id, text or integer; empty: the text's content hash is the id."""
    rows_per_shard: int = 16_384
    """Rows in a shard; a killed job loses at most one shard per actor."""
    batch_tokens: int = inference.BATCH_TOKENS
    """Tokens in a batch at most, padding included."""

    def __post_init__(self) -> None:
        require(bool(self.text_column), "embed.text_column", self.text_column, "a column's name")
        require(self.rows_per_shard >= 1, "embed.rows_per_shard", self.rows_per_shard, ">= 1")
        require(self.batch_tokens >= 1, "embed.batch_tokens", self.batch_tokens, ">= 1")


def prepare(
    draft: Draft,
    files: list[str],
    model: Path,
    config: EmbedConfig,
    actors: Actors,
    reading: raw.Reading = _STRICT,
) -> list[dict[str, Any]]:
    """Fills the draft; returns records with `files`, `counts` and `dropped`.

    `model` is a local folder, or one that every node of the cluster sees.
    Raises BadInput where nothing is left to embed.
    """
    plan = draft.records().get(_PLAN)
    if plan is None:
        plan = _plan(draft, files, config, reading)
        draft.mark(_PLAN, plan)
    if not plan["shards"]:
        raise BadInput(f"--candidates: no text to embed ({plan['dropped'] or 'no rows'})")
    tasks = {name: name for name in plan["shards"]}
    make = functools.partial(_embedder, model, config.batch_tokens)
    return [plan, *run_tasks_on_actors(draft, tasks, make, "embed candidates", actors)]


def content_hash(text: str) -> str:
    """32 hex digits that name a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _plan(
    draft: Draft, files: list[str], config: EmbedConfig, reading: raw.Reading = _STRICT
) -> dict[str, Any]:
    """Writes the rows of every shard. Ids and hashes seen take some 200 bytes a row here."""
    dropped: Counter[str] = Counter()
    rejects = raw.Rejects()
    ids: set[str] = set()
    hashes: set[str] = set()
    waiting: list[dict[str, str]] = []
    shards: list[str] = []
    entries = []
    read = 0

    def write() -> None:
        name = f"part-{len(shards):05d}"
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, ROWS) as writer:
            writer.write_table(pa.Table.from_pylist(waiting, schema=ROWS))
        entries.append(draft.write_file(f"rows/{name}.arrow", sink.getvalue(), len(waiting)))
        shards.append(name)
        waiting.clear()

    for file in tqdm(files, desc="read candidates", unit="file"):
        for key, text in _read(file, config, reading, rejects):
            read += 1
            if not _is_text(text):
                dropped["text is not a string"] += 1
                continue
            if not text.strip():
                dropped["text is empty"] += 1
                continue
            text_hash = content_hash(text)
            key = text_hash if not config.id_column else key
            key = str(key) if isinstance(key, int) and not isinstance(key, bool) else key
            if not _is_text(key) or key == "":
                dropped["id is neither a string nor an integer"] += 1
                continue
            if text_hash in hashes:
                dropped["the same text again"] += 1
                continue
            if key in ids:
                dropped["the same id again"] += 1
                continue
            ids.add(key)
            hashes.add(text_hash)
            waiting.append({"id": key, "text": text, "content_hash": text_hash})
            if len(waiting) == config.rows_per_shard:
                write()
    if waiting:
        write()
    dropped.update(rejects.counts)
    counts = {"records": read + rejects.counts.total(), "candidates": len(ids)}
    record = {"shards": shards, "files": entries, "counts": counts, "dropped": dict(dropped)}
    if rejects.counts:
        rejects.save(draft, _PLAN)
        raw.check_share(draft, [{**record, "malformed": dict(rejects.counts)}], reading)
    return record


def _read(
    uri: str, config: EmbedConfig, reading: raw.Reading, rejects: raw.Rejects
) -> Iterator[tuple[Any, Any]]:
    """(id, text) of every row of a Parquet file or of JSON lines."""
    columns = [name for name in (config.id_column, config.text_column) if name]
    if uri.endswith(".parquet"):
        with storage.open_input(uri) as stream:
            try:
                file = pq.ParquetFile(stream)
            except pa.ArrowInvalid as error:
                raise BadInput(f"{uri}: no Parquet file ({error})") from None
            _require_columns(uri, columns, file.schema_arrow.names)
            for batch in file.iter_batches(8192, columns=columns):
                for row in batch.to_pylist():
                    yield row.get(config.id_column), row[config.text_column]
        return
    first = True
    for number, line in raw.read_lines(uri, reading):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            if first:  # another format, then
                raise BadInput(f"{uri}, line {number}: not a JSON object; allowed: .parquet files, "
                               "or files with one JSON object per line")  # fmt: skip
            rejects.add("not a JSON object", uri, number, line)
            continue
        if first:
            _require_columns(f"{uri}, line {number}", columns, list(row))
        first = False
        if missing := [name for name in columns if name not in row]:
            rejects.add(f"no column {missing[0]}", uri, number, line)
            continue
        yield row.get(config.id_column), row[config.text_column]


def _is_text(value: Any) -> TypeGuard[str]:
    """Whether it is a string that UTF-8 can hold: JSON's may have half of a surrogate pair."""
    return isinstance(value, str) and not _HALF_PAIR.search(value)


def _require_columns(where: str, wanted: list[str], found: list[str]) -> None:
    for name in wanted:
        if name not in found:
            raise BadInput(f"{where}: no column {name!r}; there are: {', '.join(found)}")


def _embedder(model: Path, batch_tokens: int) -> Work:
    ranker = load_ranker(model)
    ranker.to(inference.best_device())
    return functools.partial(_embed, ranker=ranker, batch_tokens=batch_tokens)


def _embed(draft: Draft, task: str, name: str, ranker: Any, batch_tokens: int) -> dict[str, Any]:
    with storage.open_input(draft.path("rows", f"{name}.arrow")) as stream:
        texts = pa.ipc.open_file(stream).read_all()["text"].to_pylist()
    vectors_ND = inference.candidate_vectors(ranker, texts, batch_tokens).numpy()
    if not np.isfinite(vectors_ND).all():
        raise FloatingPointError(f"{name}: the model made vectors that are not finite")
    buffer = io.BytesIO()
    np.save(buffer, vectors_ND, allow_pickle=False)
    entry = draft.write_file(f"vectors/{name}.npy", buffer.getvalue(), len(texts))
    return {"files": [entry], "counts": {"shards": 1}}


def totals(records: list[dict[str, Any]]) -> tuple[dict[str, int], dict[str, int]]:
    """(counts, drop reasons) of a pool."""
    return sum_counts(records, "counts"), sum_counts(records, "dropped")
