"""What a sweep found, beside the paper's numbers: Markdown, a chart, rows."""

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
    done: tuple[Outcome, ...]
    failed: tuple[str, ...]
    """Why, for each seed that failed."""

    @property
    def published(self) -> Published | None:
        return self.trial.published.get(paper_task(self.task))

    @property
    def metric(self) -> str:
        """What `value` is: R@1/20, …, or minutes."""
        if self.figure == "minutes" or not self.done:
            return self.figure
        return next(iter(self.done[0].metrics))

    @property
    def hits(self) -> Floats:
        """The share of seeds that put each question's right answer first, [N]."""
        hits_SN = np.array([one.ranks_N == 1 for one in self.done], np.float64)
        return np.asarray(hits_SN.mean(axis=0))

    @property
    def values(self) -> list[float]:
        """The figure, seed by seed."""
        if self.figure == "minutes":
            return [one.minutes for one in self.done]
        return [float((one.ranks_N == 1).mean()) for one in self.done]

    @property
    def value(self) -> float | None:
        return float(np.mean(self.values)) if self.done else None

    @property
    def deviation(self) -> float | None:
        """Over seeds, of a sample."""
        return float(np.std(self.values, ddof=1)) if len(self.done) > 1 else None

    @property
    def interval(self) -> Interval | None:
        """Of R@1: 95 %, over questions."""
        return significance.mean_interval(self.hits) if self.done else None

    def mean(self, of: Callable[[Outcome], float]) -> float | None:
        return float(np.mean([of(one) for one in self.done])) if self.done else None


def lines(table: Table, jobs: Sequence[Job], found: dict[str, Outcome | str]) -> list[Line]:
    """A line for each task and trial, in the table's order."""
    groups: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.task, job.trial.name), []).append(job)
    made = []
    for (task, _), some in groups.items():
        ends = [found[job.label] for job in some]
        done = tuple(end for end in ends if isinstance(end, Outcome))
        failed = tuple(end for end in ends if isinstance(end, str))
        made.append(Line(task, some[0].trial, table.figure, done, failed))
    return made


def comparisons(table: Table, made: Iterable[Line]) -> dict[str, list[Comparison]]:
    """By task; over the questions' means of all seeds."""
    by_name = {(line.task, line.trial.name): line for line in made if line.done}
    compared: dict[str, list[Comparison]] = {}
    for task in dict.fromkeys(task for task, _ in by_name):
        for first, second in table.pairs:
            one, other = by_name.get((task, first)), by_name.get((task, second))
            if one and other:
                pair = significance.compare_means(first, second, one.hits, other.hits)
                compared.setdefault(task, []).append(pair)
    return compared


def rows(
    number: Number, made: Sequence[Line], compared: dict[str, list[Comparison]]
) -> list[BenchmarkRow]:
    """One for each line, and one for each comparison."""
    found = []
    for line in made:
        detail = {
            "seeds": line.values,
            "deviation": line.deviation,
            "interval of R@1": line.interval,
            "metrics": {name: line.mean(lambda one, name=name: one.metrics[name])  # type: ignore[misc]
                        for name in (line.done[0].metrics if line.done else ())},
            "samples/s": line.mean(lambda one: one.samples_per_s),
            "minutes": line.mean(lambda one: one.minutes),
            "peak MiB": line.mean(lambda one: one.peak_memory_mib),
            **({"failed": list(line.failed)} if line.failed else {}),
        }  # fmt: skip
        peer = line.published.value if line.published else None
        name = f"paper.{number}.{line.task}.{line.trial.name}"
        found.append(BenchmarkRow(name, line.value, line.metric, peer, detail=detail))
    for task, pairs in compared.items():
        for pair in pairs:
            detail = {"interval": pair.interval, "p": pair.p}
            name = f"paper.{number}.{task}.{pair.first}_less_{pair.second}"
            found.append(BenchmarkRow(name, pair.difference, "R@1", detail=detail))
    return found


def markdown(
    number: Number,
    table: Table,
    made: Sequence[Line],
    compared: dict[str, list[Comparison]],
    note: str,
) -> str:
    """A part for each task."""
    text = [f"# Table {number}: {table.title}", "", note]
    for task in dict.fromkeys(line.task for line in made):
        own = [line for line in made if line.task == task]
        done = [one for line in own for one in line.done]
        if not done:
            text += ["", f"## {task}"]
        else:
            metric = next(line.metric for line in own if line.done)
            main = next(iter(done[0].metrics))
            text += ["", f"## {task}: {metric}, {len(done[0].ranks_N):,} examples", ""]
            header = ["", "paper", "ours", *([main] if metric != main else []), "95 %",
                      "MRR", "samples/s", "minutes", "peak MiB"]  # fmt: skip
            text += [_row(header), _row(["---", *["---:"] * (len(header) - 1)])]
            text += [_row(_cells(line, metric != main)) for line in own if line.done]
        for line in own:
            for reason in dict.fromkeys(line.failed):
                text += ["", f"{line.trial.name}: {line.failed.count(reason)} failed: {reason}"]
        text += ["", *map(_sentence, compared[task])] if task in compared else []
    return "\n".join(text) + "\n"


def plot(table: Table, made: Sequence[Line]) -> bytes:
    """A PNG: ours and the paper's; a panel for each task."""
    tasks = list(dict.fromkeys(line.task for line in made))
    widest = max(sum(line.task == task for line in made) for task in tasks)
    width = max(4.5, 0.45 * widest + 1.5)
    figure = Figure(figsize=(width * len(tasks), 4.5), layout="constrained")
    for task, axes in zip(tasks, figure.subplots(1, len(tasks), squeeze=False)[0], strict=True):
        own = [line for line in made if line.task == task]
        for place, line in enumerate(own):
            if line.value is not None:
                low, high = line.interval or (line.value, line.value)
                if table.figure == "minutes":
                    low = high = line.value
                reach = [[max(0, line.value - low)], [max(0, high - line.value)]]
                axes.errorbar(place, line.value, reach, fmt="o", capsize=3, color="C0",
                              label="ours")  # fmt: skip
            if line.published:
                axes.plot(place, line.published.value, "x", color="C1", label="paper")
        axes.set_xticks(range(len(own)), [line.trial.name for line in own], rotation=60, ha="right")
        axes.set_title(task)
        axes.set_ylabel(next((line.metric for line in own if line.done), table.figure))
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
    published = line.published
    low, high = line.interval or (math.nan, math.nan)
    return [
        line.trial.name,
        _plus_minus(published.value, published.deviation) if published else "",
        _plus_minus(line.value, line.deviation),
        *([f"{line.hits.mean():.3f}"] if with_recall else []),
        f"{low:.3f} to {high:.3f}",
        _number(line.mean(lambda one: one.metrics["MRR"])),
        _number(line.mean(lambda one: one.samples_per_s)),
        _number(line.mean(lambda one: one.minutes)),
        _number(line.mean(lambda one: one.peak_memory_mib)),
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
