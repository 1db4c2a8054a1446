"""Endless shuffled batches of a corpus for one rank, which can resume at any batch.

An epoch is the files of a split in a random order, and the row groups of each in a random order;
each rank takes an equal, contiguous piece of that stream of rows. A rank reads its piece in windows,
shuffles a window and cuts it into batches of a fixed number of rows. Everything follows from (seed, epoch,
window), so a cursor of a few numbers is all that a checkpoint needs. Pre-training's batches are bounded by
tokens instead: pretraining_data.py.

What is no negative: the other responses to the same context are right, too (Reddit, AmazonQA), and where the
settings say so those of the same group (dialogue, thread, product).
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import attrgetter
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from pipeline import storage
from pipeline.artifact import Artifact
from pipeline.config import BadInput
from pipeline.models.ranker import Ranker
from pipeline.models.tokens import Tokens
from pipeline.storage.prefetch import map_prefetched
from pipeline.training.guide import Guide, GuideRows, GuideVectors
from pipeline.training.loop import derived_seed
from pipeline.training.settings import Taught

ExampleRow = dict[str, Any]
_BATCHES_AHEAD = 4
PLACE = "place_in_split"
"""A column that no file has: the row's number in the split, with the files in the order of `Rows.files`."""
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


class Cursor(NamedTuple):
    """The next batch of a rank."""

    epoch: int = 0
    window: int = 0
    batch: int = 0
    world: int = 0
    """Number of ranks that shared the epoch; 0: as many as there are now."""


class _RowGroup(NamedTuple):
    """A row group of a file."""

    uri: str
    number: int
    rows: int
    place: int
    """The `PLACE` of its first row."""


@dataclass(frozen=True)
class Rows:
    """One rank's share of a split."""

    files: tuple[tuple[_RowGroup, ...], ...]
    columns: tuple[str, ...]
    rank: int
    world: int
    seed: int

    @classmethod
    def of(
        cls,
        corpus: Artifact,
        split: str,
        columns: Sequence[str],
        rank: int,
        world: int,
        seed: int,
        excluded: Collection[str] = (),
    ) -> Rows:
        """All files of the split but the `excluded` ones. Raises BadInput where the corpus has none."""
        paths = corpus.paths(f"{split}/", ".parquet")
        uris = [storage.join(corpus.uri, path) for path in paths if path not in excluded]
        if not uris:
            raise BadInput(f"{corpus.uri}: the corpus has no examples in {split}/")
        files, place = list[tuple[_RowGroup, ...]](), 0
        for uri, sizes in zip(uris, map_prefetched(_rows_of_groups, uris), strict=True):
            groups = list[_RowGroup]()
            for number, size in enumerate(sizes):
                groups.append(_RowGroup(uri, number, size, place))
                place += size
            files.append(tuple(groups))
        return cls(tuple(files), tuple(columns), rank, world, seed)

    @property
    def total(self) -> int:
        """Rows of the split."""
        return sum(group.rows for groups in self.files for group in groups)

    def __len__(self) -> int:
        """Rows in an epoch of one rank. All ranks have as many, so up to world - 1 rows are left out."""
        return self.total // self.world

    def epoch(self, number: int) -> Epoch:
        """The order of an epoch."""
        rng = np.random.default_rng([self.seed, number])
        groups = [
            self.files[file][group]
            for file in rng.permutation(len(self.files))
            for group in rng.permutation(len(self.files[file]))
        ]
        return Epoch(groups, self.columns, self.rank * len(self))

    def in_order(self) -> Epoch:
        """The rows in the order of the files. For rank 0 of 1 the number of a row is its `PLACE`."""
        groups = list(itertools.chain(*self.files))
        return Epoch(groups, self.columns, self.rank * len(self))


@dataclass(frozen=True)
class Epoch:
    """One rank's share of a split in the order of one epoch."""

    groups: list[_RowGroup]
    """Of all ranks' shares."""
    columns: tuple[str, ...]
    first_row: int
    """The place of this rank's first row."""

    @functools.cached_property
    def ends(self) -> list[int]:
        """Rows up to the end of each group."""
        return list(itertools.accumulate(group.rows for group in self.groups))

    def read(self, start: int, stop: int) -> pa.Table:
        """Rows `start` to `stop` of this rank's share; `stop` is above `start`."""
        start, stop = self.first_row + start, self.first_row + stop
        first, last = bisect_right(self.ends, start), bisect_left(self.ends, stop)
        groups = self.groups[first : last + 1]
        # Neighbours in the order lie in the same file: one read for all of them.
        columns = [name for name in self.columns if name != PLACE]
        table = pa.concat_tables(
            _open(uri, threading.get_ident()).read_row_groups(
                [group.number for group in of_file], columns=columns
            )
            for uri, of_file in itertools.groupby(groups, attrgetter("uri"))
        )
        if PLACE in self.columns:
            places = [np.arange(group.place, group.place + group.rows) for group in groups]
            table = table.append_column(PLACE, pa.array(np.concatenate(places)))
        first_read = self.ends[first] - groups[0].rows
        return table.slice(start - first_read, stop - start)


def _rows_of_groups(uri: str) -> list[int]:
    with storage.open_input(uri) as stream:
        metadata = pq.ParquetFile(stream).metadata
        return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


@functools.lru_cache(maxsize=4)
def _open(uri: str, thread: int) -> pq.ParquetFile:
    """A Parquet file, kept open while its row groups are read: to read a remote footer takes 0.1 s.

    Each thread has its own open file, because two threads that read one file at once get "ReadRangeCache did
    not find matching cache entry", or die. One thread may prepare batches while another one mines.
    """
    return pq.ParquetFile(storage.open_input(uri), pre_buffer=True)


@dataclass(frozen=True)
class Batches:
    """Iterates over (batch, cursor of the batch after it) for ever."""

    rows: Rows
    collator: DualCollator
    batch_examples: int
    """Rows in a step of all ranks. Each rank takes an equal share; what is left over is not read."""
    window_rows: int = 16_384
    """Rows that are shuffled together. With 4,096, half of ConvAI2's dialogues, all-MiniLM learnt less: its
    R@1/20 was 0.611 after half an epoch, not 0.623."""

    def __post_init__(self) -> None:
        if len(self.rows) < self.examples:
            most = len(self.rows) * self.rows.world  # as many on each worker
            allowed = f"finetune.batch_examples of {most} at most"
            if most < 2:
                allowed = f"{max(2, self.rows.world)} examples or more"
            raise BadInput(f"the split has {self.rows.total:,} examples, too few for a batch of "
                           f"{self.examples} on each of {self.rows.world} workers; "
                           f"allowed: {allowed}")  # fmt: skip

    @property
    def examples(self) -> int:
        """Rows in every batch of this rank."""
        return self.batch_examples // self.rows.world

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch. With a number of ranks that does not divide `batch_examples` there are a few
        more, but the length of a run must not depend on its ranks."""
        return self.rows.total // self.batch_examples

    def start(self, cursors: Sequence[Sequence[int]] = ()) -> Generator[tuple[Any, Cursor]]:
        """Batches from the saved cursors of all ranks on, prepared in a thread of their own."""
        cursor = Cursor()
        if cursors:  # of more ranks than there were, a new one starts where rank 0 stands
            cursor = Cursor(*cursors[self.rows.rank if self.rows.rank < len(cursors) else 0])
        walk = self._walk(self._translate_cursor(cursor))
        return map_prefetched(
            next, itertools.repeat(walk), threads=1, most_waiting=_BATCHES_AHEAD + 1
        )

    def _translate_cursor(self, cursor: Cursor) -> Cursor:
        """A cursor of another number of ranks. It skips as many rows of the epoch as the earlier run had
        read, but not the same rows: some rows of this epoch are read twice, some never."""
        if cursor.world in (0, self.rows.world):
            return cursor
        examples = self.batch_examples // cursor.world
        window_start = cursor.window * self._window_size(examples)
        rows_read = (window_start + cursor.batch * examples) * cursor.world
        batches_done = rows_read // (self.examples * self.rows.world)
        window, batch = divmod(batches_done, self._window_size(self.examples) // self.examples)
        return Cursor(cursor.epoch, window, batch, self.rows.world)

    def _walk(self, cursor: Cursor) -> Iterator[tuple[Any, Cursor]]:
        epoch, window, skip, _ = cursor
        size = self._window_size(self.examples)
        while True:
            rows = self.rows.epoch(epoch)
            while window * size < len(self.rows):
                table = rows.read(window * size, min((window + 1) * size, len(self.rows)))
                batches = self._window(table, epoch, window)
                for number, items in enumerate(batches):
                    if number >= skip:
                        batch = self.collator.collate(items)
                        batch = batch.pin() if torch.cuda.is_available() else batch
                        yield batch, Cursor(epoch, window, number + 1, self.rows.world)
                window, skip = window + 1, 0
            epoch, window = epoch + 1, 0

    def _window_size(self, examples: int) -> int:
        """A whole number of batches, so that only an epoch's last window leaves rows over."""
        return max(1, self.window_rows // examples) * examples

    def _window(self, table: pa.Table, epoch: int, window: int) -> list[list[Any]]:
        rng = np.random.default_rng([self.rows.seed, epoch, window, self.rows.rank])
        listed = table.to_pylist()  # Arrow's own `take` fails where a column has over 2 GiB of text
        rows = [listed[place] for place in rng.permutation(table.num_rows)]
        seed = derived_seed(self.rows.seed, self.rows.rank, epoch, window)
        items = self.collator.prepare(rows, torch.Generator().manual_seed(seed))
        # Not sorted by length: a batch of contexts of one length is one of equally old dialogues, and its
        # negatives are too easy. What that costs is within a seed's chance (half an epoch of ConvAI2,
        # all-MiniLM: R@1/20 0.623 ± 0.015 sorted, 0.628 and 0.626 not), and packed rows have no padding.
        starts = range(0, len(items) - self.examples + 1, self.examples)
        return [items[start : start + self.examples] for start in starts]


def example_columns(same_group_negatives: bool) -> tuple[str, ...]:
    """The columns of a corpus that make a context, its response and its `answer_keys`."""
    return ("context", "response", *(() if same_group_negatives else ("group_id",)))


def answer_keys(row: Mapping[str, Any], same_group_negatives: bool) -> list[int]:
    """64-bit hashes, equal in all processes. Rows that share one have their right answers in common."""
    texts = ["\n".join(row["context"])]
    if not same_group_negatives:
        texts.append(row["group_id"])
    digests = [blake2b(text.encode(), digest_size=8).digest() for text in texts]
    return [int.from_bytes(digest, "little", signed=True) for digest in digests]


@dataclass(frozen=True)
class RightAnswers:
    """The responses that answer a row, its own among them."""

    sets: Sequence[set[str]]
    """Rows share them: 5,000 rows of one thread would otherwise hold 25 million texts."""

    def __contains__(self, text: str) -> bool:
        return any(text in texts for texts in self.sets)

    def __len__(self) -> int:
        """At least as many as there are."""
        return sum(map(len, self.sets))


def right_answers(
    rows: Sequence[Mapping[str, Any]], same_group_negatives: bool
) -> list[RightAnswers]:
    """The right answers of each row among the responses of all these rows."""
    responses_of_key = defaultdict[int, set[str]](set)
    sets_of_rows = [
        [responses_of_key[key] for key in answer_keys(row, same_group_negatives)] for row in rows
    ]
    for row, sets in zip(rows, sets_of_rows, strict=True):
        for texts in sets:
            texts.add(row["response"])
    return [RightAnswers(sets) for sets in sets_of_rows]


class TensorBatch:
    """The base of dataclasses with fields of tokens and tensors; others stay as they are."""

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed = {
            name: value.map_tensors(change) if isinstance(value, Tokens) else change(value)
            for name, value in vars(self).items()
            if isinstance(value, Tokens | Tensor)
        }
        return type(self)(**{**vars(self), **changed})

    def to(self, device: torch.device) -> Self:
        """The batch on a device; from pinned memory the copy does not wait."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> Self:
        """The batch in pinned memory, from which a copy to a GPU does not wait."""
        return self._map_tensors(lambda tensor: tensor.pin_memory())


@dataclass(frozen=True)
class RankingBatch(TensorBatch):
    """The base of batches of B contexts, each with candidates of its own."""

    teacher_BC: Tensor = field(kw_only=True)
    """The teacher's scores of these candidates, the right one first; NaN: it gave none."""
    guide_rows: GuideRows | None = field(default=None, kw_only=True)
    """None: there is no guide."""
    guide: GuideVectors | None = field(default=None, kw_only=True)
    """What the loss reads of the guide: of the whole batch, so `part` has none."""

    def __len__(self) -> int:
        return len(self.teacher_BC)

    def part(self, start: int, stop: int) -> Self:
        """Examples start to stop. Of tokens, each example has as many rows as the others."""

        def part_of(value: Any) -> Any:
            if isinstance(value, Tokens):
                count = len(value.lengths) // len(self)
                return value.rows(start * count, stop * count)
            return value[start:stop] if isinstance(value, Tensor) else None

        return type(self)(**{name: part_of(value) for name, value in vars(self).items()})


@dataclass(frozen=True)
class DualBatch(RankingBatch):
    """Contexts and their responses; row i answers row i."""

    contexts: Tokens
    responses: Tokens
    keys_BS: Tensor
    """int64; two examples have right answers in common where one of S keys is equal. The first one stands
    for the response's tokens, the others are `answer_keys`."""
    negatives: Tokens
    """K wrong candidates of each context's own, B · K rows; K may be 0."""
    negative_keys_BK: Tensor
    teacher_contexts_BE: Tensor
    teacher_responses_BE: Tensor
    """The teacher's vectors, float32; their products are its scores. E is 0 where it gave none."""


@dataclass(frozen=True)
class PairBatch(RankingBatch):
    """Contexts, each with C candidates, as B · C pairs."""

    pairs: Tokens
    """The right candidate of each context is its first."""
    key_BC: Tensor
    """int64; equal where the candidates' tokens are."""


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
    scores = row.get(TEACHER) or [math.nan] * len(texts)
    candidates = [_Candidate(*candidate) for candidate in zip(texts, scores, strict=True)]
    own = _Candidate(row["response"], math.nan)
    right = next((candidate for candidate in candidates if candidate.text == own.text), own)
    candidates = [candidate for candidate in candidates if candidate.text not in right_texts]
    order = torch.randperm(len(candidates), generator=generator)[:count].tolist()
    negatives = [candidates[place] for place in order]
    if len(negatives) < count and all(text in right_texts for text in responses):
        negatives += [own] * (count - len(negatives))
    while len(negatives) < count:
        text = responses[int(torch.randint(len(responses), (1,), generator=generator))]
        if text not in right_texts:
            negatives.append(_Candidate(text, math.nan))
    return [right, *negatives]


class _Item(NamedTuple):
    """An example as texts. To tokenise a whole window in advance would delay the first batch by minutes."""

    row: ExampleRow
    candidates: list[_Candidate]
    """The response, then wrong ones."""


def teacher_vectors(
    name: str, stored: Sequence[bytes], dtype: type[np.float32 | np.float16] = np.float32
) -> Tensor:
    """[B, E]. Raises BadInput if some examples of the column have no vector, or one of another width."""
    sizes = Counter(len(vector) // 2 for vector in stored)
    if len(sizes) > 1 or 0 in sizes:  # joined, they would be cut at the wrong places
        lengths = ", ".join(f"{count} of {size}" for size, count in sorted(sizes.items()))
        raise BadInput(f"{name}: vectors of several lengths or none together ({lengths}; 0: none); allowed: "
                       "one length, of one run of jobs.score_candidates over all of train")  # fmt: skip
    values = np.frombuffer(b"".join(stored), "<f2").astype(dtype)
    return torch.from_numpy(values).view(len(stored), -1)


class DualCollator:
    """For bi- and poly-encoders: responses, and `negatives` wrong candidates for each context.

    The wrong candidates come from the row's own candidates, or from `mined`, which returns those of its
    place in the split. `teacher`: some of `TEACHER_COLUMNS`. `guide`: reads the batch's texts, too.
    """

    def __init__(
        self,
        ranker: Ranker,
        negatives: int = 0,
        teacher: Sequence[str] = (),
        mined: Callable[[int], list[str]] | None = None,
        same_group_negatives: bool = True,
        guide: Guide | None = None,
    ) -> None:
        self._ranker = ranker
        self._guide = guide
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
        """The items of batches, one per row of a window; the rows come in random order."""
        if self._mined is not None:
            rows = [{**row, "candidates": self._mined(row[PLACE])} for row in rows]
        responses = [row["response"] for row in rows]
        answers = right_answers(rows, self._same_group_negatives)
        return [
            _Item(row, _choose_candidates(row, right, responses, self._negatives, generator))
            for row, right in zip(rows, answers, strict=True)
        ]

    def collate(self, items: list[_Item]) -> RankingBatch:
        """Items to one padded batch."""
        tokenizer = self._ranker.tokenizer
        candidates, keys, teacher_BC = self._tokenize(items)
        negatives = [ids for _, *rows in candidates for ids in rows]
        answers = [answer_keys(item.row, self._same_group_negatives) for item in items]
        return DualBatch(
            tokenizer.batch(self._ranker.context_rows([item.row["context"] for item in items])),
            tokenizer.batch([response for response, *_ in candidates]),
            torch.cat([keys[:, :1], torch.tensor(answers)], dim=1),
            tokenizer.batch(negatives),
            keys[:, 1:],
            *(self._teacher_vectors(name, items) for name in (TEACHER_CONTEXT, TEACHER_RESPONSE)),
            teacher_BC=teacher_BC,
            guide_rows=self._guide_rows(items),
        )

    def _teacher_vectors(self, name: str, items: list[_Item]) -> Tensor:
        if name not in self.columns:
            return torch.zeros(len(items), 0)
        return teacher_vectors(name, [item.row[name] or b"" for item in items])

    def _tokenize(self, items: list[_Item]) -> tuple[list[list[list[int]]], Tensor, Tensor]:
        """(tokens of each item's candidates; [B, C] int64, equal where the tokens are; the teacher's scores
        [B, C])"""
        candidates = [candidate for item in items for candidate in item.candidates]
        tokens = iter(self._ranker.candidate_rows([text for text, _ in candidates]))
        rows = [[next(tokens) for _ in item.candidates] for item in items]
        # Hashes of integers are the same in every process.
        keys_BC = torch.tensor([[hash(tuple(ids)) for ids in row] for row in rows])
        teacher_BC = torch.tensor([[score for _, score in item.candidates] for item in items])
        return rows, keys_BC, teacher_BC

    def _guide_rows(self, items: list[_Item]) -> GuideRows | None:
        if self._guide is None:
            return None
        texts = [candidate.text for item in items for candidate in item.candidates]
        return self._guide.rows([item.row["context"] for item in items], texts)


class PairCollator(DualCollator):
    """For cross-encoders: each context with its right candidate and `negatives` wrong ones."""

    def collate(self, items: list[_Item]) -> PairBatch:
        contexts = self._ranker.context_rows([item.row["context"] for item in items])
        candidates, key_BC, teacher_BC = self._tokenize(items)
        pairs = self._ranker.pairs(
            [context for context, rows in zip(contexts, candidates, strict=True) for _ in rows],
            [ids for rows in candidates for ids in rows],
        )
        guide_rows = self._guide_rows(items)
        return PairBatch(pairs, key_BC, teacher_BC=teacher_BC, guide_rows=guide_rows)
