"""Turns candidate texts into the shards of a pool: rows, and their vectors.

There are four steps, and a killed job resumes each where it was. Every file is read (`candidates`). The plan
says which rows there are, and whose vectors the version before has (`plan`). Actors make the shards
(`embedder`). The index for searches is added (`build`). The driver never loads the model, and holds no texts.
`pool` describes the files of a pool.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from pipeline import storage
from pipeline.config import NOT_IDENTITY, BadInput, require
from pipeline.corpora import raw
from pipeline.corpora.formats import tables
from pipeline.corpora.privacy import Privacy
from pipeline.engine.actors import Actors
from pipeline.engine.attempts import Work
from pipeline.engine.draft import Draft
from pipeline.engine.records import sum_counts
from pipeline.engine.run import run_tasks_on_actors
from pipeline.models.precision import Precision, Resolved, numerics_of
from pipeline.models.sources import Source
from pipeline.pools import candidates
from pipeline.pools.build_records import CheckRecord, EmbedRecord, GateInputs, PlanRecord
from pipeline.pools.gate import Canaries, GateConfig, read_canaries
from pipeline.pools.plan import SHARD_PREFIX, make
from pipeline.pools.shard import KNOWN_CONTEXTS, ROWS
from pipeline.pools.vector_format import FILE_DTYPES, Dtype
from pipeline.pools.verdicts import PlanInput, TextQuery
from pipeline.pools.versions import PLAN, Version, files_of_rows

# Each actor holds three shards: one computes while the others are read, checked or written. With a model that
# only waits, 15.1 s in each actor, 5,000 articles took 23.0 s, with two shards at once 25.1 s.
_SHARDS_AT_ONCE = 3
_CANARY_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True)
class EmbedConfig(tables.TableFormat):
    """Which texts are embedded, and how they are divided into shards."""

    GROUP = "embed"
    text_column: str = "text"
    """Column with the candidate's text. Where the first file has no `text`, its only column that is called
    answer, response, positive, reply, completion, output or passage."""
    id_column: str = "id"
    """Column with the candidate's id, text or integer; empty: a hash of the text and of its filter
    columns is the id."""
    repeated_ids: Literal["stop", "first"] = field(default="stop", metadata=NOT_IDENTITY)
    """What to do with an id whose rows have different texts: stop, or keep its first row and count the
    others."""
    filter_columns: tuple[str, ...] = ()
    """Columns that searches can filter by. A text with other values in them is another candidate."""
    context_column: str = ""
    """Column with a context that the text answers, such as a FAQ's question: text, or a list of turns.
    Rows with the same text are one candidate, and its vector lies between its text's and its contexts':
    new contexts find it by both. For bi and convert; one process reads all files."""
    rows_per_shard: int = 16_384
    """Rows in a shard at most; a small pool has 16 shards. A killed job loses one shard per actor."""
    dtype: Dtype = "float32"
    """The stored type of a vector: float32, bfloat16, float16, or int8 with a scale for each vector."""
    precision: Precision = "auto"
    """The precision that the encoder computes in; auto: bf16 where the actors' hardware multiplies it. int8:
    layers of 8 bits, on CPUs without bf16 faster than float32.
    Vectors of another precision are not copied from the version before."""
    neighbours: bool = False
    """Make an index for approximate searches. It needs faiss-cpu, and a byte for six numbers."""
    batch_tokens: int = 0
    """Tokens in a batch at most, padding included; 0: as many as suit the device."""
    max_text_bytes: int = 1 << 20
    """Longer texts are set aside."""

    NOT_OF_VECTORS: ClassVar[tuple[str, ...]] = (
        "text_column", "encoding", "delimiter", "quotes", "id_column", "repeated_ids", "rows_per_shard",
        "batch_tokens", "max_text_bytes", "filter_columns", "neighbours",
        "precision",  # what it was on the hardware of then is in the manifest
    )  # fmt: skip
    """Settings that say which rows there are, or how they are filed. All others decide a vector: with another
    value of one, nothing is copied from earlier versions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.dtype in FILE_DTYPES, "embed.dtype", self.dtype, ", ".join(FILE_DTYPES))
        require(bool(self.text_column), "embed.text_column", self.text_column, "a column's name")
        for column in self.filter_columns:
            reserved = (*ROWS.names, KNOWN_CONTEXTS)
            require(column not in ("", *reserved), "embed.filter_columns", column,
                    f"names of columns, but {', '.join(reserved)}")  # fmt: skip
        require(len(set(self.filter_columns)) == len(self.filter_columns), "embed.filter_columns",
                self.filter_columns, "each column once")  # fmt: skip
        require(self.batch_tokens >= 0, "embed.batch_tokens", self.batch_tokens, ">= 0")
        for name in ("rows_per_shard", "max_text_bytes"):
            require(getattr(self, name) >= 1, f"embed.{name}", getattr(self, name), ">= 1")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read: the id's ("": none), the text's, those to filter by."""
        return (self.id_column, self.text_column, *self.filter_columns)


def prepare(
    draft: Draft,
    files: list[str],
    config: EmbedConfig,
    gate: GateConfig,
    reading: raw.Reading,
    previous: Version | None,
    source: Version | None,
    precision: Resolved,
    privacy: Privacy,
) -> PlanRecord:
    """Reads all candidates and plans the pool.

    `previous`: the version before. `source`: a version whose vectors are those that the model would make.
    `precision`: the precision of the computation, which a job that is resumed elsewhere keeps. `privacy`: how
    texts are redacted.
    Raises BadInput where nothing is left to embed, too much is malformed, or an id comes twice.
    """
    canaries_before = previous.artifact.manifest.get("canaries") if previous else None
    contexts = _canaries(gate, canaries_before)
    previous_uri = previous.artifact.uri if previous else ""
    gate_inputs = GateInputs(previous_uri, contexts, gate.canary_texts, gate.top_k)
    earlier = _earlier_plan(draft, gate_inputs, precision)
    if earlier and earlier.asked == gate_inputs:
        return earlier
    began = time.perf_counter()
    table = candidates.CandidateTable(
        config.columns, config, config.max_text_bytes, config.context_column
    )
    staged = candidates.stage(draft, files, table, reading, privacy)
    dropped = sum_counts(record.dropped for record in staged)
    parts = [part for record in staged for part in record.parts]
    if not parts and not dropped:
        storage.delete(draft.staging)
        raise BadInput("--candidates: no text to embed (no rows)")
    if not parts:
        raise BadInput(
            f"--candidates: no text to embed ({raw.reasons_text(dropped)}); see {draft.path('rejected')}"
        )
    raw.check_share(draft, staged, reading)
    copies = bool(previous and source and previous.name == source.name)
    other_source = None if copies else source
    rows = PlanInput(
        candidates=parts,
        before=files_of_rows(previous.artifact) if previous else (),
        source=files_of_rows(other_source.artifact) if other_source else (),
        same_columns=previous is None or previous.filter_columns == config.filter_columns,
    )
    answers_before = canaries_before["answers"] if canaries_before else []
    query = TextQuery(
        texts=gate.canary_texts if contexts is None else 0,
        hashes=sorted({key for answers in answers_before for key in answers}),
    )
    plan = make(draft, rows, config.rows_per_shard, query)
    if plan.repeated_id and config.repeated_ids == "stop":
        raise BadInput(f"embed.id_column {config.id_column}: {plan.repeated_id!r} is the id of several rows "
                       "with different texts or filter columns; allowed: ids that differ, or "
                       "--embed.repeated-ids first, which keeps the first row of each id")  # fmt: skip
    if earlier and plan.shards != earlier.plan.shards:  # another polyrank cuts other shards
        draft.forget_tasks()
    if contexts is None:
        contexts = [[text[:_CANARY_CHARACTERS]] for text in plan.first]
    record = PlanRecord(
        plan=plan,
        asked=gate_inputs,
        copies=copies,
        source=other_source.artifact.uri if other_source else "",
        precision=precision,
        canary_file=gate.canaries,
        canaries=contexts,
        canaries_before=canaries_before,
        counts=sum_counts(record.counts for record in staged),
        malformed=sum_counts(record.malformed for record in staged),
        dropped=sum_counts([dropped, plan.dropped]),
        notes=[note for record in staged for note in record.notes],
        seconds=round(time.perf_counter() - began, 3),
        numerics=numerics_of(precision),
        planned_at=time.time(),
    )
    draft.mark(PLAN, record)
    return record


def _earlier_plan(draft: Draft, gate_inputs: GateInputs, precision: Resolved) -> PlanRecord | None:
    """The plan of a build that is resumed, whose finished shards stay; None where all begins anew."""
    finished = draft.finished_tasks()
    earlier = finished.record(PLAN, PlanRecord) if PLAN in finished else None
    if earlier and earlier.numerics == numerics_of(precision):
        if earlier.asked == gate_inputs:
            return earlier
        if earlier.precision == precision:
            print(f"{draft.uri}: planned anew, as CURRENT or the gate's canaries have changed since then; "
                  "finished shards stay", flush=True)  # fmt: skip
            return earlier
    if any(task.startswith(SHARD_PREFIX) for task in finished):
        # Without a plan they are what a removal that was killed has left, and may be of other numbers.
        print(f"{draft.uri}: begun anew, as the precision or polyrank have changed since it was planned",
              flush=True)  # fmt: skip
        draft.forget_tasks()
    return None


def embed(
    draft: Draft,
    prepared: PlanRecord,
    model: Source,
    config: EmbedConfig,
    gate: GateConfig,
    reading: raw.Reading,
    actors: Actors,
) -> list[EmbedRecord]:
    """Makes the missing shards; returns the records of all shards.

    Raises BadInput if no text, or too small a share of them, could be embedded.
    """
    gate_name = prepared.asked.name
    settings = dict[str, Any](
        model=model,
        batch_tokens=config.batch_tokens,
        plan=prepared.plan.name,
        gate_name=gate_name,
        source=prepared.asked.previous if prepared.copies else prepared.source,
        canaries=prepared.canaries,
        top_k=gate.top_k,
        sample=gate.sample,
        dtype=config.dtype,
        precision=prepared.precision,
    )
    shards = prepared.plan.shards
    rows = {name: sum(end - start for _, start, end in shards[name]) for name in shards}
    make_work = functools.partial(_embedder, **settings)
    records = run_tasks_on_actors(
        draft, shards, make_work, "embed candidates", EmbedRecord, actors, rows, _SHARDS_AT_ONCE
    )
    record_of_shard = dict(zip(shards, records, strict=True))
    to_check = [name for name, r in record_of_shard.items() if r.check and r.asked != gate_name]
    if to_check:  # CURRENT has moved since; the model embeds no more than the gate's sample of them
        checks = run_tasks_on_actors(
            draft,
            {f"check-{gate_name}-{name}": (name, shards[name]) for name in to_check},
            functools.partial(_checker, **settings),
            "check finished shards again",
            CheckRecord,
            actors,
            {f"check-{gate_name}-{name}": rows[name] for name in to_check},
            _SHARDS_AT_ONCE,
        )
        for name, check_record in zip(to_check, checks, strict=True):
            record_of_shard[name] = replace(record_of_shard[name], check=check_record.check)
        records = list(record_of_shard.values())
    raw.check_share(draft, [prepared, *records], reading)
    if not sum_counts(record.counts for record in records).get("candidates"):
        dropped = sum_counts(record.dropped for record in records)
        raise BadInput(
            f"--candidates: no text to embed ({raw.reasons_text(dropped)}); see {draft.path('rejected')}"
        )
    return records


def _canaries(gate: GateConfig, canaries_before: Canaries | None) -> list[list[str]] | None:
    """The contexts of this version's canaries; None: the plan has to choose texts."""
    if gate.canaries:
        return read_canaries(gate.canaries)
    if canaries_before and not canaries_before.get("file") and canaries_before["contexts"]:
        return list(canaries_before["contexts"]) if gate.canary_texts else []
    return None


def _embedder(model: Source, **settings: Any) -> Work[EmbedRecord]:
    # Not loaded by who drives this: torch and transformers take seconds, and memory.
    from pipeline.pools.embedder import Embedder

    return Embedder(model.local(), **settings)


def _checker(model: Source, **settings: Any) -> Work[CheckRecord]:
    from pipeline.pools.embedder import Embedder

    return Embedder(model.local(), **settings).check_again
