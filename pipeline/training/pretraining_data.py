"""The batches of pre-training: the global batch of step n follows from (seed, n), on any number of workers.

A run has a fixed number of lanes, and a step is one micro-batch of each. Lane s reads the s-th contiguous
piece of each epoch's order of files and row groups, in windows of rows; the pairs (context, next utterance)
of a window are shuffled and divided into micro-batches of a fixed number of tokens, by length (`cut_pairs`).
Of W workers, worker r serves the lanes s with s % W == r. So the micro-batches of a step, and with them the
sum of their gradients, are the same for 1, 2 or 32 workers, and a run may go on with another number of
workers.

With several corpora each lane reads each of them, with a position of its own; from which one its k-th
micro-batch comes is drawn by weight from (seed, lane, k).

Masks and random responses are hashes of (seed, corpus, epoch, example's place in the order of the epoch,
token's place in the pair). The order follows from the seed and the epoch. So an example is masked anew in
each epoch, and alike in whichever batch, on whichever worker and after whichever resume it comes.

R rows of a window, F flat tokens, B pairs of a micro-batch, T tokens of its longest, N predicted tokens,
V vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pipeline.arrays import GOLDEN, Bools, Floats, Ints, Keys, mix
from pipeline.config import BadInput, require
from pipeline.models.tokens import Tokenizer, Tokens
from pipeline.storage.prefetch import map_prefetched
from pipeline.training.data import Epoch, Rows, TensorBatch
from pipeline.training.settings import PretrainConfig
from pipeline.training.tokenized_corpus import TokenizedCorpus, Vocabulary

_TOKEN = np.uint64(0xD1342543DE82EF95)
# What a hash decides: a token's mask, what stands in its place, whether a pair is random, whose response it
# gets, the corpus of a micro-batch, a response's masks where it is a row of its own.
_CHOICE, _REPLACEMENT, _SWAP_DRAW, _RESPONSE_DRAW = 1, 2, 3, 4
_MIX, _RESPONSE_MASKS = 1 << 20, 1 << 21
_MASKED, _RANDOM = 0.8, 0.1  # of the predicted tokens; the others stay as they are
_DRAWS = 16  # of another response, until it differs from the true one
_STEPS_AHEAD = 2
_COLUMNS = ("context", "response")
_VALIDATION_GROUPS = 64  # row groups that validation reads at most: a million rows


# Hashes


def derive_keys(keys: Keys, numbers: int | Ints) -> Keys:
    """Keys of their own for each number; those of consecutive numbers are independent."""
    counters: Keys = (np.atleast_1d(np.asarray(numbers)) + 1).astype(np.uint64)
    return mix(keys + counters * GOLDEN)


def key_of(*numbers: int) -> Keys:
    """A key of its own for each sequence of numbers, uint64 [1]."""
    key: Keys = np.zeros(1, np.uint64)
    for number in numbers:
        key = derive_keys(key, number)
    return key


def example_keys(seed: int, corpus: int, epoch: int, places_R: Ints) -> Keys:
    """One key per example and epoch, uint64 [R]; `places_R` are the examples' places in the
    order of the epoch."""
    return derive_keys(key_of(seed, corpus, epoch), places_R)


def uniform(keys: Keys) -> Floats:
    """Numbers in [0, 1) out of the upper 32 bits."""
    numbers: Floats = (keys >> np.uint64(32)) * 2.0**-32
    return numbers


# Pairs (context, next utterance); a share may have the response of another example


@dataclass(frozen=True)
class Texts:
    """Texts as pieces of one flat array of token ids."""

    ids_F: Ints
    starts_R: Ints
    lengths_R: Ints

    @classmethod
    def of(cls, lists: pa.ChunkedArray, keep: int, newest: bool) -> Texts:
        """The newest or the first `keep` tokens of each list."""
        array = lists.combine_chunks()
        offsets = array.offsets.to_numpy().astype(np.int64)
        lengths_R = np.minimum(np.diff(offsets), keep)
        starts_R = (offsets[1:] - lengths_R if newest else offsets[:-1]) - offsets[0]
        return cls(array.flatten().to_numpy(), starts_R, lengths_R)

    def fingerprints(self, rows: Ints) -> Keys:
        """The same for the same text, uint64; different texts differ but for one in 2^64."""
        lengths = self.lengths_R[rows]
        ends = np.cumsum(lengths)
        places = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
        tokens = self.ids_F[np.repeat(self.starts_R[rows], lengths) + places]
        keys = mix(tokens.astype(np.uint64) * _TOKEN + (places + 1).astype(np.uint64) * GOLDEN)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(keys, dtype=np.uint64)])
        fingerprints: Keys = sums[ends] - sums[ends - lengths]
        return fingerprints


@dataclass(frozen=True)
class Pairs:
    """Contexts and second texts of a window, in one array of token ids."""

    contexts: Texts
    seconds: Texts
    is_next_R: Bools
    keys_R: Keys
    """The keys of the examples in this epoch."""

    @property
    def lengths(self) -> Ints:
        """Tokens of each pair, int64 [R]: [CLS] context [SEP] response [SEP]."""
        total: Ints = self.contexts.lengths_R + self.seconds.lengths_R + 3
        return total


def make_pairs(
    contexts: Texts, responses: Texts, pool: Texts | None, keys_R: Keys, random_share: float
) -> Pairs:
    """Gives a share of the contexts a response from the `pool` that differs from their own. If there is
    none, the pair stays true.

    `keys_R` decide which contexts change, and which response they get. Without a `pool` all pairs are true.
    """
    rows = len(keys_R)
    is_drawn_R = uniform(derive_keys(keys_R, _SWAP_DRAW)) < random_share
    other_row_R = np.full(rows, -1, np.int64)
    if pool is not None and len(pool.lengths_R):
        fingerprints = pool.fingerprints(np.arange(len(pool.lengths_R)))
        pending = np.flatnonzero(is_drawn_R)
        own_fingerprints = responses.fingerprints(pending)
        for draw in range(_DRAWS):
            share = uniform(derive_keys(keys_R[pending], _RESPONSE_DRAW + draw))
            rows_drawn = (share * len(fingerprints)).astype(np.int64)
            differs = fingerprints[rows_drawn] != own_fingerprints
            other_row_R[pending[differs]] = rows_drawn[differs]
            pending, own_fingerprints = pending[~differs], own_fingerprints[~differs]
    is_swapped_R = other_row_R >= 0
    starts_R = responses.starts_R + len(contexts.ids_F)
    lengths_R = responses.lengths_R.copy()
    id_arrays = [contexts.ids_F, responses.ids_F]
    if pool is not None:
        offset = len(contexts.ids_F) + len(responses.ids_F)
        starts_R[is_swapped_R] = pool.starts_R[other_row_R[is_swapped_R]] + offset
        lengths_R[is_swapped_R] = pool.lengths_R[other_row_R[is_swapped_R]]
        id_arrays.append(pool.ids_F)
    ids_F = np.concatenate(id_arrays)
    return Pairs(
        Texts(ids_F, contexts.starts_R, contexts.lengths_R),
        Texts(ids_F, starts_R, lengths_R),
        ~is_swapped_R,
        keys_R,
    )


def cut(lengths_R: Ints, tokens: int, rng: np.random.Generator) -> list[Ints]:
    """Rows of micro-batches of similar length: `tokens` at most, padding included, in random order. No row is
    longer than that."""
    order_R = rng.permutation(len(lengths_R))
    order_R = order_R[np.argsort(lengths_R[order_R], kind="stable")]
    sorted_R = lengths_R[order_R]
    batches, start = list[Ints](), 0
    while start < len(sorted_R):
        # The longest is the last: no more rows than fit at the first one's length.
        sizes = sorted_R[start : start + tokens // int(sorted_R[start])]
        row_count = np.searchsorted(sizes * np.arange(1, len(sizes) + 1), tokens, side="right")
        batches.append(order_R[start : start + row_count])
        start += int(row_count)
    return [batches[number] for number in rng.permutation(len(batches))]


def cut_pairs(pairs: Pairs, config: PretrainConfig, rng: np.random.Generator) -> list[Ints]:
    """Rows of micro-batches, in random order: of similar length, or, where responses are told apart, drawn
    whatever the lengths, as batches of fine-tuning are: steps of texts of one length seem to teach less
    (experiments.md, "Pre-training")."""
    if not config.single_texts:
        return cut(pairs.lengths, config.lane_tokens, rng)
    order_R = rng.permutation(len(pairs.lengths))
    return np.array_split(order_R, -(-len(order_R) // config.lane_pairs))


def layout(pairs: Pairs, rows_B: Ints, vocabulary: Vocabulary) -> tuple[Ints, Ints, Ints]:
    """(ids_BT, lengths_B, second_start_B: the second text's place) of [CLS] context [SEP] response [SEP]."""
    context_length_B = pairs.contexts.lengths_R[rows_B]
    second_length_B = pairs.seconds.lengths_R[rows_B]
    lengths_B = context_length_B + second_length_B + 3
    places_T = np.arange(lengths_B.max())
    ends_B = context_length_B + 1
    from_context_B = pairs.contexts.starts_R[rows_B] - 1
    from_second_B = pairs.seconds.starts_R[rows_B] - ends_B - 1
    source_BT = places_T + np.where(
        places_T <= context_length_B[:, None], from_context_B[:, None], from_second_B[:, None]
    )
    ids_BT: Ints = pairs.contexts.ids_F.take(source_BT, mode="clip").astype(np.int64)
    ids_BT[np.arange(len(rows_B)), ends_B] = vocabulary.sep
    return _framed(ids_BT, lengths_B, vocabulary), lengths_B, ends_B + 1


def layout_single_texts(pairs: Pairs, rows_B: Ints, vocabulary: Vocabulary) -> tuple[Ints, Ints]:
    """(ids [2B, T], lengths [2B]) of B rows [CLS] context [SEP] and then B rows [CLS] response [SEP]."""
    starts = np.concatenate([pairs.contexts.starts_R[rows_B], pairs.seconds.starts_R[rows_B]])
    text_lengths = np.concatenate(
        [pairs.contexts.lengths_R[rows_B], pairs.seconds.lengths_R[rows_B]]
    )
    lengths = text_lengths + 2
    places_T = np.arange(lengths.max())
    ids = pairs.contexts.ids_F.take(starts[:, None] + places_T - 1, mode="clip").astype(np.int64)
    return _framed(ids, lengths, vocabulary), lengths


def _framed(ids_BT: Ints, lengths_B: Ints, vocabulary: Vocabulary) -> Ints:
    """[CLS] at the beginning, [SEP] as the last of so many tokens, and padding behind it; in place."""
    ids_BT[np.arange(ids_BT.shape[1]) >= lengths_B[:, None]] = vocabulary.pad
    ids_BT[:, 0] = vocabulary.cls
    ids_BT[np.arange(len(ids_BT)), lengths_B - 1] = vocabulary.sep
    return ids_BT


# Masks


def word_starts(tokenizer: Tokenizer) -> Bools:
    """Which tokens begin a word, bool [V]: those without "##" (WordPiece), or, where the vocabulary has
    no "##", those with the mark of a space, "Ġ" or "▁". Special tokens always do."""
    tokens = [str(token) for token in tokenizer.hf.convert_ids_to_tokens(range(len(tokenizer)))]
    if any(token.startswith("##") for token in tokens):
        starts_V = np.array([not token.startswith("##") for token in tokens])
    else:
        starts_V = np.array([token.startswith(("Ġ", "▁")) for token in tokens])
    starts_V[tokenizer.hf.all_special_ids] = True
    return starts_V


def prediction_probabilities(
    vocabulary: Vocabulary, config: PretrainConfig, shares_V: Floats | None
) -> Floats:
    """The probability with which each token is predicted where it stands in a pair, float64 [V].

    `shares_V`, the share of each token in the corpora, is needed for `rare_token_alpha`: a token that the
    corpora lack, and so every special one, is then never predicted (as in XLM), and the others are predicted
    with a probability proportional to share^-alpha, at most 1, whose mean over the corpora is `masked_share`.
    """
    probability_V: Floats = np.full(vocabulary.size, config.masked_share)
    if config.rare_token_alpha and shares_V is not None:
        occurs_V = shares_V > 0
        weight_V = np.zeros_like(shares_V)
        weight_V[occurs_V] = (shares_V[occurs_V] / shares_V.max()) ** -config.rare_token_alpha
        factor = config.masked_share / (shares_V * weight_V).sum()
        for _ in range(100):  # until those that are always predicted leave the others their part
            probability_V = np.minimum(1.0, factor * weight_V)
            factor *= config.masked_share / (shares_V * probability_V).sum()
    if config.masking == "bert":
        probability_V[list(vocabulary.special)] = 0.0
    return probability_V


@dataclass(frozen=True)
class Masker:
    """Masks pairs by the probabilities of their tokens."""

    probability_V: Floats
    mask: int
    starts_V: Bools | None = None
    """Which tokens begin a word; all pieces of a word are predicted, or none, with the probability of the
    first one. None: each token for itself."""

    def mask_pairs(
        self, ids_BT: Ints, lengths_B: Ints, second_start_B: Ints, keys_B: Keys
    ) -> tuple[Ints, Ints, Ints]:
        """(ids_BT with masks, places of the predicted tokens in the flattened [B·T], their true ids).

        `lengths_B` counts tokens without padding, `second_start_B` is the place of the second text's first
        token, `keys_B` are the examples' keys. Position 0 and padding are never predicted.
        """
        size, width = ids_BT.shape
        places_T = np.arange(width)
        threshold_V = (self.probability_V * 2.0**32).astype(np.uint64)
        keys_BT = derive_keys(derive_keys(keys_B, _CHOICE)[:, None], places_T)
        is_predicted_BT = (keys_BT >> np.uint64(32)) < threshold_V[ids_BT]
        is_predicted_BT[:, 0] = False
        if self.starts_V is not None:
            starts_BT = self.starts_V[ids_BT]
            starts_BT[:, :2] = True
            starts_BT[np.arange(size), second_start_B] = True
            word_start_N = np.maximum.accumulate(
                np.where(starts_BT.ravel(), np.arange(ids_BT.size), 0)
            )
            is_predicted_BT = is_predicted_BT.ravel()[word_start_N].reshape(size, width)
        is_predicted_BT &= places_T < lengths_B[:, None]
        predicted_N = np.flatnonzero(is_predicted_BT)
        labels_N = ids_BT.ravel()[predicted_N]
        draws_N = derive_keys(keys_BT.ravel()[predicted_N], _REPLACEMENT)
        kind_N = uniform(draws_N)
        lower_N = draws_N & np.uint64(0xFFFFFFFF)
        random_N = (lower_N * np.uint64(len(self.probability_V)) >> np.uint64(32)).astype(np.int64)
        replacement_N = np.where(kind_N < _MASKED, self.mask, labels_N)
        replacement_N = np.where(kind_N >= 1 - _RANDOM, random_N, replacement_N)
        masked_BT = ids_BT.copy()
        masked_BT.ravel()[predicted_N] = replacement_N
        return masked_BT, predicted_N, labels_N


# Windows


_Window = tuple[Pairs, list[Ints]]
"""Pairs of a window, and the rows of each micro-batch."""


@dataclass(frozen=True)
class _WindowReader:
    """Windows of one corpus: pieces of an epoch's order that are shuffled together and cut into
    micro-batches."""

    rows: Rows
    """The rows of lane 0."""
    corpus: int
    config: PretrainConfig

    @property
    def window_rows(self) -> int:
        """At most half of the split, so that there are responses beyond the window."""
        return min(self.config.window_rows, max(1, self.rows.total // 2))

    @property
    def windows(self) -> int:
        """Windows in an epoch of a lane."""
        return -(-len(self.rows) // self.window_rows)

    def read(self, lane: int, epoch: int, window: int) -> _Window:
        """The same whenever and wherever it is read."""
        order = dataclasses.replace(self.rows, rank=lane).epoch(epoch)
        start = window * self.window_rows
        stop = min(start + self.window_rows, len(self.rows))
        first_place, end_place = order.first_row + start, order.first_row + stop
        contexts, responses = _texts_of(order.read(start, stop), self.config)
        rng = np.random.default_rng([self.rows.seed, self.corpus, epoch, window, lane])
        pool = None
        if self.config.random_pairs:
            pool = self._read_other_responses(order, first_place, end_place, rng)
        # The place in the epoch's order, which no number of lanes or workers changes, names an example.
        keys_R = example_keys(self.rows.seed, self.corpus, epoch, np.arange(first_place, end_place))
        pairs = make_pairs(contexts, responses, pool, keys_R, self.config.random_share)
        return pairs, cut_pairs(pairs, self.config, rng)

    def micro_batches(
        self, lane: int, position: list[int], thread: Executor
    ) -> Iterator[tuple[Pairs, Ints, list[int]]]:
        """(pairs of a window, which of them are a micro-batch, the position after it) for ever, from a
        position on. The next window is read in the thread meanwhile."""
        epoch, window, batch = position
        future = thread.submit(self.read, lane, epoch, window)
        while True:
            pairs, batches = future.result()
            after = (epoch, window + 1) if window + 1 < self.windows else (epoch + 1, 0)
            future = thread.submit(self.read, lane, *after)
            for number in range(batch, len(batches)):
                is_last = number + 1 == len(batches)
                position = [*after, 0] if is_last else [epoch, window, number + 1]
                yield pairs, batches[number], position
            (epoch, window), batch = after, 0

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
        return Texts.of(
            pa.concat_tables(tables)["response"], self.config.kept_tokens[1], newest=False
        )


def _texts_of(table: pa.Table, config: PretrainConfig) -> tuple[Texts, Texts]:
    """The contexts and the responses, truncated to their lengths."""
    keep_context, keep_response = config.kept_tokens
    contexts = Texts.of(table["context"], keep_context, newest=True)
    return contexts, Texts.of(table["response"], keep_response, newest=False)


def _sample_valid_pairs(
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
    contexts, responses = _texts_of(pa.concat_tables(tables), config)
    pool = responses if config.random_pairs else None
    keys_R = example_keys(seed, number, 0, drawn_rows)
    return make_pairs(contexts, responses, pool, keys_R, config.random_share)


# Batches


class LanePosition(TypedDict):
    """The next micro-batch of a lane; JSON-ready."""

    micro_batches: int
    """How many it has given: the number of the step."""
    corpora: list[list[int]]
    """(epoch, window, micro-batch in it) of the next one of each corpus."""


LaneCursor = dict[str, LanePosition]
"""The positions of a worker's lanes, by the lane's number; JSON-ready."""


@dataclass(frozen=True)
class MicroBatch(TensorBatch):
    """Pairs that are computed at once, and the tokens to predict in them."""

    tokens: Tokens
    """With masks, where tokens are predicted."""
    predicted_N: Tensor | None
    """Places of the predicted tokens in the flattened [B·T], int64; None: this step predicts no tokens."""
    labels_N: Tensor | None
    """The true ids of the predicted tokens, int64; None as `predicted_N`."""
    is_next_B: Tensor | None
    """bool: whether the second text is the context's own; None: this step does not ask."""
    answer_keys_BS: Tensor | None = None
    """The rows of `tokens` are B contexts and then their B responses, which are told apart. Two keys, of
    context and response, int64: pairs that share one have right answers in common. None: each row is a
    pair."""

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
        """Pairs whose next utterance is predicted."""
        labels_B = self.is_next_B if self.answer_keys_BS is None else self.answer_keys_BS
        return 0 if labels_B is None else len(labels_B)

    @property
    def model_inputs(self) -> tuple[Tokens, *tuple[Tensor | None, ...]]:
        """The arguments of `PretrainingModel`."""
        return self.tokens, self.predicted_N, self.labels_N, self.is_next_B, self.answer_keys_BS


@dataclass(frozen=True)
class StepBatch:
    """One worker's micro-batches of a step, with the numbers of their lanes."""

    step: int
    lanes: tuple[int, ...]
    parts: list[MicroBatch]

    def to(self, device: torch.device) -> StepBatch:
        """The batch on a device."""
        return StepBatch(self.step, self.lanes, [part.to(device) for part in self.parts])


class PretrainingBatches:
    """One worker's micro-batches of each step."""

    def __init__(
        self,
        corpora: Sequence[TokenizedCorpus],
        weights: Sequence[float],
        config: PretrainConfig,
        rank: int,
        world: int,
        seed: int,
    ) -> None:
        """`weights`: a positive number for each corpus. Raises BadInput for more workers than lanes, corpora
        of different tokenizers, and a corpus that is too small or whose texts were truncated too short."""
        require(world <= config.lanes, "resources.workers", world,
                f"at most {config.lanes}, the micro-batches of a step "
                "(pretrain.batch_tokens / pretrain.micro_batch_tokens)")  # fmt: skip
        self._readers = list[_WindowReader]()
        for number, corpus in enumerate(corpora):
            if corpus.tokenizer_version != corpora[0].tokenizer_version:
                raise BadInput(f"{corpus.artifact.uri}: tokenized with another tokenizer than "
                               f"{corpora[0].artifact.uri}")  # fmt: skip
            limits = corpus.tokenize_config
            for name, needed in zip(("context", "response"), config.kept_tokens, strict=True):
                available = getattr(limits, f"max_{name}_tokens")
                require(needed <= available, f"pretrain.max_{name}_tokens", needed + 2, f"at most "
                        f"{available + 2}, as {corpus.artifact.uri} holds {available} tokens")  # fmt: skip
            rows = Rows.of(corpus.artifact, "train", _COLUMNS, 0, config.lanes, seed)
            if not len(rows):
                raise BadInput(f"{corpus.artifact.uri}: too few examples in train/ for "
                               f"{config.lanes} micro-batches in a step")  # fmt: skip
            self._readers.append(_WindowReader(rows, number, config))
        self._corpora, self._weights = corpora, weights
        self._config, self._seed = config, seed
        self._shares = np.cumsum(weights) / np.sum(weights)
        self.lanes = tuple(range(rank, config.lanes, world))
        """The lanes of this worker."""
        self.steps_per_epoch = sum(corpus.train_tokens for corpus in corpora) / config.batch_tokens
        """Steps in which as many tokens, or pairs of single texts, are read as the corpora have."""
        if config.single_texts:  # a step has so many pairs, however short they are
            pairs = sum(reader.rows.total for reader in self._readers)
            self.steps_per_epoch = pairs / (config.lanes * config.lane_pairs)
        self._vocabulary = corpora[0].vocabulary
        shares_V = starts_V = None
        if config.rare_token_alpha:
            counts = [corpus.token_counts() for corpus in corpora]
            parts = [
                weight * count_V / count_V.sum()
                for weight, count_V in zip(weights, counts, strict=True)
            ]
            shares_V = np.sum(parts, axis=0) / sum(weights)
        if config.whole_words:
            starts_V = word_starts(Tokenizer.load(corpora[0].tokenizer().local()))
        probability_V = prediction_probabilities(self._vocabulary, config, shares_V)
        self._masker = Masker(probability_V, self._vocabulary.mask, starts_V)

    def start(self, cursors: Sequence[LaneCursor] = ()) -> Generator[tuple[StepBatch, LaneCursor]]:
        """(the batch of a step, the cursor after it) for ever, prepared in a thread of their own.

        `cursors`: those of all workers of the run that saved them, of any number; none: from the beginning.
        Raises BadInput if they have another number of lanes.
        """
        walk = self._walk(self._positions(cursors))
        return map_prefetched(
            next, itertools.repeat(walk), threads=1, most_waiting=_STEPS_AHEAD + 1
        )

    def _positions(self, cursors: Sequence[LaneCursor]) -> dict[int, LanePosition]:
        count = self._config.lanes
        beginning = LanePosition(micro_batches=0, corpora=[[0, 0, 0] for _ in self._readers])
        saved = {int(lane): position for cursor in cursors for lane, position in cursor.items()}
        if not saved:
            return dict.fromkeys(self.lanes, beginning)
        if sorted(saved) != list(range(count)):
            raise BadInput(f"the checkpoint has {len(saved)} micro-batches in a step, this run {count}; "
                           "pretrain.batch_tokens and pretrain.micro_batch_tokens have to stay")  # fmt: skip
        return {lane: saved[lane] for lane in self.lanes}

    def _walk(self, positions: dict[int, LanePosition]) -> Iterator[tuple[StepBatch, LaneCursor]]:
        thread = ThreadPoolExecutor(1, thread_name_prefix="windows")
        corpora = {lane: list(position["corpora"]) for lane, position in positions.items()}
        streams = {
            lane: [
                reader.micro_batches(lane, position, thread)
                for reader, position in zip(self._readers, corpora[lane], strict=True)
            ]
            for lane in self.lanes
        }
        try:
            for step in itertools.count(positions[self.lanes[0]]["micro_batches"]):
                batches = list[MicroBatch]()
                for lane in self.lanes:
                    number = self._draw_corpus(lane, step)
                    pairs, rows_B, corpora[lane][number] = next(streams[lane][number])
                    batch = self._micro_batch(pairs, rows_B, step)
                    batches.append(batch.pin() if torch.cuda.is_available() else batch)
                cursor = {
                    str(lane): LanePosition(micro_batches=step + 1, corpora=list(corpora[lane]))
                    for lane in self.lanes
                }
                yield StepBatch(step, self.lanes, batches), cursor
        finally:
            thread.shutdown(wait=False, cancel_futures=True)

    def _draw_corpus(self, lane: int, step: int) -> int:
        """Which corpus a lane's micro-batch comes from."""
        drawn = uniform(key_of(_MIX, self._seed, lane, step))[0]
        place = int(np.searchsorted(self._shares, drawn, side="right"))
        return min(place, len(self._readers) - 1)

    def _micro_batch(self, pairs: Pairs, rows_B: Ints, step: int) -> MicroBatch:
        """The micro-batch of a step."""
        config, keys, is_next_B, answer_keys_BS = self._config, pairs.keys_R[rows_B], None, None
        if config.single_texts:
            ids_BT, lengths_B = layout_single_texts(pairs, rows_B, self._vocabulary)
            second_start_B = np.ones_like(lengths_B)  # of a word; there is no second text
            keys = np.concatenate([keys, derive_keys(keys, _RESPONSE_MASKS)])
            keys_SB = [texts.fingerprints(rows_B) for texts in (pairs.contexts, pairs.seconds)]
            answer_keys_BS = torch.from_numpy(np.stack(keys_SB, axis=1).view(np.int64))
        else:
            ids_BT, lengths_B, second_start_B = layout(pairs, rows_B, self._vocabulary)
            if config.predicts_next(step):
                is_next_B = torch.from_numpy(pairs.is_next_R[rows_B])
        predicted_N = labels_N = None
        if config.predicts_tokens(step):
            ids_BT, *predictions = self._masker.mask_pairs(ids_BT, lengths_B, second_start_B, keys)
            predicted_N, labels_N = map(torch.from_numpy, predictions)
        places_T = np.arange(ids_BT.shape[1])
        mask_BT = places_T < lengths_B[:, None]
        segments_BT = None
        if not config.single_texts:
            is_second_BT = mask_BT & (places_T >= second_start_B[:, None])
            segments_BT = torch.from_numpy(is_second_BT.astype(np.int64))
        tokens = Tokens(
            torch.from_numpy(ids_BT),
            torch.from_numpy(mask_BT),
            tuple(lengths_B.tolist()),
            segments_BT,
        )
        return MicroBatch(tokens, predicted_N, labels_N, is_next_B, answer_keys_BS)

    def validation(self) -> list[MicroBatch]:
        """The fixed micro-batches of the valid splits.

        At most `valid_examples`, shared out by weight over the corpora that have a valid split, drawn at
        random from it. An alternating run validates each pair twice: with masks, and without masks for the
        next utterance. [] if no corpus has a valid split.
        """
        config = self._config
        weight_of = {
            number: weight
            for number, weight in enumerate(self._weights)
            if self._corpora[number].artifact.paths("valid/", ".parquet")
        }
        batches = list[MicroBatch]()
        for number, weight in weight_of.items():
            count = max(1, int(config.valid_examples * weight / sum(weight_of.values())))
            pairs = _sample_valid_pairs(self._corpora[number], number, count, config, self._seed)
            rng = np.random.default_rng([self._seed, number])
            for rows_B in cut_pairs(pairs, config, rng):
                for step in (0, 1) if config.objective == "alternate" else (0,):
                    batches.append(self._micro_batch(pairs, rows_B, step))
        return batches
