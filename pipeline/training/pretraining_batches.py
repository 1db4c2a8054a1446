"""The batches of pre-training: the global batch of step n follows from (seed, n), on any number of workers.

A run has a fixed number of lanes, and a step is one micro-batch of each. Lane s reads the s-th contiguous
piece of each epoch's order of files and row groups, in windows of rows; the pairs of a window are shuffled,
sorted by length, cut into micro-batches of so many tokens, and these are shuffled again. Of W workers, worker
r serves the lanes s with s % W == r. So the micro-batches of a step, and with them the sum of their
gradients, are the same for 1, 2 or 32 workers, and a run may go on with another number of workers.

With several corpora each lane reads each of them, with a position of its own; from which one its k-th
micro-batch comes is drawn by weight from (seed, lane, k).

B pairs of a micro-batch, T tokens of its longest, N predicted tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pipeline.arrays import Floats, Ints
from pipeline.config import BadInput, require
from pipeline.models.tokens import Tokenizer, Tokens
from pipeline.training import utterance_pairs
from pipeline.training.batches import Epoch, Rows, ahead
from pipeline.training.pretraining_settings import PretrainConfig
from pipeline.training.token_masking import (
    Masker,
    derived,
    example_keys,
    prediction_probabilities,
    token_shares,
    uniform,
    word_starts,
)
from pipeline.training.tokenized_corpus import TokenizedCorpus, Vocabulary
from pipeline.training.utterance_pairs import Pairs, Texts

_COLUMNS = ("context", "response")
_STEPS_AHEAD = 2
_VALIDATION_GROUPS = 64  # row groups that validation reads at most: a million rows
_MIX = 1 << 20  # what a hash decides: the corpus of a micro-batch


class LanePosition(TypedDict):
    """The next micro-batch of a lane; JSON-ready."""

    micro_batches: int
    """How many it has given: the number of the step."""
    corpora: list[list[int]]
    """(epoch, window, micro-batch in it) of the next one of each corpus."""


Cursor = dict[str, LanePosition]
"""The positions of a worker's lanes, by the lane's number; JSON-ready."""


@dataclass(frozen=True)
class MicroBatch:
    """Pairs that are computed at once, and what is to be predicted of them."""

    tokens: Tokens
    """With masks, where tokens are predicted."""
    predicted_N: Tensor | None
    """Places of the predicted tokens in the flattened [B·T], int64; None: this step predicts no tokens."""
    labels_N: Tensor | None
    """Their true ids, int64; None as `predicted_N`."""
    is_next_B: Tensor | None
    """bool: whether the second text is the context's own; None: this step does not ask."""
    unswapped: int = 0
    """Pairs that were drawn to be random and are true, because no other response was found."""

    @property
    def token_count(self) -> int:
        """Tokens without padding."""
        return sum(self.tokens.lengths)

    @property
    def predicted_count(self) -> int:
        """Tokens that are predicted."""
        return 0 if self.labels_N is None else len(self.labels_N)

    @property
    def pair_count(self) -> int:
        """Pairs of which the next utterance is asked."""
        return 0 if self.is_next_B is None else len(self.is_next_B)

    def to(self, device: torch.device) -> MicroBatch:
        """The batch on a device; from pinned memory the copy does not wait."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> MicroBatch:
        """In memory from which a copy to a GPU does not wait."""
        return self._with(lambda tensor: tensor.pin_memory())

    def _with(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        def changed(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        tokens = Tokens(
            change(self.tokens.ids_BT),
            change(self.tokens.mask_BT),
            self.tokens.lengths,
            changed(self.tokens.segments_BT),
        )
        return MicroBatch(
            tokens,
            changed(self.predicted_N),
            changed(self.labels_N),
            changed(self.is_next_B),
            self.unswapped,
        )


@dataclass(frozen=True)
class _Window:
    pairs: Pairs
    batches: list[Ints]
    """Rows of each micro-batch."""


@dataclass(frozen=True)
class _Reader:
    """Windows of one corpus."""

    rows: Rows
    """Of lane 0."""
    group_starts: dict[str, Ints]
    """The place in the split of the first row of each row group, by file."""
    corpus: int
    config: PretrainConfig

    @classmethod
    def of(cls, corpus: TokenizedCorpus, number: int, config: PretrainConfig, seed: int) -> _Reader:
        """Raises BadInput where a lane has no row, or texts are cut shorter than the recipe's."""
        _check_kept(corpus, config)
        rows = Rows.of(corpus.artifact, "train", _COLUMNS, 0, config.lanes, seed)
        if not len(rows):
            raise BadInput(f"{corpus.artifact.uri}: too few examples in train/ for "
                           f"{config.lanes} micro-batches in a step")  # fmt: skip
        starts, before = dict[str, Ints](), 0
        for uri, sizes in rows.files:
            ends = np.cumsum(sizes, dtype=np.int64) + before
            starts[uri] = ends - np.array(sizes, np.int64)
            before = int(ends[-1]) if len(ends) else before
        return cls(rows, starts, number, config)

    @property
    def total(self) -> int:
        """Rows of the split."""
        return sum(sum(sizes) for _, sizes in self.rows.files)

    @property
    def window_rows(self) -> int:
        """At most half of the split, so that there are responses beyond the window."""
        return min(self.config.window_rows, max(1, self.total // 2))

    @property
    def windows(self) -> int:
        """In an epoch of a lane."""
        return -(-len(self.rows) // self.window_rows)

    def read(self, lane: int, epoch: int, window: int) -> _Window:
        order = dataclasses.replace(self.rows, rank=lane).epoch(epoch)
        start = window * self.window_rows
        stop = min(start + self.window_rows, len(self.rows))
        table = order.read(start, stop)
        keep_context, keep_response = utterance_pairs.keep(self.config)
        contexts = Texts.of(table["context"], keep_context, newest=True)
        responses = Texts.of(table["response"], keep_response, newest=False)
        rng = np.random.default_rng([self.rows.seed, self.corpus, epoch, window, lane])
        others = None
        if self.config.objective != "mlm":
            others = self._others(order, order.first + start, order.first + stop, rng)
        places_R = self._places(order, order.first + start, order.first + stop)
        keys_R = example_keys(self.rows.seed, self.corpus, epoch, places_R)
        share = 0.0 if others is None else self.config.random_share
        pairs = utterance_pairs.make_pairs(contexts, responses, others, keys_R, share)
        return _Window(pairs, utterance_pairs.cut(pairs.lengths, self.config.lane_tokens, rng))

    def _others(self, order: Epoch, start: int, stop: int, rng: np.random.Generator) -> Texts:
        """Responses of as many neighbouring rows elsewhere in the epoch's order, if there are so many."""
        total, beyond = self.total, self.total - (stop - start)
        count = min(stop - start, beyond)
        first = (stop + int(rng.integers(beyond - count + 1))) % total
        everywhere = dataclasses.replace(order, columns=("response",), first=0)
        pieces = [(first, min(first + count, total)), (0, max(0, first + count - total))]
        tables = [everywhere.read(*piece) for piece in pieces if piece[0] < piece[1]]
        _, keep_response = utterance_pairs.keep(self.config)
        return Texts.of(pa.concat_tables(tables)["response"], keep_response, newest=False)

    def _places(self, order: Epoch, start: int, stop: int) -> Ints:
        """The places in the split of the rows that stand so in an epoch's order."""
        at_R = np.arange(start, stop)
        ends = np.array(order.ends)
        group_R = np.searchsorted(ends, at_R, side="right")
        needed, inverse_R = np.unique(group_R, return_inverse=True)
        firsts = [self.group_starts[uri][group] for uri, group in (order.groups[n] for n in needed)]
        begins = [order.ends[number - 1] if number else 0 for number in needed.tolist()]
        places_R: Ints = at_R + (np.array(firsts) - np.array(begins))[inverse_R]
        return places_R


class _Stream:
    """Micro-batches of one corpus for one lane; the next window is read while one is used."""

    def __init__(
        self, reader: _Reader, lane: int, position: list[int], threads: ThreadPoolExecutor
    ) -> None:
        self._reader, self._lane, self._threads = reader, lane, threads
        self._epoch, self._window, self._batch = position
        self._current: _Window | None = None
        self._next: Future[_Window] | None = None

    @property
    def position(self) -> list[int]:
        return [self._epoch, self._window, self._batch]

    def next(self) -> tuple[Pairs, Ints]:
        """The pairs of a window, and which of them are a micro-batch."""
        if self._current is None:
            future = self._next or self._read(self._epoch, self._window)
            self._current = future.result()
            self._next = self._read(*self._following())
        window = self._current
        rows_B = window.batches[self._batch]
        self._batch += 1
        if self._batch == len(window.batches):
            self._epoch, self._window = self._following()
            self._batch, self._current = 0, None
        return window.pairs, rows_B

    def _read(self, epoch: int, window: int) -> Future[_Window]:
        return self._threads.submit(self._reader.read, self._lane, epoch, window)

    def _following(self) -> tuple[int, int]:
        if self._window + 1 < self._reader.windows:
            return self._epoch, self._window + 1
        return self._epoch + 1, 0


@dataclass(frozen=True)
class _Collator:
    """Pairs to a micro-batch."""

    vocabulary: Vocabulary
    masker: Masker
    config: PretrainConfig

    @classmethod
    def of(
        cls,
        corpora: Sequence[TokenizedCorpus],
        weights: Sequence[float],
        config: PretrainConfig,
    ) -> _Collator:
        vocabulary = corpora[0].vocabulary
        shares_V = token_shares(corpora, weights) if config.rare_token_alpha else None
        starts_V = None
        if config.whole_words:
            starts_V = word_starts(Tokenizer.load(corpora[0].tokenizer().local()))
        probability_V = prediction_probabilities(vocabulary, config, shares_V)
        return cls(vocabulary, Masker(probability_V, vocabulary.mask, starts_V), config)

    def micro_batch(self, pairs: Pairs, rows_B: Ints, step: int) -> MicroBatch:
        """What a step trains: an alternating run masks tokens in even steps only."""
        objective = self.config.objective
        masks = objective != "alternate" or step % 2 == 0
        asks_next = objective == "joint" or (objective == "alternate" and step % 2 == 1)
        ids_BT, lengths_B, second_B = utterance_pairs.layout(pairs, rows_B, self.vocabulary)
        predicted_N = labels_N = None
        if masks:
            ids_BT, predicted_N, labels_N = self.masker.mask_pairs(
                ids_BT, lengths_B, second_B, pairs.keys_R[rows_B]
            )
        places_T = np.arange(ids_BT.shape[1])
        mask_BT = places_T < lengths_B[:, None]
        segments_BT = (mask_BT & (places_T >= second_B[:, None])).astype(np.int64)
        tokens = Tokens(
            torch.from_numpy(ids_BT),
            torch.from_numpy(mask_BT),
            tuple(lengths_B.tolist()),
            torch.from_numpy(segments_BT),
        )
        return MicroBatch(
            tokens,
            None if predicted_N is None else torch.from_numpy(predicted_N),
            None if labels_N is None else torch.from_numpy(labels_N),
            torch.from_numpy(pairs.is_next_R[rows_B]) if asks_next else None,
            int(pairs.unswapped_R[rows_B].sum()) if asks_next else 0,
        )


@dataclass(frozen=True)
class PretrainingBatches:
    """One worker's micro-batches of each step."""

    readers: tuple[_Reader, ...]
    shares: Floats
    """Cumulative weights of the corpora."""
    collator: _Collator
    lanes: tuple[int, ...]
    """Those of this worker."""
    seed: int

    @classmethod
    def of(
        cls,
        corpora: Sequence[TokenizedCorpus],
        weights: Sequence[float],
        config: PretrainConfig,
        rank: int,
        world: int,
        seed: int,
    ) -> PretrainingBatches:
        """Raises BadInput for more workers than lanes, corpora of different tokenizers, weights that are
        not positive, one for each corpus, and a corpus that is too small or cut too short."""
        require(world <= config.lanes, "resources.workers", world,
                f"at most {config.lanes}, the micro-batches of a step "
                "(pretrain.batch_tokens / pretrain.micro_batch_tokens)")  # fmt: skip
        _check(corpora, weights)
        readers = tuple(
            _Reader.of(corpus, number, config, seed) for number, corpus in enumerate(corpora)
        )
        shares = np.cumsum(weights) / np.sum(weights)
        lanes = tuple(range(rank, config.lanes, world))
        return cls(readers, shares, _Collator.of(corpora, weights, config), lanes, seed)

    def start(self, cursors: Sequence[Cursor] = ()) -> Generator[tuple[list[MicroBatch], Cursor]]:
        """(the micro-batches of a step, the cursor after it) for ever, prepared in a thread of their own.

        `cursors`: those of all workers of the run that saved them, of whatever number; none: from the
        beginning. Raises BadInput where they are not of as many lanes.
        """
        return ahead(self._walk(self._positions(cursors)), depth=_STEPS_AHEAD)

    def _positions(self, cursors: Sequence[Cursor]) -> dict[int, LanePosition]:
        count = self.collator.config.lanes
        beginning = LanePosition(micro_batches=0, corpora=[[0, 0, 0] for _ in self.readers])
        saved = {int(lane): at for cursor in cursors for lane, at in cursor.items()}
        if not saved:
            return dict.fromkeys(self.lanes, beginning)
        require(sorted(saved) == list(range(count)), "pretrain.micro_batch_tokens",
                f"{count} micro-batches in a step",
                f"the {len(saved)} of the checkpoint, which does not fit")  # fmt: skip
        for position in saved.values():
            require(len(position["corpora"]) == len(self.readers), "corpora", len(self.readers),
                    f"the {len(position['corpora'])} of the checkpoint")  # fmt: skip
        return {lane: saved[lane] for lane in self.lanes}

    def _walk(
        self, positions: dict[int, LanePosition]
    ) -> Iterator[tuple[list[MicroBatch], Cursor]]:
        with ThreadPoolExecutor(1, thread_name_prefix="windows") as threads:
            streams = {
                lane: [
                    _Stream(reader, lane, at, threads)
                    for reader, at in zip(self.readers, position["corpora"], strict=True)
                ]
                for lane, position in positions.items()
            }
            step = next(iter(positions.values()))["micro_batches"]
            while True:
                batches = [
                    self._micro_batch(*streams[lane][self._corpus(lane, step)].next(), step)
                    for lane in self.lanes
                ]
                step += 1
                cursor = {
                    str(lane): LanePosition(
                        micro_batches=step, corpora=[stream.position for stream in streams[lane]]
                    )
                    for lane in self.lanes
                }
                yield batches, cursor

    def _corpus(self, lane: int, step: int) -> int:
        """Which corpus a lane's micro-batch comes from."""
        key = np.zeros(1, np.uint64)
        for number in (_MIX, self.seed, lane, step):
            key = derived(key, number)
        place = int(np.searchsorted(self.shares, uniform(key)[0], side="right"))
        return min(place, len(self.readers) - 1)

    def _micro_batch(self, pairs: Pairs, rows_B: Ints, step: int) -> MicroBatch:
        batch = self.collator.micro_batch(pairs, rows_B, step)
        return batch.pinned() if torch.cuda.is_available() else batch


def _check(corpora: Sequence[TokenizedCorpus], weights: Sequence[float]) -> None:
    require(len(corpora) >= 1, "corpora", "none", "one or more")
    require(len(weights) == len(corpora) and min(weights) > 0, "weights", tuple(weights),
            f"{len(corpora)} numbers above 0, one for each corpus")  # fmt: skip
    for corpus in corpora[1:]:
        if corpus.tokenizer_version != corpora[0].tokenizer_version:
            raise BadInput(f"{corpus.artifact.uri}: tokenized with another tokenizer than "
                           f"{corpora[0].artifact.uri}")  # fmt: skip


def _check_kept(corpus: TokenizedCorpus, config: PretrainConfig) -> None:
    """Raises BadInput where the corpus' texts are cut shorter than the recipe's."""
    kept = corpus.kept
    for name, have, wanted in zip(
        ("max_context_tokens", "max_response_tokens"),
        (kept.max_context_tokens, kept.max_response_tokens),
        utterance_pairs.keep(config),
        strict=True,
    ):
        require(wanted <= have, f"pretrain.{name}", wanted + 2,
                f"at most {have + 2}, as {corpus.artifact.uri} holds {have} tokens")  # fmt: skip


def validation_batches(
    corpora: Sequence[TokenizedCorpus],
    weights: Sequence[float],
    config: PretrainConfig,
    rank: int,
    world: int,
    seed: int,
) -> list[MicroBatch]:
    """One worker's part of the fixed micro-batches of the valid splits.

    At most `valid_examples`, shared out by weight over the corpora that have a valid split, drawn at random
    from it. An alternating run validates each pair twice: with masks, and without for the next utterance.
    [] where no corpus has a valid split.
    """
    _check(corpora, weights)
    collator = _Collator.of(corpora, weights, config)
    held_out = [
        (number, corpus, weight)
        for number, (corpus, weight) in enumerate(zip(corpora, weights, strict=True))
        if corpus.artifact.paths("valid/", ".parquet")
    ]
    total = sum(weight for *_, weight in held_out)
    batches = list[MicroBatch]()
    for number, corpus, weight in held_out:
        _check_kept(corpus, config)
        count = max(1, int(config.valid_examples * weight / total))
        pairs = _validation_pairs(corpus, number, count, config, seed)
        rng = np.random.default_rng([seed, number])
        for rows_B in utterance_pairs.cut(pairs.lengths, config.lane_tokens, rng):
            for step in (0, 1) if config.objective == "alternate" else (0,):
                batches.append(collator.micro_batch(pairs, rows_B, step))
    return batches[rank::world]


def _validation_pairs(
    corpus: TokenizedCorpus, number: int, count: int, config: PretrainConfig, seed: int
) -> Pairs:
    """Pairs of rows drawn from at most `_VALIDATION_GROUPS` row groups; each may get another's response."""
    order = Rows.of(corpus.artifact, "valid", _COLUMNS, 0, 1, seed).epoch(0)
    ends = np.array(order.ends[:_VALIDATION_GROUPS])
    rng = np.random.default_rng([seed, number])
    drawn = np.sort(rng.choice(ends[-1], min(count, int(ends[-1])), replace=False))
    tables = []
    for begin, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        of_group = drawn[(drawn >= begin) & (drawn < end)]
        if len(of_group):
            tables.append(order.read(begin, end).take(of_group - begin))
    table = pa.concat_tables(tables)
    keep_context, keep_response = utterance_pairs.keep(config)
    contexts = Texts.of(table["context"], keep_context, newest=True)
    responses = Texts.of(table["response"], keep_response, newest=False)
    share = 0.0 if config.objective == "mlm" else config.random_share
    keys_R = example_keys(seed, number, 0, drawn)
    return utterance_pairs.make_pairs(contexts, responses, responses, keys_R, share)
