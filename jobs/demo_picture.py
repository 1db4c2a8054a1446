"""The demo in a picture: the trainings' losses, and the rankers' quality against their latency."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import mlflow
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter


def draw(runs: Mapping[str, str], evaluated: Mapping[str, Any]) -> bytes:
    """A PNG: the loss of each training (its MLflow run, by name), and R@1 against milliseconds.

    `evaluated`: the `table`, `intervals` and `latency_ms` of jobs.evaluate.
    """
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    losses, answers = figure.subplots(1, 2)
    client = mlflow.MlflowClient()
    for name, run_id in runs.items():
        history = client.get_metric_history(run_id, "loss")
        if points := sorted((point.step, point.value) for point in history):
            losses.plot(*zip(*points, strict=True), linewidth=1, label=name)
    losses.set(xscale="log", xlabel="step", ylabel="loss (nats)")
    losses.legend(fontsize=8)
    metric = ""
    for name, latency in evaluated["latency_ms"].items():
        metric = next(iter(evaluated["table"][name]))
        value, (low, high) = evaluated["table"][name][metric], evaluated["intervals"][name][metric]
        place = (latency["median"], value)
        bars = [[max(0, value - low)], [max(0, high - value)]]
        answers.errorbar(*place, yerr=bars, fmt="o", capsize=3)
        answers.annotate(name, place, xytext=(6, 4), textcoords="offset points")
    answers.set(xscale="log", xlabel="milliseconds for one question alone")
    answers.set_ylabel(f"{metric}, with its 95 % interval")
    answers.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    answers.margins(x=0.15)
    for axes in (losses, answers):
        axes.grid(alpha=0.3)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=130)
    return png.getvalue()
