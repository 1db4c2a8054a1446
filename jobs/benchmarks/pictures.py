"""The pictures of BENCHMARKS.md: the targets (SVG), and the load on a service (PNG)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from jobs.benchmarks.measure import number

TARGETS = "targets.svg"
MET, MISSED = "#2a7f62", "#c1552f"
_MOST = 4.0  # times the bound of a target; what is above ends there
_SCALE = {0.25: "¼", 0.5: "½", 1.0: "the target", 2.0: "2 ×", 4.0: "4 ×"}
# The same rows give the same bytes. Letters stay letters.
_STYLE: dict[Any, Any] = {"font.size": 7, "svg.fonttype": "none", "svg.hashsalt": "polyrank"}


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
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


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
