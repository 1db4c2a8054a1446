"""Errors to look at: the questions whose right answers were ranked worst, and what stood before them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.evaluation.questions import Questions
from pipeline.evaluation.results import Result

_TURNS = 6
_CHARACTERS = 300


def worst(result: Result, questions: Questions, count: int) -> list[dict[str, Any]]:
    """Records of the `count` worst-ranked questions, the worst first; long texts are cut."""
    records, ranking, right_places_N = [], result.ranking, questions.right()
    wrong_count = int((ranking.ranks_N > 1).sum())
    for number in np.argsort(-ranking.ranks_N, kind="stable")[: min(count, wrong_count)].tolist():
        context = questions.contexts[number]
        places = questions.places(number)[ranking.top_NT[number]]
        best = zip(places, ranking.top_scores_NT[number], strict=True)
        records.append({
            "scorer": result.name,
            "example_id": questions.ids[number],
            "rank": int(ranking.ranks_N[number]),
            "candidates": len(questions.places(number)),
            "context": [*["…"][: len(context) > _TURNS], *map(_cut, context[-_TURNS:])],
            "response": _cut(questions.texts[right_places_N[number]]),
            "score": float(ranking.right_scores_N[number]),
            "top": [
                {"text": _cut(questions.texts[place]), "score": float(score),
                 "right": bool(place == right_places_N[number])}
                for place, score in best
            ],
        })  # fmt: skip
    return records


def lines(records: Sequence[Sequence[dict[str, Any]]]) -> bytes:
    """JSON lines of each model's records."""
    return "".join(
        json.dumps(record, ensure_ascii=False) + "\n"
        for model_records in records
        for record in model_records
    ).encode()


def shown(record: dict[str, Any]) -> str:
    """A record to read."""
    lines = [f"{record['scorer']}: {record['example_id']}, the right one at {record['rank']} of "
             f"{record['candidates']}"]  # fmt: skip
    lines += [f"   | {line}" for turn in record["context"] for line in textwrap.wrap(turn, 100)]
    lines += [f"  {'*' if best['right'] else ' '}{best['score']:9.3f}  {_cut(best['text'], 100)}"
              for best in record["top"]]  # fmt: skip
    if not any(best["right"] for best in record["top"]):
        lines.append(f"  *{record['score']:9.3f}  {_cut(record['response'], 100)}")
    return "\n".join(lines)


def _cut(text: str, characters: int = _CHARACTERS) -> str:
    """One line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= characters else f"{line[: characters - 1]}…"
