"""Table 5 of the Poly-encoder paper: milliseconds for one context among 1,000 and 100,000 candidates.

The candidates' vectors are there already, as in the paper. How long a product takes does not depend on
what is in it, so vectors and heads are random. A cross-encoder reads every pair instead; as in the
paper that is measured among 1,000, and 100,000 are taken to last 100 times as long.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Literal

import torch

from jobs.benchmarks.measure import BenchmarkRow
from pipeline.artifact import Artifact
from pipeline.engine.resources import best_device
from pipeline.evaluation.questions import Question, Questions, questions
from pipeline.evaluation.ranking import Latency, PreparedCross, PreparedDual, latency
from pipeline.models import inference
from pipeline.models.ranker import Ranker, new_ranker
from pipeline.models.settings import ranker_config

# Tables 5 and 9, ms: BERT-base on an 80-core Xeon, and on a Quadro GP100; means of 100 contexts.
_PAPER = {
    "cpu": {"bi": (115, 160), "poly-16": (122, 678), "poly-64": (126, 692), "poly-360": (160, 837),
            "cross": (21_700, 2_200_000)},
    "cuda": {"bi": (19, 22), "poly-16": (18, 38), "poly-64": (23, 46), "poly-360": (57, 88),
             "cross": (2_600, 266_000)},
}  # fmt: skip
_CANDIDATES = (1_000, 100_000)
_VECTORS = (16, 64, 360)
"""Of the poly-encoders in the table."""
_QUERIES = {"small": 10, "full": 100}


def measure(size: Literal["small", "full"], encoder: Path, corpus: Artifact) -> list[BenchmarkRow]:
    """A row per model and number of candidates: ours, beside the paper's on its machine.

    Contexts and candidates are those of the corpus' valid split.
    """
    device = best_device()
    question_set = questions(corpus, "valid", "sampled", 2, max_examples=1000, seed=0)
    rows, cross_ms = list[BenchmarkRow](), 0.0
    for name, published in _PAPER[device.type].items():
        architecture, _, m = name.partition("-")
        settings = ranker_config({"architecture": architecture, "m": int(m or 1)})
        ranker = new_ranker(settings, encoder, seed=0)
        ranker.to(device).eval()
        for candidates, peer in zip(_CANDIDATES, published, strict=True):
            if not settings.has_vectors and candidates > 1_000:
                note = {"inferred": "100 times the row before"}
                rows.append(BenchmarkRow(f"paper.5.{name}.{candidates}", 100 * cross_ms, "ms", peer,
                                detail=note))  # fmt: skip
                continue
            latency_ms = _time(ranker, _with_candidates(question_set, candidates), _QUERIES[size])
            cross_ms = latency_ms.median
            rows.append(BenchmarkRow(f"paper.5.{name}.{candidates}", latency_ms.median, "ms", peer,
                            detail={"p95": latency_ms.p95, "device": latency_ms.device}))  # fmt: skip
    add_curves(rows)
    return rows


def add_curves(rows: list[BenchmarkRow]) -> None:
    """Adds the growth with the candidates to each model's last row, and the growth with the vectors of a
    context to that of the largest poly-encoder. A cross-encoder's last row is inferred, and has none."""
    ms = {row.row: row.ours for row in rows}
    many = _CANDIDATES[-1]
    for row in rows:
        name, count = row.row.split(".")[2:]
        if int(count) == many and name != "cross":
            points = [[n, ms[f"paper.5.{name}.{n}"]] for n in _CANDIDATES]
            row.detail["curve"] = {"x": "candidates", "y": "ms", "points": points}
    points = [[m, ms[f"paper.5.poly-{m}.{many}"]] for m in _VECTORS]
    largest = next(row for row in rows if row.row == f"paper.5.poly-{_VECTORS[-1]}.{many}")
    largest.detail["curve"] = {"x": "vectors of a context", "y": "ms", "points": points}


def _with_candidates(question_set: Questions, candidates: int) -> Questions:
    """The questions, with `candidates` candidates that all share; if texts are too few, they repeat."""
    contexts = zip(question_set.ids, question_set.contexts, strict=True)
    shared_questions = (
        Question(name, context, [question_set.texts[0]], 0) for name, context in contexts
    )
    return Questions.of(
        shared_questions, list(itertools.islice(itertools.cycle(question_set.texts), candidates))
    )


def _time(ranker: Ranker, question_set: Questions, queries: int) -> Latency:
    if not ranker.config.has_vectors:
        return latency(PreparedCross(ranker, inference.BATCH_TOKENS), question_set, queries)
    vectors_TD = torch.randn(len(question_set.texts), ranker.dual.dimensions, device=ranker.device)
    return latency(PreparedDual(ranker, vectors_TD, inference.BATCH_TOKENS), question_set, queries)
