"""Ranking tasks: a context, its candidates in random order, and the place of the right one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pipeline import storage
from pipeline.arrays import Floats, Ints
from pipeline.artifact import Artifact
from pipeline.config import BadInput
from pipeline.evaluation.metrics import pessimistic_rank
from pipeline.models import inference
from pipeline.models.ranker import Ranker

Source = Literal["given", "sampled"]


@dataclass(frozen=True)
class Question:
    """One ranking to do."""

    example_id: str
    context: list[str]
    candidates: list[str]
    label: int
    """The right candidate's place."""


class Scorer(Protocol):
    """Anything that scores candidates."""

    def score(self, questions: Sequence[Question]) -> list[Floats]:
        """For each question a score per candidate, [C]; higher is better."""


def questions(
    corpus: Artifact, split: str, source: Source, candidates: int, max_examples: int, seed: int
) -> list[Question]:
    """The questions of a split, at most `max_examples`, drawn at random.

    `given`: the corpus' own candidates. `sampled`: the response among `candidates` - 1 other
    responses of the split. Either way in an order that depends on the example and the seed only:
    in some public files the right one is always last.

    Raises BadInput where there are no candidates, or not as many.
    """
    tables = []
    for uri in corpus.files(f"{split}/", ".parquet"):
        with storage.open_input(uri) as stream:
            columns = ["example_id", "context", "response", "candidates", "label"]
            tables.append(pq.read_table(stream, columns=columns))
    if not tables:
        raise BadInput(f"{corpus.uri}: the corpus has no examples in {split}/")
    table = pa.concat_tables(tables)
    responses = table["response"].unique().to_pylist()
    if source == "sampled" and len(responses) < candidates:
        raise BadInput(f"--candidates {candidates}: {corpus.uri} has {len(responses)} different "
                       f"responses in {split}/; allowed: 2 to as many")  # fmt: skip
    if table.num_rows > max_examples:
        chosen = random.Random(f"examples {seed}").sample(range(table.num_rows), max_examples)
        table = table.take(sorted(chosen))
    return [_question(row, responses, source, candidates, seed) for row in table.to_pylist()]


def _question(
    row: dict[str, Any], responses: list[str], source: Source, candidates: int, seed: int
) -> Question:
    rng = random.Random(f"{row['example_id']} {seed}")
    if source == "given":
        texts, label = row["candidates"], row["label"]
        if texts is None or label is None:
            raise BadInput(f"example {row['example_id']}: no candidates; allowed: a corpus that "
                           "gives them, or --source sampled")  # fmt: skip
        if not 0 <= label < len(texts):
            raise BadInput(f"example {row['example_id']}: label {label} is not allowed; allowed: "
                           f"0 to {len(texts) - 1}")  # fmt: skip
        if len(texts) != candidates:
            raise BadInput(f"example {row['example_id']}: {len(texts)} candidates; allowed: "
                           f"--candidates {candidates}")  # fmt: skip
    else:
        wrong: list[str] = []
        while len(wrong) < candidates - 1:
            missing = candidates - 1 - len(wrong)
            drawn = rng.sample(responses, k=min(len(responses), missing + 1))
            wrong += [text for text in drawn if text != row["response"] and text not in wrong]
        texts, label = [*wrong[: candidates - 1], row["response"]], candidates - 1
    order = list(range(len(texts)))
    rng.shuffle(order)
    return Question(
        row["example_id"], row["context"], [texts[i] for i in order], order.index(label)
    )


def ranks(scorer: Scorer, questions: Sequence[Question]) -> Ints:
    """The right candidates' ranks, pessimistic, [N]."""
    found = [
        pessimistic_rank(scores, question.label)
        for scores, question in zip(scorer.score(questions), questions, strict=True)
    ]
    return np.array(found, np.int64)


@dataclass(frozen=True)
class RankerScorer:
    """A trained ranker. Each distinct candidate text is encoded once for all questions."""

    ranker: Ranker
    batch_tokens: int = inference.BATCH_TOKENS

    def score(self, questions: Sequence[Question]) -> list[Floats]:
        contexts = [question.context for question in questions]
        if self.ranker.config.architecture == "cross":
            candidates = [question.candidates for question in questions]
            rows = inference.pair_scores(self.ranker, contexts, candidates, self.batch_tokens)
            return [row.numpy() for row in rows]
        place = {text: 0 for question in questions for text in question.candidates}
        texts = list(place)
        place = {text: number for number, text in enumerate(texts)}
        vectors_ND = inference.candidate_vectors(self.ranker, texts, self.batch_tokens)
        context_NMD, mask_NM = inference.context_vectors(self.ranker, contexts, self.batch_tokens)
        network = self.ranker.dual
        found = []
        with torch.inference_mode():
            for number, question in enumerate(questions):
                chosen = torch.tensor([place[text] for text in question.candidates])
                one = slice(number, number + 1)
                scores = network.scores(context_NMD[one], mask_NM[one], vectors_ND[chosen])
                found.append(scores[0].numpy())
        return found
