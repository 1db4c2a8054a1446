"""Candidate texts to the shards of a pool: rows, and their vectors.

Four steps, and each is resumed where it was: every file is read (`candidates`); the plan says which rows
there are, and whose vectors the version before has (`plan`); actors make the shards (`embedder`); what
searches need is added (`build`). Who drives this never loads the model, nor holds the texts. What the
files of a pool are: `pool`.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any

from pipeline import storage
from pipeline.artifact import MANIFEST, Draft, sum_counts
from pipeline.config import BadInput, from_dict, require, to_dict
from pipeline.corpora import raw
from pipeline.models.precision import Precision, Resolved
from pipeline.models.sources import Source
from pipeline.retrieval.pools import candidates
from pipeline.retrieval.pools.candidates import ROWS as ROWS
from pipeline.retrieval.pools.gate import GateConfig, read_canaries
from pipeline.retrieval.pools.plan import Plan, make
from pipeline.retrieval.pools.pool import Pool
from pipeline.retrieval.pools.vector_format import FILE_DTYPES, Dtype
from pipeline.shards import Actors, Work, run_tasks_on_actors

Record = dict[str, Any]
_PLAN = "plan"
_CANARY_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    """Which texts, and how they are cut into shards."""

    text_column: str = "text"
    """Column with the candidate's text."""
    id_column: str = "id"
    """Column with its id, text or integer; empty: the text's content hash is the id."""
    filter_columns: tuple[str, ...] = ()
    """Columns that searches can filter by; a text with other values there is another candidate."""
    rows_per_shard: int = 16_384
    """Rows in a shard at most; small pools are cut in 16. A killed job loses one shard per actor."""
    dtype: Dtype = "float32"
    """What is kept of a vector's numbers: float32, bfloat16, float16, or int8 with a scale for each."""
    precision: Precision = "auto"
    """What the encoder computes in; auto: bf16 where the actors' hardware multiplies it. Vectors of
    another precision are not copied from the version before."""
    neighbours: bool = False
    """Whether an index for approximate searches is made; needs faiss-cpu, and a byte for six numbers."""
    batch_tokens: int = 0
    """Tokens in a batch at most, padding included; 0: what suits the device."""
    max_text_bytes: int = 1 << 20
    """Longer texts are set aside."""

    def __post_init__(self) -> None:
        require(self.dtype in FILE_DTYPES, "embed.dtype", self.dtype, ", ".join(FILE_DTYPES))
        require(bool(self.text_column), "embed.text_column", self.text_column, "a column's name")
        for column in self.filter_columns:
            require(column not in ("", *ROWS.names), "embed.filter_columns", column,
                    f"names of columns, but {', '.join(ROWS.names)}")  # fmt: skip
        require(self.batch_tokens >= 0, "embed.batch_tokens", self.batch_tokens, ">= 0")
        for name in ("rows_per_shard", "max_text_bytes"):
            require(getattr(self, name) >= 1, f"embed.{name}", getattr(self, name), ">= 1")


def prepare(
    draft: Draft,
    files: list[str],
    config: EmbedConfig,
    gate: GateConfig,
    reading: raw.Reading,
    previous: Pool | None,
    copies: bool,
    precision: Resolved,
) -> Record:
    """Reads all candidates and plans the pool; `plan_of` the record says what comes of it.

    `previous`: the version before. `copies`: whether its vectors are those that the model would make.
    `precision`: what it would compute them in; a job that is resumed elsewhere keeps to it.
    Raises BadInput where nothing is left to embed, or too much is malformed.
    """
    found = draft.records().get(_PLAN)
    if found and (not found["copies"] or storage.exists(storage.join(found["previous"], MANIFEST))):
        return found
    began = time.perf_counter()
    columns = (config.id_column, config.text_column, *config.filter_columns)
    staged = candidates.stage(draft, files, columns, config.max_text_bytes, reading)
    dropped = sum_counts(staged, "dropped")
    parts = [(name, rows) for record in staged for name, rows in record["parts"]]
    if not parts:
        raise BadInput(f"--candidates: no text to embed ({dropped or 'no rows'})")
    raw.check_share(draft, staged, reading)
    before = previous.artifact.manifest.get("canaries") if previous else None
    contexts = _canaries(gate, before)
    known = sorted({key for answers in (before or {}).get("answers", ()) for key in answers})
    texts = gate.canary_texts if contexts is None else 0
    plan = make(draft, parts, previous, config.rows_per_shard, texts, known)
    if contexts is None:
        contexts = [[text[:_CANARY_CHARACTERS]] for text in plan.first]
    record = {
        "plan": to_dict(plan),
        "previous": previous.artifact.uri if previous else "",
        "copies": copies,
        "precision": precision,
        "canaries": {"file": gate.canaries, "contexts": contexts, "before": before},
        "counts": sum_counts(staged, "counts"),
        "malformed": sum_counts(staged, "malformed"),
        "dropped": sum_counts([{"dropped": dropped}, {"dropped": plan.dropped}], "dropped"),
        "seconds": round(time.perf_counter() - began, 3),
    }
    draft.mark(_PLAN, record)
    return record


def plan_of(record: Record) -> Plan:
    """The plan in the record of `prepare`."""
    return from_dict(Plan, record["plan"])


def embed(
    draft: Draft,
    prepared: Record,
    model: Source,
    config: EmbedConfig,
    gate: GateConfig,
    reading: raw.Reading,
    actors: Actors,
) -> list[Record]:
    """Makes the shards; returns their records: `files`, `counts`, `dropped`, `embedded`, `check`.

    Raises BadInput where nothing could be embedded, or too little.
    """
    make_work = functools.partial(
        _embedder,
        model=model,
        batch_tokens=config.batch_tokens,
        previous=prepared["previous"] if prepared["copies"] else "",
        canaries=prepared["canaries"]["contexts"],
        top_k=gate.top_k,
        sample=gate.sample,
        dtype=config.dtype,
        precision=prepared["precision"],
    )
    tasks = plan_of(prepared).shards
    rows = {name: sum(end - start for _, start, end in tasks[name]) for name in tasks}
    label = "embed candidates"
    records = run_tasks_on_actors(draft, tasks, make_work, label, actors, rows)
    raw.check_share(draft, [prepared, *records], reading)
    if not sum_counts(records, "counts").get("candidates"):
        raise BadInput(f"--candidates: no text to embed ({sum_counts(records, 'dropped')})")
    return records


def _canaries(gate: GateConfig, before: Record | None) -> list[list[str]] | None:
    """The contexts that this version is asked; None: texts that the plan has to choose."""
    if gate.canaries:
        return read_canaries(gate.canaries)
    if before and not before["file"] and before["contexts"]:
        return list(before["contexts"]) if gate.canary_texts else []
    return None


def _embedder(model: Source, **settings: Any) -> Work:
    # Not loaded by who drives this: torch and transformers take seconds, and memory.
    from pipeline.retrieval.pools.embedder import Embedder

    return Embedder(model.local(), **settings)
