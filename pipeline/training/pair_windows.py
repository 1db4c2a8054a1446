"""Windows of pairs: pieces of an epoch's order that are shuffled together and cut into micro-batches.

R rows of a window, B of a micro-batch.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipeline.arrays import Ints
from pipeline.config import BadInput, require
from pipeline.training import utterance_pairs
from pipeline.training.data import Epoch, Rows
from pipeline.training.settings import PretrainConfig
from pipeline.training.token_masking import example_keys
from pipeline.training.tokenized_corpus import TokenizedCorpus
from pipeline.training.utterance_pairs import Pairs, Texts

_COLUMNS = ("context", "response")
_VALIDATION_GROUPS = 64  # row groups that validation reads at most: a million rows


@dataclass(frozen=True)
class Window:
    """Pairs of a window, and their division into micro-batches."""

    pairs: Pairs
    batches: list[Ints]
    """Rows of each micro-batch."""


@dataclass(frozen=True)
class WindowReader:
    """Windows of one corpus."""

    rows: Rows
    """The rows of lane 0."""
    corpus: int
    config: PretrainConfig

    @classmethod
    def of(
        cls, corpus: TokenizedCorpus, number: int, config: PretrainConfig, seed: int
    ) -> WindowReader:
        """Raises BadInput if a lane has no row, or if texts were truncated below the lengths of the
        recipe."""
        require_text_lengths(corpus, config)
        rows = Rows.of(corpus.artifact, "train", _COLUMNS, 0, config.lanes, seed)
        if not len(rows):
            raise BadInput(f"{corpus.artifact.uri}: too few examples in train/ for "
                           f"{config.lanes} micro-batches in a step")  # fmt: skip
        return cls(rows, number, config)

    @property
    def window_rows(self) -> int:
        """At most half of the split, so that there are responses beyond the window."""
        return min(self.config.window_rows, max(1, self.rows.total // 2))

    @property
    def windows(self) -> int:
        """Windows in an epoch of a lane."""
        return -(-len(self.rows) // self.window_rows)

    def read(self, lane: int, epoch: int, window: int) -> Window:
        """The same whenever and wherever it is read."""
        order = dataclasses.replace(self.rows, rank=lane).epoch(epoch)
        start = window * self.window_rows
        stop = min(start + self.window_rows, len(self.rows))
        first_place, end_place = order.first_row + start, order.first_row + stop
        table = order.read(start, stop)
        keep_context, keep_response = utterance_pairs.keep(self.config)
        contexts = Texts.of(table["context"], keep_context, newest=True)
        responses = Texts.of(table["response"], keep_response, newest=False)
        rng = np.random.default_rng([self.rows.seed, self.corpus, epoch, window, lane])
        other_responses, share = None, 0.0
        if self.config.random_pairs:
            other_responses = self._read_other_responses(order, first_place, end_place, rng)
            share = self.config.random_share
        # The place in the epoch's order, which no number of lanes or workers changes, names an example.
        keys_R = example_keys(self.rows.seed, self.corpus, epoch, np.arange(first_place, end_place))
        pairs = utterance_pairs.make_pairs(contexts, responses, other_responses, keys_R, share)
        return Window(pairs, cut_pairs(pairs, self.config, rng))

    def _read_other_responses(
        self, order: Epoch, start: int, stop: int, rng: np.random.Generator
    ) -> Texts | None:
        """Responses of as many neighbouring rows elsewhere in the order of the epoch, if it has as many."""
        total, rows_beyond = self.rows.total, self.rows.total - (stop - start)
        count = min(stop - start, rows_beyond)
        if not count:
            return None
        first = (stop + int(rng.integers(rows_beyond - count + 1))) % total
        split_order = dataclasses.replace(order, columns=("response",), first_row=0)
        pieces = [(first, min(first + count, total)), (0, max(0, first + count - total))]
        tables = [split_order.read(*piece) for piece in pieces if piece[0] < piece[1]]
        _, keep_response = utterance_pairs.keep(self.config)
        return Texts.of(pa.concat_tables(tables)["response"], keep_response, newest=False)


class WindowStream:
    """Micro-batches of one corpus for one lane; the next window is read in another thread meanwhile."""

    def __init__(
        self, reader: WindowReader, lane: int, position: list[int], threads: ThreadPoolExecutor
    ) -> None:
        self._reader, self._lane, self._threads = reader, lane, threads
        self._epoch, self._window, self._batch = position
        self._current: Window | None = None
        self._next = self._submit_read(self._epoch, self._window)

    @property
    def position(self) -> list[int]:
        return [self._epoch, self._window, self._batch]

    def next(self) -> tuple[Pairs, Ints]:
        """The pairs of a window, and which of them are a micro-batch."""
        if self._current is None:
            self._current = self._next.result()
            self._next = self._submit_read(*self._next_place())
        window = self._current
        rows_B = window.batches[self._batch]
        self._batch += 1
        if self._batch == len(window.batches):
            self._epoch, self._window = self._next_place()
            self._batch, self._current = 0, None
        return window.pairs, rows_B

    def _submit_read(self, epoch: int, window: int) -> Future[Window]:
        return self._threads.submit(self._reader.read, self._lane, epoch, window)

    def _next_place(self) -> tuple[int, int]:
        if self._window + 1 < self._reader.windows:
            return self._epoch, self._window + 1
        return self._epoch + 1, 0


def cut_pairs(pairs: Pairs, config: PretrainConfig, rng: np.random.Generator) -> list[Ints]:
    """Rows of micro-batches, in random order: of similar length, or, where responses are told apart, drawn
    whatever the lengths, as batches of fine-tuning are: steps of texts of one length seem to teach less
    (experiments.md, "Pre-training")."""
    if not config.single_texts:
        return utterance_pairs.cut(pairs.lengths, config.lane_tokens, rng)
    order_R = rng.permutation(len(pairs.lengths))
    return np.array_split(order_R, -(-len(order_R) // config.lane_pairs))


def sample_valid_pairs(
    corpus: TokenizedCorpus, number: int, count: int, config: PretrainConfig, seed: int
) -> Pairs:
    """Pairs of rows drawn from at most `_VALIDATION_GROUPS` row groups; each may get another's response."""
    order = Rows.of(corpus.artifact, "valid", _COLUMNS, 0, 1, seed).epoch(0)
    ends = np.array(order.ends[:_VALIDATION_GROUPS])
    rng = np.random.default_rng([seed, number])
    drawn_rows = np.sort(rng.choice(ends[-1], min(count, int(ends[-1])), replace=False))
    tables = []
    for begin, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        drawn_in_group = drawn_rows[(drawn_rows >= begin) & (drawn_rows < end)]
        if len(drawn_in_group):
            tables.append(order.read(begin, end).take(drawn_in_group - begin))
    table = pa.concat_tables(tables)
    keep_context, keep_response = utterance_pairs.keep(config)
    contexts = Texts.of(table["context"], keep_context, newest=True)
    responses = Texts.of(table["response"], keep_response, newest=False)
    share = config.random_share if config.random_pairs else 0.0
    keys_R = example_keys(seed, number, 0, drawn_rows)
    return utterance_pairs.make_pairs(contexts, responses, responses, keys_R, share)


def require_text_lengths(corpus: TokenizedCorpus, config: PretrainConfig) -> None:
    """Raises BadInput if the texts of the corpus were truncated below the lengths of the recipe."""
    limits = corpus.tokenize_config
    for name, available, needed in zip(
        ("max_context_tokens", "max_response_tokens"),
        (limits.max_context_tokens, limits.max_response_tokens),
        utterance_pairs.keep(config),
        strict=True,
    ):
        require(needed <= available, f"pretrain.{name}", needed + 2,
                f"at most {available + 2}, as {corpus.artifact.uri} holds {available} tokens")  # fmt: skip
