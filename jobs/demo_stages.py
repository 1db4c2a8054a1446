"""Runs jobs one after the other or side by side. Each is a line on the terminal; its output is in a log."""

from __future__ import annotations

import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from jobs import program
from jobs.workflow import Step

SECONDS: dict[str, float] = {}
"""Seconds of each stage of this run, by its title."""
_log: TextIO | None = None


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Sends what jobs print to this file, not to the terminal. If the body fails, the terminal names it."""
    global _log
    with path.open("w", buffering=1) as _log:
        try:
            yield
        except Exception:
            print(f"\nwhat the stages have printed: {path}", file=sys.stderr, flush=True)
            raise
        finally:
            _log = None


@contextmanager
def logged() -> Iterator[None]:
    log = _log
    with redirect_stdout(log or sys.stdout), redirect_stderr(log or sys.stderr):
        yield


def run_stage(step: Step) -> program.Summary:
    """Runs a job in this process, as its command would, and prints its result."""
    stage = Stage.begin(step)
    print(stage.name, end="", flush=True)
    print(stage.work(), flush=True)
    return stage.summary


def run_here(verb: str, *options: object) -> program.Summary:
    """As `run_stage`, of a job without another title than its verb."""
    return run_stage(Step(verb, ("polyrank", verb, *map(str, options))))


@dataclass
class Stage:
    """A step whose settings are read: only the rest may run in another thread, as reading a config changes
    the working directory for a moment."""

    step: Step
    config: Any
    summary: program.Summary = field(default_factory=dict)

    @classmethod
    def begin(cls, step: Step) -> Stage:
        """Logs the command and reads its settings. Raises BadInput."""
        with logged():
            print(f"\n== {step.name}\n   $ {shlex.join(step.command)}", flush=True)
        return cls(step, step.config())

    @property
    def name(self) -> str:
        return row(self.step.verb, self.step.name)

    def work(self, *watch: Callable[[int, int], None]) -> str:
        """Runs the job; returns its seconds and counts as text."""
        title = self.step.name
        with timed(title), logged():
            self.summary = self.step.job.run(self.config, *watch)
        counts = self.summary.get("counts", {})
        parts = [f"{number:,} {name}" for name, number in counts.items() if "." not in name]
        if dropped := sum(self.summary.get("dropped", {}).values()):
            parts.append(f"{dropped:,} left out")
        done = "already done" if self.summary.get("already_done") else seconds(title)
        return f"{done}   {', '.join(parts)}".rstrip()


def row(verb: str, title: str) -> str:
    """The beginning of a stage's line on the terminal."""
    return f"{verb:<16} {title:<42} "


def seconds(title: str) -> str:
    return f"{SECONDS[title]:5.1f} s"


@contextmanager
def timed(title: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    SECONDS[title] = round(time.monotonic() - began, 1)


def run_side_by_side(trainings: Sequence[Stage], at_once: int) -> None:
    """Runs `at_once` of the trainings at a time, in their order. One that starts from another's output waits
    for it.

    They share one bar, because bars of several threads would overwrite each other.
    """
    lock = threading.Lock()
    progress: dict[str, str] = {}
    steps_done = Counter[str]()
    futures: dict[str, Future[None]] = {}  # by output
    terminal = sys.stdout
    # Without a terminal (None) there is no bar, only the lines of the results.
    with tqdm(desc="trainings", unit="step", total=0, leave=False, disable=None) as bar, logged():

        def run(stage: Stage, origin: Future[None] | None) -> None:
            name = stage.step.name.removeprefix("Ranker: ")

            def watch(step: int, steps: int) -> None:
                with lock:
                    if name not in progress:
                        bar.total = (bar.total or 0) + steps
                    progress[name] = f"{step}/{steps}"
                    bar.set_postfix(progress, refresh=False)
                    bar.update(step - steps_done[name])
                    steps_done[name] = step

            if origin:
                origin.result()
            result = stage.work(watch)
            with lock:
                bar.write(stage.name + result, file=terminal)

        with ThreadPoolExecutor(at_once) as threads:
            for stage in trainings:
                origin = futures.get(stage.config.encoder)
                futures[stage.config.output] = threads.submit(run, stage, origin)
            for future in futures.values():
                future.result()
