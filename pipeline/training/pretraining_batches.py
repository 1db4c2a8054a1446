"""The batches of pre-training: the global batch of step n follows from (seed, n), on any number of workers.

A run has a fixed number of lanes, and a step is one micro-batch of each. Lane s reads the s-th contiguous
piece of each epoch's order of files and row groups, in windows of rows; the pairs of a window are shuffled
and divided into micro-batches of a fixed number of tokens, by length (pair_windows.cut_pairs). Of W
workers, worker r serves the lanes s with s % W == r. So the micro-batches of a step, and with them the sum
of their gradients, are the same for 1, 2 or 32 workers, and a run may go on with another number of workers.

With several corpora each lane reads each of them, with a position of its own; from which one its k-th
micro-batch comes is drawn by weight from (seed, lane, k).

B pairs of a micro-batch, T tokens of its longest, N predicted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from pipeline.arrays import Floats, Ints
from pipeline.config import BadInput, require
from pipeline.models.tokens import Tokenizer, Tokens
from pipeline.training import utterance_pairs
from pipeline.training.data import prefetch
from pipeline.training.pair_windows import (
    WindowReader,
    WindowStream,
    cut_pairs,
    require_text_lengths,
    sample_valid_pairs,
)
from pipeline.training.settings import PretrainConfig
from pipeline.training.token_masking import (
    Masker,
    derive_keys,
    prediction_probabilities,
    token_shares,
    uniform,
    word_starts,
)
from pipeline.training.tokenized_corpus import TokenizedCorpus, Vocabulary
from pipeline.training.utterance_pairs import Pairs

_STEPS_AHEAD = 2
_MIX = 1 << 20  # what a hash decides: the corpus of a micro-batch
_RESPONSE_MASKS = 1 << 21  # a response's masks, where it is a row of its own


class LanePosition(TypedDict):
    """The next micro-batch of a lane; JSON-ready."""

    micro_batches: int
    """How many it has given: the number of the step."""
    corpora: list[list[int]]
    """(epoch, window, micro-batch in it) of the next one of each corpus."""


LaneCursor = dict[str, LanePosition]
"""The positions of a worker's lanes, by the lane's number; JSON-ready."""


@dataclass(frozen=True)
class MicroBatch:
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

    def to(self, device: torch.device) -> MicroBatch:
        """The batch on a device; from pinned memory the copy does not wait."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> MicroBatch:
        """The batch in pinned memory, from which a copy to a GPU does not wait."""
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        _, *tensors = self.model_inputs
        changed = (None if tensor is None else change(tensor) for tensor in tensors)
        return MicroBatch(self.tokens.map_tensors(change), *changed)


@dataclass(frozen=True)
class StepBatch:
    """One worker's micro-batches of a step, with the numbers of their lanes."""

    step: int
    lanes: tuple[int, ...]
    parts: list[MicroBatch]

    def to(self, device: torch.device) -> StepBatch:
        """The batch on a device."""
        return StepBatch(self.step, self.lanes, [part.to(device) for part in self.parts])


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
        masks = config.predicts_tokens(step=0)
        shares_V = token_shares(corpora, weights) if masks and config.rare_token_alpha else None
        starts_V = None
        if masks and config.whole_words:
            starts_V = word_starts(Tokenizer.load(corpora[0].tokenizer().local()))
        probability_V = prediction_probabilities(vocabulary, config, shares_V)
        return cls(vocabulary, Masker(probability_V, vocabulary.mask, starts_V), config)

    def micro_batch(self, pairs: Pairs, rows_B: Ints, step: int) -> MicroBatch:
        """The micro-batch of a step."""
        config, keys, is_next_B, answer_keys_BS = self.config, pairs.keys_R[rows_B], None, None
        if config.single_texts:
            ids_BT, lengths_B = utterance_pairs.layout_single_texts(pairs, rows_B, self.vocabulary)
            second_start_B = np.ones_like(lengths_B)  # of a word; there is no second text
            keys = np.concatenate([keys, derive_keys(keys, _RESPONSE_MASKS)])
            answer_keys_BS = torch.from_numpy(pairs.fingerprints(rows_B).view(np.int64))
        else:
            ids_BT, lengths_B, second_start_B = utterance_pairs.layout(
                pairs, rows_B, self.vocabulary
            )
            if config.predicts_next(step):
                is_next_B = torch.from_numpy(pairs.is_next_R[rows_B])
        predicted_N = labels_N = None
        if config.predicts_tokens(step):
            ids_BT, *predictions = self.masker.mask_pairs(ids_BT, lengths_B, second_start_B, keys)
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


@dataclass(frozen=True)
class PretrainingBatches:
    """One worker's micro-batches of each step."""

    readers: tuple[WindowReader, ...]
    shares: Floats
    """Cumulative weights of the corpora."""
    collator: _Collator
    lanes: tuple[int, ...]
    """The lanes of this worker."""
    seed: int
    steps_per_epoch: float
    """Steps in which as many tokens, or pairs of single texts, are read as the corpora have."""

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
        """The batches of one worker. Raises BadInput for more workers than lanes, corpora of different
        tokenizers, weights that are not one positive number per corpus, and a corpus that is too small or
        whose texts were truncated too short."""
        require(world <= config.lanes, "resources.workers", world,
                f"at most {config.lanes}, the micro-batches of a step "
                "(pretrain.batch_tokens / pretrain.micro_batch_tokens)")  # fmt: skip
        _check(corpora, weights)
        readers = tuple(
            WindowReader.of(corpus, number, config, seed) for number, corpus in enumerate(corpora)
        )
        shares = np.cumsum(weights) / np.sum(weights)
        lanes = tuple(range(rank, config.lanes, world))
        steps_per_epoch = sum(corpus.train_tokens for corpus in corpora) / config.batch_tokens
        if config.single_texts:  # a step has so many pairs, however short they are
            pairs = sum(reader.rows.total for reader in readers)
            steps_per_epoch = pairs / (config.lanes * config.lane_pairs)
        collator = _Collator.of(corpora, weights, config)
        return cls(readers, shares, collator, lanes, seed, steps_per_epoch)

    def start(self, cursors: Sequence[LaneCursor] = ()) -> Generator[tuple[StepBatch, LaneCursor]]:
        """(the batch of a step, the cursor after it) for ever, prepared in a thread of their own.

        `cursors`: those of all workers of the run that saved them, of any number; none: from the beginning.
        Raises BadInput if they have another number of lanes.
        """
        return prefetch(self._walk(self._positions(cursors)), depth=_STEPS_AHEAD)

    def _positions(self, cursors: Sequence[LaneCursor]) -> dict[int, LanePosition]:
        count = self.collator.config.lanes
        beginning = LanePosition(micro_batches=0, corpora=[[0, 0, 0] for _ in self.readers])
        saved = {int(lane): position for cursor in cursors for lane, position in cursor.items()}
        if not saved:
            return dict.fromkeys(self.lanes, beginning)
        if sorted(saved) != list(range(count)):
            raise BadInput(f"the checkpoint has {len(saved)} micro-batches in a step, this run {count}; "
                           "pretrain.batch_tokens and pretrain.micro_batch_tokens have to stay")  # fmt: skip
        if len({position["micro_batches"] for position in saved.values()}) != 1:
            raise BadInput(
                "the checkpoint has cursors of several steps; resume from a whole checkpoint"
            )
        for position in saved.values():
            if len(position["corpora"]) != len(self.readers):
                raise BadInput(f"the checkpoint has {len(position['corpora'])} corpora, this run "
                               f"{len(self.readers)}; resume with the same ones")  # fmt: skip
        return {lane: saved[lane] for lane in self.lanes}

    def _walk(self, positions: dict[int, LanePosition]) -> Iterator[tuple[StepBatch, LaneCursor]]:
        threads = ThreadPoolExecutor(1, thread_name_prefix="windows")
        try:
            streams = {
                lane: [
                    WindowStream(reader, lane, lane_position, threads)
                    for reader, lane_position in zip(self.readers, position["corpora"], strict=True)
                ]
                for lane, position in positions.items()
            }
            step = next(iter(positions.values()))["micro_batches"]
            while True:
                batches = [
                    self._micro_batch(*streams[lane][self._draw_corpus(lane, step)].next(), step)
                    for lane in self.lanes
                ]
                cursor = {
                    str(lane): LanePosition(
                        micro_batches=step + 1,
                        corpora=[stream.position for stream in streams[lane]],
                    )
                    for lane in self.lanes
                }
                yield StepBatch(step, self.lanes, batches), cursor
                step += 1
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _draw_corpus(self, lane: int, step: int) -> int:
        """Which corpus a lane's micro-batch comes from."""
        key = np.zeros(1, np.uint64)
        for number in (_MIX, self.seed, lane, step):
            key = derive_keys(key, number)
        place = int(np.searchsorted(self.shares, uniform(key)[0], side="right"))
        return min(place, len(self.readers) - 1)

    def _micro_batch(self, pairs: Pairs, rows_B: Ints, step: int) -> MicroBatch:
        batch = self.collator.micro_batch(pairs, rows_B, step)
        return batch.pin() if torch.cuda.is_available() else batch


def _check(corpora: Sequence[TokenizedCorpus], weights: Sequence[float]) -> None:
    require(len(corpora) >= 1, "corpora", "none", "one or more")
    require(len(weights) == len(corpora) and min(weights) > 0, "weights", tuple(weights),
            f"{len(corpora)} numbers above 0, one for each corpus")  # fmt: skip
    for corpus in corpora[1:]:
        if corpus.tokenizer_version != corpora[0].tokenizer_version:
            raise BadInput(f"{corpus.artifact.uri}: tokenized with another tokenizer than "
                           f"{corpora[0].artifact.uri}")  # fmt: skip


def validation_batches(
    corpora: Sequence[TokenizedCorpus],
    weights: Sequence[float],
    config: PretrainConfig,
    seed: int,
) -> list[MicroBatch]:
    """The fixed micro-batches of the valid splits.

    At most `valid_examples`, shared out by weight over the corpora that have a valid split, drawn at random
    from it. An alternating run validates each pair twice: with masks, and without masks for the next
    utterance. [] if no corpus has a valid split.
    """
    _check(corpora, weights)
    collator = _Collator.of(corpora, weights, config)
    valid_corpora = [
        (number, corpus, weight)
        for number, (corpus, weight) in enumerate(zip(corpora, weights, strict=True))
        if corpus.artifact.paths("valid/", ".parquet")
    ]
    total = sum(weight for *_, weight in valid_corpora)
    batches = list[MicroBatch]()
    for number, corpus, weight in valid_corpora:
        require_text_lengths(corpus, config)
        count = max(1, int(config.valid_examples * weight / total))
        pairs = sample_valid_pairs(corpus, number, count, config, seed)
        rng = np.random.default_rng([seed, number])
        for rows_B in cut_pairs(pairs, config, rng):
            for step in (0, 1) if config.objective == "alternate" else (0,):
                batches.append(collator.micro_batch(pairs, rows_B, step))
    return batches
