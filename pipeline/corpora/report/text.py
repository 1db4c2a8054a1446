"""A survey as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pipeline.arrays import Ints
from pipeline.corpora.report.survey import CorpusSurvey, Ranked

_WIDTH = 100
STATISTICS = ("min", "median", "mean", "90 %", "99 %", "max")


def lines(survey: CorpusSurvey) -> Iterator[str]:
    yield f"== {survey.uri} ({survey.fingerprint}, made {survey.created_at})"
    total = sum(survey.rows.values())
    for split, rows in survey.rows.items():
        yield f"   {split:<6} {rows:>13,}  {rows / total:7.2%}"
    for split, examples in survey.examples.items():
        yield f"== Examples of {split}"
        for row in examples:
            yield from _example(row)
    yield f"== Lengths ({basis(survey)})"
    yield f"   {'':<22}{''.join(f'{name:>10}' for name in STATISTICS)}"
    for name, values in survey.lengths.items():
        yield f"   {name:<22}{''.join(f'{number:>10}' for number in statistics(values))}"
    yield f"== Repeated ({basis(survey)}; the fewer the rows, the fewer repeat others)"
    for name, repeats in survey.repeats.items():
        yield f"   {repeats.share:7.2%} of the {name} were there before"
    yield from _ranked(survey.top_responses)
    for name, ranked in survey.top_values.items():
        yield f"== {name} ({basis(survey)})"
        yield from _ranked(ranked)
    if survey.dropped:
        yield f"== Left out of {survey.records:,} records"
    for reason, number in sorted(survey.dropped.items(), key=lambda item: -item[1]):
        yield f"   {number:>13,}  {number / max(1, survey.records):7.2%}  {reason}"
        for sample in survey.rejected.get(reason, []):
            yield f"                  | {printable(str(sample['text']), _WIDTH - 20)}"


def basis(survey: CorpusSurvey) -> str:
    """The rows behind the numbers: all, or a sample of how many."""
    is_whole = survey.sampled == sum(survey.rows.values())
    return "all rows" if is_whole else f"{survey.sampled:,} rows, spread evenly over the files"


def statistics(values: Ints) -> list[str]:
    """`STATISTICS` of the values."""
    low, median, high, higher, top = np.percentile(values, [0, 50, 90, 99, 100])
    numbers = (low, median, np.mean(values), high, higher, top)
    return [f"{number:,.0f}" if number >= 100 else f"{number:.3g}" for number in numbers]


def printable(text: str, max_characters: int = 1000) -> str:
    """One line of characters that are safe to print: a corpus may hold control codes."""
    line = " ".join(text[: max_characters + 1].split())
    line = "".join(character if character.isprintable() else "\ufffd" for character in line)
    return line if len(text) <= max_characters else f"{line[: max_characters - 1]}…"


def _example(row: dict[str, Any]) -> Iterator[str]:
    for turn in row["context"]:
        yield f"   | {printable(turn)}"
    yield f"   > {printable(row['response'])}"
    if row["candidates"]:
        yield f"     (of {len(row['candidates'])} candidates)"
    yield ""


def _ranked(ranked: Ranked) -> Iterator[str]:
    for text, number in ranked:
        yield f"   {number:>13,}  {printable(text, _WIDTH)}"
