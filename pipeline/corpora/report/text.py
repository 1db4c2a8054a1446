"""A survey as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pipeline.arrays import Ints
from pipeline.corpora.report.survey import CorpusSurvey, Ranked

_WIDTH = 100
STATISTICS = ("min", "median", "mean", "90 %", "99 %", "max")


def lines(found: CorpusSurvey) -> Iterator[str]:
    yield f"== {found.uri} ({found.fingerprint}, made {found.created_at})"
    total = sum(found.rows.values())
    for split, rows in found.rows.items():
        yield f"   {split:<6} {rows:>13,}  {rows / total:7.2%}"
    for split, examples in found.examples.items():
        yield f"== Examples of {split}"
        for row in examples:
            yield from _example(row)
    yield f"== Lengths ({basis(found)})"
    yield f"   {'':<22}{''.join(f'{name:>10}' for name in STATISTICS)}"
    for name, values in found.lengths.items():
        yield f"   {name:<22}{''.join(f'{number:>10}' for number in statistics(values))}"
    yield f"== Repeated ({basis(found)}; the fewer the rows, the fewer repeat others)"
    for name, repeats in found.repeats.items():
        yield f"   {repeats.share:7.2%} of the {name} were there before"
    yield from _ranked(found.top_responses)
    for name, ranked in found.top_values.items():
        yield f"== {name} ({basis(found)})"
        yield from _ranked(ranked)
    if found.dropped:
        yield f"== Left out of {found.records:,} records"
    for reason, number in sorted(found.dropped.items(), key=lambda item: -item[1]):
        yield f"   {number:>13,}  {number / max(1, found.records):7.2%}  {reason}"
        for sample in found.rejected.get(reason, []):
            yield f"                  | {plain(str(sample['text']), _WIDTH - 20)}"


def basis(found: CorpusSurvey) -> str:
    """What numbers are of: all rows, or so many."""
    whole = found.sampled == sum(found.rows.values())
    return "all rows" if whole else f"{found.sampled:,} rows, spread evenly over the files"


def statistics(values: Ints) -> list[str]:
    """`STATISTICS` of the values."""
    low, median, high, higher, top = np.percentile(values, [0, 50, 90, 99, 100])
    numbers = (low, median, np.mean(values), high, higher, top)
    return [f"{number:,.0f}" if number >= 100 else f"{number:.3g}" for number in numbers]


def plain(text: str, most: int = 1000) -> str:
    """One line of characters that are safe to print: a corpus may hold control codes."""
    shown = " ".join(text[: most + 1].split())
    shown = "".join(character if character.isprintable() else "\ufffd" for character in shown)
    return shown if len(text) <= most else f"{shown[: most - 1]}…"


def _example(row: dict[str, Any]) -> Iterator[str]:
    for turn in row["context"]:
        yield f"   | {plain(turn)}"
    yield f"   > {plain(row['response'])}"
    if row["candidates"]:
        yield f"     (of {len(row['candidates'])} candidates)"
    yield ""


def _ranked(ranked: Ranked) -> Iterator[str]:
    for text, number in ranked:
        yield f"   {number:>13,}  {plain(text, _WIDTH)}"
