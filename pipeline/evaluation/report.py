"""Results to read: a row per scorer, with intervals and milliseconds; as Markdown, as JSON, as a plot."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from pipeline.evaluation.results import ScorerResult
from pipeline.evaluation.significance import Comparison


def as_json(rows: Sequence[ScorerResult], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    return {
        "table": {row.name: row.metrics for row in rows},
        "intervals": {row.name: row.intervals for row in rows},
        "latency_ms": {row.name: asdict(row.latency) for row in rows if row.latency},
        "comparisons": [asdict(comparison) for comparison in comparisons],
    }


def markdown(rows: Sequence[ScorerResult], comparisons: Sequence[Comparison]) -> str:
    """One row per scorer; then every two models; then what the times are."""
    names = list(rows[0].metrics)
    has_latency = any(row.latency for row in rows)
    header = ["scorer", names[0], f"95 % of {names[0]}", *names[1:]]
    header += ["ms (p95)"] if has_latency else []
    lines = [header, ["---", *("---:" for _ in header[1:])]]
    for row in rows:
        low, high = row.intervals[names[0]]
        numbers = [f"{row.metrics[name]:.3f}" for name in names]
        lines.append([row.name, numbers[0], f"{low:.3f} to {high:.3f}", *numbers[1:]])
        if has_latency:
            ms = row.latency
            lines[-1].append(f"{_short(ms.median)} ({_short(ms.p95)})" if ms else "")
    text = [f"| {' | '.join(cells)} |" for cells in lines]
    if comparisons:
        text += ["", "| R@1: first - second | difference | 95 % | p |"]
        text += ["| --- | ---: | ---: | ---: |"]
    for pair in comparisons:
        low, high = pair.interval
        text.append(f"| {pair.first} - {pair.second} | {pair.difference:+.3f} "
                    f"| {low:+.3f} to {high:+.3f} | {pair.p:.2g} |")  # fmt: skip
    if has_latency:
        text += ["", f"ms: one question alone, median (95th percentile), {_describe_setting(rows)}"]
    return "\n".join(text)


def plot(rows: Sequence[ScorerResult]) -> bytes:
    """A PNG: the main metric, with its interval, against milliseconds."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    metric = next(iter(rows[0].metrics))
    for row in rows:
        if row.latency is None:
            continue
        value, (low, high) = row.metrics[metric], row.intervals[metric]
        place = (row.latency.median, value)
        below_and_above = [[max(0, value - low)], [max(0, high - value)]]
        axes.errorbar(*place, yerr=below_and_above, fmt="o", capsize=3)
        axes.annotate(row.name, place, xytext=(6, 4), textcoords="offset points")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel(f"milliseconds for one question alone, {_describe_setting(rows)}", fontsize=8)
    axes.set_ylabel(f"{metric}, with its 95 % interval")
    axes.margins(x=0.15)
    axes.grid(alpha=0.3)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    return png.getvalue()


def _describe_setting(rows: Sequence[ScorerResult]) -> str:
    """The devices of the measured times, and the work that the times leave out."""
    devices: dict[str, list[str]] = {}
    for row in rows:
        if row.latency:
            devices.setdefault(row.latency.device, []).append(row.name)
    devices_with_names = [f"{device} ({', '.join(names)})" for device, names in devices.items()]
    parts = devices_with_names if len(devices_with_names) > 1 else devices
    return f"on {'; '.join(parts)}; all but cross-encoders have their candidates' vectors ready"


def _short(milliseconds: float) -> str:
    return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:,.0f}"
