"""Locks: small files that their owners keep fresh.

    <folder>/00000017.json           the highest number's owner may change what the folder is the lock of

    {"token": "9f…", "owner": "pid 4711 on host-3", "machine": "…", "pid": 4711, "since": …, "expires_s": …}

A thread writes the file again and again while the owner lives. A lock that is older than `expires_s`, or
whose process is known to be dead, is taken over by making the next number, which only one can: one atomic
step locally and in the object stores that `storage.create_bytes` names. In others two may hold a lock for a
moment: `Lock.check`, right before something is published, lets only one of them go on. The age of a file is
what its storage says: the clocks of hosts may differ by minutes.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import storage
from pipeline.config import Stopped


class LeaseFile:
    """A file that says, until the process dies or `stop` is called, that its owner lives."""

    def __init__(self, uri: str, expires_s: float) -> None:
        self.uri = uri
        self._expires_s = expires_s
        self._facts = {
            "token": uuid.uuid4().hex,
            "owner": f"pid {os.getpid()} on {socket.gethostname()}",
            "machine": _machine(),
            "pid": os.getpid(),
            "since": time.time(),
            "expires_s": expires_s,
        }
        self._text = json.dumps(self._facts).encode()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_fresh, daemon=True)

    def start(self) -> bool:
        """Makes the file; False where there is one already."""
        # A lost answer to our own request, which was sent again, reads as if another were there.
        if not storage.create_bytes(self.uri, self._text) and not self.is_ours():
            return False
        self._thread.start()
        return True

    def stop(self) -> None:
        """Removes the file, where the storage lets it; otherwise it expires."""
        self._stop.set()
        self._thread.join()
        with suppress(OSError):  # the owner's own failure, such as of this storage, says more
            if self.is_ours():
                storage.delete(self.uri)

    def is_ours(self) -> bool:
        facts = read(self.uri)
        return facts is not None and facts["token"] == self._facts["token"]

    def renew(self) -> bool:
        """Writes the file again; False where it is not ours any more."""
        if not self.is_ours():
            return False
        storage.write_bytes(self.uri, self._text)
        return True

    def _keep_fresh(self) -> None:
        while not self._stop.wait(self._expires_s / 4):
            with suppress(OSError):  # a store that is away for a moment: the next beat tries again
                if not self.renew():
                    return


@dataclass(frozen=True)
class Lock:
    """The right to change something."""

    subject: str
    folder: str
    number: int
    lease_file: LeaseFile

    def check(self) -> None:
        """Raises Stopped where the lock has been lost to another."""
        if not self.lease_file.is_ours() or max(_numbers(self.folder)) != self.number:
            raise Stopped(f"{self.subject}: another job has taken over the lock of this one, which did "
                          f"not renew it in time; see {self.folder}")  # fmt: skip


@contextmanager
def locked(folder: str, subject: str, expires_s: float) -> Iterator[Lock]:
    """Holds the lock of the `subject`; takes over a lock that its owner no longer renews, and prints that.

    Raises Stopped, naming the owner, where another holds it.
    """
    numbers = _numbers(folder)
    last_number = max(numbers, default=0)
    holder = read(_path(folder, last_number)) if last_number else None
    if holder and is_alive(_path(folder, last_number), holder):
        raise Stopped(f"{subject}: {_describe(holder)} works on it")
    lease_file = LeaseFile(_path(folder, last_number + 1), expires_s)
    if not lease_file.start():
        winner = read(lease_file.uri)
        raise Stopped(f"{subject}: {_describe(winner) if winner else 'another job'} works on it")
    if holder:
        print(f"{subject}: took over the lock of {_describe(holder)} who is gone", flush=True)
    try:
        for number in numbers:
            storage.delete(_path(folder, number))
        yield Lock(subject, folder, last_number + 1, lease_file)
    finally:
        lease_file.stop()


def is_held(folder: str) -> bool:
    """Whether a living job holds the lock of this folder."""
    last_number = max(_numbers(folder), default=0)
    holder = read(_path(folder, last_number)) if last_number else None
    return holder is not None and is_alive(_path(folder, last_number), holder)


def _numbers(folder: str) -> list[int]:
    names = (storage.name_of(uri).removesuffix(".json") for uri in storage.walk_json(folder))
    return [int(name) for name in names if name.isdecimal()]


def _path(folder: str, number: int) -> str:
    return storage.join(folder, f"{number:08d}.json")


def read(uri: str) -> dict[str, Any] | None:
    """The facts in a lock file; None where the file is missing or is no lock file."""
    # Twice: fsspec garbles a file of a store that its owner renews between two requests.
    for _ in range(2):
        try:
            facts = json.loads(storage.read_bytes(uri))
            return facts if isinstance(facts, dict) and "token" in facts else None
        except FileNotFoundError:
            return None
        except ValueError:
            continue
    return None


def is_alive(uri: str, facts: dict[str, Any]) -> bool:
    """Whether the owner of a file lives, as far as this machine and the storage know."""
    if facts["machine"] and facts["machine"] == _machine():
        try:
            os.kill(facts["pid"], 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # somebody else's, and alive
            pass
    return bool(_age(uri) < facts.get("expires_s", 600))  # earlier versions wrote none


def _age(uri: str) -> float:
    """Seconds since a file was written, until a file that is written now."""
    now = storage.join(storage.parent_of(uri), f".{uuid.uuid4().hex}")
    storage.write_bytes(now, b"")
    try:
        return storage.modified_at(now) - storage.modified_at(uri)
    except FileNotFoundError:  # given back meanwhile
        return math.inf
    finally:
        storage.delete(now)


def _describe(facts: dict[str, Any]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(facts["since"]))
    return f"{facts['owner']}, since {since} UTC,"


def _machine() -> str:
    """Names this boot of this machine and its space of process numbers; "" where that is not known."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    return ""
