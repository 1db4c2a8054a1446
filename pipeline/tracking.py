"""Tracks jobs in MLflow: one run per job, with its settings, numbers and ancestry.

MLFLOW_TRACKING_URI names the server; without it runs go to `mlflow.db` in the working directory. The driver
owns the run and logs the messages of its workers. Other processes log to the run by its id.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import LifecycleStage
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

from pipeline import storage
from pipeline.artifact import Artifact
from pipeline.config import BadInput, flatten
from pipeline.drafts import RUN, Draft
from pipeline.provenance import git_revision
from pipeline.tasks import costs

# MLflow's thread sends the numbers of a second together, and the last ones as soon as it is told to. Without
# this it sends them one by one, and each `flush` waits for a second.
os.environ.setdefault("MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS", "1")

_SQLITE = "sqlite:///"
local_store = ""
"""The data base on this machine that this process has logged a run to; "": none yet, or a server."""
_MAX_PARAM_CHARACTERS = 500  # MLflow's own bound is 6,000; nobody reads more than this in a table


@dataclass(frozen=True)
class Run:
    """A run that any process can log to."""

    run_id: str
    tracking_uri: str

    def log(
        self, metrics: Mapping[str, float], step: int | None = None, wait: bool = False
    ) -> None:
        """Logs the finite numbers, without waiting for the server unless told to."""
        finite = {
            _metric_name(name): float(value)
            for name, value in metrics.items()
            if math.isfinite(value)
        }
        mlflow.set_tracking_uri(self.tracking_uri)
        mlflow.log_metrics(finite, step=step, run_id=self.run_id, synchronous=wait)

    def attach(self, files: Mapping[str, bytes]) -> None:
        """Keeps small files with the run."""
        mlflow.set_tracking_uri(self.tracking_uri)
        with tempfile.TemporaryDirectory() as folder:
            for name, data in files.items():
                (Path(folder) / name).write_bytes(data)
            mlflow.log_artifacts(folder, run_id=self.run_id)

    def histories(self, names: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
        """(step, value) of each metric in the order of the steps, also from before the job was resumed."""
        self.flush()
        client = mlflow.MlflowClient(self.tracking_uri)
        points_of = {
            name: client.get_metric_history(self.run_id, _metric_name(name)) for name in names
        }
        return {
            name: sorted({point.step: point.value for point in points}.items())
            for name, points in points_of.items()
        }

    def flush(self) -> None:
        """Waits until the server has all that was logged."""
        mlflow.flush_async_logging()


@contextmanager
def start(job: str, draft: Draft) -> Iterator[Run]:
    """Opens the run of a job that makes `draft`; a failure inside ends it as FAILED.

    A job that continues an unfinished draft continues its run, so that one curve shows all attempts.
    Raises Stopped where another job makes the same draft (`Draft.locked`).
    """
    name = f"{job} {Path(draft.uri).name}"
    note = draft.path(RUN)
    with (
        draft.locked(),
        _open(
            job, name, draft.inputs, draft.config, {"output_uri": draft.uri}, _earlier_run(draft)
        ) as run,
    ):
        record = {"run_id": run.run_id, "request": draft.request}
        storage.write_bytes(note, json.dumps(record).encode())
        yield run


@contextmanager
def start_evaluation(model: Artifact, corpus: Artifact, settings: dict[str, Any]) -> Iterator[Run]:
    """Opens the run of an evaluation, which makes no artifact."""
    inputs = {"model": model.reference(), "corpus": corpus.reference()}
    with _open("evaluate", f"evaluate {Path(model.uri).name}", inputs, settings, {}) as run:
        yield run


@contextmanager
def start_promotion(model: Artifact, settings: dict[str, Any]) -> Iterator[Run]:
    """Opens the run of a promotion of `model`, which makes no artifact."""
    name = f"promote {settings['registered_model']}"
    with _open("promote", name, {"model": model.reference()}, settings, {}) as run:
        yield run


@contextmanager
def start_sweep(
    name: str, inputs: Mapping[str, Mapping[str, Any]], settings: dict[str, Any]
) -> Iterator[Run]:
    """Opens the run of a comparison of many models, whose own runs lie beside it."""
    with _open("benchmark", name, inputs, settings, {}) as run:
        yield run


def server() -> str:
    """The address for processes elsewhere."""
    return _absolute_uri(mlflow.get_tracking_uri())


@contextmanager
def _open(
    job: str,
    name: str,
    inputs: Mapping[str, Mapping[str, Any]],
    settings: dict[str, Any],
    extra_tags: dict[str, str],
    earlier_run: str = "",
) -> Iterator[Run]:
    """Continues the run `earlier_run` if the server has it; else opens a new one."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    global local_store
    mlflow.set_tracking_uri(server())
    local_store = server() if server().startswith(_SQLITE) else ""
    experiment_id = _set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "polyrank"))
    tags = {
        "job": job,
        "git_revision": git_revision() or "unknown",
        "mlflow.note.content": "\n".join(["Made from:", *_ancestry_lines(inputs)]),
        **extra_tags,
    }
    for input_name, reference in inputs.items():
        for field in ("uri", "fingerprint", "run_id"):
            if value := reference.get(field):  # an encoder from elsewhere has no run
                tags[f"input.{input_name}.{field}"] = str(value)
    run_id = earlier_run if _can_continue(earlier_run, experiment_id) else None
    with mlflow.start_run(run_id, run_name=name, tags=tags) as active_run:
        params = {k: str(v)[:_MAX_PARAM_CHARACTERS] for k, v in flatten(settings).items()}
        # MLflow refuses a second value of a parameter: those of the first attempt stay.
        mlflow.log_params({k: v for k, v in params.items() if k not in active_run.data.params})
        run = Run(active_run.info.run_id, mlflow.get_tracking_uri())
        with costs.collect_stages() as stages:
            try:
                yield run
            finally:
                _attach_stages(run, stages)
        run.flush()


def _attach_stages(run: Run, stages: Sequence[costs.Stage]) -> None:
    """Keeps what tasks cost and which failed, also of a job that fails."""
    if not stages:
        return
    text = json.dumps([stage.as_json() for stage in stages], indent=1, ensure_ascii=False)
    try:
        run.attach({"tasks.json": text.encode()})
    except (MlflowException, OSError) as error:  # the failure of the job says more
        print(f"MLflow did not take tasks.json: {str(error).splitlines()[0]}", file=sys.stderr)


def finish(run: Run, artifact: Artifact, delivered: Mapping[str, float] | None = None) -> None:
    """Records the output: fingerprint, precision, counts, drop reasons, and the manifest itself.

    `delivered`: metrics of the weights in the artifact, logged as `delivered_<name>`. The last point
    of a curve is that of the last validation, and the weights may be those of an earlier one.
    """
    counts = {f"count.{name}": float(n) for name, n in artifact.counts.items()}
    dropped = {f"dropped.{name}": float(n) for name, n in artifact.manifest["dropped"].items()}
    metrics = {f"delivered_{name}": value for name, value in (delivered or {}).items()}
    # Waits: to start the threads that would log it later and to end them again takes 2 s.
    run.log({**counts, **dropped, **metrics}, wait=True)
    mlflow.set_tag("output_fingerprint", artifact.fingerprint)
    if precision := artifact.manifest.get("precision"):
        mlflow.set_tag("precision", precision)
    mlflow.log_dict(artifact.manifest, "manifest.json")


def register(name: str, artifact: Artifact, alias: str) -> str:
    """Makes a published model the registry's `name`@`alias` and returns its version.

    The registry points to the artifact where it lies; nothing is copied.
    """
    client = mlflow.MlflowClient()
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    versions = client.search_model_versions(f"name = '{name}'")
    identity = (artifact.uri, artifact.fingerprint)
    version = next((v for v in versions if (v.source, v.tags.get("fingerprint")) == identity), None)
    if version is None:
        tags = {"fingerprint": artifact.fingerprint}
        version = client.create_model_version(
            name, source=artifact.uri, run_id=artifact.manifest["run_id"], tags=tags
        )
    client.set_registered_model_alias(name, alias, version.version)
    return str(version.version)


def registered_version(name: str, version: str) -> tuple[str, str]:
    """(number, URI of the model) of a version: a number, or what an alias means.

    Raises BadInput where the registry has no such model or version.
    """
    client = mlflow.MlflowClient()
    try:
        aliases = dict(client.get_registered_model(name).aliases)
        number = str(aliases.get(version, version))
        if not number.isdecimal():
            alias_names = ", ".join(sorted(aliases)) or "none"
            raise BadInput(f"{name}: no version has the alias {version}; there are: {alias_names}")
        return number, str(client.get_model_version(name, number).source)
    except MlflowException as error:
        raise BadInput(f"{name}, version {version}: {str(error).splitlines()[0]}") from None


def version_of_alias(name: str, alias: str) -> str:
    """The version that an alias of a registered model means; "" where it means none."""
    return str(dict(mlflow.MlflowClient().get_registered_model(name).aliases).get(alias, ""))


def previous_alias(alias: str) -> str:
    """The alias of the version that another alias meant before."""
    return "previous" if alias == "champion" else f"previous-{alias}"


def move_alias(name: str, alias: str, version: str) -> None:
    """Lets `name`@`alias` mean another version, and its `previous_alias` the one before.

    The order is such that the same call completes one that was killed between the two. A move back is to the
    version that the previous alias names, so that alias moves last; otherwise it moves first, as afterwards
    nobody would know the version before.
    """
    client, previous = mlflow.MlflowClient(), previous_alias(alias)
    version_before = version_of_alias(name, alias)
    moves = [(alias, version)]
    if version_before and version_before != version:
        is_back = version_of_alias(name, previous) == version
        moves.insert(len(moves) if is_back else 0, (previous, version_before))
    for moved_alias, target in moves:
        client.set_registered_model_alias(name, moved_alias, target)


def _earlier_run(draft: Draft) -> str:
    """The run of an earlier attempt at this draft, "" if there was none."""
    uri = draft.path(RUN)
    if not storage.exists(uri):
        return ""
    record = json.loads(storage.read_bytes(uri))
    return str(record["run_id"]) if record["request"] == draft.request else ""


def _can_continue(run_id: str, experiment_id: str) -> bool:
    """Whether the server has the run in the experiment, and it is not deleted."""
    if not run_id:
        return False
    try:
        info = mlflow.get_run(run_id).info
    except MlflowException as error:
        if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            return False
        raise
    return bool(
        info.lifecycle_stage == LifecycleStage.ACTIVE and info.experiment_id == experiment_id
    )


def _set_experiment(name: str) -> str:
    """Returns the experiment's id; makes the experiment if there is none.

    Files of runs lie beside a data base of our own, not in whichever directory a job runs.

    One process after the other: of two that find no data base, MLflow lets both make its tables, and one
    dies of it.
    """
    uri = mlflow.get_tracking_uri()
    if not uri.startswith(_SQLITE):
        return str(mlflow.set_experiment(name).experiment_id)
    base = Path(uri.removeprefix(_SQLITE))
    with _file_lock(base.with_name(f"{base.name}.lock")):
        if mlflow.get_experiment_by_name(name) is None:
            mlflow.create_experiment(name, artifact_location=str(base.parent / "mlruns"))
        return str(mlflow.set_experiment(name).experiment_id)


@contextmanager
def _file_lock(lock: Path) -> Iterator[None]:
    """Waits for other processes that hold the file; one that dies lets go."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as stream:
        with suppress(OSError):  # a file system without locks: as it would be without us
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _ancestry_lines(inputs: Mapping[str, Any], depth: int = 0) -> list[str]:
    lines = []
    for name, reference in inputs.items():
        run_text = f", run {reference['run_id']}" if reference.get("run_id") else ""
        text = f"{name}: {reference['uri']} ({reference['fingerprint'][:16]}{run_text})"
        lines.append("    " * depth + "* " + text)
        lines += _ancestry_lines(reference.get("inputs") or {}, depth + 1)
    return lines


def _absolute_uri(uri: str) -> str:
    """A relative sqlite path means another file in another process' working directory."""
    if not uri.startswith(_SQLITE):
        return uri
    return _SQLITE + str(Path(uri.removeprefix(_SQLITE)).absolute())


def _metric_name(name: str) -> str:
    """MLflow refuses a whole batch of metrics for one "@" in a name."""
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in name)
