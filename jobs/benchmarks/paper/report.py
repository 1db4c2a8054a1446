"""The results of a sweep beside the paper's numbers: Markdown, a chart, rows."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from jobs.benchmarks.measure import BenchmarkRow
from jobs.benchmarks.paper.tables import Number, Published, Table, Trial
from jobs.benchmarks.paper.trials import Job, Outcome, paper_task
from pipeline.arrays import Floats
from pipeline.evaluation import significance
from pipeline.evaluation.significance import Comparison, Interval

_SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Line:
    """A trial on a task, over its seeds."""

    task: str
    trial: Trial
    figure: str
    outcomes: tuple[Outcome, ...]
    failures: tuple[str, ...]
    """The reason for each seed that failed."""

    @property
    def published(self) -> Published | None:
        return self.trial.published.get(paper_task(self.task))

    @property
    def metric(self) -> str:
        """The metric of `value`: R@1/20, …, or minutes."""
        if self.figure == "minutes" or not self.outcomes:
            return self.figure
        return next(iter(self.outcomes[0].metrics))

    @property
    def hits(self) -> Floats:
        """The share of seeds that put each question's right answer first, [N]."""
        hits_SN = np.array([outcome.ranks_N == 1 for outcome in self.outcomes], np.float64)
        return np.asarray(hits_SN.mean(axis=0))

    @property
    def values(self) -> list[float]:
        """The figure, seed by seed."""
        if self.figure == "minutes":
            return [outcome.minutes for outcome in self.outcomes]
        return [float((outcome.ranks_N == 1).mean()) for outcome in self.outcomes]

    @property
    def value(self) -> float | None:
        return float(np.mean(self.values)) if self.outcomes else None

    @property
    def deviation(self) -> float | None:
        """The sample's standard deviation over seeds."""
        return float(np.std(self.values, ddof=1)) if len(self.outcomes) > 1 else None

    @property
    def interval(self) -> Interval | None:
        """The 95 % interval of R@1, over questions."""
        return significance.mean_interval(self.hits) if self.outcomes else None

    def mean(self, figure_of: Callable[[Outcome], float]) -> float | None:
        return (
            float(np.mean([figure_of(outcome) for outcome in self.outcomes]))
            if self.outcomes
            else None
        )


def lines(
    table: Table, jobs: Sequence[Job], outcome_of_label: dict[str, Outcome | str]
) -> list[Line]:
    """A line for each task and trial, in the table's order."""
    groups: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.task, job.trial.name), []).append(job)
    table_lines = []
    for (task, _), group_jobs in groups.items():
        results = [outcome_of_label[job.label] for job in group_jobs]
        outcomes = tuple(result for result in results if isinstance(result, Outcome))
        failures = tuple(result for result in results if isinstance(result, str))
        table_lines.append(Line(task, group_jobs[0].trial, table.figure, outcomes, failures))
    return table_lines


def comparisons(table: Table, table_lines: Iterable[Line]) -> dict[str, list[Comparison]]:
    """The comparisons by task, over the questions' means of all seeds."""
    by_name = {(line.task, line.trial.name): line for line in table_lines if line.outcomes}
    compared: dict[str, list[Comparison]] = {}
    for task in dict.fromkeys(task for task, _ in by_name):
        for first, second in table.pairs:
            first_line, second_line = by_name.get((task, first)), by_name.get((task, second))
            if first_line and second_line:
                pair = significance.compare_means(first, second, first_line.hits, second_line.hits)
                compared.setdefault(task, []).append(pair)
    return compared


def rows(
    number: Number, table_lines: Sequence[Line], compared: dict[str, list[Comparison]]
) -> list[BenchmarkRow]:
    """One for each line, and one for each comparison."""
    result_rows = []
    for line in table_lines:
        detail = {
            "seeds": line.values,
            "deviation": line.deviation,
            "interval of R@1": line.interval,
            "metrics": {name: line.mean(lambda outcome, name=name: outcome.metrics[name])  # type: ignore[misc]
                        for name in (line.outcomes[0].metrics if line.outcomes else ())},
            "samples/s": line.mean(lambda outcome: outcome.samples_per_s),
            "minutes": line.mean(lambda outcome: outcome.minutes),
            "peak MiB": line.mean(lambda outcome: outcome.peak_memory_mib),
            **({"failed": list(line.failures)} if line.failures else {}),
        }  # fmt: skip
        peer = line.published.value if line.published else None
        name = f"paper.{number}.{line.task}.{line.trial.name}"
        result_rows.append(BenchmarkRow(name, line.value, line.metric, peer, detail=detail))
    for task, pairs in compared.items():
        for pair in pairs:
            detail = {"interval": pair.interval, "p": pair.p}
            name = f"paper.{number}.{task}.{pair.first}_less_{pair.second}"
            result_rows.append(BenchmarkRow(name, pair.difference, "R@1", detail=detail))
    return result_rows


def markdown(
    number: Number,
    table: Table,
    table_lines: Sequence[Line],
    compared: dict[str, list[Comparison]],
    note: str,
) -> str:
    """A part for each task."""
    text = [f"# Table {number}: {table.title}", "", note]
    for task in dict.fromkeys(line.task for line in table_lines):
        task_lines = [line for line in table_lines if line.task == task]
        outcomes = [outcome for line in task_lines for outcome in line.outcomes]
        if not outcomes:
            text += ["", f"## {task}"]
        else:
            metric = next(line.metric for line in task_lines if line.outcomes)
            main = next(iter(outcomes[0].metrics))
            text += ["", f"## {task}: {metric}, {len(outcomes[0].ranks_N):,} examples", ""]
            header = ["", "paper", "ours", *([main] if metric != main else []), "95 %",
                      "MRR", "samples/s", "minutes", "peak MiB"]  # fmt: skip
            text += [_row(header), _row(["---", *["---:"] * (len(header) - 1)])]
            text += [_row(_cells(line, metric != main)) for line in task_lines if line.outcomes]
        for line in task_lines:
            for reason in dict.fromkeys(line.failures):
                text += ["", f"{line.trial.name}: {line.failures.count(reason)} failed: {reason}"]
        text += ["", *map(_sentence, compared[task])] if task in compared else []
    return "\n".join(text) + "\n"


def plot(table: Table, table_lines: Sequence[Line]) -> bytes:
    """A PNG: ours and the paper's; a panel for each task."""
    tasks = list(dict.fromkeys(line.task for line in table_lines))
    widest = max(sum(line.task == task for line in table_lines) for task in tasks)
    width = max(4.5, 0.45 * widest + 1.5)
    figure = Figure(figsize=(width * len(tasks), 4.5), layout="constrained")
    for task, axes in zip(tasks, figure.subplots(1, len(tasks), squeeze=False)[0], strict=True):
        task_lines = [line for line in table_lines if line.task == task]
        for place, line in enumerate(task_lines):
            if line.value is not None:
                low, high = line.interval or (line.value, line.value)
                if table.figure == "minutes":
                    low = high = line.value
                error_bars = [[max(0, line.value - low)], [max(0, high - line.value)]]
                axes.errorbar(place, line.value, error_bars, fmt="o", capsize=3, color="C0",
                              label="ours")  # fmt: skip
            if line.published:
                axes.plot(place, line.published.value, "x", color="C1", label="paper")
        axes.set_xticks(
            range(len(task_lines)),
            [line.trial.name for line in task_lines],
            rotation=60,
            ha="right",
        )
        axes.set_title(task)
        axes.set_ylabel(next((line.metric for line in task_lines if line.outcomes), table.figure))
        if table.figure == "minutes":
            axes.set_yscale("log")
        axes.grid(axis="y", alpha=0.3)
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        if handles:
            axes.legend(handles.values(), handles.keys())
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    return png.getvalue()


def _cells(line: Line, with_recall: bool) -> list[str]:
    paper_number = line.published
    low, high = line.interval or (math.nan, math.nan)
    return [
        line.trial.name,
        _plus_minus(paper_number.value, paper_number.deviation) if paper_number else "",
        _plus_minus(line.value, line.deviation),
        *([f"{line.hits.mean():.3f}"] if with_recall else []),
        f"{low:.3f} to {high:.3f}",
        _number(line.mean(lambda outcome: outcome.metrics["MRR"])),
        _number(line.mean(lambda outcome: outcome.samples_per_s)),
        _number(line.mean(lambda outcome: outcome.minutes)),
        _number(line.mean(lambda outcome: outcome.peak_memory_mib)),
    ]


def _sentence(pair: Comparison) -> str:
    low, high = pair.interval
    verdict = "a significant difference" if pair.p < _SIGNIFICANT else "no significant difference"
    return (f"* {pair.first} - {pair.second}: {pair.difference:+.3f} (95 %: {low:+.3f} to {high:+.3f}), "
            f"p = {pair.p:.2g}: {verdict}")  # fmt: skip


def _plus_minus(value: float | None, deviation: float | None) -> str:
    return _number(value) + ("" if deviation is None else f" ± {_number(deviation)}")


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.3f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
