"""Results to read: a row per scorer, with intervals and milliseconds, as Markdown, as JSON and as a plot; and
the questions whose right answers were ranked worst."""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from pipeline.evaluation.questions import Questions
from pipeline.evaluation.results import ScorerResult
from pipeline.evaluation.significance import Comparison

_TURNS = 6
_CHARACTERS = 300


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


def worst_answers(result: ScorerResult, questions: Questions, count: int) -> list[dict[str, Any]]:
    """Records of the `count` worst-ranked questions, the worst first. Long texts are truncated."""
    records, ranking, right_places_N = [], result.ranking, questions.right_places()
    wrong_count = int((ranking.ranks_N > 1).sum())
    for number in np.argsort(-ranking.ranks_N, kind="stable")[: min(count, wrong_count)].tolist():
        context = questions.contexts[number]
        places = questions.places(number)[ranking.top_NT[number]]
        best = zip(places, ranking.top_scores_NT[number], strict=True)
        records.append({
            "scorer": result.name,
            "example_id": questions.ids[number],
            "rank": int(ranking.ranks_N[number]),
            "candidates": len(questions.places(number)),
            "context": [*["…"][: len(context) > _TURNS], *map(_truncate, context[-_TURNS:])],
            "response": _truncate(questions.texts[right_places_N[number]]),
            "score": float(ranking.right_scores_N[number]),
            "top": [
                {"text": _truncate(questions.texts[place]), "score": float(score),
                 "right": bool(place == right_places_N[number])}
                for place, score in best
            ],
        })  # fmt: skip
    return records


def json_lines(records: Sequence[Sequence[dict[str, Any]]]) -> bytes:
    """JSON lines of each model's records."""
    return "".join(
        json.dumps(record, ensure_ascii=False) + "\n"
        for model_records in records
        for record in model_records
    ).encode()


def answer_text(record: dict[str, Any]) -> str:
    """A record as text for a reader."""
    lines = [f"{record['scorer']}: {record['example_id']}, the right one at {record['rank']} of "
             f"{record['candidates']}"]  # fmt: skip
    lines += [f"   | {line}" for turn in record["context"] for line in textwrap.wrap(turn, 100)]
    lines += [f"  {'*' if best['right'] else ' '}{best['score']:9.3f}  {_truncate(best['text'], 100)}"
              for best in record["top"]]  # fmt: skip
    if not any(best["right"] for best in record["top"]):
        lines.append(f"  *{record['score']:9.3f}  {_truncate(record['response'], 100)}")
    return "\n".join(lines)


def _truncate(text: str, characters: int = _CHARACTERS) -> str:
    """The text as one line of at most this many characters."""
    line = " ".join(text.split())
    return line if len(line) <= characters else f"{line[: characters - 1]}…"
