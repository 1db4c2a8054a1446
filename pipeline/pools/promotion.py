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
from pipeline.pools.versions import (
    PREVIOUS,
    Version,
    current_name,
    newest_versions,
    previous_name,
)

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
    current, previous = current_name(pools, name), previous_name(pools, name)
    names = versions_by_age(pools, name)
    if previous in names and previous != current:
        return previous
    older = names[names.index(current) + 1 :] if current in names else names
    if not older:
        raise BadInput(f"version: {storage.join(pools, name)} has none before {current or 'CURRENT'}; "
                       f"there are: {', '.join(sorted(names)) or 'none'}")  # fmt: skip
    return older[0]


def versions_by_age(pools: str, name: str) -> list[str]:
    """All published versions, the newest first."""
    return [storage.name_of(version.uri) for version in newest_versions(pools, name)]


def newest_of_model(pools: str, name: str, fingerprint: str) -> str:
    """The newest version that a model embedded; "" where there is none."""
    versions = map(Version, newest_versions(pools, name))
    return next((v.name for v in versions if v.model_fingerprint == fingerprint), "")
