"""BENCHMARKS.md and its picture, made from the JSON files of runs: `python -m jobs.benchmarks.report`.

A file `results/<section>-<any name>.json` holds the rows of a run, as `jobs.benchmark --json` writes them.
Each row has its `source`: the command, its size, the date, the commit and the machine. Numbers that were
copied from pages and notes are kept the same way; their source's kind is "one run, earlier".
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from jobs.benchmarks.measure import number
from pipeline.config import BadInput, require

RESULTS = Path(__file__).with_name("results")
ROOT = Path(__file__).parents[2]
PICTURE = "targets.svg"

SECTIONS = {
    "demo": "The demo",
    "corpora": "Corpora",
    "pretrain": "Pre-training",
    "finetune": "Fine-tuning",
    "tables": "Tables of questions and answers",
    "paper": "The Poly-encoder paper's tables",
    "embed": "Embedding a pool",
    "search": "Search",
    "serve": "Serving",
    "convert": "ConveRT",
    "intents": "Intents",
    "cluster": "Clusters",
    "gpu": "GPUs",
}
FIRST_ROWS = {
    "corpora.reddit.comments_per_s": ("Reddit dumps to examples", "PolyAI's job, one worker"),
    "finetune.vs_sentence_transformers": ("Fine-tuning a bi-encoder", "sentence-transformers"),
    "finetune.quality_vs_sentence_transformers": (
        "R@1 of the fine-tuned bi-encoder",
        "sentence-transformers",
    ),
    "embed.vs_openvino_short": ("Embedding replies", "sentence-transformers on OpenVINO"),
    "embed.vs_onnx_int8_short": ("Embedding replies", "sentence-transformers on ONNX, int8"),
    "search.exact_1m_m64.vs_plain_torch": ("Exact search of a million", "plain PyTorch"),
    "serve.saturation_vs_in_process": ("`/rank`, 32 clients", "the same work without HTTP"),
    "serve.rerank.vs_infinity": ("`/rerank`, 32 clients", "infinity"),
    "serve.embed.vs_infinity": ("`/embed`, 32 clients", "infinity"),
    "convert.encode_vs_minilm_sentence_transformers": ("ConveRT encodes", "all-MiniLM-L6-v2"),
}
"""The page's first table: (what is measured, beside whom)."""
MET, MISSED, NOT_MEASURED = "met", "**missed**", "not measured"
_TEXTS = {"row", "target", "note", "run", "what", "by kind of processor"}
_FIELDS = {"row", "ours", "unit"}
_SOURCE = {"kind", "command", "date", "commit", "machine"}
_PROCESSORS = {"avx2": "AVX2 alone", "avx512_bf16": "AVX512_BF16", "amx": "AMX"}
"""The columns of rows that were measured on several kinds of processors."""
_REFERENCE = "avx512_bf16"
"""The kind that the targets are for, and that of rows whose source names none."""

ResultRow = dict[str, Any]
"""A `BenchmarkRow` as its file has it, with its `source`."""


@dataclass(frozen=True)
class Target:
    """An entry of targets.yaml."""

    row: str
    bound: str
    """The number of the row that it is for (`ours` or `ratio`), ≥ or ≤, and the bound."""
    what: str
    limit: str = "the limit was not looked for."
    """The reason why the bound is missed, as far as known."""
    avx2: str = ""
    """The bound on a processor with AVX2 and nothing later, where it is another one."""

    @property
    def field(self) -> str:
        return self.bound.split()[0]

    def __str__(self) -> str:
        return self.text("")

    def text(self, processor: str) -> str:
        """The bound on a kind of processor, as `≥ 8`."""
        _, sign, value = self._bound(processor)
        return f"{sign} {float(value):,.6g}"

    def _bound(self, processor: str) -> list[str]:
        return (self.avx2 if self.avx2 and processor == "avx2" else self.bound).split()

    def share(self, row: ResultRow | None) -> float | None:
        """The reached share of the bound; 1 and above: met. None: not measured."""
        _, sign, bound = self._bound(_processor(row) if row else "")
        value: float | None = row[self.field] if row else None
        if value is None:
            return None
        return value / float(bound) if sign == "≥" else float(bound) / value if value else math.inf

    def status(self, row: ResultRow | None) -> str:
        share = self.share(row)
        return NOT_MEASURED if share is None else MET if share >= 1 else MISSED


TARGETS = {
    row: Target(row, **entry)
    for row, entry in yaml.safe_load(Path(__file__).with_name("targets.yaml").read_text()).items()
}


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


def newest(rows: Iterable[ResultRow]) -> dict[str, ResultRow]:
    """The row that counts of each name: one with a number, on the processor that targets are for, of a full
    run if there is one, and the newest."""

    def rank(row: ResultRow) -> tuple[bool, bool, bool, str]:
        source = row["source"]
        on_reference = _processor(row) == _REFERENCE
        return row["ours"] is not None, on_reference, source.get("size") != "small", source["date"]

    row_of_name: dict[str, ResultRow] = {}
    for row in rows:
        previous = row_of_name.get(row["row"])
        if previous is None or rank(row) >= rank(previous):
            row_of_name[row["row"]] = row
    return row_of_name


def _processor(row: ResultRow) -> str:
    kind: str = row["source"].get("processor", _REFERENCE)
    return kind


def page(rows_of_section: Mapping[str, Sequence[ResultRow]], results_folder: Path = RESULTS) -> str:
    """BENCHMARKS.md, for the root if the results are the committed ones, else for their own folder."""
    committed = results_folder == RESULTS
    folder = f"{RESULTS.relative_to(ROOT).as_posix()}/" if committed else ""
    rows = newest(row for rows in rows_of_section.values() for row in rows)
    targets = {status: list[Target]() for status in (MET, MISSED, NOT_MEASURED)}
    for target in TARGETS.values():
        targets[target.status(rows.get(target.row))].append(target)
    missed = [f"`{t.row}` {number(rows[t.row][t.field])} ({t})" for t in targets[MISSED]]
    missed_of_part = itertools.groupby(missed, lambda target: target.partition(".")[0])
    open_targets = [f"`{target.row}` ({target.what}; {target})" for target in targets[NOT_MEASURED]]
    first_rows = [(*texts, rows[name]) for name, texts in FIRST_ROWS.items() if name in rows]
    first_table = _table({
        "what": [what for what, _, _ in first_rows],
        "polyrank": [_ours(row) for *_, row in first_rows],
        "beside it": [f"{number(row['peer'])} ({whom})" for _, whom, row in first_rows],
        "ratio": [number(row["ratio"]) for *_, row in first_rows],
    })  # fmt: skip
    picture_of = {}
    if committed:
        picture_of["serve"] = "![p50 and p99 by requests a second](serve/measured/load.png)"
    sections = [
        _section(title, rows_of_section[name], picture_of.get(name, ""))
        for name, title in SECTIONS.items()
    ]
    parts = [
        "# Benchmarks",
        f"Of {len(TARGETS)} targets **{len(targets[MET])} are met**; {len(missed)} are missed and "
        f"{len(open_targets)} not measured: [their list](#missed-targets) ends this page.",
        first_table if first_rows else "",
        f"![Share of each target that is reached]({folder}{PICTURE})",
        _INTRODUCTION,
        *sections,
        "## Missed targets",
        "\n".join(f"- {', '.join(some)}" for _, some in missed_of_part),
        f"Not measured: {'; '.join(open_targets)}." if open_targets else "",
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


_INTRODUCTION = """\
`make benchmark` measures every part on your machine in half an hour, with the small models of the demo, and
writes a page like this one to `.benchmark/results`. `python -m jobs.benchmarks.report` makes this one \
from `jobs/benchmarks/results`.

- **ratio**: above 1 polyrank is faster. Both sides of a row ran in turn in one run, because only such \
ratios mean anything on a shared machine.
- **share of the floor**: the floor is what the machine itself allows.
- **target**: for a processor with products of bf16. No machine with AVX-512 alone or with ARM was at hand.
- **run**: the command below the table. A row shows its newest run, a full one if there is one. "One run, \
earlier": the numbers were copied by hand from a run's output. **±**: a mean over seeds.
- **by kind of processor**: a second table of the rows that were measured on several kinds."""


def _section(title: str, rows: Sequence[ResultRow], picture: str) -> str:
    """One table of the newest row of each name, and the commands of its runs."""
    if not rows:
        return f"## {title}\n\nNot measured yet."
    shown = list(newest(rows).values())
    by_kind = {kind: newest(row for row in rows if _processor(row) == kind) for kind in _PROCESSORS}
    compared = [name for name in newest(rows) if sum(name in some for some in by_kind.values()) > 1]
    others = [some[name] for some in by_kind.values() for name in compared if name in some]
    sources = [_source(row) for row in [*shown, *others]]
    number_of_run = {run: str(place) for place, run in enumerate(dict.fromkeys(sources), 1)}
    targets = [TARGETS.get(row["row"]) for row in shown]
    table = _table({
        "row": [f"`{row['row']}`" + (f": {target.what}" if target else "")
                for row, target in zip(shown, targets, strict=True)],
        "polyrank": list(map(_ours, shown)),
        "beside it": list(map(_peer, shown)),
        "ratio": [number(row["ratio"]) for row in shown],
        "share of the floor": [number(row["share_of_floor"]) for row in shown],
        "target": [_reached(row) for row in shown],
        "note": list(map(_note, shown, targets)),
        "run": [number_of_run[_source(row)] for row in shown],
    })  # fmt: skip
    by_processor = _table({
        "by kind of processor": [f"`{name}`" for name in compared],
        **{title: [_on_processor(by_kind[kind].get(name)) for name in compared]
           for kind, title in _PROCESSORS.items()},
    }) if compared else ""  # fmt: skip
    commands = "\n".join(_run_line(json.loads(run), place) for run, place in number_of_run.items())
    return "\n\n".join(filter(None, [f"## {title}", table, by_processor, commands, picture]))


def _source(row: ResultRow) -> str:
    return json.dumps(row["source"], sort_keys=True)


def _reached(row: ResultRow) -> str:
    """The target that holds for the row's processor, and whether it is met."""
    target = TARGETS.get(row["row"])
    return f"{target.text(_processor(row))} {target.status(row)}" if target else ""


def _on_processor(row: ResultRow | None) -> str:
    if not row:
        return ""
    ratio = f"ratio {number(row['ratio'])}" if row["ratio"] is not None else ""
    return ", ".join(filter(None, [_ours(row), ratio, _reached(row)]))


def _table(columns: Mapping[str, list[str]]) -> str:
    """Columns in which no row has a value are left out."""
    filled = {title: cells for title, cells in columns.items() if any(cells)}
    sides = ["---" if title in _TEXTS else "---:" for title in filled]
    lines = [filled, sides, *zip(*filled.values(), strict=True)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _ours(row: ResultRow) -> str:
    return f"{number(row['ours'])} {row['unit']}" if row["ours"] is not None else "failed"


def _peer(row: ResultRow) -> str:
    value, peer_name = number(row["peer"]), row["detail"].get("peer")
    return f"{value} ({peer_name})" if value and peer_name else value


def _note(row: ResultRow, target: Target | None) -> str:
    """The run's own note, and the known limit of a missed target."""
    limit = target.limit if target and target.status(row) == MISSED else ""
    return " ".join(filter(None, [row["detail"].get("note", ""), limit]))


def _run_line(source: Mapping[str, str], run: str) -> str:
    about = " ".join(source.get("about", "").split())
    kind = "" if source["kind"] == "run" else f", {source['kind']}"
    origin = f"{source['date']}, commit {source['commit']}, {source['machine']}{kind}"
    return f"    {source['command']}  # {run}: {origin}{'. ' if about else ''}{about}"


_MOST = 4.0  # times the bound of a target; what is above ends there
_SCALE = {0.25: "¼", 0.5: "½", 1.0: "the target", 2.0: "2 ×", 4.0: "4 ×"}
# The same rows give the same bytes. Letters stay letters.
_STYLE: dict[Any, Any] = {"font.size": 7, "svg.fonttype": "none", "svg.hashsalt": "polyrank"}


def targets_picture(rows_of_section: Mapping[str, Sequence[ResultRow]]) -> str:
    """The share of each target that is reached, as SVG: a bar for each."""
    rows = newest(row for rows in rows_of_section.values() for row in rows)
    shares = {t: share for t in TARGETS.values() if (share := t.share(rows.get(t.row))) is not None}
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.5, 0.6 + 0.19 * len(shares)), layout="constrained")
        axes = figure.add_subplot(xscale="log", xlim=(1 / _MOST, _MOST))
        places = range(len(shares))
        lengths = [min(share, _MOST) - 1 / _MOST for share in shares.values()]
        colours = ["#2a7f62" if share >= 1 else "#c1552f" for share in shares.values()]
        axes.barh(places, lengths, left=1 / _MOST, color=colours)
        axes.set_yticks(places, [target.row for target in shares])
        axes.invert_yaxis()
        axes.margins(y=0.01)
        axes.xaxis.tick_top()
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(list(_SCALE), list(_SCALE.values()))
        axes.axvline(1.0, color="black", linewidth=0.8)
        measured = axes.secondary_yaxis("right")
        measured.set_yticks(places, [number(rows[t.row][t.field]) for t in shares])
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m jobs.benchmarks.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    folder: Path = parser.parse_args(argv).results
    folder = RESULTS if folder.resolve() == RESULTS.resolve() else folder
    rows_of_section = read(folder)
    output = (ROOT if folder == RESULTS else folder) / "BENCHMARKS.md"
    output.write_text(page(rows_of_section, folder))
    (folder / PICTURE).write_text(targets_picture(rows_of_section))
    print(f"{os.path.relpath(output)}: {sum(map(len, rows_of_section.values()))} rows")


if __name__ == "__main__":
    main()
