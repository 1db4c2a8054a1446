"""Which versions are served: what is proposed, what is refused, and how replicas go over together."""

from __future__ import annotations

import math
import re
import shutil
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import mlflow
import pytest

from pipeline import storage
from pipeline.artifact import read_artifact
from pipeline.config import BadInput
from pipeline.pools.lock import is_leased
from pipeline.pools.pool import make_current
from serve import versions
from serve.engine import Engine
from serve.follower import Follower, close_later, collect_garbage
from serve.versions import (
    Decider,
    Decision,
    PollingDecider,
    Report,
    Versions,
    resolve,
    without_folders,
)

from .conftest import Clock


@pytest.fixture
def pools(tmp_path: Path) -> Path:
    return tmp_path / "pools"


@pytest.fixture
def publish(pools, tiny_pool) -> Callable[..., str]:
    """`publish(model, "v-2")`: a further version of the pool `replies`; made CURRENT."""

    def make(model: Any, version: str, created_at: str = "") -> str:
        target = pools / "replies" / version
        shutil.copytree(Path(tiny_pool(model)) / "v-1", target)
        if created_at:
            manifest = target / "manifest.json"
            old = read_artifact(str(target), "pool").manifest["created_at"]
            manifest.write_text(manifest.read_text().replace(old, created_at))
        make_current(str(pools), "replies", version)
        return str(target)

    return make


@pytest.fixture
def model(tiny_ranker):
    return tiny_ranker("poly")


def failing_once(name: str) -> Callable[[str], bytes]:
    """`storage.read_bytes` over a network that loses its first request for a file of this name."""
    read_bytes, failures = storage.read_bytes, [OSError("connection reset")]

    def read(uri: str) -> bytes:
        if failures and storage.name_of(uri) == name:
            raise failures.pop()
        return read_bytes(uri)

    return read


def resolved(model: Any, pools: Path) -> tuple[Versions, list[str]]:
    return resolve(model.uri, [str(pools / "replies")])


class SteppedDecider(Decider):
    """Polls before it answers, when a poll is due. The real one polls on a thread."""

    _polled_at = -math.inf

    def follow(self, report: Report) -> Decision:
        decision = super().follow(report)
        now = versions.time.monotonic()
        if self._is_due.is_set() or now - self._polled_at >= self._poll_s:
            self._polled_at = now
            self._is_due.clear()
            self.poll()
            decision = super().follow(replace(report, refused=None))
        return decision


def decider_of(model: Any, pools: Path) -> Decider:
    return SteppedDecider(model.uri, [str(pools / "replies")], poll_s=1.0)


@pytest.fixture
def decider(model, pools, publish, clock) -> Decider:
    """Of the pool `replies`, whose version v-1 is current."""
    publish(model, "v-1")
    return decider_of(model, pools)


def test_the_deciders_process_loads_no_model():
    """Its process is the fourth of a service with two replicas; with torch it has 0.4 GB."""
    source = (
        "import sys, serve.versions\n"
        "assert not {'ray', 'torch', 'mlflow', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# What is wanted


def test_the_current_version_is_wanted(model, pools, publish):
    first = publish(model, "v-1")
    assert resolved(model, pools)[0].pools == (first,)
    second = publish(model, "v-2")
    versions, problems = resolved(model, pools)
    assert (versions.pools, problems) == ((second,), [])
    assert versions.fingerprint == model.fingerprint
    assert resolve(model.uri, [first])[0].pools == (first,)


@pytest.mark.parametrize("current", [b"v-9\n", b"\xff\xfe", b"", b"\0" * 15, b"../../etc\n"])
def test_a_damaged_current_means_the_newest_whole_version(model, pools, publish, current):
    publish(model, "v-1", "2026-01-01T00:00:00+00:00")
    newest = publish(model, "v-0", "2026-01-02T00:00:00+00:00")
    (pools / "replies" / "CURRENT").write_bytes(current)
    versions, problems = resolved(model, pools)
    assert versions.pools == (newest,)
    assert "v-0 is served" in problems[-1]


def test_a_pool_of_the_next_model_waits_for_the_model(tiny_ranker, model, pools, publish):
    """So that a new model and its pool are taken in one step, whichever is published first."""
    old = publish(model, "v-1")
    other = tiny_ranker("poly", 1)
    new = publish(other, "v-2")
    versions, problems = resolved(model, pools)
    assert versions.pools == (old,)
    assert other.fingerprint in problems[0] and "v-1 is served" in problems[0]
    versions, problems = resolved(other, pools)
    assert (versions.pools, versions.fingerprint, problems) == ((new,), other.fingerprint, [])


def test_an_error_of_the_storage_is_no_damage(model, pools, publish, monkeypatch):
    publish(model, "v-1")
    monkeypatch.setattr("serve.versions.storage.read_bytes", failing_once("CURRENT"))
    with pytest.raises(OSError, match="connection reset"):
        resolved(model, pools)


@pytest.mark.parametrize(
    ("problem", "shown"),
    [
        ("/srv/my pools/replies/v-2: damaged", "replies/v-2: damaged"),
        ("/srv/my pools/replies/v-2/ids.npy: gone; v-1 is served",
         "replies/v-2/ids.npy: gone; v-1 is served"),
        ("s3://bucket/articles/v-1: no version", "articles/v-1: no version"),
        ("/mlruns/1/4f0c/artifacts/ranker: is ab now, not cd", "ranker: is ab now, not cd"),
        ("gs://models/4f0c/ranker/: no manifest", "ranker/: no manifest"),
        ("[Errno 2] No such file: '/mlruns/1/4f0c/manifest.json'",
         "[Errno 2] No such file: 'manifest.json'"),
        ("reading key 'mlflow/1/4f0c/manifest.json' in bucket 'b': denied",
         "reading key 'manifest.json' in bucket 'b': denied"),
        ("model: models:/dialogue@champion: no such alias",
         "model: models:/dialogue@champion: no such alias"),
    ],
)  # fmt: skip
def test_a_problem_is_shown_without_folders_and_ids_of_runs(problem, shown):
    assert without_folders(problem, ["/srv/my pools/replies", "s3://bucket/articles"]) == shown


def test_the_log_has_the_problem_with_its_paths(tiny_ranker, model, pools, publish, clock, caplog):
    publish(model, "v-1")
    new = publish(tiny_ranker("poly", 1), "v-2")
    decider = decider_of(model, pools)
    for _ in range(3):
        clock.now += 1
        (problem,) = decider.follow(Report("one", None)).problems
    assert caplog.messages == [problem]
    assert new in problem
    shown = without_folders(problem, [str(pools / "replies")])
    assert shown.startswith("replies/v-2: embedded by the model") and str(pools) not in shown


# One decision for all replicas


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """Seconds pass when a test says so."""
    made = Clock()
    for module in ("serve.versions", "serve.follower"):
        monkeypatch.setattr(f"{module}.time", made)
    return made


def replica(name: str, decider: Decider, load: Callable[[Versions], Any]) -> Follower:
    return Follower(name, decider.follow, load, poll_s=1.0)


def engine_of(versions: Versions) -> Any:
    """The real one: it checks the vectors."""
    return Engine(versions.model, versions.pools)


def opened(versions: Versions) -> Any:
    """Stands for an engine where nothing but its versions matters."""
    replies = SimpleNamespace(version=storage.name_of(versions.pools[0]))
    return SimpleNamespace(pools={"replies": replies}, close=lambda: None)


class Network:
    """Loads engines, unless a test says that the network is down."""

    def __init__(self, load: Callable[[Versions], Any] = opened) -> None:
        self.is_down, self.loads, self._load = False, 0, load

    def load(self, versions: Versions) -> Any:
        self.loads += 1
        if self.is_down:
            raise OSError("connection reset")
        return self._load(versions)


def started(follower: Follower) -> Follower:
    while follower._engine is None:
        follower._step()
    return follower


def pass_seconds(clock: Clock, seconds: int, *followers: Follower, every: int = 1) -> None:
    """Lets each replica ask the decider every so many seconds; after 5 of silence it counts as dead."""
    for _ in range(0, seconds, every):
        clock.now += every
        for follower in followers:
            follower._step()


def served(follower: Follower) -> str:
    return follower.engine.pools["replies"].version


def test_replicas_go_over_when_all_have_loaded(model, publish, clock, decider):
    one, two = (started(replica(name, decider, opened)) for name in ("one", "two"))
    publish(model, "v-2")
    for step in range(2):
        clock.now += 1
        one._step()
        assert (served(one), served(two)) == ("v-1", "v-1"), step
    two._step()  # loads, and hears that all have
    assert (served(one), served(two)) == ("v-1", "v-2")
    one._step()
    assert (served(one), served(two)) == ("v-2", "v-2")


def test_what_is_decided_is_served_before_the_next_version_is_loaded(
    model, pools, publish, clock, decider
):
    """Both may come with one answer."""
    loads: list[tuple[str, str]] = []

    def load(versions: Versions) -> Engine:
        serving = served(one) if one.loaded else ""
        loads.append((serving, storage.name_of(versions.pools[0])))
        return opened(versions)

    one = replica("one", decider, load)
    started(one)
    two = started(replica("two", decider, opened))
    publish(model, "v-2")
    clock.now += 1
    one._step()
    two._step()  # all have loaded v-2
    publish(model, "v-3")
    clock.now += 1
    one._step()
    assert loads == [("", "v-1"), ("v-1", "v-2"), ("v-2", "v-3")]
    two._step()
    one._step()
    assert (served(one), served(two)) == ("v-3", "v-3")


def test_a_replica_that_is_gone_holds_up_nobody(model, publish, clock, decider):
    one, _gone = (started(replica(name, decider, opened)) for name in ("one", "gone"))
    publish(model, "v-2")
    pass_seconds(clock, 7, one)
    assert served(one) == "v-2"


def test_a_new_replica_starts_with_what_is_decided(model, publish, clock, decider):
    one = started(replica("one", decider, opened))
    publish(model, "v-2")
    clock.now += 1
    two = started(replica("two", decider, opened))
    assert (served(one), served(two)) == ("v-1", "v-1")


def test_a_replica_that_loads_for_long_is_waited_for(clock, decider):
    may_end, began, reported = threading.Event(), threading.Event(), threading.Event()

    def load_slowly(versions: Versions) -> Any:
        began.set()
        assert may_end.wait(60)
        return opened(versions)

    def ask(report: Report) -> Decision:
        decision = decider.follow(report)
        reported.set()
        return decision

    one = replica("one", decider, opened)
    slow = Follower("slow", ask, load_slowly, poll_s=0.01)
    starting = threading.Thread(target=slow.start)
    starting.start()
    assert began.wait(60)
    for _ in range(12):
        clock.now += 1
        reported.clear()
        assert reported.wait(60)
        one._step()
    assert one.loaded is None
    may_end.set()
    starting.join(60)
    one._step()
    slow.close()
    assert (served(one), served(slow)) == ("v-1", "v-1")


def test_a_replica_that_cannot_load_what_others_serve_tries_once_a_minute(clock, decider):
    network = Network()
    one = started(replica("one", decider, opened))
    two, network.is_down = replica("two", decider, network.load), True
    pass_seconds(clock, 57, one, two, every=3)
    assert network.loads == 1
    network.is_down = False
    pass_seconds(clock, 9, one, two, every=3)
    assert (served(two), network.loads) == ("v-1", 2)


def damage(version: str) -> None:
    """Flips a byte of a pool version's vectors."""
    path = next((Path(version) / "vectors").glob("*.npy"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(bytes(content))


def test_a_damaged_version_is_refused_and_the_old_one_serves_on(model, publish, clock, decider):
    one = started(replica("one", decider, engine_of))
    damage(publish(model, "v-2"))
    pass_seconds(clock, 4, one)
    assert served(one) == "v-1"
    assert any("damaged" in problem and "v-2" in problem for problem in one.problems)
    publish(model, "v-3")
    pass_seconds(clock, 3, one)
    assert (served(one), one.problems) == ("v-3", ())


def test_a_start_with_a_damaged_version_in_a_bucket_takes_the_last_that_opens(
    model, pools, publish, clock, tmp_path, monkeypatch
):
    """The error names the copy on the node, from which nobody learnt which pool was damaged."""
    monkeypatch.setenv("POLYRANK_CACHE", str(tmp_path / "cache"))
    publish(model, "v-1")
    damage(publish(model, "v-2"))
    storage.upload(pools / "replies", "memory://bucket/replies")
    try:
        decider = SteppedDecider(model.uri, ["memory://bucket/replies"], poll_s=1.0)
        one = replica("one", decider, engine_of)
        one.start()
        one.close()
        assert served(one) == "v-1"
        assert any("v-1 is served" in problem for problem in one.problems)
    finally:
        fsspec.filesystem("memory").store.clear()


def test_a_start_with_nothing_that_opens_fails_in_one_line(model, pools, publish, clock):
    damage(publish(model, "v-1"))
    decider = decider_of(model, pools)
    with pytest.raises(BadInput, match="no version to serve"):
        replica("one", decider, engine_of).start()


def test_the_successor_of_a_replica_that_could_not_load_tries_again(clock, decider):
    """The decider outlives both."""
    network = Network()
    network.is_down = True
    with pytest.raises(BadInput, match="connection reset"):
        replica("one", decider, network.load).start()
    network.is_down = False
    clock.now += 6  # then the first one counts as dead
    two = replica("two", decider, network.load)
    two.start()
    two.close()
    assert served(two) == "v-1"
    assert two.problems == ()


def test_an_error_of_the_network_is_tried_again_later_and_a_damaged_version_is_not(
    model, pools, publish, clock
):
    publish(model, "v-1")
    network = Network(engine_of)
    one = started(replica("one", decider_of(model, pools), network.load))
    publish(model, "v-2")
    network.is_down = True
    pass_seconds(clock, 10, one)
    assert (served(one), network.loads) == ("v-1", 2)
    network.is_down = False
    pass_seconds(clock, 60, one, every=3)
    assert (served(one), network.loads) == ("v-2", 3)
    damage(publish(model, "v-3"))
    pass_seconds(clock, 90, one, every=3)
    assert (served(one), network.loads) == ("v-2", 4)


@pytest.mark.slow
def test_a_replica_closes_what_another_one_refused(model, pools, publish, clock, decider):
    network = Network(engine_of)
    one = started(replica("one", decider, engine_of))
    two = started(replica("two", decider, network.load))
    publish(model, "v-2")
    network.is_down = True
    pass_seconds(clock, 2, one)
    assert is_leased(str(pools), "replies", "v-2")
    two._step()
    one._step()
    for timer in threading.enumerate():
        if isinstance(timer, threading.Timer) and timer.interval == 0:
            timer.join(60)
    assert not is_leased(str(pools), "replies", "v-2")
    assert (served(one), served(two)) == ("v-1", "v-1")


@pytest.mark.slow
def test_an_engine_that_is_closed_takes_no_memory(model, pools, publish):
    publish(model, "v-1")
    engine = engine_of(resolved(model, pools)[0])
    reference = weakref.ref(engine)
    collect_garbage()  # as after a load: it was left out of all later collections
    timer = close_later(engine.close, 60.0)
    timer.cancel()
    del engine
    timer.function()
    assert reference() is None


def test_any_failure_to_load_is_a_problem_and_is_not_repeated_at_each_poll(
    model, pools, publish, clock, caplog
):
    publish(model, "v-1")
    loads: list[Versions] = []

    def load(versions: Versions) -> Any:
        loads.append(versions)
        raise RuntimeError("out of memory")

    one = replica("one", decider_of(model, pools), load)
    pass_seconds(clock, 5, one)
    assert len(loads) == 1
    assert one.problems == ("RuntimeError('out of memory')",)
    assert caplog.text.count("Traceback") == 1


def test_a_decider_that_does_not_answer_is_a_problem_that_is_counted(caplog):
    counted: list[tuple[str, ...]] = []
    heard = threading.Event()

    def ask(report: Report) -> Decision:
        raise RuntimeError("the actor died")

    def followed(problems: Sequence[str]) -> None:
        counted.append(tuple(problems))
        heard.set()

    follower = Follower("one", ask, opened, 0.01, followed)
    follower.start(until_loaded=False)
    assert heard.wait(60)
    follower.close()
    assert counted[0] == follower.problems == ("RuntimeError('the actor died')",)
    assert "the actor died" in caplog.text


def test_versions_that_cannot_be_resolved_for_any_reason_are_a_problem(model, pools, monkeypatch):
    monkeypatch.setattr("serve.versions.resolve", {}.__getitem__)
    decision = decider_of(model, pools).follow(Report("one", None))
    assert decision.problems[0].startswith("TypeError(")


def test_a_decider_with_nothing_to_serve_looks_once_a_poll(model, pools, clock, monkeypatch):
    looks = list[str]()

    def resolve_nothing(model: str, *pools: Any) -> Any:
        looks.append(model)
        raise BadInput("no version to serve")

    monkeypatch.setattr("serve.versions.resolve", resolve_nothing)
    decider = decider_of(model, pools)
    for _ in range(10):
        assert decider.follow(Report("one", None)).problems == ("no version to serve",)
    assert len(looks) == 1


def test_a_service_that_slept_starts_though_its_old_version_was_removed(
    model, pools, publish, clock
):
    old = publish(model, "v-1")
    decider = decider_of(model, pools)
    started(replica("one", decider, opened))
    publish(model, "v-2")
    shutil.rmtree(old)
    clock.now += 3600
    two = replica("two", decider, opened)
    for _ in range(2):
        two._step()
    assert served(two) == "v-2"


def test_vectors_that_are_not_the_models_are_refused(model, pools, publish):
    """As another build of the same weights might make them: the manifest cannot tell."""
    publish(model, "v-1")
    engine = engine_of(resolved(model, pools)[0])
    with pytest.raises(BadInput, match="is not what the model makes of its text"):
        pool = engine.pools["replies"]
        vectors = [canary.vector_D for canary in reversed(pool.canaries)]
        pool.canaries = [
            canary._replace(vector_D=vector_D)
            for canary, vector_D in zip(pool.canaries, vectors, strict=True)
        ]
        engine._check_pools()


def test_a_decider_that_starts_again_goes_on_from_what_is_served(model, pools, publish, clock):
    publish(model, "v-1")
    one = started(replica("one", decider_of(model, pools), opened))
    publish(model, "v-2")
    again = decider_of(model, pools)
    decision = again.follow(Report("one", one._serving))
    assert decision.decided == one._serving
    assert decision.proposed is not None and decision.proposed.pools[0].endswith("v-2")


def test_a_decider_that_starts_again_decides_nothing_before_it_has_heard_all(
    model, pools, publish, clock, decider
):
    """One replica had loaded v-2, another one had refused it: the first one to report served it alone."""
    one = started(replica("one", decider, opened))
    network = Network()
    two = started(replica("two", decider, network.load))
    publish(model, "v-2")
    network.is_down = True
    clock.now += 1
    one._step()  # loads v-2
    one.ask = two.ask = decider_of(model, pools).follow
    for _ in range(10):
        one._step()
        clock.now += 0.5
        two._step()
        clock.now += 0.5
        assert (served(one), served(two)) == ("v-1", "v-1")
    network.is_down = False
    pass_seconds(clock, 72, one, two, every=3)
    assert (served(one), served(two)) == ("v-2", "v-2")


def test_no_replica_waits_for_a_registry_that_hangs(model, pools, publish, monkeypatch):
    """Sixteen replicas waited for 79 s."""
    publish(model, "v-1")
    wanted, _ = resolved(model, pools)
    may_end, is_asked = threading.Event(), threading.Event()

    def hang(*asked: Any) -> Any:
        is_asked.set()
        assert may_end.wait(60)
        return wanted, []

    monkeypatch.setattr("serve.versions.resolve", hang)
    decider = PollingDecider(model.uri, [str(pools / "replies")], poll_s=1.0)
    try:
        assert is_asked.wait(60)
        assert decider.follow(Report("new", None)) == Decision(None, None, ())
        served = [decider.follow(Report(f"replica {at}", wanted)) for at in range(16)]
        assert decider.follow(Report("new", None)).decided == wanted
        assert not may_end.is_set()
    finally:
        may_end.set()
    assert all(decision == Decision(wanted, None, ()) for decision in served)


@pytest.fixture
def rolled_back(model, pools, publish, clock) -> Follower:
    """A replica that serves v-1, because v-2 was rolled back."""
    publish(model, "v-1")
    publish(model, "v-2")
    one = started(replica("one", decider_of(model, pools), engine_of))
    make_current(str(pools), "replies", "v-1")
    pass_seconds(clock, 2, one)
    assert served(one) == "v-1"
    return one


@pytest.mark.parametrize("problem", ["embedded by the model", "damaged", "names no version"])
def test_a_current_that_cannot_be_taken_does_not_bring_back_what_was_rolled_back(
    tiny_ranker, model, pools, publish, clock, rolled_back, problem
):
    """A promotion of a model with its pool passes through a CURRENT of the next model."""
    new = publish(tiny_ranker("poly", int(problem == "embedded by the model")), "v-3")
    if problem == "damaged":
        damage(new)
    elif problem == "names no version":
        (pools / "replies" / "CURRENT").write_bytes(b"\xff")
    for _ in range(4):
        clock.now += 1
        rolled_back._step()
        assert served(rolled_back) == "v-1"
    assert any("v-1 is served" in problem for problem in rolled_back.problems)


def test_a_current_that_cannot_be_read_for_once_changes_nothing(
    model, pools, publish, clock, rolled_back, monkeypatch
):
    publish(model, "v-3")
    make_current(str(pools), "replies", "v-1")
    monkeypatch.setattr("serve.versions.storage.read_bytes", failing_once("CURRENT"))
    clock.now += 1
    decision = rolled_back._step()
    assert (decision.proposed, rolled_back.problems) == (None, ("connection reset",))
    clock.now += 1
    decision = rolled_back._step()
    assert (decision.proposed, rolled_back.problems, served(rolled_back)) == (None, (), "v-1")


@pytest.mark.slow
def test_a_registry_that_does_not_answer_changes_nothing(model, pools, publish, monkeypatch):
    """New replicas start meanwhile, with what is served."""
    publish(model, "v-1")
    served, _ = resolved(model, pools)
    before = mlflow.get_tracking_uri()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        mlflow.set_tracking_uri(f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        try:
            decider = SteppedDecider("models:/dialogue@champion", served.pools, poll_s=3600.0)
            old = decider.follow(Report("old", served))
            new = decider.follow(Report("new", None))
            first = SteppedDecider("models:/dialogue@champion", served.pools, 1.0).follow(
                Report("first", None)
            )
        finally:
            mlflow.set_tracking_uri(before)
    assert old.decided == new.decided == served
    assert "models:/dialogue@champion" in new.problems[0]
    assert first.decided is None
    assert re.search("models:/dialogue@champion: .*Read timed out", first.problems[0])


def test_a_candidate_is_tried_again_until_it_loads(tiny_ranker, model, pools, publish, clock):
    """Without a pool of its own it answers nothing, and holds up nobody."""
    publish(model, "v-1")
    other = tiny_ranker("poly", 1)
    follower = replica("one", decider_of(other, pools), engine_of)
    for _ in range(2):
        clock.now += 1
        follower._step()
        assert follower.loaded is None
        assert "no version to serve" in follower.problems[0]
    publish(other, "v-2")
    clock.now += 1
    started(follower)
    assert follower.engine.model.fingerprint == other.fingerprint
