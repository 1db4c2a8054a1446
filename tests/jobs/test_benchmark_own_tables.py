"""The tables of `jobs.benchmark tables` ask questions that they do not hold."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from jobs.benchmarks import tables


def test_no_asked_question_stands_in_the_table(tmp_path: Path) -> None:
    rows = [f"text {place % 40} of {intent},{intent}\n" for intent in "abc" for place in range(60)]
    (tmp_path / "train.csv").write_text("text,category\n" + "".join(rows))
    known, asked = tables._draw(tmp_path, "banking77", 4, 6, answers=2)
    assert not {row.text for row in known} & {row.text for row in asked}
    assert Counter(row.intent for row in known) == {"a": 4, "b": 4}
    assert Counter(row.intent for row in asked) == {"a": 6, "b": 6}
