"""Estimates the cost of a job for `--dry-run`: sizes from listings and manifests.

No input is copied. Hours are estimated only where the dry run measures a rate itself, on this machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_RANGE_BYTES = 8 << 20  # one request of `storage.read_ahead`


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The expected cost of a job. None: the quantity does not apply or is not known."""

    input_files: int | None = None
    input_bytes: int | None = None
    rows: int | None = None
    """Rows that the job reads."""
    tasks: int | None = None
    requests: int | None = None
    """Requests to the object store, if the input lies in one."""
    shuffle_bytes: int | None = None
    """Written between the stages of the job, and read again."""
    steps: int | None = None
    """Steps of training."""
    memory_bytes: int | None = None
    """Memory of the largest task or of a worker."""
    cpu_hours: float | None = None
    gpu_hours: float | None = None
    basis: str = ""
    """What was measured for the hours; "": nothing."""

    def as_json(self) -> dict[str, Any]:
        quantities = dataclasses.asdict(self)
        return {name: value for name, value in quantities.items() if value not in (None, "")}


_LABELS = {
    "input_files": "input files",
    "input_bytes": "input",
    "rows": "rows",
    "tasks": "tasks",
    "requests": "requests",
    "shuffle_bytes": "shuffle",
    "steps": "steps",
    "memory_bytes": "memory of a task or worker",
    "cpu_hours": "core hours",
    "gpu_hours": "GPU hours",
    "basis": "rates from",
}


def show(job: str, estimate: Estimate, details: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Prints the estimate and returns it for the job's summary.

    `details`: what else this job can say of itself, by names that a person can read. JSON-ready.
    """
    quantities, job_details = estimate.as_json(), dict(details or {})
    print(f"{job}: nothing is written; the job would take about")
    for name, value in quantities.items():
        print(f"  {_LABELS[name]:<28}{_text(name, value)}")
    for name, value in job_details.items():
        if value in ("", {}):
            continue
        print(f"  {name.replace('_', ' '):<28}{_text(name, value)}")
    return {"dry_run": True, "estimate": quantities, **job_details}


def measured_here(hours: float, measurement: str, **quantities: Any) -> Estimate:
    """`hours` of this process, on its GPU or on all its cores; `measurement` says what was measured."""
    import torch

    from pipeline.engine.resources import best_device

    device, cores = best_device(), torch.get_num_threads()
    on_gpu = device.type == "cuda"
    return Estimate(
        gpu_hours=hours if on_gpu else None,
        cpu_hours=None if on_gpu else hours * cores,
        basis=f"{measurement}, measured on {device} ({cores} threads)",
        **quantities,
    )


def reads(sizes: Iterable[int]) -> int:
    """Requests that read files of these sizes from an object store."""
    return sum(max(1, -(-size // _RANGE_BYTES)) for size in sizes)


def _text(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return _bytes(value)
    if name.endswith("_hours"):
        return f"{value:,.1f}" if value >= 0.1 else f"{value:.4f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{count:,} {label}" for label, count in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.1f} {unit}"
        number /= 1000
    return f"{number:,.1f} TB"
