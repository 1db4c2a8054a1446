"""Reads and changes which version of a pool is CURRENT, which one was before, and whether it is pinned.

<pools>/<name>/CURRENT    the version that readers open
<pools>/<name>/PREVIOUS   the version that was CURRENT before
<pools>/<name>/PINNED     jobs leave CURRENT as it is

Whoever changes one of them holds `lock.current_locked`.
"""

from __future__ import annotations

from pipeline import storage
from pipeline.config import BadInput, Stopped
from pipeline.pools.lock import current_locked
from pipeline.pools.pool import make_current
from pipeline.pools.versions import PREVIOUS, current_name, previous_name, read_versions

_PINNED = "PINNED"


def publish(pools: str, name: str, version: str, publish_only: bool, compared: str) -> None:
    """Makes a job's new version CURRENT, unless the CURRENT one is pinned or has to stay.

    `compared`: the version that was CURRENT when the gate compared the new one with it; "": there was none.
    Raises Stopped if CURRENT has moved since then.
    """
    with current_locked(pools, name):
        current = current_name(pools, name)
        if current and publish_only:
            print(f"pool {name}: {version} is published; CURRENT stays {current}", flush=True)
        elif current and current != version and is_pinned(pools, name):
            print(f"pool {name}: {version} is made, but {current} stays CURRENT: it is pinned, as by a "
                  f"rollback. polyrank promote --unpin --pools {pools} --name {name} ends that; then the "
                  "same command publishes", flush=True)  # fmt: skip
        elif current not in (compared, version):
            raise Stopped(
                f"pool {name}: {version} is published and does not become CURRENT: the gate compared it with "
                f"{compared or 'no version'}, but {current or 'no version'} is CURRENT now; the same command "
                "compares it again"
            )
        else:
            promote(pools, name, version)


def promote(pools: str, name: str, version: str) -> None:
    """Makes a version CURRENT and remembers the one before."""
    current = current_name(pools, name)
    if current and current != version:
        storage.write_bytes(storage.join(pools, name, PREVIOUS), f"{current}\n".encode())
    make_current(pools, name, version)


def set_pin(pools: str, name: str, pinned: bool) -> None:
    uri = storage.join(pools, name, _PINNED)
    if pinned:
        storage.write_bytes(uri, b"")
    else:
        storage.delete(uri)


def is_pinned(pools: str, name: str) -> bool:
    """Whether jobs leave CURRENT as it is."""
    return storage.exists(storage.join(pools, name, _PINNED))


def version_before(pools: str, name: str) -> str:
    """The version that was CURRENT before, else the newest one that is older than CURRENT.

    Raises BadInput where there is none.
    """
    current, created_at = current_name(pools, name), _creation_times(pools, name)
    previous = previous_name(pools, name)
    if previous in created_at and previous != current:
        return previous
    older = [
        version for version in created_at if created_at[version] < created_at.get(current, "~")
    ]
    if not older:
        raise BadInput(f"version: {storage.join(pools, name)} has none before {current or 'CURRENT'}; "
                       f"there are: {', '.join(sorted(created_at)) or 'none'}")  # fmt: skip
    return max(older, key=lambda version: created_at[version])


def versions_by_age(pools: str, name: str) -> list[str]:
    """All published versions, the newest first."""
    created_at = _creation_times(pools, name)
    return sorted(created_at, key=lambda version: created_at[version], reverse=True)


def newest_of_model(pools: str, name: str, fingerprint: str) -> str:
    """The newest version that a model embedded; "" where there is none."""
    created_at = _creation_times(pools, name, fingerprint)
    return max(created_at, key=lambda version: created_at[version], default="")


def _creation_times(pools: str, name: str, fingerprint: str = "") -> dict[str, str]:
    """When each published version was made; those of one model only, if its fingerprint is given."""
    created_at = {}
    for artifact in read_versions(pools, name):
        manifest = artifact.manifest
        if fingerprint in ("", manifest["inputs"]["model"]["fingerprint"]):
            created_at[storage.name_of(artifact.uri)] = str(manifest["created_at"])
    return created_at
