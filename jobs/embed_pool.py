"""Embeds candidate texts into a versioned pool, which searches and services open."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace

from jobs import cluster, program
from pipeline import cost, storage
from pipeline.artifact import MANIFEST, Artifact, open_artifact
from pipeline.config import NOT_IDENTITY, Stopped, require
from pipeline.corpora.formats import pairs, tables
from pipeline.corpora.privacy import NOT_REDACTED, Privacy
from pipeline.corpora.raw import Reading
from pipeline.engine.actors import Actors
from pipeline.engine.draft import Draft, discard, draft, request_of
from pipeline.engine.records import TaskRecord, sum_counts
from pipeline.models.precision import numerics_of
from pipeline.models.settings import read_settings
from pipeline.models.truncation import Truncated
from pipeline.pools import build, embed, gate, promotion, versions
from pipeline.pools.build_records import PlanRecord
from pipeline.pools.changes import Changes, RowSet
from pipeline.pools.estimate import estimate
from pipeline.pools.gate import GateConfig
from pipeline.pools.inputs import PoolInputs, resolve_inputs
from pipeline.pools.lock import locked
from pipeline.pools.plan import compare, is_small
from pipeline.pools.pool import KIND, current_uri
from pipeline.pools.settings import EmbedConfig
from pipeline.pools.versions import Version
from pipeline.storage.locks import Lock

_FILES = ("candidates", "order")  # the inputs that say which files are read
_MEASURED_ROWS = 1000  # a rate from fewer rows says little


@dataclass(frozen=True, kw_only=True)
class Config:
    """Embeds candidate texts with a ranker into a new version of a pool and makes it CURRENT.

    The vector of a text is copied from the version before, if the same model embedded the text there. With
    the same texts and model there is nothing to do. Candidates are tables: Parquet (such as a corpus' train/
    folder, with `--embed.text-column response --embed.id-column example_id`), JSON lines, CSV or TSV.
    """

    model: str
    """A ranker (of jobs.finetune): bi, poly or convert. Or models:/name@alias of MLflow's registry."""
    candidates: tuple[str, ...]
    """Files or folders with a text column and an id column (--embed.text-column, --embed.id-column)."""
    pools: str = field(metadata=program.OUTPUT)
    """Folder of all pools; the version becomes <pools>/<name>/<version>."""
    name: str
    """The pool's name."""
    redact: bool = field(default=False, metadata=NOT_IDENTITY)
    """Replace e-mail addresses, u/names, IPs and phone numbers by tags, as jobs.prepare_corpus does in public
    dumps."""
    dry_run: bool = field(default=False, metadata=NOT_IDENTITY)
    """Print what would be done. The job still reads all candidates, and writes a plan below
    <pools>/_plans, which it removes at its end."""
    publish_only: bool = field(default=False, metadata=NOT_IDENTITY)
    """Leave CURRENT as it is, until jobs.promote moves it. A pool's first version becomes CURRENT all the
    same."""
    keep: int = field(default=3, metadata=NOT_IDENTITY)
    """Keep this many versions, and also CURRENT, each version that a service has open, and (from 2 on) the
    newest one by another model. A killed build stays until this many newer versions are there. 0: keep
    all versions, and a killed build until the next version."""
    keep_days: float = field(default=0.0, metadata=NOT_IDENTITY)
    """Also keep versions that are younger than this."""
    lock_expires_s: float = field(default=120.0, metadata=NOT_IDENTITY)
    """A job that has given no sign of life for this long loses the pool to the next job."""
    embed: EmbedConfig = field(default_factory=EmbedConfig)
    """The texts."""
    gate: GateConfig = field(default_factory=GateConfig, metadata=NOT_IDENTITY)
    """The checks that a version has to pass."""
    reading: Reading = field(default_factory=Reading, metadata=NOT_IDENTITY)
    """How much damage in the input is tolerated."""
    resources: Actors = field(default_factory=Actors, metadata=NOT_IDENTITY)
    """The hardware that the job runs on."""

    def __post_init__(self) -> None:
        require(bool(self.name) and not set(self.name) & set("/\\ .\n"), "name", self.name,
                "a folder's name without dots, slashes and spaces")  # fmt: skip
        require(not self.name.startswith("_"), "name", self.name, "a name that begins otherwise")
        for name in ("keep", "keep_days"):
            require(getattr(self, name) >= 0, name, getattr(self, name), ">= 0")
        require(self.lock_expires_s > 0, "lock_expires_s", self.lock_expires_s, "above 0")


def run(config: Config) -> program.Summary:
    made_from = resolve_inputs(config.model, config.candidates, config.embed, config.redact)
    config = _with_text_column(config, made_from.files)
    version = f"v-{request_of(KIND, config, made_from.references)[:12]}"
    job = _Job(made_from, version, storage.join(config.pools, config.name, version))
    is_current = _current_name(config) == version
    if is_current and storage.exists(storage.join(job.uri, MANIFEST)):
        pool = open_artifact(job.uri, KIND)
        if not config.dry_run:
            # A job that was killed after it made this version may have left old ones, and its lock.
            with suppress(Stopped), locked(config.pools, config.name, config.lock_expires_s):
                _remove_old(config, unfinished=False)  # those may be of another input, and go on
        return _summary(config, pool, True)
    columns = config.embed.columns_by_option
    tables.require_columns(made_from.files, columns, config.reading, config.embed)
    if config.gate.canaries:
        gate.read_canaries(config.gate.canaries)
    if config.dry_run:
        return _dry_run(config, job)
    with locked(config.pools, config.name, config.lock_expires_s) as lock:
        pool, already_there = _update(config, job, lock)
        _remove_old(config)
    return _summary(config, pool, already_there)


def _remove_old(config: Config, unfinished: bool = True) -> None:
    """`unfinished`: also removes killed builds that `--keep` newer versions have outlived."""
    limit = config.gate.max_removed_share
    removal = versions.remove_old(
        config.pools, config.name, config.keep, config.keep_days, limit, unfinished
    )
    versions.remove_dead_plans(config.pools)
    for version in removal.removed:
        _say(config, f"removed {version}")
    if removal.killed_runs:
        from pipeline import tracking

        tracking.end_killed(removal.killed_runs)
    for version, rows in removal.kept_larger:
        _say(config, f"kept {version} beyond --keep {config.keep}: it has {rows:,} candidates, and no "
             f"version that stays has {1 - limit:.0%} of that; remove its folder if it may go")  # fmt: skip


def _say(config: Config, text: str) -> None:
    print(f"pool {config.name}: {text}", flush=True)


@dataclass(frozen=True)
class _Job:
    """The job's inputs and output, resolved from its settings."""

    made_from: PoolInputs
    version: str
    uri: str


def _with_text_column(config: Config, files: list[str]) -> Config:
    """Where the first file lacks the default column, its only one with a usual name, such as answer."""
    if config.embed.text_column != EmbedConfig.text_column:
        return config
    column = pairs.text_column(files, config.embed, config.reading)
    if column and column != config.embed.text_column:
        print(f"texts are the column {column!r}; --embed.text-column names another", file=sys.stderr,
              flush=True)  # fmt: skip
        return replace(config, embed=replace(config.embed, text_column=column))
    return config


def _update(config: Config, job: _Job, lock: Lock) -> tuple[Artifact, bool]:
    """(the version that is CURRENT afterwards, whether it existed before)

    Raises Stopped where the gate refuses the version.
    """
    from pipeline import tracking

    current = _current_name(config)  # before it is compared with: it may move at any time
    previous = versions.open_before(config.pools, config.name)
    versions.finish_removals(config.pools, config.name, job.version)
    out = draft(job.uri, KIND, config, job.made_from.references)
    if isinstance(out, Artifact):
        if previous:
            changes = _compare(config, job, Version(out), previous)
            _, refusal = _judge_changes(config, changes, out.rows("rows/"), previous)
            if refusal:
                raise Stopped(refusal)
        made = out.manifest["created_at"][:16]
        _say(config, f"{job.version}, made {made} UTC, has these texts already")
        _publish(config, job.version, current)
        return out, True
    tracking.connect()  # refuses a server that is away before the work
    with cluster.session(for_tasks=True):
        plan_record = _plan(config, job, out, previous)
        if previous and _is_same(config, job, plan_record, previous):
            discard(out.staging)
            if previous.name != current:  # CURRENT is lost
                _publish(config, previous.name, current)
            return previous.artifact, True
        plan = plan_record.plan
        shares, refusal = _judge_changes(config, plan.changes, plan.rows, previous)
        if refusal:
            raise Stopped(refusal)
        with tracking.start("embed_pool", out) as tracked:
            pool = _embed(config, job, out, plan_record, previous, shares, lock, tracked.run_id)
            tracking.finish(tracked, pool)
    lock.check()
    _publish(config, job.version, current)
    return pool, False


def _current_name(config: Config) -> str:
    return versions.current_name(config.pools, config.name)


def _publish(config: Config, version: str, compared: str) -> None:
    promotion.publish(config.pools, config.name, version, config.publish_only, compared)


def _compare(config: Config, job: _Job, version: Version, before: Version) -> Changes:
    """The ids of a version that is there already beside those of the version before."""
    rows, rows_before = (versions.files_of_rows(v.artifact) for v in (version, before))
    same_columns = version.filter_columns == before.filter_columns
    session = nullcontext() if is_small(rows, rows_before) else cluster.session(for_tasks=True)
    with session, _scratch(config, job) as scratch:
        return compare(scratch, rows, rows_before, same_columns)


@contextmanager
def _scratch(config: Config, job: _Job) -> Iterator[Draft]:
    """A draft that is removed at the end; where this job is killed, by the next one."""
    uri = storage.join(versions.plans(config.pools), f"{job.version}-{uuid.uuid4().hex[:8]}")
    out = draft(uri, KIND, config, job.made_from.references)
    assert isinstance(out, Draft)
    try:
        with out.locked():
            yield out
    finally:
        storage.delete(out.staging)


def _judge_changes(
    config: Config, changes: Changes, rows: int, before: Version | None
) -> tuple[gate.Shares, str]:
    """(how much of the version before a version of so many rows leaves, why the gate refuses that)"""
    name = before.name if before else _current_name(config)
    rows_before = versions.rows_of(config.pools, config.name, name) if name else 0
    shares = gate.shares_of(changes, rows, rows_before)
    return shares, gate.refusal(config.gate, shares, name, rows_before)


def _plan(config: Config, job: _Job, out: Draft, previous: Version | None) -> PlanRecord:
    """Plans the version and prints the plan. `previous`: the version before."""
    from pipeline.engine.resources import precision_of_tasks

    precision = precision_of_tasks(config.embed.precision, config.resources.gpu)
    if previous and previous.precision != precision:
        before = f"the version before in {previous.precision}"
        _say(config, f"computed in {precision}, {before}: nothing is copied from it")
    if previous and previous.model_fingerprint != job.made_from.model.fingerprint:
        other = f"{previous.name} is of another model, {previous.model_fingerprint}"
        _say(config, f"{other}; a service with that model goes on with it")
    # It is not CURRENT if that is pinned, and so grows old, or if this model is not promoted yet.
    source = previous and versions.newest_with_vectors_of(
        config.pools, config.name, job.made_from.model, config, precision
    )
    if not config.redact:
        print(NOT_REDACTED, file=sys.stderr, flush=True)
    privacy = Privacy(redact=config.redact, authors="hash", salt="")
    plan_record = embed.prepare(
        out, job.made_from.files, config.embed, config.gate, config.reading, previous, source,
        precision, privacy,
    )  # fmt: skip
    job.made_from.check_candidates(out.staging)
    for note in plan_record.notes:
        _say(config, note)
    plan, rows = plan_record.plan, plan_record.rows_to_embed
    if plan_record.source:
        name = storage.name_of(plan_record.source)
        _say(config, f"{plan.salvaged:,} texts are copied from {name}")
    estimate = "not known yet how long that takes"
    if rate := _rate(previous):
        minutes = rows / rate / config.resources.count(len(plan.shards)) / 60
        estimate = f"about {minutes:.1f} minutes"
    if previous and previous.filter_columns != config.embed.filter_columns:
        columns_before = ", ".join(previous.filter_columns) or "none"
        _say(config, f"filter columns before: {columns_before}; so texts alone are compared")
    changes = ", ".join(f"{count:,} {kind}" for kind, count in asdict(plan.changes).items())
    _say(config, f"{changes}; to embed {rows:,} of {plan.rows:,} ({estimate})")
    return plan_record


def _rate(previous: Version | None) -> float:
    """Rows that an actor embeds in a second, as the version before has measured; 0: not known."""
    return float(previous.artifact.manifest["embedded"]["rate"]) if previous else 0.0


def _is_same(config: Config, job: _Job, plan_record: PlanRecord, previous: Version) -> bool:
    """Whether the version before has the same rows, and they would be made the same way.

    The rows that its model has set aside would be set aside again.
    """
    plan = plan_record.plan
    no_new_rows = plan.new_rows in (RowSet(), previous.set_aside)
    same_rows = no_new_rows and replace(plan.changes, new=0).none
    precision = plan_record.precision
    same_numbers = (precision, numerics_of(precision)) == (previous.precision, previous.numerics)
    # The rows themselves are compared, so it does not matter which files they are in, nor in which order.
    references = job.made_from.references
    earlier = previous.artifact.manifest["inputs"]
    inputs = {
        **{name: value for name, value in references.items() if name not in _FILES},
        **{name: value for name, value in earlier.items() if name in _FILES},
    }
    same_request = request_of(KIND, config, inputs) == previous.artifact.manifest["request"]
    return same_rows and same_numbers and same_request


def _embed(
    config: Config,
    job: _Job,
    out: Draft,
    plan_record: PlanRecord,
    previous: Version | None,
    shares: gate.Shares,
    lock: Lock,
    run_id: str,
) -> Artifact:
    """Raises Stopped where the gate does, or where the lock is lost."""
    model, plan = job.made_from.model, plan_record.plan
    records = embed.embed(
        out, plan_record, model, config.embed, config.gate, config.reading, config.resources
    )
    for note in dict.fromkeys(note for record in records for note in record.notes):
        _say(config, note)
    truncated = sum((record.truncated for record in records), Truncated())
    most_tokens = read_settings(model.uri).max_candidate_tokens
    if line := truncated.line("sampled candidates", most_tokens):
        _say(config, line)
    names = [name for name, record in zip(plan.shards, records, strict=True) if record.check]
    checks = [record.check for record in records if record.check]
    dimensions = checks[0].dimensions
    kind = f"{job.made_from.architecture}, {dimensions} dimensions"
    if not plan_record.canary_file:  # near texts are not the same ones to two models
        kind += f", {model.fingerprint}"
    answers = gate.read_answers(out, names, plan_record.asked.name)
    try:
        gate_report, canary_answers = gate.check(
            config.gate, checks, answers, kind, plan_record.canaries, plan_record.canaries_before,
            plan.present, shares,
        )  # fmt: skip
    except Stopped as refusal:
        # The same command finds its shards finished, and would be refused for ever.
        raise Stopped(
            f"{refusal}. Its shards stay in {out.staging}; remove this folder to embed them anew"
        ) from None
    _say(config, gate.passed_line(gate_report))
    began = time.perf_counter()
    entries, statistics = build.index(out, names, dimensions, config.embed.neighbours)
    indexing = time.perf_counter() - began
    rows = sum(record.rows_embedded for record in records)
    actor_seconds = sum(record.actor_seconds for record in records)
    rate = _rate(previous)
    if rows >= _MEASURED_ROWS or not rate:
        rate = rows / max(actor_seconds, 1e-3)
    started = min(record.started for record in records)
    seconds = max(record.ended for record in records) - started + indexing
    embedding_facts = {
        "rows": rows,
        "actor_seconds": actor_seconds,
        "rate": round(rate, 1),
        "plan_seconds": plan_record.seconds,
        "seconds": round(seconds, 3),
    }
    all_records: list[TaskRecord] = [plan_record, *records]
    job.made_from.check_model(out.staging)
    lock.check()
    return out.publish(
        [*(entry for record in records for entry in record.files), *entries],
        sum_counts(record.counts for record in all_records),
        sum_counts(record.dropped for record in all_records),
        run_id,
        dimensions=dimensions,
        dtype=config.embed.dtype,
        precision=plan_record.precision,
        numerics=plan_record.numerics,
        statistics=statistics,
        plan=asdict(plan.changes),
        embedded=embedding_facts,
        set_aside=asdict(sum((record.set_aside for record in records), RowSet())),
        gate=gate_report,
        canaries={**canary_answers, "file": plan_record.canary_file},
    )


def _dry_run(config: Config, job: _Job) -> program.Summary:
    """Makes the plan alone, and removes its files."""
    from pipeline.engine.resources import cpus_each

    previous = versions.open_before(config.pools, config.name)
    with cluster.session(for_tasks=True), _scratch(config, job) as out:
        plan_record = _plan(config, job, out, previous)
        cores = 0
        if not config.resources.gpu:
            actors = config.resources.count(len(plan_record.plan.shards))
            cores = cpus_each(actors, chosen=config.resources.cpus_per_actor)
    plan = plan_record.plan
    is_same = previous is not None and _is_same(config, job, plan_record, previous)
    _, refusal = _judge_changes(config, plan.changes, plan.rows, previous)
    if refusal:
        _say(config, f"would be refused: {refusal}")
    details = {
        "pool": storage.join(config.pools, config.name),
        "version": previous.name if previous and is_same else job.version,
        "already_done": is_same,
        "plan": asdict(plan.changes),
        "dropped": dict(plan_record.dropped),
    }
    estimated = estimate(job.made_from.files, plan_record, _rate(previous), cores)
    return cost.show("embed_pool", estimated, details)


def _summary(config: Config, pool: Artifact, already_there: bool) -> program.Summary:
    return program.artifact_summary(
        pool, already_there, pool=storage.join(config.pools, config.name), version=storage.name_of(pool.uri),
        current=current_uri(config.pools, config.name), plan=pool.manifest["plan"],
    )  # fmt: skip


if __name__ == "__main__":
    program.main(Config, run, "embed_pool")
