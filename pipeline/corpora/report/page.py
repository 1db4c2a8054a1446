"""A survey as one HTML page that needs nothing else: no scripts, no links, plots as inline SVG.

A corpus is untrusted input: every text goes through `html.escape`, and the page's own policy forbids
a browser to run or to load anything.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from html import escape
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from pipeline.corpora.report.survey import CorpusSurvey, Ranked, histogram
from pipeline.corpora.report.text import STATISTICS, basis, statistics

_MAX_CHARACTERS = 3000  # of a text that is shown
_METADATA = ("Creator", "Date", "Format", "Type")  # of a plot: none

_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<style>
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.3em; overflow-wrap: anywhere } h2 { font-size: 1.1em; margin-top: 2.2em }
table { border-collapse: collapse }
td, th { padding: .15em .8em .15em 0; text-align: left; vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.text { white-space: pre-wrap; overflow-wrap: anywhere } .note { color: #666 }
.example { border-left: 3px solid #ccc; padding-left: 1em; margin: 1.2em 0 }
.response { border-left: 3px solid #2a7; padding-left: .6em } svg { max-width: 100%; height: auto }
</style>
"""


def page(survey: CorpusSurvey) -> str:
    total = sum(survey.rows.values())
    name = escape(survey.uri)
    note = f'<p class="note">{escape(basis(survey))}</p>'
    parts = [
        _HEAD,
        f"<title>{name}</title></head><body><h1>{name}</h1>",
        f'<p class="note">{escape(survey.fingerprint)}, made {escape(survey.created_at)}</p>',
        _table(
            ("split", "examples", "share"),
            [(split, f"{n:,}", f"{n / total:.2%}") for split, n in survey.rows.items()],
        ),
        "<h2>Lengths</h2>",
        note,
        _plots(survey),
        _table(
            ("", *STATISTICS),
            [(measure, *statistics(values)) for measure, values in survey.lengths.items()],
        ),
        "<h2>Repeated texts</h2>",
        note,
        *(
            f"<p>{repeats.share:.2%} of the {escape(texts_name)} were there before.</p>"
            for texts_name, repeats in survey.repeats.items()
        ),
        _ranking("response", survey.top_responses),
    ]
    for column, ranked in survey.top_values.items():
        parts += [f"<h2>{escape(column)}</h2>", note, _ranking(column, ranked)]
    for split, examples in survey.examples.items():
        parts += [f"<h2>Examples of {escape(split)}</h2>", *map(_example, examples)]
    return "\n".join([*parts, *_dropped_section(survey), "</body></html>\n"])


def _dropped_section(survey: CorpusSurvey) -> Iterable[str]:
    if not survey.dropped:
        return
    yield f"<h2>Left out of {survey.records:,} records</h2>"
    by_number = sorted(survey.dropped.items(), key=lambda item: -item[1])
    yield _table(
        ("reason", "records", "share"),
        [(reason, f"{n:,}", f"{n / max(1, survey.records):.2%}") for reason, n in by_number],
    )
    for reason, _ in by_number:
        if samples := survey.rejected.get(reason):
            yield f"<h3>{escape(reason)}</h3>"
            yield _table(
                ("record", "text"), [(_place(s), str(s["text"])) for s in samples], numbers=False
            )


def _place(sample: dict[str, Any]) -> str:
    """The file and line of a rejected record; of a row that jobs.clean_corpus dropped, its example and the
    one that it repeats."""
    if "same_as" in sample:
        return f"{sample['example_id']}, as {sample['same_as']}"
    line = f":{sample['line']}" if sample["line"] else ""
    return str(sample["file"]).rpartition("/")[2] + line


def _example(row: dict[str, Any]) -> str:
    turns = "".join(f"<p>{_text(turn)}</p>" for turn in row["context"])
    candidate_note = f", one of {len(row['candidates'])} candidates" if row["candidates"] else ""
    return (
        f'<div class="example">{turns}<p class="response">{_text(row["response"])}</p>'
        f'<p class="note">{escape(str(row["example_id"]))}{candidate_note}</p></div>'
    )


def _ranking(column: str, ranked: Ranked) -> str:
    if not ranked:
        return ""
    return _table((column, "rows"), [(text, f"{number:,}") for text, number in ranked])


def _table(head: Iterable[str], rows: Iterable[Iterable[str]], numbers: bool = True) -> str:
    """`numbers`: all columns but the first hold numbers."""
    kind = [' class="n"' if numbers and place else "" for place in range(10)]
    cells = "".join(f"<th{kind[i]}>{escape(text)}</th>" for i, text in enumerate(head))
    lines = (
        "".join(f"<td{kind[i]}>{_text(text)}</td>" for i, text in enumerate(row)) for row in rows
    )
    return f"<table><tr>{cells}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _text(text: str) -> str:
    """`bdi`: a text from right to left turns nothing around it. NUL has no place in HTML."""
    shortened = text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"
    return f'<bdi class="text">{escape(shortened).replace(chr(0), chr(0xFFFD))}</bdi>'


def _plots(survey: CorpusSurvey) -> str:
    """A histogram of each length, as SVG."""
    columns = 2
    rows = -(-len(survey.lengths) // columns)
    figure = Figure(figsize=(9, 2.3 * rows), layout="constrained")
    for place, (name, values) in enumerate(survey.lengths.items(), start=1):
        axes = figure.add_subplot(rows, columns, place)
        counts, edges = histogram(values)
        axes.stairs(counts / max(1, len(values)), edges, fill=True, color="#2a7")
        tail_note = f" (last bar: up to {values.max():,})" if values.max() >= edges[-1] else ""
        axes.set_title(name + tail_note, fontsize=10)
        axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
    svg = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "polyrank"}):
        figure.savefig(svg, format="svg", metadata=dict.fromkeys(_METADATA))
    return svg.getvalue()[svg.getvalue().index("<svg") :]
