"""Turns rows of a corpus into batches: contexts with their responses, or with candidates of their own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from pipeline import storage
from pipeline.artifact import Artifact
from pipeline.config import BadInput
from pipeline.models.ranker import Ranker
from pipeline.models.tokens import Tokens
from pipeline.training.batches import PLACE, ExampleRow
from pipeline.training.negatives import RightAnswers, answer_keys, example_columns, right_answers
from pipeline.training.settings import Taught

TEACHER = "teacher_scores"
"""Column of a corpus: a score for each of `candidates`, of a model to learn from."""
TEACHER_CONTEXT, TEACHER_RESPONSE = "teacher_context", "teacher_response"
"""Columns of a corpus: a teacher's vectors of context and response, E little-endian float16 each, as
binary: as lists, 16,384 rows of 384 would be twelve million Python objects. The product of any
context with any response is the teacher's score, as its loss takes it."""
TEACHER_COLUMNS: dict[Taught, tuple[str, ...]] = {
    "candidates": (TEACHER,),
    "batch": (TEACHER_CONTEXT, TEACHER_RESPONSE),
}
"""The columns that learning from a teacher reads, by what it has scored."""
_NO_SCORE = math.nan


@dataclass(frozen=True)
class DualBatch:
    """Contexts and their responses; row i answers row i."""

    contexts: Tokens
    responses: Tokens
    keys_BS: Tensor
    """int64; two examples have right answers in common where one of S keys is equal. The first one stands
    for the response's tokens, the others are `answer_keys`."""
    negatives: Tokens
    """K wrong candidates of each context's own, B · K rows; K may be 0."""
    negative_keys_BK: Tensor
    teacher_BC: Tensor
    """The teacher's scores of the response and of the K negatives; NaN: the teacher gave no score."""
    teacher_contexts_BE: Tensor
    teacher_responses_BE: Tensor
    """The teacher's vectors, float32; their products are its scores. E is 0 where it gave none."""

    def __len__(self) -> int:
        return len(self.keys_BS)

    def to(self, device: torch.device) -> DualBatch:
        return DualBatch(*(value.to(device) for value in vars(self).values()))

    def part(self, start: int, stop: int) -> DualBatch:
        """Examples start to stop."""
        count = self.negative_keys_BK.shape[1]
        return DualBatch(
            self.contexts.rows(start, stop),
            self.responses.rows(start, stop),
            self.keys_BS[start:stop],
            self.negatives.rows(start * count, stop * count),
            self.negative_keys_BK[start:stop],
            self.teacher_BC[start:stop],
            self.teacher_contexts_BE[start:stop],
            self.teacher_responses_BE[start:stop],
        )


@dataclass(frozen=True)
class PairBatch:
    """Contexts, each with C candidates, as B · C pairs."""

    pairs: Tokens
    label_B: Tensor
    """The right candidate's column."""
    key_BC: Tensor
    """int64; equal where the candidates' tokens are."""
    teacher_BC: Tensor
    """The teacher's scores; NaN where it gave none."""

    def __len__(self) -> int:
        return len(self.label_B)

    def to(self, device: torch.device) -> PairBatch:
        return PairBatch(*(value.to(device) for value in vars(self).values()))

    def part(self, start: int, stop: int) -> PairBatch:
        """Examples start to stop."""
        count = self.teacher_BC.shape[1]
        return PairBatch(
            self.pairs.rows(start * count, stop * count),
            self.label_B[start:stop],
            self.key_BC[start:stop],
            self.teacher_BC[start:stop],
        )


def teacher_dimensions(corpus: Artifact) -> int:
    """The width of the teacher's vectors in the train split of this corpus; 0: it has none."""
    for uri in corpus.files("train/", ".parquet"):
        with storage.open_input(uri) as stream:
            file = pq.ParquetFile(stream)
            if TEACHER_RESPONSE not in file.schema_arrow.names:
                continue
            for batch in file.iter_batches(batch_size=1000, columns=[TEACHER_RESPONSE]):
                for vector in batch.column(0).drop_null():
                    return len(vector.as_py()) // 2
    return 0


def has_values(corpus: Artifact, column: str) -> bool:
    """Whether any example of the train split has a value in this column.

    It is read from the Parquet footers, up to the first one with a value. A corpus that was joined from
    several corpora may begin with files that have none.
    """
    for uri in corpus.files("train/", ".parquet"):
        with storage.open_input(uri) as stream:
            metadata = pq.read_metadata(stream)
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for chunk in map(group.column, range(group.num_columns)):
                is_column = chunk.path_in_schema.split(".")[0] == column
                # Very long values have no statistics.
                if is_column and (chunk.statistics is None or chunk.statistics.num_values):
                    return True
    return False


class _Candidate(NamedTuple):
    text: str
    teacher: float


def _choose_candidates(
    row: ExampleRow,
    right_texts: RightAnswers,
    responses: Sequence[str],
    count: int,
    generator: torch.Generator,
) -> list[_Candidate]:
    """The right candidate, then wrong ones: given ones if the row has any, else `responses`.

    Responses fill up missing ones, so that every example has `count` of them: copies of its own, which count
    for nothing, where all of them are right.
    """
    texts = row.get("candidates") or ()
    scores = row.get(TEACHER) or [_NO_SCORE] * len(texts)
    candidates = [_Candidate(*candidate) for candidate in zip(texts, scores, strict=True)]
    response = next(
        (candidate for candidate in candidates if candidate.text == row["response"]), None
    )
    candidates = [candidate for candidate in candidates if candidate.text not in right_texts]
    order = torch.randperm(len(candidates), generator=generator)[:count].tolist()
    negatives = [candidates[place] for place in order]
    if len(negatives) < count and all(text in right_texts for text in responses):
        negatives += [_Candidate(row["response"], _NO_SCORE)] * (count - len(negatives))
    while len(negatives) < count:
        text = responses[int(torch.randint(len(responses), (1,), generator=generator))]
        if text not in right_texts:
            negatives.append(_Candidate(text, _NO_SCORE))
    return [response or _Candidate(row["response"], _NO_SCORE), *negatives]


class _Item(NamedTuple):
    """An example as texts. To tokenise a whole window in advance would delay the first batch by minutes."""

    context: list[str]
    candidates: list[_Candidate]
    """The response, then wrong ones."""
    keys: list[int]
    """`answer_keys`"""
    teacher_context: bytes
    teacher_response: bytes


def _make_items(
    rows: list[ExampleRow], count: int, same_group_negatives: bool, generator: torch.Generator
) -> list[_Item]:
    responses = [row["response"] for row in rows]
    return [
        _Item(
            row["context"],
            _choose_candidates(row, right_texts, responses, count, generator),
            answer_keys(row, same_group_negatives),
            row.get(TEACHER_CONTEXT) or b"",
            row.get(TEACHER_RESPONSE) or b"",
        )
        for row, right_texts in zip(rows, right_answers(rows, same_group_negatives), strict=True)
    ]


def _teacher_scores(items: Sequence[_Item]) -> Tensor:
    return torch.tensor([[candidate.teacher for candidate in item.candidates] for item in items])


def teacher_vectors(
    name: str, stored: Sequence[bytes], dtype: type[np.float32 | np.float16] = np.float32
) -> Tensor:
    """[B, E]. Raises BadInput if some examples of the column have no vector, or one of another width."""
    sizes = Counter(len(vector) // 2 for vector in stored)
    if len(sizes) > 1:  # joined, they would be cut at the wrong places
        lengths = ", ".join(f"{count} of {size}" for size, count in sorted(sizes.items()))
        raise BadInput(f"{name}: vectors of several lengths together ({lengths}; 0: none); allowed: one "
                       "length, of one run of jobs.score_candidates over all of train")  # fmt: skip
    values = np.frombuffer(b"".join(stored), "<f2").astype(dtype)
    return torch.from_numpy(values).view(len(stored), -1)


def _candidate_rows(ranker: Ranker, items: Sequence[_Item]) -> list[list[list[int]]]:
    """Tokens of each item's candidates."""
    tokens = iter(
        ranker.candidate_rows([candidate.text for item in items for candidate in item.candidates])
    )
    return [[next(tokens) for _ in item.candidates] for item in items]


def _keys(candidates: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """[B, C] int64 for the tokens of each item's candidates: equal where the tokens are.

    They are hashes of integers, which are the same in every process.
    """
    return torch.tensor([[hash(tuple(ids)) for ids in rows] for rows in candidates])


class DualCollator:
    """For bi- and poly-encoders: responses, and `negatives` wrong candidates for each context.

    The wrong candidates come from the row's own candidates, or from `mined`, which returns those of its
    place in the split. `teacher`: some of `TEACHER_COLUMNS`.
    """

    def __init__(
        self,
        ranker: Ranker,
        negatives: int = 0,
        teacher: Sequence[str] = (),
        mined: Callable[[int], list[str]] | None = None,
        same_group_negatives: bool = True,
    ) -> None:
        self._ranker = ranker
        self._negatives = negatives
        self._mined = mined
        self._same_group_negatives = same_group_negatives
        source = PLACE if mined else "candidates"
        self.columns = (
            *example_columns(same_group_negatives),
            *([source] if negatives else []),
            *teacher,
        )

    def prepare(self, rows: list[ExampleRow], generator: torch.Generator) -> list[_Item]:
        if self._mined is not None:
            rows = [{**row, "candidates": self._mined(row[PLACE])} for row in rows]
        return _make_items(rows, self._negatives, self._same_group_negatives, generator)

    def collate(self, items: list[_Item], generator: torch.Generator) -> DualBatch:
        tokenizer = self._ranker.tokenizer
        candidates = _candidate_rows(self._ranker, items)
        keys = _keys(candidates)
        negatives = [ids for _, *rows in candidates for ids in rows]
        empty = Tokens(torch.zeros(0, 0, dtype=torch.long), torch.zeros(0, 0, dtype=torch.bool), ())
        return DualBatch(
            tokenizer.batch(self._ranker.context_rows([item.context for item in items])),
            tokenizer.batch([response for response, *_ in candidates]),
            torch.cat([keys[:, :1], torch.tensor([item.keys for item in items])], dim=1),
            tokenizer.batch(negatives) if negatives else empty,
            keys[:, 1:],
            _teacher_scores(items),
            teacher_vectors(TEACHER_CONTEXT, [item.teacher_context for item in items]),
            teacher_vectors(TEACHER_RESPONSE, [item.teacher_response for item in items]),
        )


class PairCollator:
    """For cross-encoders: each context with its right candidate and `negatives` wrong ones."""

    def __init__(
        self,
        ranker: Ranker,
        negatives: int,
        teacher: Sequence[str] = (),
        same_group_negatives: bool = True,
    ) -> None:
        self._ranker = ranker
        self._negatives = negatives
        self._same_group_negatives = same_group_negatives
        self.columns = (*example_columns(same_group_negatives), "candidates", *teacher)

    def prepare(self, rows: list[ExampleRow], generator: torch.Generator) -> list[_Item]:
        return _make_items(rows, self._negatives, self._same_group_negatives, generator)

    def collate(self, items: list[_Item], generator: torch.Generator) -> PairBatch:
        contexts = self._ranker.context_rows([item.context for item in items])
        candidates = _candidate_rows(self._ranker, items)
        pairs = self._ranker.pairs(
            [context for context, rows in zip(contexts, candidates, strict=True) for _ in rows],
            [ids for rows in candidates for ids in rows],
        )
        labels = torch.zeros(len(items), dtype=torch.long)
        return PairBatch(pairs, labels, _keys(candidates), _teacher_scores(items))
