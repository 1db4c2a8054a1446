"""The versions of a pool: finds the CURRENT one, and removes old ones."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pipeline import storage
from pipeline.artifact import MANIFEST, Artifact, NewerFormat, open_artifact, read_artifact
from pipeline.config import BadInput, defaults_of, to_dict
from pipeline.engine.draft import discard, is_being_made, read_mark, read_request, read_run
from pipeline.models.precision import Resolved, numerics_of
from pipeline.pools.changes import RowSet
from pipeline.pools.lock import current_locked, is_leased
from pipeline.pools.pool import KIND, current_uri, precision_of, version_in

PLAN = "plan"
"""The task whose record says when a build was planned, and in what it computes."""
_DAY_S = 86_400
_PREFIX = "v-"
PREVIOUS = "PREVIOUS"


def current_name(pools: str, name: str) -> str:
    """The version that CURRENT names; "": there is no CURRENT."""
    return _read_name(current_uri(pools, name))


def previous_name(pools: str, name: str) -> str:
    """The version that was CURRENT before; "": there was none."""
    return _read_name(storage.join(pools, name, PREVIOUS))


def _read_name(uri: str) -> str:
    return version_in(uri) if storage.exists(uri) else ""


@dataclass(frozen=True)
class Version:
    """A published version, of which nothing but the manifest has been read."""

    artifact: Artifact

    @property
    def name(self) -> str:
        return storage.name_of(self.artifact.uri)

    @property
    def model_fingerprint(self) -> str:
        return str(self.artifact.manifest["inputs"]["model"]["fingerprint"])

    @property
    def precision(self) -> str:
        return precision_of(self.artifact)

    @property
    def filter_columns(self) -> tuple[str, ...]:
        return tuple(self.artifact.manifest["config"]["embed"].get("filter_columns", ()))

    @property
    def numerics(self) -> int:
        """See `pipeline.models.precision`."""
        return int(self.artifact.manifest.get("numerics", 1))

    @property
    def set_aside(self) -> RowSet:
        """The candidates that the model has no vector for; pools of earlier versions do not say."""
        return RowSet(**self.artifact.manifest.get("set_aside", {}))


def open_before(pools: str, name: str) -> Version | None:
    """The version before the one to be made: CURRENT, or, if that cannot be opened, the newest one that can.
    None: there is none. Both are said.

    Its files are not fetched: whoever copies vectors opens them.

    Raises NewerFormat for a CURRENT version of a later polyrank: it is whole, and its services read it.
    """
    if current := current_name(pools, name):
        try:
            return Version(open_artifact(storage.join(pools, name, current), KIND))
        except NewerFormat:
            raise
        except BadInput as error:
            print(f"pool {name}: its CURRENT version cannot be opened: {error}", flush=True)
    for version in newest_versions(pools, name):
        with suppress(BadInput):
            before = Version(open_artifact(version.uri, KIND))
            state = f"{current} is" if current else "no version is"
            print(
                f"pool {name}: {state} CURRENT; compares with the newest one, {before.name}",
                flush=True,
            )
            return before
    return None


def files_of_rows(pool: Artifact) -> list[tuple[str, int]]:
    """(URI, rows) of each file with a pool's rows, in order."""
    return [
        (storage.join(pool.uri, entry["path"]), entry["rows"])
        for entry in pool.manifest["files"]
        if entry["path"].startswith("rows/")
    ]


def rows_of(pools: str, name: str, version: str) -> int:
    """The number of candidates of a version; 0 if it does not exist or its manifest cannot be read."""
    try:
        return _candidates(read_artifact(storage.join(pools, name, version), KIND))
    except BadInput:
        return 0


def has_vectors_of(before: Version, model: Artifact, config: Any, precision: Resolved) -> bool:
    """Whether a job's model and settings would make the same vectors of the same texts.

    Pools of earlier versions do not say their precision; they are taken to have another. An option that they
    do not know had its default's effect.
    """
    if before.model_fingerprint != model.fingerprint or before.precision != precision:
        return False
    settings_before = {**defaults_of(config.embed), **before.artifact.manifest["config"]["embed"]}
    settings = to_dict(config.embed)
    for name in config.embed.NOT_OF_VECTORS:
        del settings_before[name], settings[name]
    return before.numerics == numerics_of(precision) and settings_before == settings


def newest_with_vectors_of(
    pools: str, name: str, model: Artifact, config: Any, precision: Resolved
) -> Version | None:
    """The newest version for which `has_vectors_of` holds; one with incomplete files is named and left out.

    The version may be removed unless the caller holds the pool's lock.
    """
    for version in map(Version, newest_versions(pools, name)):
        if has_vectors_of(version, model, config, precision):
            try:
                return Version(open_artifact(version.artifact.uri, KIND))
            except BadInput as error:
                print(f"pool {name}: nothing is copied from {version.name}: {error}", flush=True)
    return None


def _drafts(pools: str, name: str) -> list[str]:
    """The URIs of the drafts of killed jobs."""
    return [
        uri
        for uri in storage.list_folders(storage.join(pools, name))
        if storage.name_of(uri).startswith(_PREFIX) and not is_version(uri)
    ]


def is_version(uri: str) -> bool:
    """Whether a folder of a pool is a published version."""
    name = storage.name_of(uri)
    is_complete = name.startswith(_PREFIX) and not name.endswith(".partial")
    return is_complete and storage.exists(storage.join(uri, MANIFEST))


@dataclass(frozen=True)
class Removal:
    """The result of `remove_old`."""

    removed: list[str]
    kept_larger: list[tuple[str, int]]
    """(version, candidates) of old versions that are kept because every newer version is much
    smaller."""
    killed_runs: list[str]
    """The tracking runs of the removed drafts."""


def newest_versions(pools: str, name: str) -> list[Artifact]:
    """A pool's published versions, the newest first; one whose manifest cannot be read is named and left
    out."""
    return sorted(_read_versions(pools, name), key=_created_at, reverse=True)


def _read_versions(pools: str, name: str) -> Iterator[Artifact]:
    for uri in storage.list_folders(storage.join(pools, name)):
        if is_version(uri):
            try:
                yield read_artifact(uri, KIND)
            except BadInput as error:
                print(f"pool {name}: a version is left alone: {error}", flush=True)


def plans(pools: str) -> str:
    """The folder of the plans of dry runs."""
    return storage.join(pools, "_plans")


def remove_dead_plans(pools: str) -> None:
    """Removes the plans of jobs that were killed: they hold texts."""
    for uri in storage.list_folders(plans(pools)):
        if not is_being_made(uri):
            storage.delete(uri)


def remove_old(
    pools: str,
    name: str,
    keep: int,
    keep_days: float,
    max_removed_share: float = 1.0,
    unfinished: bool = True,
) -> Removal:
    """Removes versions, and (`unfinished`) what killed builds have left.

    What stays: the `keep` newest versions, those younger than `keep_days`, CURRENT, the one before it
    (PREVIOUS; not with `keep` 1), the newest one by another model than CURRENT's, to which a rollback of the
    model goes (not with `keep` 1), and each that somebody has open (`lock.lease`). `keep` 0: all versions.
    The newest of the others stays, too, where it has so many candidates that all that stay lack more than
    `max_removed_share` of them: it may be the last one before an export broke off. So does a
    version whose manifest cannot be read.
    A killed build stays until `keep` versions are newer than its plan (with `keep` 0: one): it may be of a
    larger input, or of a new model, and have taken days, while the job of every night goes on. One without a
    plan has embedded nothing, and goes.
    Only who holds the pool's lock may call it.
    """
    newest = newest_versions(pools, name)
    removed = [
        storage.name_of(uri)
        for uri in _drafts(pools, name)
        # What was killed while it was removed has no request any more: no job goes on with it.
        if not read_request(uri) or (unfinished and _is_outlived(uri, newest, keep))
    ]
    drafts = [storage.join(pools, name, folder) for folder in removed]
    killed_runs = [run for draft in drafts if (run := read_run(draft))]
    # A rollback moves CURRENT without the pool's lock, and never to a version that is being removed.
    with current_locked(pools, name):
        storage.remove_unfinished(storage.join(pools, name), deep=False)  # of CURRENT, say
        current = current_name(pools, name)
        protected = [current]
        if keep > 1:
            protected += [previous_name(pools, name), _newest_of_another_model(newest, current)]
        removable = [
            version
            for version in (newest[keep:] if keep else [])
            if storage.name_of(version.uri) not in protected
            and time.time() - _created_at(version) >= keep_days * _DAY_S
            and not is_leased(pools, name, storage.name_of(version.uri))
        ]
        kept_larger = _much_larger(newest, removable, max_removed_share)
        for version in removable:
            if version not in kept_larger:
                removed.append(storage.name_of(version.uri))
                storage.delete(storage.join(version.uri, MANIFEST))  # no version any more
    for folder in removed:
        discard(storage.join(pools, name, folder))
    larger = [(storage.name_of(version.uri), _candidates(version)) for version in kept_larger]
    return Removal(removed, larger, killed_runs)


def finish_removals(pools: str, name: str, next_version: str) -> None:
    """Removes what a killed `remove_old` has left, which would be in the way of a version of that name.

    Also removes other builds that have embedded nothing, such as those that the gate has refused: each has
    all texts of its input, and while no version is published nothing else removes them.
    """
    for uri in _drafts(pools, name):
        is_next = storage.name_of(uri).removesuffix(".partial") == next_version
        if not read_request(uri) or not (is_next or read_run(uri)):
            discard(uri)


def _created_at(version: Artifact) -> float:
    return datetime.fromisoformat(version.manifest["created_at"]).timestamp()


def _candidates(version: Artifact) -> int:
    return version.counts.get("candidates", 0)


def _newest_of_another_model(versions: Sequence[Artifact], current: str) -> str:
    """The newest version by another model than that of the version `current`; "": there is none."""
    model_of = {version.name: version.model_fingerprint for version in map(Version, versions)}
    models = (name for name in model_of if model_of[name] != model_of.get(current, model_of[name]))
    return next(models, "")


def _is_outlived(draft: str, versions: Sequence[Artifact], keep: int) -> bool:
    """Whether a killed build has no plan, or as many versions are newer as are kept."""
    planned_at = read_mark(draft, PLAN).get("planned_at", 0.0)
    newer_count = sum(_created_at(version) >= planned_at for version in versions)
    return not planned_at or newer_count >= max(keep, 1)


def _much_larger(
    versions: Sequence[Artifact], removable: Sequence[Artifact], max_removed_share: float
) -> list[Artifact]:
    """The removable versions, newest first, that are much larger than all that stay."""
    kept: list[Artifact] = []
    largest = max((_candidates(v) for v in versions if v not in removable), default=0)
    for version in removable:
        if largest < _candidates(version) * (1 - max_removed_share):
            kept.append(version)
            largest = _candidates(version)
    return kept
