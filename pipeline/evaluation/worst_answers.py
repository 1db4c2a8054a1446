"""The questions whose right answers were ranked worst, with the candidates ranked before them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.evaluation.questions import Questions
from pipeline.evaluation.results import ScorerResult

_TURNS = 6
_CHARACTERS = 300


def worst_answers(result: ScorerResult, questions: Questions, count: int) -> list[dict[str, Any]]:
    """Records of the `count` worst-ranked questions, the worst first. Long texts are truncated."""
    records, ranking, right_places_N = [], result.ranking, questions.right_places()
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
            "context": [*["…"][: len(context) > _TURNS], *map(_truncate, context[-_TURNS:])],
            "response": _truncate(questions.texts[right_places_N[number]]),
            "score": float(ranking.right_scores_N[number]),
            "top": [
                {"text": _truncate(questions.texts[place]), "score": float(score),
                 "right": bool(place == right_places_N[number])}
                for place, score in best
            ],
        })  # fmt: skip
    return records


def json_lines(records: Sequence[Sequence[dict[str, Any]]]) -> bytes:
    """JSON lines of each model's records."""
    return "".join(
        json.dumps(record, ensure_ascii=False) + "\n"
        for model_records in records
        for record in model_records
    ).encode()


def as_text(record: dict[str, Any]) -> str:
    """A record as text for a reader."""
    lines = [f"{record['scorer']}: {record['example_id']}, the right one at {record['rank']} of "
             f"{record['candidates']}"]  # fmt: skip
    lines += [f"   | {line}" for turn in record["context"] for line in textwrap.wrap(turn, 100)]
    lines += [f"  {'*' if best['right'] else ' '}{best['score']:9.3f}  {_truncate(best['text'], 100)}"
              for best in record["top"]]  # fmt: skip
    if not any(best["right"] for best in record["top"]):
        lines.append(f"  *{record['score']:9.3f}  {_truncate(record['response'], 100)}")
    return "\n".join(lines)


def _truncate(text: str, characters: int = _CHARACTERS) -> str:
    """The text as one line of at most this many characters."""
    line = " ".join(text.split())
    return line if len(line) <= characters else f"{line[: characters - 1]}…"
