"""The model and pool versions of a service, and the change of all replicas to new ones together.

One `Decider` for all replicas polls the pools' CURRENT files and the model's alias in MLflow's registry, and
proposes new versions. It polls on a thread of its own: a registry that hangs delays no replica. Each
replica's `Follower` loads the proposal beside what it serves, checks it, and reports the result. When all
replicas have loaded it, the proposal becomes the decision. Each replica swaps by one assignment when it next
asks the decider, within `poll_s`. If one replica refuses a version, no replica takes it: the old versions
stay, and the reason is reported.

The decider has a process of its own, which loads this module and no model. Without torch its start takes 5 s
of a processor less, and it needs a quarter of the memory.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from pipeline import registry, storage
from pipeline.artifact import Artifact, read_artifact
from pipeline.config import BadInput, Stopped
from pipeline.models.settings import read_settings
from pipeline.pools.pool import CURRENT, KIND, version_in

CHAMPION, CANDIDATE = "versions", "candidate"  # names of the deciders
_SILENT_POLLS = 5  # a replica that has not asked for this many polls counts as dead
RETRY_S = 60.0  # until a failure that may pass, such as one of the network, is tried again

_log = logging.getLogger("polyrank.serve")


@dataclass(frozen=True)
class Versions:
    """A model and versions of pools that it embedded."""

    model: str
    """URI"""
    fingerprint: str
    """Fingerprint of the model; the files at the URI may be replaced."""
    pools: tuple[str, ...]
    """URIs of one version of each pool."""


@dataclass(frozen=True)
class Report:
    """A replica's report to the decider."""

    replica: str
    serving: Versions | None
    prepared: Versions | None = None
    """Versions that the replica has loaded and does not serve yet."""
    refused: Versions | None = None
    """Versions that the replica could not load."""
    refused_pools: tuple[str, ...] = ()
    """URIs of the pool versions that are the reason; none: any may be."""
    problem: str = ""
    """The reason."""
    may_pass: bool = False
    """Whether the problem may pass by itself, such as an error of the network."""


class RefusedPool(BadInput):
    """A version of a pool that cannot be served."""

    def __init__(self, uri: str, problem: object) -> None:
        super().__init__(str(problem))
        self.uri = uri


@dataclass(frozen=True)
class Decision:
    """The decider's answer."""

    decided: Versions | None
    """The versions to serve; None: no versions have been loaded yet."""
    proposed: Versions | None
    """The versions to load beside the decided ones."""
    problems: tuple[str, ...]
    """Reasons why the wanted versions are not served."""


def resolve(
    model_name: str,
    pools: Sequence[str],
    refused: Sequence[str] = (),
    served: Sequence[str] = (),
) -> tuple[Versions, list[str]]:
    """(the versions to serve, the reasons why some are not the wanted ones)

    `model_name`: URI of a ranker, or `models:/name@alias` of MLflow's registry. `pools`: URIs of pools, whose
    CURRENT versions are wanted, or of fixed versions.

    If another model embedded the CURRENT version of a pool, or it is damaged, or its URI is in `refused`,
    then another version that this model embedded takes its place: the one in `served`, or else the newest.
    Newer versions than the served one may have been rolled back, or not been promoted yet.

    Raises BadInput if there is none. Raises OSError for an error of the storage, and Stopped for one of the
    registry; both may pass.
    """
    # MLflow's client would try for minutes while replicas wait for the decider; the next poll tries again.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    model = read_artifact(registry.model_uri(model_name), "ranker")
    require_search(model, pools)
    found = [_servable_version(uri, model, refused, served) for uri in pools]
    names = [storage.name_of(storage.parent_of(uri)) for uri, _ in found]
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"pools: two are named {name!r}")
    versions = Versions(model.uri, model.fingerprint, tuple(uri for uri, _ in found))
    return versions, [problem for _, problem in found if problem]


def require_search(model: Artifact, pools: Sequence[str]) -> None:
    """Raises BadInput if there are pools, but the model has no vectors or cannot search pools."""
    if not pools:
        return
    config = read_settings(model.uri)
    if not config.has_vectors:
        raise BadInput(
            "pools: a cross-encoder cannot use one; allowed: none, or another kind of model"
        )
    _ = config.search_attention  # refuses what cannot search


def _servable_version(
    uri: str, model: Artifact, refused: Sequence[str], served: Sequence[str]
) -> tuple[str, str]:
    """(URI of a version of a pool, the reason why it is not the wanted one or "")"""
    uri = storage.absolute(uri.rstrip("/"))
    if not storage.exists(storage.join(uri, CURRENT)):
        return _require_model(uri, model), ""
    # An empty one is no version either.
    current = storage.join(uri, version_in(storage.join(uri, CURRENT)) or CURRENT)
    reason = f"{current} was refused"
    if current not in refused:
        try:
            return _require_model(current, model), ""
        except BadInput as error:
            reason = str(error)
    versions = _versions_newest_first(uri)
    for version in sorted(versions, key=lambda version: version not in served):
        if version in refused or version == current:
            continue
        with suppress(BadInput):
            pool_uri = _require_model(version, model)
            return pool_uri, f"{reason}; {storage.name_of(pool_uri)} is served"
    raise BadInput(f"{uri}: no version to serve: {reason}")


def _versions_newest_first(uri: str) -> list[str]:
    dated_versions: list[tuple[str, str]] = []
    for version in storage.list_folders(uri):
        with suppress(BadInput):
            manifest = read_artifact(version, KIND).manifest
            dated_versions.append((str(manifest["created_at"]), version))
    return [version for _, version in sorted(dated_versions, reverse=True)]


def _require_model(version: str, model: Artifact) -> str:
    """The URI of this version of a pool. Raises BadInput if another model embedded it."""
    pool = read_artifact(version, KIND)
    embedding_model = str(pool.manifest["inputs"]["model"]["fingerprint"])
    if embedding_model != model.fingerprint:
        raise BadInput(
            f"{version}: embedded by the model {embedding_model}, not by {model.fingerprint}"
        )
    return pool.uri


class Decider:
    """One for all replicas of a service. It stores nothing: after a restart it learns from the replicas what
    is served, and decides nothing else before each living replica has reported."""

    def __init__(self, model: str, pools: Sequence[str], poll_s: float) -> None:
        """`model` and `pools` as in `resolve`."""
        self._model, self._pools, self._poll_s = model, pools, poll_s
        self._decided: Versions | None = None
        self._proposed: Versions | None = None
        self._reports: dict[str, tuple[float, Report]] = {}
        """The last report of each living replica, and its time."""
        self._refused: dict[Versions, tuple[float, Report]] = {}
        """For versions that a replica could not load the time from which they may be proposed again, and the
        report."""
        self._problems: list[str] = []
        self._decides_from = -math.inf
        """The time by which all living replicas have reported."""
        self._lock = threading.Lock()
        self._is_due = threading.Event()

    def follow(self, report: Report) -> Decision:
        """Takes a replica's report, and answers what to serve and what to load. It waits for nothing."""
        now, patience_s = time.monotonic(), _SILENT_POLLS * self._poll_s
        with self._lock:
            reports, refused = self._reports.items(), self._refused.items()
            self._reports = {name: entry for name, entry in reports if now - entry[0] < patience_s}
            self._refused = {versions: entry for versions, entry in refused if now < entry[0]}
            is_new = report.replica not in self._reports
            self._reports[report.replica] = now, report
            if self._decided is None and report.serving is not None:
                self._decided, self._decides_from = report.serving, now + patience_s
            if report.refused:
                self._refuse(report.refused, report, now)
            elif is_new and self._decided is None:  # it may load what its predecessor could not
                self._refused, self._problems = {}, []
                self._is_due.set()
            is_loaded_by_all = all(
                self._proposed in (last.prepared, last.serving)
                for _, last in self._reports.values()
            )
            if self._proposed and now >= self._decides_from and is_loaded_by_all:
                self._decided, self._proposed = self._proposed, None
            refusals = [refusal.problem for _, refusal in self._refused.values()]
            return Decision(self._decided, self._proposed, (*self._problems, *refusals))

    def poll(self) -> None:
        """Looks for the wanted versions; that may take long."""
        with self._lock:
            refused_pools = [
                pool for _, refusal in self._refused.values() for pool in refusal.refused_pools
            ]
            served_pools = self._decided.pools if self._decided else ()
        try:
            wanted, problems = resolve(self._model, self._pools, refused_pools, served_pools)
        except Exception as error:
            with self._lock:
                if [problem_of(error)] != self._problems:
                    log_failure("cannot resolve the wanted versions", error)
                self._problems = [problem_of(error)]
            return
        with self._lock:
            for problem in problems:
                if problem not in self._problems:
                    _log.warning("%s", problem)
            self._problems = problems
            is_served = wanted == self._decided
            if is_served and not problems:  # the refused versions are not wanted any longer
                self._refused = {}
            self._proposed = None if is_served or wanted in self._refused else wanted

    def _refuse(self, versions: Versions, report: Report, now: float) -> None:
        """Remembers refused versions: the pool versions that are the reason, or all."""
        until = now + RETRY_S if report.may_pass else math.inf
        self._refused[versions] = until, report
        self._proposed = None
        self._is_due.set()
        served = [last.serving for _, last in self._reports.values()]
        if self._decided == versions and versions not in served:
            self._decided = None  # its files have gone: decide again


class PollingDecider(Decider):
    """Polls on a thread."""

    def __init__(self, model: str, pools: Sequence[str], poll_s: float) -> None:
        super().__init__(model, pools, poll_s)
        threading.Thread(target=self._poll_again_and_again, name="poll", daemon=True).start()

    def _poll_again_and_again(self) -> None:
        while True:
            self.poll()
            self._is_due.wait(self._poll_s)
            self._is_due.clear()


def problem_of(error: Exception) -> str:
    """An error in one line."""
    is_for_people = isinstance(error, (BadInput, Stopped, OSError)) and str(error)
    return (str(error) if is_for_people else repr(error)).splitlines()[0]


def without_folders(problem: str, pools: Sequence[str]) -> str:
    """A problem for /info: paths begin with the name of one of `pools`, or are the name of their file.

    Folders say where a site keeps its files, and have ids of runs. The log has the whole paths.
    """

    def shortened(match: re.Match[str]) -> str:
        path = match[0]
        folder = next((pool for pool in pools if path.startswith(pool)), path.rstrip("/:"))
        return storage.name_of(folder) + path[len(folder) :]

    rest = r"[^\s'\"]*"
    paths = [*(re.escape(pool) + rest for pool in pools), f"{rest}/{rest}/{rest}"]
    return re.sub("|".join(paths), shortened, problem)


def log_failure(action: str, error: Exception) -> None:
    """Logs a failed action, with the traceback unless the message is enough."""
    trace = None if isinstance(error, (BadInput, Stopped, OSError)) else error
    _log.warning("%s: %s", action, problem_of(error), exc_info=trace)
