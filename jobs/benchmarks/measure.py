"""Measurements: rows of a report; jobs as processes, with their time and memory."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from pipeline.config import BadInput
from pipeline.provenance import git_revision

Key = TypeVar("Key")
"""Of a way to do the same."""


@dataclass(frozen=True)
class BenchmarkRow:
    """One line of a report."""

    row: str
    """Name of the measured figure; the same in every run."""
    ours: float | None
    """None: it failed; `detail` says why."""
    unit: str
    peer: float | None = None
    """The same by somebody else's code, or by the plain way."""
    ratio: float | None = None
    """Ours to the peer's, as speed: higher is better."""
    floor: float | None = None
    """The machine's limit."""
    share_of_floor: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)


def source(size: str) -> dict[str, str]:
    """The run that makes the rows: command, size, date, commit, machine. A command's folders are left out."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    machine = environment()
    return {
        "kind": "run",
        "command": f"python -m jobs.benchmark {shlex.join(words)}",
        "size": size,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": git_revision() or "unknown",
        "machine": f"{machine['cores']} cores, {machine['cpu']}",
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def report(rows: list[BenchmarkRow], file: str, source: Mapping[str, str] | None = None) -> None:
    """Prints the rows as a table. Writes them to a JSON file if one is named, each with its source."""
    print(f"{'':44} {'ours':>12} {'peer':>12} {'ratio':>7} {'floor':>12}  unit")
    for row in rows:
        numbers = map(number, (row.ours, row.peer, row.ratio, row.floor))
        print("{:44} {:>12} {:>12} {:>7} {:>12}  {}".format(row.row, *numbers, row.unit))
        for name, value in row.detail.items():
            print(f"    {name}: {value}")
    write_rows(rows, file, source)


def write_rows(
    rows: Sequence[BenchmarkRow], file: str, source: Mapping[str, str] | None = None
) -> None:
    """Writes rows to a JSON file, each with its source; "": to none."""
    if file:
        entries = [{**asdict(row), "source": dict(source or {})} for row in rows]
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(json.dumps(entries, indent=1) + "\n")


def read_rows(file: Path) -> list[BenchmarkRow]:
    """The rows of a file of `report`, without their sources."""
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    return [
        BenchmarkRow(**{name: value for name, value in row.items() if name != "source"})
        for row in rows
    ]


def number(value: float | None) -> str:
    """Three digits that count; None: ""."""
    if value is None:
        return ""
    if 0 < abs(value) < 0.001:
        return f"{value:.5f}"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def in_turn(ways: Mapping[Key, Callable[[], object]], rounds: int) -> dict[Key, list[float]]:
    """Seconds of each way, round by round. The ways take turns, so that all have the same machine.

    A round before the first one, which compiles, allocates and maps pages, does not count. The clock waits
    for a GPU.
    """
    from torch.utils.benchmark import timer

    seconds: dict[Key, list[float]] = {way: [] for way in ways}
    for round_number in range(rounds + 1):
        for way, run in ways.items():
            began = timer()
            run()
            if round_number:
                seconds[way].append(timer() - began)
    return seconds


@dataclass(frozen=True)
class Run:
    """A finished job."""

    summary: dict[str, Any]
    seconds: float
    peak_mib: float
    """Peak memory of all its processes together; shared pages are counted once (PSS)."""


def run_job(verb: str, *arguments: object) -> Run:
    """`python -m jobs.<verb> …` to its end, on a Ray of its own. Raises BadInput where it fails."""
    began = time.perf_counter()
    with (
        job(verb, *arguments, stdout=subprocess.PIPE) as process,
        samples_of(lambda: _memory(process.pid), 0.5) as samples,
    ):
        out, _ = process.communicate()
    if process.returncode:
        raise BadInput(f"python -m jobs.{verb} {' '.join(map(str, arguments))}: it failed")
    seconds = time.perf_counter() - began
    peak = max((memory for _, memory in samples), default=0.0)
    return Run(json.loads(out.splitlines()[-1]), seconds, peak / 2**20)


@contextmanager
def job(
    verb: str, *arguments: object, stdout: int = subprocess.DEVNULL, stderr: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A job's process, the leader of its own group; the group is killed at the end."""
    command = [sys.executable, "-m", f"jobs.{verb}", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)
    try:
        yield process
    finally:
        kill_group(process)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a job with its whole local Ray, as the loss of a node would."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def workers_of(pid: int) -> list[psutil.Process]:
    """The Ray workers below a process that are at work on a task of ours."""
    workers = []
    for process in _family(pid):
        with suppress(psutil.Error):
            title = " ".join(process.cmdline()[:1])
            # A node does not survive its agents; an idle worker is no loss; actors that keep a book for
            # others (Ray Data's, and `shards`' own) have names with an underscore.
            if title.startswith("ray::") and not (
                title.startswith("ray::_") or title.endswith(("Agent", "IDLE"))
            ):
                workers.append(process)
    return workers


def environment() -> Mapping[str, Any]:
    """The machine, on which the figures depend."""
    model = next((line.split(": ")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), "unknown")  # fmt: skip
    memory = psutil.virtual_memory().total / 2**30
    return {"cores": os.cpu_count(), "cpu": model, "memory_gib": round(memory, 1)}


@contextmanager
def samples_of(look: Callable[[], float], every_s: float) -> Iterator[list[tuple[float, float]]]:
    """(seconds since the beginning, what `look` returned), from a thread, as long as the block lasts."""
    samples, is_over = list[tuple[float, float]](), threading.Event()
    began = time.perf_counter()

    def watch() -> None:
        while not is_over.wait(every_s):
            value = look()
            samples.append((time.perf_counter() - began, value))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()


def _memory(pid: int) -> float:
    """Bytes of a process and all below it; shared pages are counted once (PSS)."""
    total = 0
    for process in _family(pid):
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []
