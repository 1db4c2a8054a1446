"""Measures the speed and the peak memory of a training process."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from pipeline.training.loop import Progress


class Pace:
    """Measures from its creation on: a process that resumed from a checkpoint counts its own steps."""

    def __init__(self, device: torch.device, step: float) -> None:
        self._device = device
        self._first_step = self._last_step = step
        self._seconds = 0.0
        _forget_peak(device)

    def measure(self, progress: Progress) -> dict[str, float]:
        """`mean_steps_per_s`: without validations and checkpoints. `peak_memory_mib`: with them."""
        self._seconds += (progress.step - self._last_step) / progress.metrics["steps_per_s"]
        self._last_step = progress.step
        return {
            "mean_steps_per_s": (self._last_step - self._first_step) / self._seconds,
            "peak_memory_mib": _peak_bytes(self._device) / 2**20,
        }


def _forget_peak(device: torch.device) -> None:
    """Ray gives a process to one task after another."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):  # Linux only; see proc(5)
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes(device: torch.device) -> int:
    """Peak memory of a GPU's tensors; on a CPU of the whole process, libraries included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
