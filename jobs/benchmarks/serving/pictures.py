"""Pictures of loads: the answers, and the number of replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jobs.benchmarks.serving.load import LoadResult, Step


def load(curve: Sequence[Mapping[str, float]], file: Path) -> None:
    """Latency by requests a second."""
    figure = _figure(1)
    axes = figure.add_subplot(1, 1, 1)
    per_s = [point["per_s"] for point in curve]
    for name in ("p50", "p99"):
        axes.plot(per_s, [point[name] for point in curve], "o-", markersize=3, label=name)
    axes.set(xlabel="requests/s", ylabel="ms", ylim=(0, None), title="Latency by load")
    axes.legend(fontsize=7)
    _save(figure, file)


def burst(result: LoadResult, crowd: LoadResult, start_s: float, end_s: float, file: Path) -> None:
    """A steady load while a crowd comes and goes."""
    figure = _figure(2)
    times = figure.add_subplot(2, 1, 1)
    _dots(times, result)
    times.axvspan(start_s, end_s, alpha=0.15, color="tab:red")
    times.set(yscale="log", ylabel="ms", title="A steady load; shaded: a crowd beside it")
    rates = figure.add_subplot(2, 1, 2)
    _rates(rates, {"steady": (result, 0.0), "crowd": (crowd, start_s)})
    _save(figure, file)


def scaling(
    result: LoadResult, replicas: Sequence[tuple[float, float]], steps: Sequence[Step], file: Path
) -> None:
    """A stepped load, and the replicas that followed it."""
    figure = _figure(2)
    times = figure.add_subplot(2, 1, 1)
    _dots(times, result)
    times.set(yscale="log", ylabel="ms", title="A stepped load, and replicas")
    rates = figure.add_subplot(2, 1, 2)
    _rates(rates, {"answered": (result, 0.0)})
    ends = np.cumsum([0.0, *(step.seconds for step in steps)])
    rates.stairs([step.per_s for step in steps], ends, color="grey", label="asked")
    replica_axes = rates.twinx()
    replica_axes.step(*zip(*replicas, strict=True), where="post", color="tab:green")
    replica_axes.set(ylabel="replicas (green)", ylim=(0, 1 + max(count for _, count in replicas)))
    _save(figure, file)


def _dots(axes: Axes, result: LoadResult) -> None:
    for status, color in ((200, "tab:blue"), (429, "tab:orange")):
        selected = result.select(result.status == status)
        axes.plot(
            selected.due_s, 1e3 * selected.seconds, ".", markersize=2, color=color, label=status
        )
    axes.legend(fontsize=7)


def _rates(axes: Axes, loads: Mapping[str, tuple[LoadResult, float]]) -> None:
    for name, (result, start_s) in loads.items():
        seconds = range(int(result.end_s) + 1)
        axes.plot(
            [second + start_s for second in seconds],
            [result.per_s(second, second + 1.0) for second in seconds],
            label=name,
        )
    axes.set(xlabel="seconds", ylabel="answers/s", ylim=(0, None))
    axes.legend(fontsize=7)


def _figure(rows: int) -> Figure:
    figure = Figure(figsize=(6.4, 2.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, file: Path) -> None:
    figure.savefig(file, dpi=130)
