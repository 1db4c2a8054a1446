"""The pictures of BENCHMARKS.md (SVG), and those of a load on a service (PNG)."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from jobs.benchmarks.measure import number
from jobs.benchmarks.serving.load import LoadResult, Step

TARGETS, GROWTH, PROFILES = "targets.svg", "growth.svg", "profiles.svg"
MET, MISSED = "#2a7f62", "#c1552f"
_MOST = 4.0  # times the bound of a target; what is above ends there
_SCALE = {0.25: "¼", 0.5: "½", 1.0: "the target", 2.0: "2 ×", 4.0: "4 ×"}
_COLUMNS = 3
# The same rows give the same bytes. Letters stay letters.
_STYLE: dict[Any, Any] = {"font.size": 7, "svg.fonttype": "none", "svg.hashsalt": "polyrank"}


@dataclass(frozen=True)
class Curve:
    """Points of a measure, by rising x; all above 0. A row has it in `detail["curve"]`:
    {"x": "comments", "y": "seconds", "points": [[1e6, 48], …]}."""

    row: str
    x: str
    y: str
    points: tuple[tuple[float, float], ...]

    @property
    def slope(self) -> float:
        """Slope of the least-squares line through the logarithms."""
        xs, ys = np.log(np.array(self.points)).T
        return float(np.polyfit(xs, ys, 1)[0])


def curves(rows: Iterable[Mapping[str, Any]]) -> list[Curve]:
    """The curves of the rows that have one with two points or more."""
    drawable = []
    for row in rows:
        if curve := row["detail"].get("curve"):
            points = sorted((float(x), float(y)) for x, y in curve["points"] if x > 0 and y > 0)
            if len(points) > 1:
                drawable.append(Curve(row["row"], curve["x"], curve["y"], tuple(points)))
    return drawable


def with_shares(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows that have `detail["shares"]`, {"part": share, …}."""
    return [row for row in rows if row["detail"].get("shares")]


# -------------------------------------------------------------------------------------------------
# The page


def targets(bars: Sequence[tuple[str, float, float]]) -> str:
    """A bar for each (target, measured value, reached share of the bound)."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.5, 0.6 + 0.19 * len(bars)), layout="constrained")
        axes = figure.add_subplot(xscale="log", xlim=(1 / _MOST, _MOST))
        names, values, shares = zip(*bars, strict=True) if bars else ((), (), ())
        places = range(len(bars))
        lengths = [min(share, _MOST) - 1 / _MOST for share in shares]
        colours = [MET if share >= 1 else MISSED for share in shares]
        axes.barh(places, lengths, left=1 / _MOST, color=colours)
        axes.set_yticks(places, names)
        axes.invert_yaxis()
        axes.margins(y=0.01)
        axes.xaxis.tick_top()
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(list(_SCALE), list(_SCALE.values()))
        axes.axvline(1.0, color="black", linewidth=0.8)
        measured = axes.secondary_yaxis("right")
        measured.set_yticks(places, [number(value) for value in values])
        return _svg(figure)


def growth(curves: Sequence[Curve]) -> str:
    """A panel for each curve, on logarithmic axes."""
    rows = max(1, -(-len(curves) // _COLUMNS))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8.4, 2.0 * rows), layout="constrained")
        panels = figure.subplots(rows, _COLUMNS, squeeze=False).ravel()
        for axes, curve in zip(panels, curves, strict=False):
            xs, ys = zip(*curve.points, strict=True)
            axes.loglog(xs, ys, "o-", markersize=3, color="#2a6f97")
            axes.set(title=f"{curve.row}\nslope {curve.slope:.2f}", xlabel=curve.x, ylabel=curve.y)
            for axis, values in ((axes.xaxis, xs), (axes.yaxis, ys)):
                axis.set_minor_locator(NullLocator())
                ends = [values[0], values[-1]]
                axis.set_ticks(ends, [number(value) for value in ends])
        for axes in panels[len(curves) :]:
            axes.set_axis_off()
        return _svg(figure)


def profiles(rows: Sequence[Mapping[str, Any]]) -> str:
    """The parts of each row side by side, named below."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.6, 0.9 * max(1, len(rows))), layout="constrained")
        panels = figure.subplots(max(1, len(rows)), 1, squeeze=False).ravel()
        for axes, row in zip(panels, rows, strict=False):
            start = 0.0
            for part, share in row["detail"]["shares"].items():
                colour = "#9aa0a6" if part == "the rest" else None
                label = f"{part} {100 * share:.0f} %"
                axes.barh(0, share, left=start, color=colour, label=label)
                start += share
            axes.set(xlim=(0, start), xticks=[])
            axes.set_yticks([0], [f"{row['row']}\n{number(row['ours'])} {row['unit']}"])
            axes.legend(loc="upper left", bbox_to_anchor=(0, 0), ncols=3, frameon=False)
        return _svg(figure)


def _svg(figure: Figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


# -------------------------------------------------------------------------------------------------
# Loads


def load(curve: Sequence[Mapping[str, float]], file: Path) -> None:
    """Latency by requests a second."""
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axes = figure.add_subplot()
    per_s = [point["per_s"] for point in curve]
    for name in ("p50", "p99"):
        axes.plot(per_s, [point[name] for point in curve], "o-", markersize=3, label=name)
    axes.set(xlabel="requests/s", ylabel="ms", ylim=(0, None), title="Latency by load")
    axes.legend(fontsize=7)
    figure.savefig(file, dpi=130)


def burst(result: LoadResult, crowd: LoadResult, start_s: float, end_s: float, file: Path) -> None:
    """A steady load while a crowd comes and goes."""
    figure, times, rates = _times_and_rates("A steady load; shaded: a crowd beside it", result)
    times.axvspan(start_s, end_s, alpha=0.15, color="tab:red")
    _plot_rate(rates, "steady", result)
    _plot_rate(rates, "crowd", crowd, start_s)
    rates.legend(fontsize=7)
    figure.savefig(file, dpi=130)


def scaling(
    result: LoadResult, replicas: Sequence[tuple[float, float]], steps: Sequence[Step], file: Path
) -> None:
    """A stepped load, and the replicas that followed it."""
    figure, _, rates = _times_and_rates("A stepped load, and replicas", result)
    _plot_rate(rates, "answered", result)
    ends = np.cumsum([0.0, *(step.seconds for step in steps)])
    rates.stairs([step.per_s for step in steps], ends, color="grey", label="asked")
    rates.legend(fontsize=7)
    replica_axes = rates.twinx()
    replica_axes.step(*zip(*replicas, strict=True), where="post", color="tab:green")
    replica_axes.set(ylabel="replicas (green)", ylim=(0, 1 + max(count for _, count in replicas)))
    figure.savefig(file, dpi=130)


def _times_and_rates(title: str, result: LoadResult) -> tuple[Figure, Axes, Axes]:
    """The time of each answer; below it room for answers a second."""
    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    times, rates = figure.subplots(2, 1)
    for status, color in ((200, "tab:blue"), (429, "tab:orange")):
        selected = result.select(result.status == status)
        ms = 1e3 * selected.seconds
        times.plot(selected.due_s, ms, ".", markersize=2, color=color, label=status)
    times.set(yscale="log", ylabel="ms", title=title)
    times.legend(fontsize=7)
    rates.set(xlabel="seconds", ylabel="answers/s", ylim=(0, None))
    return figure, times, rates


def _plot_rate(axes: Axes, name: str, result: LoadResult, start_s: float = 0.0) -> None:
    seconds = range(int(result.end_s) + 1)
    starts = [start_s + second for second in seconds]
    axes.plot(starts, [result.per_s(second, second + 1.0) for second in seconds], label=name)
