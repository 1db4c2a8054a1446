"""Runs jobs one after the other or side by side, and prints their results and seconds."""

from __future__ import annotations

import importlib
import shlex
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import MappingProxyType, ModuleType
from typing import Any

from tqdm import tqdm

from jobs import program
from pipeline.config import parse

SECONDS: dict[str, float] = {}
"""Seconds of each stage of this run, by its title."""


def run_stage(title: str, verb: str, *argv: str) -> program.Summary:
    """Runs a job in this process, as its command would, and prints its result."""
    return begin_stage(title, verb, *argv).run()


class Stage:
    """A job whose settings are read: only the rest may run in another thread, as reading a config changes
    the working directory for a moment."""

    def __init__(self, title: str, job: ModuleType, config: Any) -> None:
        self._title, self._job, self._config = title, job, config
        self._summary: program.Summary = {}

    def run(self) -> program.Summary:
        print(self.work(), flush=True)
        return self._summary

    def work(self, *watch: Callable[[int, int], None]) -> str:
        """Runs the job; returns lines to print about its result."""
        with timed(self._title):
            summary = self._summary = self._job.run(self._config, *watch)
        duration = (
            "already done" if summary.get("already_done") else f"{SECONDS[self._title]:.1f} s"
        )
        lines = [f"{self._title}: {duration}"]
        for field in ("counts", "dropped"):
            if numbers := summary.get(field):
                parts = [f"{number:,} {name}" for name, number in numbers.items()]
                lines += [f"{field}: {', '.join(parts)}"]
        metrics = summary.get("metrics", {})
        if losses := {k: number for k, number in metrics.items() if "loss" in k or k == "accuracy"}:
            lines += [", ".join(f"{name} {value:.3f}" for name, value in losses.items())]
        return "   " + "\n   ".join(lines)


def begin_stage(title: str, verb: str, *argv: str) -> Stage:
    """Prints the command and reads its settings. Raises BadInput."""
    print(f"\n== {title}\n   $ python -m jobs.{verb} {shlex.join(argv)}", flush=True)
    module = importlib.import_module(f"jobs.{verb}")
    return Stage(title, module, parse(module.Config, argv, f"python -m jobs.{verb}"))


@contextmanager
def timed(title: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    SECONDS[title] = round(time.monotonic() - began, 1)


def run_side_by_side(
    trainings: Mapping[str, Stage],
    at_once: int,
    predecessors: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Runs `at_once` of the trainings at a time, in their order. `predecessors`: the training that another
    one waits for.

    They share one bar, because bars of several threads would overwrite each other.
    """
    lock = threading.Lock()
    progress: dict[str, str] = {}
    steps_done = Counter[str]()
    futures: dict[str, Future[None]] = {}
    with tqdm(desc="trainings", unit="step", total=0) as bar:

        def run(name: str) -> None:
            def watch(step: int, steps: int) -> None:
                with lock:
                    if name not in progress:
                        bar.total = (bar.total or 0) + steps
                    progress[name] = f"{step}/{steps}"
                    bar.set_postfix(progress, refresh=False)
                    bar.update(step - steps_done[name])
                    steps_done[name] = step

            if name in predecessors:
                futures[predecessors[name]].result()
            text = trainings[name].work(watch)
            with lock:
                bar.write(text)

        with ThreadPoolExecutor(at_once) as threads:
            for name in trainings:
                futures[name] = threads.submit(run, name)
            for future in futures.values():
                future.result()
