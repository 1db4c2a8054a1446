"""Locks and leases: one owner at a time, fresh while it lives, taken over when it is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from pipeline import storage
from pipeline.config import Stopped
from pipeline.pools import lock
from pipeline.pools.lock import current_locked, is_leased, lease, locked
from pipeline.storage import locks


@pytest.fixture(params=["local", "memory"])
def pools(request, tmp_path):
    """A folder of pools, also in an object store."""
    yield str(tmp_path) if request.param == "local" else "memory://bucket/pools"
    fsspec.filesystem("memory").store.clear()


def files(pools: str) -> list[str]:
    found = storage.walk_json(storage.join(pools, "_locks", "p"))
    return [storage.name_of(uri) for uri in found]


def leave(pools: str, number: int = 1, **facts) -> str:
    """A lock that its owner has not released."""
    uri = storage.join(pools, "_locks", "p", f"{number:08d}.json")
    known = {"token": "t", "owner": "pid 1 on far", "machine": "far", "pid": 1, "since": 0.0}
    storage.write_bytes(uri, json.dumps({**known, "expires_s": 100, **facts}).encode())
    return uri


def let_age(uri: str, seconds: float) -> None:
    """Lets a file be older for its storage."""
    if storage.is_local(uri):
        written = Path(uri).stat().st_mtime - seconds
        os.utime(uri, (written, written))
    else:
        file = fsspec.filesystem("memory").store[uri.removeprefix("memory:/")]
        file.modified -= timedelta(seconds=seconds)


def test_a_lock_is_held_by_one_and_free_afterwards(pools):
    for _ in range(2):
        with pytest.raises(ArithmeticError), locked(pools, "p", 60):
            assert len(files(pools)) == 1
            message = rf"pool p: pid {os.getpid()} on .*, since 2.* works on it"
            with pytest.raises(Stopped, match=message), locked(pools, "p", 60):
                pass
            with locked(pools, "q", 60):  # another pool is another matter
                raise ArithmeticError
        assert files(pools) == []


def test_the_lock_of_current_is_waited_for_and_is_another_one(pools, monkeypatch):
    asked = list[float]()
    with ExitStack() as owner, locked(pools, "p", 60):
        owner.enter_context(current_locked(pools, "p"))
        monkeypatch.setattr(lock.time, "sleep", lambda s: (asked.append(s), owner.close()))
        with current_locked(pools, "p"):
            assert len(asked) == 1
        with current_locked(pools, "p"):
            monkeypatch.setattr(lock, "_CURRENT_WAIT_S", -1.0)
            with pytest.raises(Stopped, match="works on it"), current_locked(pools, "p"):
                pass


def test_a_lock_that_nobody_renews_is_taken_over_and_that_is_said(pools, capsys):
    let_age(leave(pools, number=4), 101)
    with locked(pools, "p", 60) as held:
        assert files(pools) == ["00000005.json"]
        said = "took over the lock of pid 1 on far, since 1970-01-01 00:00:00 UTC, who is gone\n"
        assert said in capsys.readouterr().out
        held.check()


def test_a_living_owner_holds_its_lock(pools):
    for facts in ({}, {"machine": locks._machine(), "pid": os.getppid()}):  # elsewhere, and here
        leave(pools, **facts)
        with pytest.raises(Stopped, match=" on far, since"), locked(pools, "p", 60):
            pass


@pytest.mark.parametrize("ahead_s", [-1000, 1000])
def test_the_clocks_of_hosts_do_not_count(pools, monkeypatch, ahead_s):
    """By the storage's clock the other host's lock is new at first, and then too old."""
    uri = leave(pools)
    clock = SimpleNamespace(**{**vars(time), "time": lambda: time.time() + ahead_s})
    monkeypatch.setattr(locks, "time", clock)
    with pytest.raises(Stopped, match=" on far, since"), locked(pools, "p", 60):
        pass
    let_age(uri, 101)
    with locked(pools, "p", 60) as held:
        assert held.number == 2
    assert files(pools) == []


def test_a_dead_process_of_this_machine_holds_no_lock(pools, capsys):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    leave(pools, machine=locks._machine(), pid=dead.pid)
    with locked(pools, "p", 60):
        assert "took over" in capsys.readouterr().out


def test_of_many_that_come_at_once_one_holds_the_lock(tmp_path):
    barrier, done = threading.Barrier(16), threading.Event()
    held, refused = [], []

    def come():
        barrier.wait()
        try:
            with locked(str(tmp_path), "p", 60) as mine:
                held.append(mine.number)
                done.wait()
        except Stopped:
            refused.append(1)
            if len(refused) == 15:
                done.set()

    leave(str(tmp_path), expires_s=0)
    threads = [threading.Thread(target=come) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert held == [2]
    assert len(refused) == 15


def test_who_has_lost_the_lock_is_told_before_it_publishes(pools):
    with locked(pools, "p", 60) as slept:
        held = leave(pools, number=slept.number + 1)  # as another does that found this one expired
        with pytest.raises(Stopped, match="another job has taken over"):
            slept.check()
    assert storage.exists(held)  # and its lock stays


def test_of_two_in_an_object_store_at_one_moment_only_the_later_one_may_publish():
    with locked("memory://bucket/race", "p", 60) as first:
        facts = json.loads(storage.read_bytes(first.lease_file.uri))
        storage.write_bytes(first.lease_file.uri, json.dumps({**facts, "token": "later"}).encode())
        with pytest.raises(Stopped):
            first.check()
    assert json.loads(storage.read_bytes(first.lease_file.uri))["token"] == "later"
    fsspec.filesystem("memory").store.clear()


def test_a_lock_whose_making_was_answered_too_late_is_held(tmp_path, monkeypatch):
    """A store has made the file, its answer was lost, and the client's second request finds the file."""
    create = storage.create_bytes
    monkeypatch.setattr(storage, "create_bytes", lambda *file: create(*file) and create(*file))
    with locked(str(tmp_path), "p", 60) as held:
        held.check()
    assert files(str(tmp_path)) == []


def test_a_lock_that_is_renewed_while_it_is_read_is_no_free_one(pools, monkeypatch):
    uri, read_bytes = leave(pools), storage.read_bytes
    garbled = [read_bytes(uri)[:-3] + b"\0\xe0\xbb"]
    monkeypatch.setattr(
        storage, "read_bytes", lambda uri: garbled.pop() if garbled else read_bytes(uri)
    )
    with pytest.raises(Stopped, match=" on far, since"), locked(pools, "p", 60):
        pass


def test_a_lock_that_is_renewed_is_new_and_otherwise_the_same(pools):
    with locked(pools, "p", 60) as held:
        uri = held.lease_file.uri
        first = storage.read_bytes(uri)
        let_age(uri, 100)
        old = storage.modified_at(uri)
        assert held.lease_file.renew()
        assert storage.modified_at(uri) > old + 50
        assert storage.read_bytes(uri) == first


def test_a_lock_is_kept_fresh_also_after_a_failure(tmp_path, monkeypatch):
    renew, beats = locks.LeaseFile.renew, threading.Semaphore(0)
    failures = iter([OSError("the network is away")])

    def counted(lease_file):
        beats.release()
        for failure in failures:
            raise failure
        return renew(lease_file)

    monkeypatch.setattr(locks.LeaseFile, "renew", counted)
    with locked(str(tmp_path), "p", 0.04):
        for _ in range(3):
            assert beats.acquire(timeout=60)


def test_a_beat_ends_where_the_lock_is_another_s(pools):
    with locked(pools, "p", 60) as held:
        storage.write_bytes(held.lease_file.uri, b'{"token": "another"}')
        assert not held.lease_file.renew()
        assert b"another" in storage.read_bytes(held.lease_file.uri)


def test_a_lock_that_cannot_be_given_back_hides_no_failure(pools, monkeypatch):
    """Where the store refuses everything, the first refusal says more than that of the lock."""

    def refuse(uri):
        raise OSError("AccessDenied")

    with pytest.raises(ValueError, match="the job's own"), locked(pools, "p", 60):
        monkeypatch.setattr(storage, "read_bytes", refuse)
        raise ValueError("the job's own")


def test_a_lease_keeps_a_version_until_it_is_given_back_or_runs_out(pools):
    version = storage.join(pools, "p", "v-1")
    assert not is_leased(pools, "p", "v-1")
    mine, other = lease(version), lease(version + "/")
    assert is_leased(pools, "p", "v-1")
    assert not is_leased(pools, "p", "v-2")
    mine.stop()
    assert is_leased(pools, "p", "v-1")
    other.stop()
    assert not is_leased(pools, "p", "v-1")
    uri = storage.join(pools, "_leases", "p", "v-1", "old.json")
    facts = {"token": "t", "machine": "far", "pid": 1, "expires_s": 100}
    storage.write_bytes(uri, json.dumps(facts).encode())
    assert is_leased(pools, "p", "v-1")
    let_age(uri, 101)
    assert not is_leased(pools, "p", "v-1")
    assert not storage.exists(uri)


def test_where_nothing_can_be_written_there_is_no_lease(tmp_path):
    (tmp_path / "pools").write_text("a file")  # root may write into any folder
    assert lease(str(tmp_path / "pools" / "p" / "v-1")) is None
