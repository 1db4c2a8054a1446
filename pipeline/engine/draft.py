"""Drafts: unfinished outputs, into which the tasks of a job write files and mark themselves done.

So a killed job resumes where it was. `publish` writes the manifest and makes the directory visible as an
artifact (pipeline.artifact) in one step. Locally the draft is `<output>.partial` and publishing is a rename;
in an object store the files lie in place already, and the manifest's upload is the step.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.artifact import (
    FORMAT_VERSION,
    MANIFEST,
    REQUEST,
    Artifact,
    FileEntry,
    file_entry,
    fingerprint_of_entries,
    open_artifact,
)
from pipeline.config import (
    BadInput,
    Stopped,
    digest,
    flatten,
    identity,
    require,
    to_dict,
    uncounted_options,
)
from pipeline.engine.records import RecordT, TaskRecord, from_json, to_json
from pipeline.provenance import git_revision, library_versions
from pipeline.storage import locks
from pipeline.storage.prefetch import map_prefetched

RUN = "_run.json"
"""The file in a draft that names the tracking run of the job that makes it (see pipeline.tracking)."""
ROWS_PER_GROUP = 2048
"""Rows in a row group of Parquet, by default."""
_TASKS = "_tasks"
_LOCK = "_lock"
_LOCK_EXPIRES_S = 120.0
_held_locks: dict[str, locks.Lock] = {}
"""The locks of this process, by draft. A draft is plain data, which tasks elsewhere get, too."""


@dataclass(frozen=True)
class FinishedTasks:
    """The finished tasks of a draft. Their records are read at their first use."""

    staging: str
    tasks: frozenset[str]

    def __contains__(self, task: str) -> bool:
        return task in self.tasks

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.tasks))

    def record(self, task: str, kind: type[RecordT]) -> RecordT:
        """The record of a finished task.

        Raises BadInput for a record of another kind, which an earlier version of polyrank wrote.
        """
        try:
            return from_json(kind, storage.read_bytes(_mark_uri(self.staging, task)))
        except (TypeError, ValueError):
            raise BadInput(
                f"{self.staging}: holds an unfinished job of another version of polyrank; remove it"
            ) from None

    def records(self, tasks: Iterable[str], kind: type[RecordT]) -> dict[str, RecordT]:
        """The records of finished tasks, in their order."""
        names = list(tasks)
        records = map_prefetched(lambda task: self.record(task, kind), names)
        return dict(zip(names, records, strict=True))


@dataclass(frozen=True)
class Draft:
    """An unfinished output. It is plain data, so tasks on other machines can write into it, too."""

    uri: str
    staging: str
    kind: str
    config: dict[str, Any]
    inputs: dict[str, dict[str, Any]]
    request: str
    started: float = field(default_factory=time.time)
    job: dict[str, Any] = field(default_factory=dict)
    """What `request` is the digest of (`describe_request`)."""

    def path(self, *parts: str) -> str:
        """The URI of a file of the draft."""
        return storage.join(self.staging, *parts)

    def write_table(
        self, name: str, table: pa.Table, rows_per_group: int = ROWS_PER_GROUP
    ) -> FileEntry:
        """Writes a Parquet file and returns its entry for the manifest."""
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="zstd", row_group_size=rows_per_group)
        return self.write_file(name, buffer.getvalue(), table.num_rows)

    def write_file(self, name: str, data: bytes | pa.Buffer, rows: int = 0) -> FileEntry:
        storage.write_bytes(self.path(name), data)
        return file_entry(name, data, rows)

    def mark(self, task: str, record: TaskRecord) -> None:
        """Notes that a task's files are complete, and keeps its record."""
        storage.write_bytes(_mark_uri(self.staging, task), to_json(record).encode())

    def is_marked(self, task: str) -> bool:
        return storage.exists(_mark_uri(self.staging, task))

    def finished_tasks(self) -> FinishedTasks:
        """All finished tasks, of this run and of those before it."""
        uris = storage.walk_json(self.path(_TASKS))
        names = (storage.name_of(uri).removesuffix(".json") for uri in uris)
        return FinishedTasks(self.staging, frozenset(names))

    def forget_tasks(self) -> None:
        """Removes all marks, so that every task is done again."""
        storage.delete(self.path(_TASKS))

    def publish(
        self,
        files: Iterable[FileEntry],
        counts: Mapping[str, int],
        dropped: Mapping[str, int] | None = None,
        run_id: str | None = None,
        **manifest_values: Any,
    ) -> Artifact:
        """Writes the manifest and makes the artifact visible, in one atomic step.

        Raises Stopped where this process has lost the draft's lock (`locked`) to another job, and where
        another job has published it.
        """
        entries = sorted(files, key=lambda entry: entry["path"])
        manifest = {
            "kind": self.kind,
            "format_version": FORMAT_VERSION,
            "fingerprint": fingerprint_of_entries(entries),
            "request": self.request,
            "created_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "seconds": round(time.time() - self.started, 1),
            "config": self.config,
            "inputs": self.inputs,
            "counts": dict(counts),
            "dropped": dict(sorted((dropped or {}).items())),
            "git_revision": git_revision(),
            "libraries": library_versions(),
            "run_id": run_id,
            **manifest_values,
            "files": entries,
        }
        text = json.dumps(manifest, indent=1, ensure_ascii=False).encode()
        if lock := _held_locks.get(self.staging):
            lock.check()
        storage.remove_unfinished(self.staging)
        if self.staging != self.uri:
            storage.write_bytes(self.path(MANIFEST), text)
            is_ours = _moved(Path(self.staging), Path(self.uri))
        else:
            # A lost answer to our own request, which was sent again, reads as if another were there.
            is_ours = storage.create_bytes(self.path(MANIFEST), text) or (
                storage.read_bytes(self.path(MANIFEST)) == text
            )
        if not is_ours:
            raise _published_meanwhile(self.uri)
        _tidy(self.uri)
        return Artifact(self.uri, manifest)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the draft against other jobs while it is made. `publish` checks that the lock still holds.

        Raises Stopped, naming the owner, if another job makes it or has just published it, and BadInput where
        another job has begun there and was killed.
        """
        with locks.locked(self.path(_LOCK), self.uri, _LOCK_EXPIRES_S) as lock:
            if storage.exists(storage.join(self.uri, MANIFEST)):
                raise _published_meanwhile(self.uri)
            earlier_job = read_request(self.staging)
            if digest(earlier_job) != self.request:
                # Only here: a job without the lock would put its name on another's finished tasks.
                _require_untouched(self.staging, earlier_job, self.job)
                storage.write_bytes(self.path(REQUEST), json.dumps(self.job).encode())
            _held_locks[self.staging] = lock
            try:
                yield
            finally:
                del _held_locks[self.staging]


def _published_meanwhile(uri: str) -> Stopped:
    return Stopped(f"{uri}: another job has published it meanwhile")


def _moved(folder: Path, target: Path) -> bool:
    """Moves a folder; False where there is one with files already."""
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def is_being_made(staging: str) -> bool:
    """Whether a living job holds the lock of a draft (`Draft.locked`)."""
    return locks.is_held(storage.join(staging, _LOCK))


def read_mark(staging: str, task: str) -> dict[str, Any]:
    """The record of a task of a draft; empty where it is not finished."""
    return _read_object(_mark_uri(staging, task))


def _mark_uri(staging: str, task: str) -> str:
    return storage.join(staging, _TASKS, f"{task}.json")


def read_request(staging: str) -> dict[str, Any]:
    """The request of a draft: `kind`, fingerprints of `inputs`, `config`; empty where there is no draft."""
    return _read_object(storage.join(staging, REQUEST))


def read_run(staging: str) -> str:
    """The id of the tracking run of the job that makes a draft; "": it has none yet."""
    return str(_read_object(storage.join(staging, RUN)).get("run_id", ""))


def discard(staging: str) -> None:
    """Removes a draft, the marks of its tasks first: after a kill no job takes files that are gone for
    finished ones."""
    storage.delete(storage.join(staging, _TASKS))
    storage.delete(staging)


def _read_object(uri: str) -> dict[str, Any]:
    """A JSON file of a draft; empty where it is missing, as after another job has published the draft."""
    try:
        value: dict[str, Any] = json.loads(storage.read_bytes(uri))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        fault = f"{uri}: not JSON ({error}), as where a store's answer is cut"
        raise Stopped(f"{fault}; the same command tries again") from None
    return value


def _tidy(uri: str) -> None:
    """Removes what only a resumed run would need: everything whose name begins with "_"."""
    for name in storage.names_in(uri):
        if name.startswith("_"):
            storage.delete(storage.join(uri, name))


def request_of(kind: str, config: Any, inputs: Mapping[str, Artifact | dict[str, Any]]) -> str:
    """The name of a job's output. It is the same for the same kind, settings and contents of inputs."""
    return digest(describe_request(kind, config, _references(inputs)))


def draft(
    uri: str,
    kind: str,
    config: Any,
    inputs: Mapping[str, Artifact | dict[str, Any]],
) -> Draft | Artifact:
    """Returns the draft of an output, with what an earlier killed run of the same job left in it.

    If the same job (kind, settings, contents of the inputs) has published it already, returns the
    artifact. `config` is the job's dataclass: its fields named like an input stand for that input's
    contents; which others count, their metadata say (`NOT_IDENTITY`, `identity_with`).

    Raises BadInput where another job's output, finished or not, is in the way.
    """
    references = _references(inputs)
    job = describe_request(kind, config, references)
    request = digest(job)
    require(uri.strip("/") != "", "output", uri, "a folder that is not the root")
    uri = storage.absolute(uri.rstrip("/"))
    if storage.exists(storage.join(uri, MANIFEST)):
        published = open_artifact(uri, kind)
        if published.manifest["request"] == request:
            _tidy(uri)  # of a job that was killed while it did this
            return published
        published_job = {
            "inputs": {n: r["fingerprint"] for n, r in published.manifest["inputs"].items()},
            "config": {n: flatten(published.manifest["config"]).get(n) for n in job["config"]},
        }
        raise BadInput(f"{uri}: holds the result of another job ({difference(published_job, job)}); "
                       "choose another --output, or remove this one")  # fmt: skip
    local = storage.is_local(uri)
    if local:  # no folder can be renamed to the name of a link, nor to a mounted folder
        uri = os.path.realpath(uri) if Path(uri).is_symlink() else uri
        require(not Path(uri).is_symlink(), "output", uri, "a folder, not a link to itself")
        require(not Path(uri).is_mount(), "output", uri, "a folder in this one, which is mounted")
    staging = f"{uri}.partial" if local else uri
    is_occupied = storage.is_occupied(
        uri
    )  # before it is asked why: another host may begin right now
    earlier_job = read_request(staging)
    if is_occupied and (local or not earlier_job):
        if storage.exists(storage.join(uri, MANIFEST)):
            raise _published_meanwhile(uri)
        raise BadInput(f"--output {uri}: there are files here that no polyrank job made")
    if not earlier_job:
        storage.create_bytes(storage.join(staging, REQUEST), json.dumps(job).encode())
    elif digest(earlier_job) != request:
        _require_untouched(staging, earlier_job, job)
    uncounted = uncounted_options(config)
    settings = {name: value for name, value in to_dict(config).items() if name not in uncounted}
    return Draft(uri, staging, kind, settings, references, request, job=job)


def _require_untouched(staging: str, earlier_job: dict[str, Any], job: dict[str, Any]) -> None:
    """Raises BadInput where another job has begun. A refused job leaves no more than its request and its
    tracking run."""
    if not set(storage.names_in(staging)) <= {REQUEST, RUN, _LOCK}:
        raise BadInput(f"{staging}: holds an unfinished job ({difference(earlier_job, job)}); "
                       "finish that one, choose another --output, or remove it")  # fmt: skip


def _references(inputs: Mapping[str, Artifact | dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: value.reference() if isinstance(value, Artifact) else value
        for name, value in inputs.items()
    }


# The identity of a job: the kind of its output, its inputs' contents, and its settings


def describe_request(
    kind: str, config: Any, inputs: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """JSON-ready. `inputs`: a reference to each, with its `fingerprint`; those of a list are numbered, such
    as corpus.0. Settings that are named like an input do not count."""
    input_names = {re.sub(r"\.\d+$", "", name) for name in inputs}
    return {
        "kind": kind,
        "inputs": {name: reference["fingerprint"] for name, reference in inputs.items()},
        "config": {
            name: value for name, value in identity(config).items() if name not in input_names
        },
    }


def difference(earlier_request: dict[str, Any], request: dict[str, Any]) -> str:
    """Names the inputs and the first settings that differ, for a person: "--corpus has other contents than
    it had; max_steps: 3 there, 4 here"."""
    earlier_inputs, inputs = earlier_request.get("inputs", {}), request["inputs"]
    earlier_settings = flatten(earlier_request.get("config", {}))
    settings = flatten(request["config"])
    descriptions = []
    for name in _changed(earlier_inputs, inputs):
        option = "--" + re.sub(r"\.\d+$", "", name).replace("_", "-")
        if name in earlier_inputs and name in inputs:
            descriptions.append(f"{option} has other contents than it had")
        else:
            descriptions.append(f"{option} is given only {'here' if name in inputs else 'there'}")
    descriptions += [
        f"{name}: {earlier_settings.get(name)!r} there, {settings.get(name)!r} here"
        for name in _changed(earlier_settings, settings)
    ]
    return "; ".join(list(dict.fromkeys(descriptions))[:3]) or "of another kind"


def _changed(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [name for name in {**earlier, **now} if earlier.get(name) != now.get(name)]
