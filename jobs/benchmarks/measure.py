"""Measurements: rows of a report; jobs as processes, with their time and memory."""

from __future__ import annotations

import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import psutil

from pipeline.config import BadInput
from pipeline.processor import processor
from pipeline.provenance import git_revision

Key = TypeVar("Key")
Result = TypeVar("Result")
_REST_S = 0.01


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
    """`note` stands on the page, and `peer` says who the peer is; the rest is for this run's reader."""

    @classmethod
    def alone(
        cls, row: str, ours: float | None, unit: str, note: str, **fields: Any
    ) -> BenchmarkRow:
        return cls(row, ours, unit, detail={"note": note}, **fields)

    @classmethod
    def beside(
        cls, row: str, ours: float, peer: float, unit: str, note: str = "", **fields: Any
    ) -> BenchmarkRow:
        """Ours and the peer's; more is better. `fields`: further ones of the row."""
        values = {"ratio": ours / peer, "detail": {"note": note} if note else {}, **fields}
        return cls(row, ours, unit, peer, **values)

    @classmethod
    def of_rounds(
        cls, row: str, ours: Sequence[float], peer: Sequence[float], unit: str, note: str, **fields: Any
    ) -> BenchmarkRow:  # fmt: skip
        """Rates of rounds in turn: the best of each side, and the median of the rounds' ratios."""
        ratio = median(a / b for a, b in zip(ours, peer, strict=True))
        return cls.beside(row, max(ours), max(peer), unit, note, ratio=ratio, **fields)


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
        "processor": processor(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def attempt(name: str, rows: Iterable[BenchmarkRow]) -> Iterator[BenchmarkRow]:
    """The rows of a part. If it fails, a row `name` says why, and the other parts count nevertheless."""
    print(f"{name} …", flush=True)
    try:
        yield from rows
    except (BadInput, RuntimeError) as problem:
        yield BenchmarkRow(name, None, "", detail={"failed": str(problem)})


def report(
    rows: Iterable[BenchmarkRow], file: str, source: Mapping[str, str]
) -> list[BenchmarkRow]:
    """Prints the rows as a table, and returns them. Each is written to the JSON file, with its source, once
    it is measured, so that a run that is stopped keeps it. `file` "": none."""
    done = list[BenchmarkRow]()
    for row in rows:
        done.append(row)
        _write(done, file, source)
    _write(done, file, source)
    print(f"{'':44} {'ours':>12} {'peer':>12} {'ratio':>7} {'floor':>12}  unit")
    for row in done:
        numbers = map(number, (row.ours, row.peer, row.ratio, row.floor))
        print("{:44} {:>12} {:>12} {:>7} {:>12}  {}".format(row.row, *numbers, row.unit))
        for name, value in row.detail.items():
            print(f"    {name}: {value}")
    return done


def _write(rows: Sequence[BenchmarkRow], file: str, source: Mapping[str, str]) -> None:
    if file:
        entries = [{**asdict(row), "source": dict(source)} for row in rows]
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(json.dumps(entries, indent=1) + "\n")


def number(value: float | None) -> str:
    """Three digits that count; None: ""."""
    if value is None:
        return ""
    if 0 < abs(value) < 0.001:
        return f"{value:.5f}"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def take_turns(ways: Mapping[Key, Callable[[], Result]], rounds: int) -> dict[Key, list[Result]]:
    """What each way returns, round by round. The ways take turns, so that all have the same machine."""
    results: dict[Key, list[Result]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            results[way].append(run())
    return results


def in_turn(ways: Mapping[Key, Callable[[], object]], rounds: int) -> dict[Key, list[float]]:
    """Seconds of each way, round by round; the clock waits for a GPU.

    Before each there is a rest: OpenMP's threads of the way before it wait for more at full load, for 7 ms.
    A round before the first one, which compiles, allocates and maps pages, does not count.
    """
    from torch.utils.benchmark import timer

    def seconds(run: Callable[[], object]) -> float:
        time.sleep(_REST_S)
        began = timer()
        run()
        return timer() - began

    timed = {way: functools.partial(seconds, run) for way, run in ways.items()}
    return {way: times[1:] for way, times in take_turns(timed, rounds + 1).items()}


@dataclass(frozen=True)
class Run:
    """A finished job."""

    summary: dict[str, Any]
    seconds: float
    peak_mib: float
    """Peak memory of all its processes together; shared pages are counted once (PSS)."""


def run_job(verb: str, *arguments: object, **variables: str) -> Run:
    """`python -m jobs.<verb> …` to its end, on a Ray of its own. Raises BadInput where it fails.

    `variables`: of its environment.
    """
    command = [sys.executable, "-m", f"jobs.{verb}", *map(str, arguments)]
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, start_new_session=True, env={**os.environ, **variables}
    )
    peak, out = 0, None
    try:
        while out is None:
            try:
                out, _ = process.communicate(timeout=0.5)
            except subprocess.TimeoutExpired:
                peak = max(peak, _memory(process.pid))
    finally:
        with suppress(ProcessLookupError):  # its whole Ray, too, as the loss of a node would
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise BadInput(f"{' '.join(command[1:])}: it failed")
    return Run(json.loads(out.splitlines()[-1]), time.perf_counter() - began, peak / 2**20)


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
