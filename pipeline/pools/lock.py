"""Locks of pools and leases of their versions: files that their owners keep fresh.

<pools>/_locks/<name>/00000017.json             versions are made or removed; see `pipeline.storage.locks`
<pools>/_locks/<name>/current/00000017.json     CURRENT, PREVIOUS or PINNED is changed
<pools>/_leases/<name>/<version>/<owner>.json   somebody has this version open
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

from pipeline import storage
from pipeline.config import Stopped
from pipeline.storage import locks
from pipeline.storage.locks import LeaseFile, Lock

_LEASE_S = 600.0
# The lock of CURRENT is held for some small writes, of 100 ms each to an object store.
_CURRENT_EXPIRES_S, _CURRENT_WAIT_S, _CURRENT_ASKED_EVERY_S = 30.0, 60.0, 0.5


def locked(pools: str, name: str, expires_s: float) -> AbstractContextManager[Lock]:
    """Holds the lock of a pool. Raises Stopped, naming the owner, if another process holds it."""
    return locks.locked(storage.join(pools, "_locks", name), f"pool {name}", expires_s)


@contextmanager
def current_locked(pools: str, name: str) -> Iterator[None]:
    """Holds the lock of a pool's CURRENT, PREVIOUS and PINNED, and waits for another owner.

    It is a lock of its own because a build holds the pool's for hours. Raises Stopped, naming the owner,
    after a minute.
    """
    folder = storage.join(pools, "_locks", name, "current")
    give_up_at = time.monotonic() + _CURRENT_WAIT_S
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(locks.locked(folder, f"pool {name}", _CURRENT_EXPIRES_S))
                break
            except Stopped:
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(_CURRENT_ASKED_EVERY_S)
        storage.remove_unfinished(folder)  # of owners that were killed
        yield


def lease(version: str) -> LeaseFile | None:
    """Says that a version of a pool (<pools>/<name>/<version>) is open here, so that it is not removed.

    None if nothing can be written, as in a folder that is mounted read-only.
    """
    pool = storage.parent_of(version)
    leases = _leases(storage.parent_of(pool), storage.name_of(pool), storage.name_of(version))
    lease_file = LeaseFile(storage.join(leases, f"{uuid.uuid4().hex}.json"), _LEASE_S)
    with suppress(OSError):
        lease_file.start()
        return lease_file
    return None


def is_leased(pools: str, name: str, version: str) -> bool:
    """Whether somebody has the version open; leases that have run out are removed."""
    alive = False
    for uri in list(storage.walk_json(_leases(pools, name, version))):
        facts = locks.read(uri)
        if facts is None or not locks.is_alive(uri, facts):
            storage.delete(uri)
        else:
            alive = True
    return alive


def _leases(pools: str, name: str, version: str) -> str:
    return storage.join(pools, "_leases", name, version)
