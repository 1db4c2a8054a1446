"""Turns candidate texts into the shards of a pool: rows, and their vectors.

There are four steps, and a killed job resumes each where it was. Every file is read (`candidates`). The plan
says which rows there are, and whose vectors the version before has (`plan`). Actors make the shards
(`embedder`). The index for searches is added (`build`). The driver never loads the model, and holds no texts.
`pool` describes the files of a pool.
"""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import Any

from pipeline import storage
from pipeline.config import BadInput
from pipeline.corpora import raw
from pipeline.corpora.privacy import Privacy
from pipeline.engine.actors import Actors
from pipeline.engine.attempts import Work
from pipeline.engine.draft import Draft
from pipeline.engine.records import sum_counts
from pipeline.engine.run import run_tasks_on_actors
from pipeline.models.precision import Resolved, numerics_of
from pipeline.models.sources import Source
from pipeline.pools import candidates
from pipeline.pools.build_records import CheckRecord, EmbedRecord, GateInputs, PlanRecord
from pipeline.pools.gate import Canaries, GateConfig, read_canaries
from pipeline.pools.plan import SHARD_PREFIX, PlanInput, TextQuery, make
from pipeline.pools.settings import EmbedConfig
from pipeline.pools.versions import PLAN, Version, files_of_rows

# Each actor holds three shards: one computes while the others are read, checked or written. With a model that
# only waits, 15.1 s in each actor, 5,000 articles took 23.0 s, with two shards at once 25.1 s.
_SHARDS_AT_ONCE = 3
_CANARY_CHARACTERS = 300


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
    staged = candidates.stage(draft, files, config, reading, privacy)
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
