"""Ranking tasks: contexts, the candidates of each, and which of them is right.

    given     the corpus' own candidates
    sampled   the response among other responses of the split
    blocks    1-of-C as PolyAI defines it (C = 100): examples at random in blocks of exactly C, the last
              and partial one left out; the block's C responses are the candidates of its contexts
    others    the response among the fixed texts of the corpus' others/ (article search)

Candidates and contexts are in random order, so that a habit of some place earns nothing: in some public
files the right answer is always the last.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.arrays import Ints
from pipeline.artifact import Artifact
from pipeline.config import BadInput

Source = Literal["given", "sampled", "blocks", "others"]


class Question(NamedTuple):
    """One ranking to do."""

    example_id: str
    context: list[str]
    candidates: list[str]
    label: int
    """The right candidate's place."""


@dataclass(frozen=True)
class Questions:
    """Many rankings to do. N questions; K candidates of each alone, S that all of them share."""

    ids: list[str]
    contexts: list[list[str]]
    texts: list[str]
    """All candidates, each text once; the first S are the shared ones."""
    own_NK: Ints
    """Places in `texts`."""
    label_N: Ints
    """The right candidate's place among a question's own."""
    shared: int = 0
    """S"""

    @classmethod
    def of(cls, questions: Iterable[Question], shared: Sequence[str] = ()) -> Questions:
        """Gathers questions that have the same number of candidates."""
        places = {text: place for place, text in enumerate(shared)}
        texts, ids, contexts, own, labels = list(shared), [], [], [], []
        for question in questions:
            ids.append(question.example_id)
            contexts.append(question.context)
            labels.append(question.label)
            for text in question.candidates:
                if places.setdefault(text, len(texts)) == len(texts):
                    texts.append(text)
            own.append([places[text] for text in question.candidates])
        return cls(ids, contexts, texts, np.array(own), np.array(labels), len(shared))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def candidates(self) -> int:
        """C = K + S"""
        return int(self.own_NK.shape[1]) + self.shared

    def places(self, number: int) -> Ints:
        """A question's candidates as places in `texts`, [C]: its own, then the shared ones."""
        return np.concatenate([self.own_NK[number], np.arange(self.shared)])

    def rows(self, numbers: Ints) -> Questions:
        """Some of the questions, with all texts."""
        ids = [self.ids[number] for number in numbers]
        contexts = [self.contexts[number] for number in numbers]
        own_NK, label_N = self.own_NK[numbers], self.label_N[numbers]
        return Questions(ids, contexts, self.texts, own_NK, label_N, self.shared)

    def part(self, numbers: Ints) -> Questions:
        """Some of the questions, with the texts that they need and no others."""
        some = self.rows(numbers)
        used = np.unique(some.own_NK)
        own_texts = used[used >= self.shared]
        places = np.arange(len(self.texts))
        places[own_texts] = self.shared + np.arange(len(own_texts))
        kept = [*self.texts[: self.shared], *(self.texts[place] for place in own_texts)]
        return replace(some, texts=kept, own_NK=places[some.own_NK])

    def right(self) -> Ints:
        """The right candidates as places in `texts`, [N]."""
        found: Ints = np.take_along_axis(self.own_NK, self.label_N[:, None], axis=1)[:, 0]
        return found

    def place_of(self, text: str) -> int:
        """-1: no candidate is this text."""
        return self.texts.index(text) if text in self.texts else -1

    def unanswerable(self) -> int:
        """Questions where a wrong candidate has the right one's very text: nobody can tell them apart."""
        right_N = self.right()
        twice_N = (self.own_NK == right_N[:, None]).sum(axis=1) > 1
        return int((twice_N | (right_N < self.shared)).sum())


def questions(
    corpus: Artifact, split: str, source: Source, candidates: int, max_examples: int, seed: int
) -> Questions:
    """The questions of a split, of at most `max_examples` examples, drawn at random.

    Which examples, which candidates and in which order depends on the corpus and the seed only.

    Raises BadInput where there are no candidates, or not as many.
    """
    total = corpus.rows(f"{split}/")
    if not total:
        raise BadInput(f"{corpus.uri}: the corpus has no examples in {split}/")
    chosen = random.Random(f"examples {seed}").sample(range(total), min(total, max_examples))
    if source == "blocks":
        return _blocks(_rows(corpus, split, chosen), candidates, seed)
    rows = _rows(corpus, split, sorted(chosen))
    if source == "given":
        return Questions.of(_given(row, candidates, seed) for row in rows)
    if source == "sampled":
        pool = _responses(corpus, split, candidates)
        return Questions.of(_sampled(row, pool, candidates, seed) for row in rows)
    return _among_others(corpus, rows, candidates)


def _given(row: dict[str, Any], candidates: int, seed: int) -> Question:
    name, texts, label = f"example {row['example_id']}", row["candidates"], row["label"]
    if texts is None or label is None:
        raise BadInput(f"{name}: no candidates; allowed: a corpus that gives them, or "
                       "--source sampled")  # fmt: skip
    if not 0 <= label < len(texts):
        raise BadInput(f"{name}: label {label} is not allowed; allowed: 0 to {len(texts) - 1}")
    if len(texts) != candidates:
        raise BadInput(f"{name}: {len(texts)} candidates; allowed: --candidates {candidates}")
    if texts[label] != row["response"]:
        raise BadInput(f"{name}: the response is not the candidate at label {label}; allowed: a "
                       "corpus whose label is the response's place among its candidates")  # fmt: skip
    return _shuffled(row, texts, label, random.Random(f"{row['example_id']} {seed}"))


def _sampled(row: dict[str, Any], pool: list[str], candidates: int, seed: int) -> Question:
    rng = random.Random(f"{row['example_id']} {seed}")
    wrong: list[str] = []
    while len(wrong) < candidates - 1:
        missing = candidates - 1 - len(wrong)
        drawn = rng.sample(pool, k=min(len(pool), missing + 1))
        wrong += [text for text in drawn if text != row["response"] and text not in wrong]
    return _shuffled(row, [*wrong[: candidates - 1], row["response"]], candidates - 1, rng)


def _shuffled(row: dict[str, Any], texts: list[str], label: int, rng: random.Random) -> Question:
    order = list(range(len(texts)))
    rng.shuffle(order)
    shuffled = [texts[place] for place in order]
    return Question(row["example_id"], row["context"], shuffled, order.index(label))


def _blocks(rows: Sequence[dict[str, Any]], candidates: int, seed: int) -> Questions:
    if len(rows) < candidates:
        raise BadInput(f"--candidates {candidates}: {len(rows)} examples; allowed: a block's worth "
                       "of examples at least")  # fmt: skip

    def ask() -> Iterator[Question]:
        for start in range(0, len(rows) - candidates + 1, candidates):
            block = rows[start : start + candidates]
            texts = [row["response"] for row in block]
            order = random.Random(f"block {start} {seed}").sample(range(candidates), candidates)
            for label in order:
                yield Question(block[label]["example_id"], block[label]["context"], texts, label)

    return Questions.of(ask())


def _among_others(corpus: Artifact, rows: Sequence[dict[str, Any]], candidates: int) -> Questions:
    files = corpus.files("others/", ".parquet")
    if not files:
        raise BadInput(f"{corpus.uri}: no others/; allowed: a corpus for article search "
                       "(--wikipedia.task search), or --source sampled")  # fmt: skip
    table = _table(files, ["id", "text"]).slice(0, candidates - 1)
    if table.num_rows < candidates - 1:
        raise BadInput(f"--candidates {candidates}: {corpus.uri} has {table.num_rows} texts in "
                       f"others/; allowed: at most {table.num_rows + 1}")  # fmt: skip
    names = set(table["id"].to_pylist())
    for row in rows:
        if row["group_id"] in names:
            raise BadInput(f"example {row['example_id']}: its article is among others/; allowed: "
                           "--split valid or test")  # fmt: skip
    asked = (Question(row["example_id"], row["context"], [row["response"]], 0) for row in rows)
    return Questions.of(asked, table["text"].to_pylist())


def _responses(corpus: Artifact, split: str, candidates: int) -> list[str]:
    """The different responses of a split."""
    table = _table(corpus.files(f"{split}/", ".parquet"), ["response"])
    found: list[str] = pc.unique(table["response"]).to_pylist()
    if len(found) < candidates:
        raise BadInput(f"--candidates {candidates}: {corpus.uri} has {len(found)} different "
                       f"responses in {split}/; allowed: 2 to as many")  # fmt: skip
    return found


def _rows(corpus: Artifact, split: str, chosen: Sequence[int]) -> list[dict[str, Any]]:
    """The examples at some places of a split, in the order of `chosen`; one file at a time."""
    columns = ["example_id", "group_id", "context", "response", "candidates", "label"]
    order = np.argsort(chosen)
    wanted = np.asarray(chosen)[order]
    parts, first = [], 0
    for uri in corpus.files(f"{split}/", ".parquet"):
        rows = corpus.rows(uri.removeprefix(corpus.uri).lstrip("/"))
        inside = wanted[(wanted >= first) & (wanted < first + rows)] - first
        if len(inside):
            parts.append(_table([uri], columns).take(pa.array(inside)))
        first += rows
    rows_sorted: list[dict[str, Any]] = pa.concat_tables(parts).to_pylist()
    place_of = np.argsort(order)
    return [rows_sorted[place] for place in place_of]


def _table(uris: Sequence[str], columns: list[str]) -> pa.Table:
    tables = []
    for uri in uris:
        with storage.open_input(uri) as stream:
            tables.append(pq.read_table(stream, columns=columns))
    return pa.concat_tables(tables)
