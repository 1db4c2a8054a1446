"""BENCHMARKS.md and its pictures, made from the JSON files of runs: `python -m jobs.benchmarks.report`.

A file `results/<section>-<any name>.json` holds the rows of a run, as `jobs.benchmark --json` writes them.
Each row has its `source`: the command, its size, the date, the commit and the machine. Numbers that were
copied from pages and notes are kept the same way; their source's kind is "one run, earlier".
"""

from __future__ import annotations

import argparse
import html
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.benchmarks import growth, shares
from jobs.benchmarks.growth import Curve
from jobs.benchmarks.targets import BY_ROW, TARGETS, Target
from pipeline.config import BadInput, require

RESULTS = Path(__file__).with_name("results")
ROOT = Path(__file__).parents[2]
PICTURE = "targets.svg"

SECTIONS = {
    "demo": "The demo",
    "corpora": "Corpora",
    "pretrain": "Pre-training",
    "finetune": "Fine-tuning",
    "paper": "The Poly-encoder paper's tables",
    "embed": "Embedding a pool",
    "search": "Search",
    "serve": "Serving",
    "convert": "ConveRT",
    "intents": "Intents",
    "cluster": "Clusters",
    "gpu": "GPUs",
    "profile": "Where the time goes",
}
SERVE_PICTURES = {
    "serve/measured/load.png": "p50 and p99 by requests a second",
    "serve/measured/burst.png": "Latency and answers while a crowd comes and goes",
    "serve/measured/scaling.png": "A stepped load, and the replicas that follow it",
}
"""Pictures of the committed page, by their path from the root."""
_FIELDS = {"row", "ours", "unit"}
_SOURCE = {"kind", "command", "date", "commit", "machine"}

ResultRow = dict[str, Any]
"""A `BenchmarkRow` as its file has it, with its `source`."""


@dataclass(frozen=True)
class TargetResult:
    """A target and the row that is compared with it."""

    target: Target
    row: ResultRow | None
    """None: not measured."""

    @property
    def value(self) -> float | None:
        value: float | None = self.row[self.target.field] if self.row else None
        return value

    @property
    def status(self) -> str:
        if self.value is None:
            return "not measured"
        return "met" if self.target.is_met(self.value) else "**missed**"

    @property
    def share(self) -> float | None:
        """The reached share of the bound; 1 and above: met."""
        if not self.value:
            return None if self.value is None else math.inf
        bound = self.target.minimum
        return self.value / bound if bound is not None else (self.target.maximum or 0) / self.value


def read(folder: Path) -> dict[str, list[ResultRow]]:
    """Rows by section, in the order of the files' names. Raises BadInput for what is no row."""
    rows_of_section: dict[str, list[ResultRow]] = {name: [] for name in SECTIONS}
    for file in sorted(folder.glob("*.json")):
        section = file.stem.partition("-")[0]
        require(section in SECTIONS, "results", file.name, ", ".join(SECTIONS))
        for row in json.loads(file.read_text()):
            if missing := (_FIELDS - row.keys()) | (_SOURCE - row.get("source", {}).keys()):
                raise BadInput(f"{file.name}: a row lacks {', '.join(sorted(missing))}")
            rows_of_section[section].append({"peer": None, "ratio": None, "floor": None,
                                   "share_of_floor": None, "detail": {}, **row})  # fmt: skip
    return rows_of_section


def compare(rows: Iterable[ResultRow]) -> list[TargetResult]:
    """Every target with the row that counts: of a full run if there is one, and the newest."""
    row_of_target: dict[str, ResultRow] = {}
    for row in rows:
        if row["row"] in BY_ROW and row["ours"] is not None:
            previous = row_of_target.get(row["row"])
            if previous is None or _rank(row) >= _rank(previous):
                row_of_target[row["row"]] = row
    return [TargetResult(target, row_of_target.get(target.row)) for target in TARGETS]


def _rank(row: ResultRow) -> tuple[bool, str]:
    return row["source"].get("size") != "small", row["source"]["date"]


# -------------------------------------------------------------------------------------------------
# Markdown


def page(rows_of_section: Mapping[str, Sequence[ResultRow]], results_folder: Path = RESULTS) -> str:
    """BENCHMARKS.md, for the root if the results are the committed ones, else for their own folder."""
    committed = results_folder == RESULTS
    pictures = f"{RESULTS.relative_to(ROOT).as_posix()}/" if committed else ""
    section_pictures = {
        "profile": {pictures + shares.PICTURE: "Parts of the time of each path"},
        "serve": SERVE_PICTURES if committed else {},
    }
    results = compare(row for rows in rows_of_section.values() for row in rows)
    counts = [
        sum(result.status == status for result in results) for status in ("met", "**missed**")
    ]
    parts = [
        _INTRODUCTION.format(
            all=len(results),
            met=counts[0],
            missed=counts[1],
            rest=len(results) - sum(counts),
            picture=pictures + PICTURE,
        ),
        _targets(results),
        _limits(results),
    ]
    parts += [
        _section(name, rows_of_section[name], section_pictures.get(name, {})) for name in SECTIONS
    ]
    curves = growth.curves(row for rows in rows_of_section.values() for row in rows)
    parts.append(_growth(curves, pictures + growth.PICTURE))
    return "\n\n".join(part for part in parts if part) + "\n"


_INTRODUCTION = """# Benchmarks

`make benchmark` measures every part on your machine in half an hour, with the small models of the demo. It
writes a page like this one to `.benchmark/results`. This page is made by `python -m jobs.benchmarks.report`
from the files of `jobs/benchmarks/results`, and a test compares the two. Most of its numbers are of larger
models. Those of `--size full` count against the targets, and take hours.

The two sides of a row ran in turn in one run, because only such ratios mean anything on a shared machine. A
ratio above 1 means that polyrank is faster. The floor is what the machine itself allows. "One run, earlier"
marks numbers that were copied by hand from a run's output, a page or a note; its commit is the one that
wrote the number down, or the one before. A number with ± is a mean over seeds, all others come from one run.

Of {all} targets {met} are met, {missed} are missed, and {rest} are not measured.

![Share of each target that is reached]({picture})

## Targets"""


def _targets(results: Sequence[TargetResult]) -> str:
    lines = ["| target | bound | measured | status | run |", "| --- | --- | ---: | --- | --- |"]
    for result in results:
        run = _run_note(result.row["source"]) if result.row else ""
        target = f"`{result.target.row}`: {result.target.description}"
        cells = (target, result.target.bound, number(result.value), result.status, run)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _limits(results: Sequence[TargetResult]) -> str:
    """The known limits of the missed targets."""
    missed = [result for result in results if result.status == "**missed**"]
    if not missed:
        return ""
    lines = [
        f"- `{result.target.row}`: {result.target.limit or 'the limit was not looked for.'}"
        for result in missed
    ]
    return "\n".join(["## What limits the missed ones", "", *lines])


def _section(name: str, rows: Sequence[ResultRow], pictures: Mapping[str, str]) -> str:
    if not rows:
        return f"## {SECTIONS[name]}\n\nNot measured yet."
    parts = [f"## {SECTIONS[name]}"]
    groups: dict[str, list[ResultRow]] = {}
    for row in rows:
        groups.setdefault(json.dumps(row["source"], sort_keys=True), []).append(row)
    for source_rows in groups.values():
        parts += [_origin(source_rows[0]["source"]), _table(source_rows), _notes(source_rows)]
    parts += [f"![{text}]({file})" for file, text in pictures.items()]
    return "\n\n".join(part for part in parts if part)


def _origin(source: Mapping[str, str]) -> str:
    about = source.get("about", "")
    return f"{about}{' ' if about else ''}{_sentence(source)}\n\n    {source['command']}"


def _sentence(source: Mapping[str, str]) -> str:
    kind = "" if source["kind"] == "run" else f", {source['kind']}"
    return f"{source['date']}, commit {source['commit']}, {source['machine']}{kind}:"


def _run_note(source: Mapping[str, str]) -> str:
    size = source.get("size", "")
    kind = f"{size} run" if source["kind"] == "run" else source["kind"]
    return f"{source['date']}, {kind}"


def _table(rows: Sequence[ResultRow]) -> str:
    """Columns in which no row has a value are left out."""
    columns: dict[str, list[str]] = {
        "row": [f"`{row['row']}`" for row in rows],
        "polyrank": [
            f"{number(row['ours'])} {row['unit']}" if row["ours"] is not None else "failed"
            for row in rows
        ],
        "beside it": [_peer(row) for row in rows],
        "ratio": [number(row["ratio"]) for row in rows],
        "share of the floor": [number(row["share_of_floor"]) for row in rows],
    }
    filled_columns = {name: cells for name, cells in columns.items() if any(cells)}
    lines = [
        f"| {' | '.join(filled_columns)} |",
        f"| --- {'| ---: ' * (len(filled_columns) - 1)}|",
        *(f"| {' | '.join(cells)} |" for cells in zip(*filled_columns.values(), strict=True)),
    ]
    return "\n".join(lines)


def _peer(row: ResultRow) -> str:
    value, peer_name = number(row["peer"]), row["detail"].get("peer")
    return f"{value} ({peer_name})" if value and peer_name else value


def _notes(rows: Sequence[ResultRow]) -> str:
    row_notes = [(row["row"], row["detail"]["note"]) for row in rows if "note" in row["detail"]]
    return "\n".join(f"- `{name}`: {note}" for name, note in row_notes)


def _growth(curves: Sequence[Curve], picture_file: str) -> str:
    if not curves:
        return ""
    lines = ["| row | from | to | slope |", "| --- | ---: | ---: | ---: |"]
    for curve in curves:
        first, last = (
            f"{number(x)} {curve.x}: {number(y)} {curve.y}"
            for x, y in (curve.points[0], curve.points[-1])
        )
        lines.append(f"| `{curve.row}` | {first} | {last} | {curve.slope:.2f} |")
    return "\n".join([
        "## Growth", "",
        "How a measure grows with the size of its input, or with the number of workers. The slope is that of "
        "a line through the logarithms: 1 means proportional, 0 constant.", "",
        *lines, "", f"![Growth, on logarithmic axes]({picture_file})",
    ])  # fmt: skip


def number(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return ""
    if 0 < abs(value) < 0.001:
        return f"{value:.5f}"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


# -------------------------------------------------------------------------------------------------
# Picture

_ROW, _LEFT, _WIDTH = 18, 330, 300
_MOST = 4.0  # times the bound; what is above ends there
_COLOURS = {"met": "#2a7f62", "**missed**": "#c1552f"}
_SCALE = {0.25: "¼", 0.5: "½", 1.0: "the target", 2.0: "2 ×", 4.0: "4 ×"}


def picture(results: Sequence[TargetResult]) -> str:
    """SVG: a bar per measured target; its length is the share of the bound that is reached.

    The values stand in a column of their own: at the ends of bars the target's line would cross them.
    """
    measured = [result for result in results if result.share is not None]
    right = _LEFT + _WIDTH
    width, height = right + 96, _ROW * (len(measured) + 2)
    target_x = _LEFT + _x(1.0)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{width - 8}" y="{_ROW - 5}" text-anchor="end">measured</text>',
    ]
    for place, result in enumerate(measured):
        y, share = _ROW * (place + 1), min(result.share or 0.0, _MOST)
        name = html.escape(result.target.row)
        lines += [
            f'<text x="{_LEFT - 6}" y="{y + 12}" text-anchor="end">{name}</text>',
            f'<rect x="{_LEFT}" y="{y + 2}" width="{_x(share):.1f}" height="{_ROW - 5}" '
            f'fill="{_COLOURS[result.status]}"/>',
            f'<text x="{width - 8}" y="{y + 12}" text-anchor="end">{number(result.value)}</text>',
        ]
    lines += [
        f'<text x="{_LEFT + _x(share):.1f}" y="{_ROW - 5}" text-anchor="middle">{label}</text>'
        for share, label in _SCALE.items()
    ]
    legend = "".join(
        f'<tspan fill="{colour}">■</tspan> {status.strip("*")}  '
        for status, colour in _COLOURS.items()
    )
    lines += [
        f'<line x1="{target_x:.1f}" y1="{_ROW}" x2="{target_x:.1f}" y2="{height - _ROW}" stroke="black"/>',
        f'<text x="{_LEFT}" y="{height - 5}">{legend.strip()}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _x(share: float) -> float:
    """A logarithmic scale from a quarter of the target to four times it."""
    minimum = 1 / _MOST
    clipped = min(max(share, minimum), _MOST)
    return _WIDTH * math.log(clipped / minimum) / math.log(_MOST / minimum)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m jobs.benchmarks.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    folder: Path = parser.parse_args(argv).results
    folder = RESULTS if folder.resolve() == RESULTS.resolve() else folder
    rows_of_section = read(folder)
    output = (ROOT if folder == RESULTS else folder) / "BENCHMARKS.md"
    results = compare(row for rows in rows_of_section.values() for row in rows)
    output.write_text(page(rows_of_section, folder))
    (folder / PICTURE).write_text(picture(results))
    curves = growth.curves(row for rows in rows_of_section.values() for row in rows)
    parts = shares.with_shares(rows_of_section["profile"])
    (folder / shares.PICTURE).write_text(shares.picture(parts))
    (folder / growth.PICTURE).write_text(growth.picture(curves))
    print(f"{os.path.relpath(output)}: {sum(map(len, rows_of_section.values()))} rows")


if __name__ == "__main__":
    main()
