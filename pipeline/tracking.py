"""Tracks jobs in MLflow: one run per job, with its settings, numbers and ancestry.

MLFLOW_TRACKING_URI names the server; without it runs go to `mlflow.db` in the working directory. The driver
owns the run and logs the messages of its workers. Other processes log to the run by its id.

A job that cannot open its run ends before its work. Once the run is open, a server that fails costs one line
and seconds: numbers wait until it is back, and the job goes on.
"""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import math
import operator
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import unquote

import mlflow
import sqlalchemy
from mlflow.entities import LifecycleStage, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.tracking.context.registry import resolve_tags
from mlflow.utils.mlflow_tags import MLFLOW_GIT_REPO_URL

from pipeline import registry, storage
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import BadInput, Stopped, flatten
from pipeline.engine import report
from pipeline.engine.draft import RUN, Draft
from pipeline.provenance import git_revision

registry.limit_waits()
# MLflow asks GitPython for the commit, which otherwise prints 40 lines where git is not installed.
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")

_SQLITE = "sqlite:///"
local_store = ""
"""The data base on this machine that this process has logged a run to; "": none yet, or a server."""
_MAX_PARAM_CHARACTERS = 500  # MLflow's own bound is 6,000; nobody reads more than this in a table
_BUFFER_S = 1.0  # the numbers of a second are sent together
# After a request that took seconds to fail, so that a job waits for such requests once.
_PAUSE_S = 30.0
_MAX_WAITING = 100_000  # numbers, some 300 bytes each

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Run:
    """A run that any process can log to. Its methods never fail because of the server: one line says so."""

    run_id: str
    """"": the server did not open a run, so nothing is logged."""
    tracking_uri: str

    def log(
        self, metrics: Mapping[str, float], step: int | None = None, wait: bool = False
    ) -> None:
        """Logs the finite numbers, without waiting for the server unless told to."""
        now = int(1000 * time.time())
        link = _link(self)
        link.put(
            Metric(_metric_name(name), float(value), now, step or 0)
            for name, value in metrics.items()
            if math.isfinite(value)
        )
        if wait:
            link.flush()

    def attach(self, files: Mapping[str, bytes]) -> None:
        """Keeps small files with the run."""
        with tempfile.TemporaryDirectory() as folder:
            for name, data in files.items():
                (Path(folder) / name).write_bytes(data)
            _link(self).send(lambda client: client.log_artifacts(self.run_id, folder))

    def histories(self, names: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
        """(step, value) of each metric in the order of the steps, also from before the job was resumed; []
        where the server does not answer."""
        self.flush()
        histories = {}
        for name in names:
            ask = operator.methodcaller("get_metric_history", self.run_id, _metric_name(name))
            points = _link(self).send(ask) or []
            histories[name] = sorted({point.step: point.value for point in points}.items())
        return histories

    def flush(self) -> None:
        """Sends all that was logged."""
        _link(self).flush()


@dataclass
class _Link:
    """Sends what belongs to a run. While the server is away numbers wait, and all else is left out."""

    run: Run
    client: mlflow.MlflowClient
    _waiting: list[Metric] = field(default_factory=list)
    _timer: threading.Timer | None = None
    _is_away: bool = False
    _paused_until: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sending: threading.RLock = field(default_factory=threading.RLock)

    def put(self, points: Iterable[Metric]) -> None:
        """Takes numbers, which a thread sends within a second."""
        with self._lock:
            self._waiting += points
            del self._waiting[:-_MAX_WAITING]
            if self._timer is None:
                self._timer = threading.Timer(_BUFFER_S, self.flush)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        """Sends the numbers that wait."""
        with self._sending:
            with self._lock:
                points, self._waiting = self._waiting, []
                if self._timer:
                    self._timer.cancel()
                self._timer = None
            if points and not self.send(lambda client: self._log(client, points)):
                with self._lock:
                    self._waiting = [*points, *self._waiting][-_MAX_WAITING:]

    def _log(self, client: mlflow.MlflowClient, points: Sequence[Metric]) -> bool:
        client.log_batch(self.run.run_id, metrics=points)
        return True

    def send(self, request: Callable[[mlflow.MlflowClient], ResultT]) -> ResultT | None:
        """Returns what the request returns; None where it failed, or was left out during a pause."""
        with self._sending:
            begin = time.monotonic()
            if not self.run.run_id or begin < self._paused_until:
                return None
            try:
                result = request(self.client)
            except Exception as error:  # whatever it is, the job's own work is worth more
                if not self._is_away:
                    reason = f"MLflow at {registry.shown(self.run.tracking_uri)}: {registry.reason_of(error)}"
                    print(f"{reason}; the job goes on without it", file=sys.stderr, flush=True)
                self._is_away, now = True, time.monotonic()
                self._paused_until = now + _PAUSE_S if now - begin > 3 else 0.0
                return None
            self._is_away = False
            return result


_links: dict[Run, _Link] = {}


def _link(run: Run) -> _Link:
    """This process's link to a run."""
    if run not in _links:
        _links[run] = _Link(run, registry.client(run.tracking_uri))
    return _links[run]


@contextmanager
def start(job: str, draft: Draft) -> Iterator[Run]:
    """Opens the run of a job that makes `draft`; a failure inside ends it as FAILED.

    A job that continues an unfinished draft continues its run, so that one curve shows all attempts.
    Raises Stopped where another job makes the same draft (`Draft.locked`), and as `connect`.
    """
    folder = Path(draft.uri)
    # The version of a pool says little without the pool.
    name = f"{folder.parent.name} {folder.name}" if draft.kind == "pool" else folder.name
    note = draft.path(RUN)
    with draft.locked():
        tags = {"output_uri": draft.uri}
        run = _create(job, name, draft.inputs, draft.config, tags, _earlier_run(draft))
        record = {"run_id": run.run_id, "request": draft.request}
        storage.write_bytes(note, json.dumps(record).encode())
        with _ended(run):
            yield run


@contextmanager
def start_without_artifact(
    job: str, name: str, inputs: Mapping[str, Artifact], settings: dict[str, Any]
) -> Iterator[Run]:
    """Opens the run of a job that makes no artifact, after its work. Where that fails, one line says so, and
    nothing is logged."""
    run = Run("", server())
    references = {input_name: artifact.reference() for input_name, artifact in inputs.items()}
    try:
        run = _create(job, name, references, settings)
    except (BadInput, Stopped) as error:
        print(f"{error}; nothing is logged", file=sys.stderr, flush=True)
    with _ended(run):
        yield run


def server() -> str:
    """The address for processes elsewhere."""
    return _absolute_uri(mlflow.get_tracking_uri())


def connect() -> str:
    """Returns the id of the experiment. A job whose run opens after its work calls it before.

    Raises BadInput where the server refuses, and Stopped where it does not answer.
    """
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    mlflow.set_tracking_uri(server())
    with registry.answers():
        return _set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "polyrank"))


def _tags(job: str, inputs: Mapping[str, Mapping[str, Any]], experiment_id: str) -> dict[str, str]:
    tags = {
        "job": job,
        "git_revision": git_revision() or "unknown",
        "mlflow.note.content": "\n".join(["Made from:", *_ancestry_lines(inputs, experiment_id)]),
    }
    for input_name, reference in inputs.items():
        for field_name in ("uri", "fingerprint", "run_id"):
            if value := reference.get(field_name):  # an encoder from elsewhere has no run
                tags[f"input.{input_name}.{field_name}"] = str(value)
    return tags


def _create(
    job: str,
    name: str,
    inputs: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    extra_tags: Mapping[str, str] = MappingProxyType({}),
    earlier_run: str = "",
) -> Run:
    """Continues the run `earlier_run` if the server has it; else makes a new one."""
    global local_store
    experiment_id = connect()
    local_store = server() if server().startswith(_SQLITE) else ""
    client = registry.client()
    params = {k: str(v)[:_MAX_PARAM_CHARACTERS] for k, v in flatten(dict(settings)).items()}
    name = f"{job} {name}"
    tags = resolve_tags({"mlflow.runName": name, **_tags(job, inputs, experiment_id), **extra_tags})
    if repository := tags.get(MLFLOW_GIT_REPO_URL):  # that of CI's checkouts has a token
        tags[MLFLOW_GIT_REPO_URL] = registry.shown(repository)
    with registry.answers():
        if known_run := _run_to_continue(earlier_run, experiment_id):
            run_id = earlier_run
            client.update_run(run_id, "RUNNING")
            # MLflow refuses a second value of a parameter: those of the first attempt stay.
            params = {k: v for k, v in params.items() if k not in known_run.data.params}
        else:
            run_id = client.create_run(experiment_id, run_name=name).info.run_id
        client.log_batch(
            run_id,
            params=[Param(key, value) for key, value in params.items()],
            tags=[RunTag(key, value) for key, value in tags.items()],
        )
    return Run(run_id, server())


@contextmanager
def _ended(run: Run) -> Iterator[None]:
    """Ends the run: FINISHED, or FAILED after an exception inside."""
    status = "FAILED"
    try:
        with report.collect_stages() as stages:
            try:
                yield
                status = "FINISHED"
            finally:
                if stages:  # what tasks cost and which failed, also of a job that fails
                    rows = [stage.as_json() for stage in stages]
                    text = json.dumps(rows, indent=1, ensure_ascii=False)
                    run.attach({"tasks.json": text.encode()})
    finally:
        run.flush()
        _link(run).send(lambda client: client.set_terminated(run.run_id, status))


def end_killed(run_ids: Iterable[str]) -> None:
    """Ends the runs of jobs that were killed and cannot be resumed any more. Ended ones stay as they are."""

    def end(client: mlflow.MlflowClient, run_id: str) -> None:
        if client.get_run(run_id).info.status == "RUNNING":
            client.set_terminated(run_id, "KILLED")

    for run_id in run_ids:
        _link(Run(run_id, server())).send(functools.partial(end, run_id=run_id))


def finish(run: Run, artifact: Artifact, delivered: Mapping[str, float] | None = None) -> None:
    """Records the output: fingerprint, precision, counts, drop reasons, and the manifest itself.

    `delivered`: metrics of the weights in the artifact, logged as `delivered_<name>`. The last point
    of a curve is that of the last validation, and the weights may be those of an earlier one.
    """
    counts = {f"count.{name}": float(n) for name, n in artifact.counts.items()}
    dropped = {f"dropped.{name}": float(n) for name, n in artifact.manifest["dropped"].items()}
    metrics = {f"delivered_{name}": value for name, value in (delivered or {}).items()}
    run.log({**counts, **dropped, **metrics}, wait=True)
    tags = {
        "output_fingerprint": artifact.fingerprint,
        "precision": artifact.manifest.get("precision"),
    }

    def record(client: mlflow.MlflowClient) -> None:
        tag_list = [RunTag(name, str(value)) for name, value in tags.items() if value]
        client.log_batch(run.run_id, tags=tag_list)
        client.log_dict(run.run_id, artifact.manifest, "manifest.json")

    _link(run).send(record)


def prepare_registration(name: str) -> None:
    """Makes the registered model `name` if there is none, before the work whose output will be its version.

    Raises BadInput where the registry refuses, and Stopped where it does not answer.
    """
    connect()
    client = registry.client()
    with registry.answers():
        if client.search_registered_models(f"name = '{name}'"):
            return
        try:
            client.create_registered_model(name)
        except MlflowException:  # another job may have made it meanwhile
            if not client.search_registered_models(f"name = '{name}'"):
                raise


def register(name: str, artifact: Artifact, alias: str) -> str:
    """Makes a published model the registry's `name`@`alias` and returns its version.

    The registry points to the artifact where it lies; nothing is copied. Raises Stopped where the registry
    fails: the artifact stays, and the same call registers it later.
    """
    try:
        prepare_registration(name)
        with registry.answers():
            return _register(name, artifact, alias)
    except (BadInput, Stopped) as error:
        failure = f"{artifact.uri} is complete, but not registered as {name}: {error}"
        raise Stopped(f"{failure}; the same command registers it") from None


def _register(name: str, artifact: Artifact, alias: str) -> str:
    client = registry.client()
    versions = client.search_model_versions(f"name = '{name}'")
    identity = (artifact.uri, artifact.fingerprint)
    version = next(
        (v for v in versions if (registry.uri_of(v), v.tags.get("fingerprint")) == identity), None
    )
    if version is None:
        pointer = registry.location(artifact, mlflow.get_registry_uri())
        version = client.create_model_version(name, run_id=artifact.manifest["run_id"], **pointer)
    client.set_registered_model_alias(name, alias, version.version)
    return str(version.version)


def note_quality(artifact: Artifact, corpus: Artifact, numbers: Mapping[str, float]) -> None:
    """Writes the first of an evaluation's numbers, with its interval, on all registered versions of a model.

    Where the registry fails, one line says so.
    """
    metric, value = next(iter(numbers.items()))
    tag = _metric_name(f"{metric} on {Path(corpus.uri).name}")
    text = f"{value:.3f} ({numbers[f'{metric}.low']:.3f} to {numbers[f'{metric}.high']:.3f})"
    client = registry.client()
    try:
        with registry.answers():
            found = client.search_model_versions(f"tags.fingerprint = '{artifact.fingerprint}'")
            for version in found:
                client.set_model_version_tag(version.name, version.version, tag, text)
    except (BadInput, Stopped) as error:
        print(f"{error}; no registered version is tagged", file=sys.stderr, flush=True)


def registered_version(name: str, version: str) -> tuple[str, Artifact]:
    """(number, model) of a version: a number, or what an alias means.

    Raises BadInput where the registry has no such model or version, or another model has taken the place of
    the registered one, and Stopped where the registry does not answer.
    """
    client = registry.client()
    with registry.answers(f"{name}, version {version}"):
        aliases = dict(client.get_registered_model(name).aliases)
        number = str(aliases.get(version, version))
        if not number.isdecimal():
            alias_names = ", ".join(sorted(aliases)) or "none"
            raise BadInput(f"{name}: no version has the alias {version}; there are: {alias_names}")
        found = client.get_model_version(name, number)
    model = open_artifact(registry.uri_of(found), "ranker")
    registered = found.tags.get("fingerprint", model.fingerprint)
    if model.fingerprint != registered:
        raise BadInput(
            f"{name}, version {number}: was registered as {registered}, and {model.uri} holds another model "
            f"now, {model.fingerprint}; nothing can be compared with that version, or go back to it"
        )
    return number, model


def version_of_alias(name: str, alias: str) -> str:
    """The version that an alias of a registered model means; "" where it means none."""
    with registry.answers(f"model {name}"):
        aliases = dict(registry.client().get_registered_model(name).aliases)
        return str(aliases.get(alias, ""))


def previous_alias(alias: str) -> str:
    """The alias of the version that another alias meant before."""
    return "previous" if alias == "champion" else f"previous-{alias}"


def move_alias(name: str, alias: str, version: str) -> None:
    """Lets `name`@`alias` mean another version, and its `previous_alias` the one before.

    The order is such that the same call completes one that was killed between the two. A move back is to the
    version that the previous alias names, so that alias moves last; otherwise it moves first, as afterwards
    nobody would know the version before. Raises as `version_of_alias`.
    """
    client, previous = registry.client(), previous_alias(alias)
    version_before = version_of_alias(name, alias)
    moves = [(alias, version)]
    if version_before and version_before != version:
        is_back = version_of_alias(name, previous) == version
        moves.insert(len(moves) if is_back else 0, (previous, version_before))
    with registry.answers(f"{name}: its alias {alias} may not have moved"):
        for moved_alias, target in moves:
            client.set_registered_model_alias(name, moved_alias, target)


def _earlier_run(draft: Draft) -> str:
    """The run of an earlier attempt at this draft, "" if there was none."""
    uri = draft.path(RUN)
    if not storage.exists(uri):
        return ""
    record = json.loads(storage.read_bytes(uri))
    return str(record["run_id"]) if record["request"] == draft.request else ""


def _run_to_continue(run_id: str, experiment_id: str) -> mlflow.entities.Run | None:
    """The run, if the server has it in the experiment and it is not deleted."""
    if not run_id:
        return None
    try:
        run = registry.client().get_run(run_id)
    except MlflowException as error:
        if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            return None
        raise
    is_active = run.info.lifecycle_stage == LifecycleStage.ACTIVE
    return run if is_active and run.info.experiment_id == experiment_id else None


def _set_experiment(name: str) -> str:
    """Returns the experiment's id; makes the experiment if there is none.

    Files of runs lie beside a data base of our own, not in whichever directory a job runs.

    One process after the other: of two that find no data base, MLflow lets both make its tables, and one
    dies of it.
    """
    uri = mlflow.get_tracking_uri()
    if re.match("postgresql|mysql|mssql", uri):  # MLflow tries for 100 s to reach one that is away
        sqlalchemy.create_engine(uri).connect().close()
    if not uri.startswith(_SQLITE):
        return str(registry.bounded(mlflow.set_experiment, name).experiment_id)
    base = _sqlite_path(uri)
    with _file_lock(base.with_name(f"{base.name}.lock")):
        if not base.exists():  # that takes MLflow 5 s
            print(f"makes {base}, the log of runs", file=sys.stderr, flush=True)
        _require_writable(uri)
        if mlflow.get_experiment_by_name(name) is None:
            mlflow.create_experiment(name, artifact_location=(base.parent / "mlruns").as_uri())
        return str(mlflow.set_experiment(name).experiment_id)


def _require_writable(uri: str) -> None:
    """Raises SQLAlchemyError at once for a data base that MLflow would try to open for 100 s."""
    engine = sqlalchemy.create_engine(uri, poolclass=sqlalchemy.NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        connection.rollback()


@contextmanager
def _file_lock(lock: Path) -> Iterator[None]:
    """Waits for other processes that hold the file; one that dies lets go."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as stream:
        with suppress(OSError):  # a file system without locks: as it would be without us
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _ancestry_lines(inputs: Mapping[str, Any], experiment_id: str, depth: int = 0) -> list[str]:
    """Markdown: a list of the inputs and of what they were made from, with links to their runs."""
    lines = []
    for name, reference in inputs.items():
        paths = reference["uri"].split()
        text = Path(paths[0]).name if paths else ""
        if len(paths) > 1:
            text += f" and {len(paths) - 1} more"
        if run_id := reference.get("run_id"):
            text = f"[{text}](#/experiments/{experiment_id}/runs/{run_id})"
        lines.append(f"{'    ' * depth}* {name}: {text} {reference['fingerprint'][:16]}")
        lines += _ancestry_lines(reference.get("inputs") or {}, experiment_id, depth + 1)
    return lines


def _absolute_uri(uri: str) -> str:
    """A relative sqlite path means another file in another process' working directory."""
    if not uri.startswith(_SQLITE):
        return uri
    _, mark, query = uri.partition("?")
    # SQLAlchemy decodes the path. MLflow does not, and makes an empty folder of the encoded name.
    path = str(_sqlite_path(uri).absolute()).replace("%", "%25")
    return f"{_SQLITE}{path}{mark}{query}"


def _sqlite_path(uri: str) -> Path:
    return Path(unquote(uri.removeprefix(_SQLITE).partition("?")[0]))


def _metric_name(name: str) -> str:
    """MLflow refuses a whole batch of metrics for one "@" in a name."""
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in name)
