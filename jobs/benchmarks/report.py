"""BENCHMARKS.md and its picture, made from the JSON files of runs: `python -m jobs.benchmarks.report`.

A file `results/<section>-<any name>.json` holds the rows of a run, as `jobs.benchmark --json` writes them.
Each row has its `source`: the command, its size, the date, the commit and the machine. Numbers that were
copied from pages and notes are kept the same way; their source's kind is "one run, earlier".
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.benchmarks import pictures
from jobs.benchmarks.measure import number
from jobs.benchmarks.targets import BY_ROW, TARGETS, Target
from pipeline.config import BadInput, require

RESULTS = Path(__file__).with_name("results")
ROOT = Path(__file__).parents[2]

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
}
SERVE_PICTURES = {"serve/measured/load.png": "p50 and p99 by requests a second"}
"""Pictures of the committed page, by their path from the root."""
MET, MISSED, NOT_MEASURED = "met", "**missed**", "not measured"
_TEXTS = {"row", "target", "note", "run"}
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
            return NOT_MEASURED
        return MET if self.target.is_met(self.value) else MISSED

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
    folder = f"{RESULTS.relative_to(ROOT).as_posix()}/" if committed else ""
    section_pictures = {"serve": SERVE_PICTURES if committed else {}}
    results = compare(row for rows in rows_of_section.values() for row in rows)
    counts = Counter(result.status for result in results)
    open_targets = [
        f"`{result.target.row}` ({result.target.description}; {result.target.bound})"
        for result in results
        if result.status == NOT_MEASURED
    ]
    parts = [
        _INTRODUCTION.format(
            all=len(results),
            met=counts[MET],
            missed=counts[MISSED],
            picture=folder + pictures.TARGETS,
        ),
        f"Not measured: {'; '.join(open_targets)}." if open_targets else "",
    ]
    result_of_row = {id(result.row): result for result in results if result.row}
    parts += [
        _section(name, rows_of_section[name], result_of_row, section_pictures.get(name, {}))
        for name in SECTIONS
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


_INTRODUCTION = """# Benchmarks

Of {all} targets **{met} are met** and {missed} are missed.

![Share of each target that is reached]({picture})

`make benchmark` measures every part on your machine in half an hour, with the small models of the demo. It
writes a page like this one to `.benchmark/results`. This page is made by `python -m jobs.benchmarks.report`
from the files of `jobs/benchmarks/results`. The two sides of a row ran in turn in one run, because only such
ratios mean anything on a shared machine. A ratio above 1 means that polyrank is faster. The floor is what the
machine itself allows. "One run, earlier" marks numbers that were copied by hand from a run's output. A number
with ± is a mean over seeds. Each row shows its newest run, a full one where there is one; its number is that
of the command below the table."""


def _section(
    name: str,
    rows: Sequence[ResultRow],
    result_of_row: Mapping[int, TargetResult],
    section_pictures: Mapping[str, str],
) -> str:
    """One table of the newest row of each name, and the commands of its runs."""
    if not rows:
        return f"## {SECTIONS[name]}\n\nNot measured yet."
    newest: dict[str, ResultRow] = {}
    for row in rows:
        previous = newest.get(row["row"])
        if previous is None or _rank(row) >= _rank(previous):
            newest[row["row"]] = row
    shown = list(newest.values())
    runs = list(dict.fromkeys(json.dumps(row["source"], sort_keys=True) for row in shown))
    number_of_run = {run: str(place) for place, run in enumerate(runs, 1)}
    columns: dict[str, list[str]] = {
        "row": [_name(row, result_of_row.get(id(row))) for row in shown],
        "polyrank": [
            f"{number(row['ours'])} {row['unit']}" if row["ours"] is not None else "failed"
            for row in shown
        ],
        "beside it": [_peer(row) for row in shown],
        "ratio": [number(row["ratio"]) for row in shown],
        "share of the floor": [number(row["share_of_floor"]) for row in shown],
        "target": [_status(result_of_row.get(id(row))) for row in shown],
        "note": [_note(row, result_of_row.get(id(row))) for row in shown],
        "run": [number_of_run[json.dumps(row["source"], sort_keys=True)] for row in shown],
    }
    # Columns in which no row has a value are left out.
    filled_columns = {title: cells for title, cells in columns.items() if any(cells)}
    table = [
        f"| {' | '.join(filled_columns)} |",
        f"| {' | '.join('---' if title in _TEXTS else '---:' for title in filled_columns)} |",
        *(f"| {' | '.join(cells)} |" for cells in zip(*filled_columns.values(), strict=True)),
    ]
    commands = [_run_line(json.loads(run), number_of_run[run]) for run in runs]
    parts = [f"## {SECTIONS[name]}", "\n".join(table), "\n".join(commands)]
    parts.append(" ".join(f"![{text}]({file})" for file, text in section_pictures.items()))
    return "\n\n".join(part for part in parts if part)


def _name(row: ResultRow, result: TargetResult | None) -> str:
    return f"`{row['row']}`" + (f": {result.target.description}" if result else "")


def _status(result: TargetResult | None) -> str:
    return f"{result.target.bound} {result.status}" if result else ""


def _note(row: ResultRow, result: TargetResult | None) -> str:
    """The run's own note, and the known limit of a missed target."""
    notes = [row["detail"].get("note", "")]
    if result and result.status == MISSED:
        notes.append(result.target.limit or "the limit was not looked for.")
    return " ".join(note for note in notes if note)


def _run_line(source: Mapping[str, str], run: str) -> str:
    about = " ".join(source.get("about", "").split())
    kind = "" if source["kind"] == "run" else f", {source['kind']}"
    origin = f"{source['date']}, commit {source['commit']}, {source['machine']}{kind}"
    return f"    {source['command']}  # {run}: {origin}{'. ' if about else ''}{about}"


def _peer(row: ResultRow) -> str:
    value, peer_name = number(row["peer"]), row["detail"].get("peer")
    return f"{value} ({peer_name})" if value and peer_name else value


def targets_picture(rows_of_section: Mapping[str, Sequence[ResultRow]]) -> str:
    """The share of each target that is reached, as SVG."""
    return pictures.targets(
        [
            (result.target.row, result.value, result.share)
            for result in compare(row for rows in rows_of_section.values() for row in rows)
            if result.value is not None and result.share is not None
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m jobs.benchmarks.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    folder: Path = parser.parse_args(argv).results
    folder = RESULTS if folder.resolve() == RESULTS.resolve() else folder
    rows_of_section = read(folder)
    output = (ROOT if folder == RESULTS else folder) / "BENCHMARKS.md"
    output.write_text(page(rows_of_section, folder))
    (folder / pictures.TARGETS).write_text(targets_picture(rows_of_section))
    print(f"{os.path.relpath(output)}: {sum(map(len, rows_of_section.values()))} rows")


if __name__ == "__main__":
    main()
