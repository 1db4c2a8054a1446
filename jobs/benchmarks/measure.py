"""Measurements: rows of a report; jobs as processes, with their time and memory."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
    command = [sys.executable, "-m", f"jobs.{verb}", *map(str, arguments)]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    peak, out = 0, None
    try:
        while out is None:
            try:
                out, _ = process.communicate(timeout=0.5)
            except subprocess.TimeoutExpired:
                peak = max(peak, _memory(process.pid))
    finally:
        kill_group(process)
    if process.returncode:
        raise BadInput(f"{' '.join(command[1:])}: it failed")
    return Run(json.loads(out.splitlines()[-1]), time.perf_counter() - began, peak / 2**20)


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kills a job with its whole local Ray, as the loss of a node would."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment() -> Mapping[str, Any]:
    """The machine, on which the figures depend."""
    model = next((line.split(": ")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), "unknown")  # fmt: skip
    memory = psutil.virtual_memory().total / 2**30
    return {"cores": os.cpu_count(), "cpu": model, "memory_gib": round(memory, 1)}


def _memory(pid: int) -> int:
    """Bytes of a process and all below it; shared pages are counted once (PSS)."""
    total = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                total += member.memory_full_info().pss
    return total
