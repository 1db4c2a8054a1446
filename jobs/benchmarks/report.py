"""BENCHMARKS.md and its picture, made from the JSON files of runs: `python -m jobs.benchmarks.report`.

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
PICTURES = {
    "profile": ((f"jobs/benchmarks/results/{shares.PICTURE}", "Parts of the time of each path"),),
    "serve": (
        ("serve/measured/load.png", "p50 and p99 by requests a second"),
        ("serve/measured/burst.png", "Latency and answers while a crowd comes and goes"),
        ("serve/measured/scaling.png", "A stepped load, and the replicas that follow it"),
    ),
}
_FIELDS = {"row", "ours", "unit"}
_SOURCE = {"kind", "command", "date", "commit", "machine"}

ResultRow = dict[str, Any]
"""A `BenchmarkRow` as its file has it, with its `source`."""


@dataclass(frozen=True)
class Measured:
    """A target and the row that is compared with it."""

    target: Target
    row: ResultRow | None
    """None: not measured."""

    @property
    def value(self) -> float | None:
        value: float | None = self.row[self.target.of] if self.row else None
        return value

    @property
    def status(self) -> str:
        if self.value is None:
            return "not measured"
        return "met" if self.target.met(self.value) else "**missed**"

    @property
    def share(self) -> float | None:
        """How far the bound is reached; 1 and above: met."""
        if not self.value:
            return None if self.value is None else math.inf
        bound = self.target.least
        return self.value / bound if bound is not None else (self.target.most or 0) / self.value


def read(folder: Path) -> dict[str, list[ResultRow]]:
    """Rows by section, in the order of the files' names. Raises BadInput for what is no row."""
    found: dict[str, list[ResultRow]] = {name: [] for name in SECTIONS}
    for file in sorted(folder.glob("*.json")):
        section = file.stem.partition("-")[0]
        require(section in SECTIONS, "results", file.name, ", ".join(SECTIONS))
        for row in json.loads(file.read_text()):
            if missing := (_FIELDS - row.keys()) | (_SOURCE - row.get("source", {}).keys()):
                raise BadInput(f"{file.name}: a row lacks {', '.join(sorted(missing))}")
            found[section].append({"peer": None, "ratio": None, "floor": None,
                                   "share_of_floor": None, "detail": {}, **row})  # fmt: skip
    return found


def compare(rows: Iterable[ResultRow]) -> list[Measured]:
    """Every target with the row that counts: of a full run if there is one, and the newest."""
    best: dict[str, ResultRow] = {}
    for row in rows:
        if row["row"] in BY_ROW and row["ours"] is not None:
            other = best.get(row["row"])
            if other is None or _rank(row) >= _rank(other):
                best[row["row"]] = row
    return [Measured(target, best.get(target.row)) for target in TARGETS]


def _rank(row: ResultRow) -> tuple[bool, str]:
    return row["source"].get("size") != "small", row["source"]["date"]


# -------------------------------------------------------------------------------------------------
# Markdown


def page(found: Mapping[str, Sequence[ResultRow]]) -> str:
    """BENCHMARKS.md."""
    compared = compare(row for rows in found.values() for row in rows)
    counts = [sum(one.status == status for one in compared) for status in ("met", "**missed**")]
    parts = [
        _INTRODUCTION.format(
            all=len(compared),
            met=counts[0],
            missed=counts[1],
            rest=len(compared) - sum(counts),
            picture=f"jobs/benchmarks/results/{PICTURE}",
        ),
        _targets(compared),
        _limits(compared),
    ]
    parts += [_section(name, found[name]) for name in SECTIONS]
    parts.append(_growth(growth.curves(row for rows in found.values() for row in rows)))
    return "\n\n".join(part for part in parts if part) + "\n"


_INTRODUCTION = """# Benchmarks

`make benchmark` makes this page. It runs `python -m jobs.benchmark <part> --size small --json FILE` for each
part. Then `python -m jobs.benchmarks.report` reads all files of `jobs/benchmarks/results`. The numbers of
`--size full` count against the targets; they take hours. A test compares this page with the files.

The two sides of a row ran in turn in one run, because only such ratios mean anything on a shared machine. A
ratio above 1 means that polyrank is faster. The floor is what the machine itself allows. "One run, earlier"
marks numbers that were copied by hand from a run's output, a page or a note; its commit is the one that
wrote the number down, or the one before. A number with ± is a mean over seeds, all others come from one run.

Of {all} targets {met} are met, {missed} are missed, and {rest} are not measured.

![Share of each target that is reached]({picture})

## Targets"""


def _targets(compared: Sequence[Measured]) -> str:
    lines = ["| target | bound | measured | status | run |", "| --- | --- | ---: | --- | --- |"]
    for one in compared:
        run = _short(one.row["source"]) if one.row else ""
        what = f"`{one.target.row}`: {one.target.what}"
        lines.append(
            f"| {what} | {one.target.bound} | {number(one.value)} | {one.status} | {run} |"
        )
    return "\n".join(lines)


def _limits(compared: Sequence[Measured]) -> str:
    """What limits the rows that miss their bound."""
    missed = [one for one in compared if one.status == "**missed**"]
    if not missed:
        return ""
    lines = [
        f"- `{one.target.row}`: {one.target.limit or 'the limit was not looked for.'}"
        for one in missed
    ]
    return "\n".join(["## What limits the missed ones", "", *lines])


def _section(name: str, rows: Sequence[ResultRow]) -> str:
    if not rows:
        return f"## {SECTIONS[name]}\n\nNot measured yet."
    parts = [f"## {SECTIONS[name]}"]
    groups: dict[str, list[ResultRow]] = {}
    for row in rows:
        groups.setdefault(json.dumps(row["source"], sort_keys=True), []).append(row)
    for some in groups.values():
        parts += [_origin(some[0]["source"]), _table(some), _notes(some)]
    parts += [f"![{text}]({file})" for file, text in PICTURES.get(name, ())]
    return "\n\n".join(part for part in parts if part)


def _origin(source: Mapping[str, str]) -> str:
    about = source.get("about", "")
    return f"{about}{' ' if about else ''}{_sentence(source)}\n\n    {source['command']}"


def _sentence(source: Mapping[str, str]) -> str:
    kind = "" if source["kind"] == "run" else f", {source['kind']}"
    return f"{source['date']}, commit {source['commit']}, {source['machine']}{kind}:"


def _short(source: Mapping[str, str]) -> str:
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
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    lines = [
        f"| {' | '.join(shown)} |",
        f"| --- {'| ---: ' * (len(shown) - 1)}|",
        *(f"| {' | '.join(cells)} |" for cells in zip(*shown.values(), strict=True)),
    ]
    return "\n".join(lines)


def _peer(row: ResultRow) -> str:
    value, who = number(row["peer"]), row["detail"].get("peer")
    return f"{value} ({who})" if value and who else value


def _notes(rows: Sequence[ResultRow]) -> str:
    noted = [(row["row"], row["detail"]["note"]) for row in rows if "note" in row["detail"]]
    return "\n".join(f"- `{name}`: {note}" for name, note in noted)


def _growth(curves: Sequence[Curve]) -> str:
    if not curves:
        return ""
    lines = ["| row | from | to | slope |", "| --- | ---: | ---: | ---: |"]
    for one in curves:
        first, last = (
            f"{number(x)} {one.x}: {number(y)} {one.y}" for x, y in (one.points[0], one.points[-1])
        )
        lines.append(f"| `{one.row}` | {first} | {last} | {one.slope:.2f} |")
    return "\n".join([
        "## Growth", "",
        "How a measure grows with the size of its input. The slope is that of a line through the logarithms: "
        "1 means proportional, 0 constant.", "",
        *lines, "", f"![Growth, on logarithmic axes](jobs/benchmarks/results/{growth.PICTURE})",
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


def picture(compared: Sequence[Measured]) -> str:
    """SVG: a bar per measured target; its length is the share of the bound that is reached.

    The values stand in a column of their own: at the ends of bars the target's line would cross them.
    """
    some = [one for one in compared if one.share is not None]
    right = _LEFT + _WIDTH
    width, height = right + 96, _ROW * (len(some) + 2)
    one_x = _LEFT + _x(1.0)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{width - 8}" y="{_ROW - 5}" text-anchor="end">measured</text>',
    ]
    for at, one in enumerate(some):
        y, share = _ROW * (at + 1), min(one.share or 0.0, _MOST)
        name = html.escape(one.target.row)
        lines += [
            f'<text x="{_LEFT - 6}" y="{y + 12}" text-anchor="end">{name}</text>',
            f'<rect x="{_LEFT}" y="{y + 2}" width="{_x(share):.1f}" height="{_ROW - 5}" '
            f'fill="{_COLOURS[one.status]}"/>',
            f'<text x="{width - 8}" y="{y + 12}" text-anchor="end">{number(one.value)}</text>',
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
        f'<line x1="{one_x:.1f}" y1="{_ROW}" x2="{one_x:.1f}" y2="{height - _ROW}" stroke="black"/>',
        f'<text x="{_LEFT}" y="{height - 5}">{legend.strip()}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _x(share: float) -> float:
    """A logarithmic scale from a quarter of the target to four times it."""
    least = 1 / _MOST
    clipped = min(max(share, least), _MOST)
    return _WIDTH * math.log(clipped / least) / math.log(_MOST / least)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m jobs.benchmarks.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--output", type=Path, default=ROOT / "BENCHMARKS.md", help="the page")
    options = parser.parse_args(argv)
    found = read(options.results)
    compared = compare(row for rows in found.values() for row in rows)
    options.output.write_text(page(found))
    (options.results / PICTURE).write_text(picture(compared))
    curves = growth.curves(row for rows in found.values() for row in rows)
    (options.results / shares.PICTURE).write_text(
        shares.picture(shares.with_shares(found["profile"]))
    )
    (options.results / growth.PICTURE).write_text(growth.picture(curves))
    print(f"{os.path.relpath(options.output)}: {sum(map(len, found.values()))} rows")


if __name__ == "__main__":
    main()
