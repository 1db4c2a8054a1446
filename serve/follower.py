"""The part of following versions that is in each replica: it loads what the decider proposes, and swaps.

`versions.py` has the wanted and the decided versions.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.config import BadInput
from serve.versions import (
    RETRY_S,
    Decision,
    RefusedPool,
    Report,
    Versions,
    log_failure,
    problem_of,
)

if TYPE_CHECKING:
    from serve.engine import Engine

_START_POLL_S = 0.2  # between two questions of a replica that has nothing to serve yet
_LEASE_S = 90.0  # an old version is released after this time, when its longest request has ended


@dataclass
class Follower:
    """Follows a decider."""

    replica: str
    ask: Callable[[Report], Decision]
    load: Callable[[Versions], Engine]
    poll_s: float
    record_decision: Callable[[Sequence[str]], None] = lambda problems: None
    """Called with the problems after each question to the decider, also where it failed."""
    problems: tuple[str, ...] = ()
    _engine: Engine | None = None
    _serving: Versions | None = None
    _prepared: Versions | None = None
    _prepared_engine: Engine | None = None
    _retry_at: dict[Versions, float] = field(default_factory=dict)
    """Versions that could not be loaded, and when to try again."""
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self, until_loaded: bool = True) -> None:
        """Starts to follow the decider, and returns when versions are loaded. Raises BadInput if none can be.

        Without `until_loaded` it returns at once, and tries again at each poll."""
        while until_loaded and not self._stop.is_set():
            decision = self._step()
            if self._engine is not None:
                break
            has_nothing = decision.decided is None and decision.proposed is None
            if self._prepared is None and has_nothing and decision.problems:
                raise BadInput("; ".join(self.problems))
            self._stop.wait(min(self.poll_s, _START_POLL_S))
        threading.Thread(target=self._follow, name="follow-versions", daemon=True).start()

    def close(self) -> None:
        self._stop.set()
        for engine in (self._engine, self._prepared_engine):
            if engine is not None:
                engine.close()

    @property
    def loaded(self) -> Engine | None:
        """None: nothing is loaded yet, which only happens without `until_loaded`."""
        return self._engine

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def _follow(self) -> None:
        while not self._stop.wait(self.poll_s):
            try:
                self._step()
            except Exception as error:  # such as a decider that restarts; the old versions stay
                if (problem_of(error),) != self.problems:
                    log_failure("cannot follow the decider", error)
                self._set_problems((problem_of(error),))

    def _step(self) -> Decision:
        """Reports, loads what the decider answers, and serves what it has decided."""
        decision = self._report()
        self._serve_prepared(decision)  # other replicas do so now, and the next load takes long
        for versions in (decision.decided, decision.proposed):
            if versions is None or versions in (self._serving, self._prepared):
                continue
            if time.monotonic() < self._retry_at.get(versions, 0.0):
                continue
            try:
                engine = self._load_while_reporting(versions)
            except Exception as error:
                log_failure(f"cannot load {versions}", error)
                self._retry_at[versions] = time.monotonic() + RETRY_S
                return self._report(
                    refused=versions,
                    refused_pools=(error.uri,) if isinstance(error, RefusedPool) else (),
                    problem=problem_of(error),
                    may_pass=not isinstance(error, BadInput),
                )
            self._close_prepared()
            self._prepared, self._prepared_engine = versions, engine
            decision = self._report()
            break
        self._serve_prepared(decision)
        if self._serving is not None and self._prepared != decision.proposed:
            self._close_prepared()  # another replica refused it
        return decision

    def _serve_prepared(self, decision: Decision) -> None:
        """Swaps, if what it has prepared is decided."""
        if self._prepared is None or decision.decided != self._prepared:
            return
        previous_engine = self._engine
        self._engine = self._prepared_engine  # the swap, for all later requests
        self._serving, self._prepared, self._prepared_engine = self._prepared, None, None
        if previous_engine is not None:
            close_later(previous_engine.close)

    def _load_while_reporting(self, versions: Versions) -> Engine:
        """Reports while it loads, because a silent replica counts as dead."""
        loading = ThreadPoolExecutor(1, "load-versions").submit(self.load, versions)
        while not wait([loading], self.poll_s).done:
            with suppress(Exception):  # a decider that restarts; the load goes on
                self._report()
        return loading.result()

    def _close_prepared(self) -> None:
        if self._prepared_engine is not None:
            close_later(self._prepared_engine.close, 0.0)
            self._prepared = self._prepared_engine = None

    def _report(self, **refusal: Any) -> Decision:
        """`refusal`: what it could not load; see `Report`."""
        report = Report(self.replica, self._serving, self._prepared, **refusal)
        decision = self.ask(report)
        self._set_problems(decision.problems)
        return decision

    def _set_problems(self, problems: tuple[str, ...]) -> None:
        self.problems = problems
        self.record_decision(problems)


def close_later(close: Callable[[], None], seconds: float = _LEASE_S) -> threading.Timer:
    """Closes an engine or a shard, whose requests have ended then, and frees its memory."""
    closes = [close]

    def close_and_forget() -> None:
        closes.pop()()
        collect_garbage()  # an engine refers to itself

    timer = threading.Timer(seconds, close_and_forget)
    timer.daemon = True
    timer.start()
    return timer


def collect_garbage() -> None:
    """Collects what an earlier version has left, and leaves out of later collections what is loaded now.

    Otherwise the results of large answers set off full collections again and again, each of 0.1 to 0.35 s in
    which nobody is answered: of 56 lists of 64 queries with `top_k` 1,000 39 were answered in time, now all,
    and small requests beside them took 0.24 s at p99, now 0.13 s."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
