"""Ranking tasks: contexts, the candidates of each, and which of them is right.

    given     the corpus' own candidates. In DSTC7 an example with several right answers has fewer than the
              others, because only one right answer stays among its candidates
    sampled   the response among other responses of the split
    corpus    the response among other responses of all splits
    blocks    1-of-C as PolyAI defines it (C = 100): examples at random in blocks of C; the block's C
              responses are the candidates of its contexts. PolyAI leaves out the last, smaller block;
              here, responses drawn from the other blocks fill it up to C
    others    the response among the fixed texts of the corpus' others/ (article search)

A validation during training asks `validation_questions`: given or sampled, as each example allows.

Candidates of a question alone, and contexts, are in random order. In some public files the right answer is
always the last one, so a model that prefers a place would score well.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.arrays import Ints
from pipeline.artifact import Artifact
from pipeline.config import BadInput
from pipeline.corpora.drawn_rows import DrawnRow, draw_places, read_rows

CandidateSource = Literal["given", "sampled", "corpus", "blocks", "others"]


NO_TEXT = -1


class Question(NamedTuple):
    """One ranking to do."""

    example_id: str
    context: list[str]
    candidates: list[str]
    label: int
    """The right candidate's place."""


@dataclass(frozen=True)
class Questions:
    """Many rankings to do. N questions; at most K candidates of each alone, S that all of them share."""

    ids: list[str]
    contexts: list[list[str]]
    texts: list[str]
    """All candidates, each text once; the first S are the shared ones."""
    places_NK: Ints
    """Each question's own candidates as places in `texts`; `NO_TEXT` fills the rows with fewer than K."""
    label_N: Ints
    """The right candidate's place among a question's own and, behind K places for these, the shared ones."""
    shared: int = 0
    """S"""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """How many examples of the split are no question, by reason."""

    @classmethod
    def of(cls, questions: Iterable[Question], shared: Sequence[str] = ()) -> Questions:
        """Gathers questions."""
        places = {text: place for place, text in enumerate(shared)}
        texts, ids, contexts, own_places, labels = list(shared), [], [], [], []
        for question in questions:
            ids.append(question.example_id)
            contexts.append(question.context)
            labels.append(question.label)
            for text in question.candidates:
                if places.setdefault(text, len(texts)) == len(texts):
                    texts.append(text)
            own_places.append([places[text] for text in question.candidates])
        places_NK = np.full((len(own_places), max(map(len, own_places), default=0)), NO_TEXT)
        for number, row in enumerate(own_places):
            places_NK[number, : len(row)] = row
        return cls(ids, contexts, texts, places_NK, np.array(labels, np.int64), len(shared))

    def __len__(self) -> int:
        return len(self.ids)

    def leaving_out(self, counts: Mapping[str, int]) -> Questions:
        """The same questions, with the counts of examples that are none."""
        return replace(self, left_out={reason: count for reason, count in counts.items() if count})

    @property
    def candidates(self) -> int:
        """C = K + S, the most that a question has."""
        return int(self.places_NK.shape[1]) + self.shared

    def places(self, number: int) -> Ints:
        """A question's candidates as places in `texts`, [C]: its own, then the shared ones."""
        places_K = self.places_NK[number]
        return np.concatenate([places_K[places_K != NO_TEXT], np.arange(self.shared)])

    def rows(self, numbers: Ints) -> Questions:
        """Some of the questions, with all texts."""
        ids = [self.ids[number] for number in numbers]
        contexts = [self.contexts[number] for number in numbers]
        places_NK, label_N = self.places_NK[numbers], self.label_N[numbers]
        return Questions(ids, contexts, self.texts, places_NK, label_N, self.shared)

    def part(self, numbers: Ints) -> Questions:
        """Some of the questions, with only the texts that they need."""
        subset = self.rows(numbers)
        used_places = np.unique(subset.places_NK)
        own_used_places = used_places[used_places >= self.shared]
        places = np.arange(len(self.texts))
        places[own_used_places] = self.shared + np.arange(len(own_used_places))
        texts = [*self.texts[: self.shared], *(self.texts[place] for place in own_used_places)]
        places_NK = np.where(subset.places_NK == NO_TEXT, NO_TEXT, places[subset.places_NK])
        return replace(subset, texts=texts, places_NK=places_NK)

    def right_places(self) -> Ints:
        """The places of the right candidates in `texts`, [N]."""
        own = self.places_NK.shape[1]
        columns = np.column_stack([self.places_NK, self.label_N - own])  # the last for a shared one
        labels_N1 = np.minimum(self.label_N, own)[:, None]
        places_N: Ints = np.take_along_axis(columns, labels_N1, axis=1)[:, 0]
        return places_N

    def shorter_count(self) -> int:
        """The number of questions with fewer candidates than C."""
        return int((self.places_NK == NO_TEXT).any(axis=1).sum())

    def several_right_count(self) -> int:
        """The number of questions whose context is asked with another right answer, too."""
        contexts = [tuple(context) for context in self.contexts]
        pairs = set(zip(contexts, self.right_places().tolist(), strict=True))
        answers = Counter(context for context, _ in pairs)
        return sum(answers[context] > 1 for context in contexts)

    def unanswerable_count(self) -> int:
        """The number of questions with a wrong candidate whose text equals the right one's, but for white
        space, which most models do not read."""
        numbers = dict[str, int]()
        number_T = np.array(
            [numbers.setdefault(" ".join(text.split()), len(numbers)) for text in self.texts]
        )
        right_N = number_T[self.right_places()]
        is_text_NK = self.places_NK != NO_TEXT
        own_N = ((number_T[self.places_NK] == right_N[:, None]) & is_text_NK).sum(axis=1)
        shared_N = np.bincount(number_T[: self.shared], minlength=len(numbers))[right_N]
        return int((own_N + shared_N > 1).sum())


def questions(
    corpus: Artifact,
    split: str,
    source: CandidateSource,
    candidates: int,
    max_examples: int,
    seed: int,
    fewer: bool = False,
) -> Questions:
    """The questions of a split, of at most `max_examples` examples, drawn at random.

    The examples, their candidates and the order depend on the corpus and the seed only. `fewer`: a split
    that is too small for this many candidates (blocks, sampled) gives all that it has.

    Raises BadInput if there are no candidates, or fewer than `candidates`.
    """
    total = _count_examples(corpus, split)
    places = draw_places(total, max_examples, seed)
    rows = [] if source == "blocks" else read_rows(corpus, split, sorted(places))
    if source == "blocks":
        drawn = _block_questions(corpus, split, places, candidates, seed, fewer)
    elif source == "given":
        drawn = Questions.of(_read_given(row, candidates, seed) for row in rows)
    elif source == "others":
        drawn = _article_questions(corpus, rows, candidates)
    else:
        pool = _responses(corpus, f"{split}/" if source == "sampled" else "", candidates, fewer)
        if candidates >= len(pool):
            drawn = _among_all(rows, pool)
        else:
            drawn = Questions.of(_sample(row, pool, candidates, seed) for row in rows)
    return drawn.leaving_out({"beyond max_examples": total - len(drawn)})


def validation_questions(
    corpus: Artifact, split: str, candidates: int, max_examples: int, seed: int
) -> Questions:
    """The questions that training asks to choose weights: at most `max_examples` examples, drawn at
    random over the whole split.

    An example is asked among the candidates that the corpus gives it; one without any, among `candidates`
    responses of the drawn examples, or as many as there are. Each text stands once among a question's
    candidates: a second copy of the right one would be a wrong one.
    """
    total = _count_examples(corpus, split)
    rows = read_rows(corpus, split, sorted(draw_places(total, max_examples, seed)))
    pool = list(dict.fromkeys(row["response"] for row in rows))
    answerable = []
    for row in rows:
        if row["candidates"]:
            texts = list(dict.fromkeys([row["response"], *row["candidates"]]))
            question = _shuffle(row, texts, 0, random.Random(f"{row['example_id']} {seed}"))
        else:
            question = _sample(row, pool, min(candidates, len(pool)), seed)
        if len(question.candidates) > 1:
            answerable.append(question)
    return Questions.of(answerable).leaving_out({
        "beyond valid_examples": total - len(rows),
        "no wrong candidate": len(rows) - len(answerable),
    })  # fmt: skip


def _count_examples(corpus: Artifact, split: str) -> int:
    """The number of examples of a split. Raises BadInput if there are none."""
    total = corpus.rows(f"{split}/")
    if not total:
        raise BadInput(f"{corpus.uri}: the corpus has no examples in {split}/")
    return total


def _read_given(row: DrawnRow, candidates: int, seed: int) -> Question:
    name, texts, label = f"example {row['example_id']}", row["candidates"], row["label"]
    if texts is None or label is None:
        raise BadInput(f"{name}: no candidates; allowed: a corpus that gives them, or "
                       "--protocol polyai, which ranks the response among 100 of the split")  # fmt: skip
    if not 0 <= label < len(texts):
        raise BadInput(f"{name}: label {label} is not allowed; allowed: 0 to {len(texts) - 1}")
    may_be_fewer = row["source"] == "dstc7" and len(texts) < candidates
    if len(texts) != candidates and not may_be_fewer:
        raise BadInput(f"{name}: {len(texts)} candidates, not {candidates}; allowed: examples that all have "
                       f"as many, and --candidates {len(texts)} where that is the number")  # fmt: skip
    if texts[label] != row["response"]:
        raise BadInput(f"{name}: the response is not the candidate at label {label}; allowed: a "
                       "corpus whose label is the response's place among its candidates")  # fmt: skip
    return _shuffle(row, texts, label, random.Random(f"{row['example_id']} {seed}"))


def _sample(row: DrawnRow, pool: list[str], candidates: int, seed: int) -> Question:
    rng = random.Random(f"{row['example_id']} {seed}")
    wrong: list[str] = []
    while len(wrong) < candidates - 1:
        missing = candidates - 1 - len(wrong)
        drawn = rng.sample(pool, k=min(len(pool), missing + 1))
        wrong += [text for text in drawn if text != row["response"] and text not in wrong]
    return _shuffle(row, [*wrong[: candidates - 1], row["response"]], candidates - 1, rng)


def _among_all(rows: Sequence[DrawnRow], pool: list[str]) -> Questions:
    """Questions that share all candidates. A row of places for each of them would take 12 GB for 15,000
    questions among 100,000 texts."""
    places = {text: place for place, text in enumerate(pool)}
    questions = (
        Question(row["example_id"], row["context"], [], places[row["response"]]) for row in rows
    )
    return Questions.of(questions, pool)


def _shuffle(row: DrawnRow, texts: list[str], label: int, rng: random.Random) -> Question:
    order = list(range(len(texts)))
    rng.shuffle(order)
    shuffled = [texts[place] for place in order]
    return Question(row["example_id"], row["context"], shuffled, order.index(label))


def _block_questions(
    corpus: Artifact, split: str, places: Sequence[int], candidates: int, seed: int, fewer: bool
) -> Questions:
    total, question_count = corpus.rows(f"{split}/"), len(places)
    if question_count < candidates <= total:  # enough for a block, some of them are only candidates
        places = draw_places(total, candidates, seed)
    size = min(candidates, len(places)) if fewer else candidates
    if not 2 <= size <= len(places):
        raise BadInput(f"--candidates {candidates}: {total} examples; allowed: a block's worth of "
                       "examples at least")  # fmt: skip
    rows = read_rows(corpus, split, places)
    return Questions.of(itertools.islice(_walk_blocks(rows, size, seed), question_count))


def _walk_blocks(rows: Sequence[DrawnRow], size: int, seed: int) -> Iterator[Question]:
    for start in range(0, len(rows), size):
        block = list(rows[start : start + size])
        rng = random.Random(f"block {start} {seed}")
        own_count = len(block)
        block += rng.sample(rows[:start], size - own_count)  # a last, smaller block
        order = rng.sample(range(size), size)
        if own_count < size:  # its own responses stand anywhere
            block, order = [block[n] for n in order], [order.index(n) for n in range(own_count)]
        texts = [row["response"] for row in block]
        for label in order:
            yield Question(block[label]["example_id"], block[label]["context"], texts, label)


def _article_questions(corpus: Artifact, rows: Sequence[DrawnRow], candidates: int) -> Questions:
    files = corpus.files("others/", ".parquet")
    if not files:
        raise BadInput(f"{corpus.uri}: no others/; allowed: a corpus for article search "
                       "(--wikipedia.task search), or --source sampled")  # fmt: skip
    table = _table(files, ["id", "text"]).slice(0, candidates - 1)
    if table.num_rows < candidates - 1:
        raise BadInput(f"--candidates {candidates}: {corpus.uri} has {table.num_rows} texts in "
                       f"others/; allowed: at most {table.num_rows + 1}")  # fmt: skip
    other_ids = set(table["id"].to_pylist())
    for row in rows:
        if row["group_id"] in other_ids:
            raise BadInput(f"example {row['example_id']}: its article is among others/; allowed: "
                           "--split valid or test")  # fmt: skip
    questions = (Question(row["example_id"], row["context"], [row["response"]], 0) for row in rows)
    return Questions.of(questions, table["text"].to_pylist())


def train_responses(corpus: Artifact) -> set[str]:
    """The responses of the train split."""
    files = corpus.files("train/", ".parquet")
    return set(_table(files, ["response"])["response"].to_pylist()) if files else set()


def train_contexts(corpus: Artifact) -> dict[str, list[list[str]]]:
    """The contexts of each response of the train split, each once."""
    files = corpus.files("train/", ".parquet")
    contexts = dict[str, dict[tuple[str, ...], None]]()
    if files:
        table = _table(files, ["context", "response"])
        for turns, response in zip(*table.to_pydict().values(), strict=True):
            contexts.setdefault(response, {})[tuple(turns)] = None
    return {response: list(map(list, known)) for response, known in contexts.items()}


def _responses(corpus: Artifact, folder: str, candidates: int, fewer: bool) -> list[str]:
    """The different responses of a split's folder; "": of all splits."""
    files = [uri for name in ("train/", "valid/", "test/") for uri in corpus.files(name, ".parquet")
             if name.startswith(folder)]  # fmt: skip
    # File by file: of all texts at once Arrow makes a column, which ends at 2 GiB.
    texts = (pc.unique(_table([uri], ["response"])["response"]).to_pylist() for uri in files)
    responses: list[str] = list(dict.fromkeys(itertools.chain.from_iterable(texts)))
    if len(responses) < (2 if fewer else candidates):
        raise BadInput(f"--candidates {candidates}: {corpus.uri} has {len(responses)} different "
                       f"responses{f' in {folder}' if folder else ''}; allowed: 2 to as many")  # fmt: skip
    return responses


def _table(uris: Sequence[str], columns: list[str]) -> pa.Table:
    tables = []
    for uri in uris:
        with storage.open_input(uri) as stream:
            tables.append(pq.read_table(stream, columns=columns))
    return pa.concat_tables(tables)
