"""Pairs (context, next utterance) of a window of examples; a share may have the response of another example.

R rows of a window, F flat tokens, B pairs of a micro-batch, T tokens of its longest pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipeline.arrays import Bools, Ints, Keys
from pipeline.training.settings import PretrainConfig
from pipeline.training.token_masking import derive_keys, hash_keys, uniform
from pipeline.training.tokenized_corpus import Vocabulary

_SWAP_DRAW, _RESPONSE_DRAW = 3, 4  # the numbers of hash draws; token_masking has 1 and 2
_DRAWS = 16  # of another response, until it differs from the true one
_TOKEN, _PLACE = np.uint64(0xD1342543DE82EF95), np.uint64(0x9E3779B97F4A7C15)


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
        keys = hash_keys(
            tokens.astype(np.uint64) * _TOKEN + (places + 1).astype(np.uint64) * _PLACE
        )
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(keys, dtype=np.uint64)])
        fingerprints: Keys = sums[ends] - sums[ends - lengths]
        return fingerprints


@dataclass(frozen=True)
class Pairs:
    """Contexts and second texts of a window, truncated to their lengths."""

    ids_F: Ints
    context_starts_R: Ints
    context_lengths_R: Ints
    second_starts_R: Ints
    second_lengths_R: Ints
    is_next_R: Bools
    keys_R: Keys
    """The keys of the examples in this epoch."""

    @property
    def lengths(self) -> Ints:
        """Tokens of each pair, int64 [R]: [CLS] context [SEP] response [SEP]."""
        total: Ints = self.context_lengths_R + self.second_lengths_R + 3
        return total

    def fingerprints(self, rows: Ints) -> Keys:
        """Fingerprints of contexts and second texts, uint64 [R, 2]; equal texts have equal ones."""
        contexts = Texts(self.ids_F, self.context_starts_R, self.context_lengths_R)
        seconds = Texts(self.ids_F, self.second_starts_R, self.second_lengths_R)
        return np.stack([contexts.fingerprints(rows), seconds.fingerprints(rows)], axis=1)


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
    second_starts_R = responses.starts_R + len(contexts.ids_F)
    second_lengths_R = responses.lengths_R.copy()
    id_arrays = [contexts.ids_F, responses.ids_F]
    if pool is not None:
        offset = len(contexts.ids_F) + len(responses.ids_F)
        second_starts_R[is_swapped_R] = pool.starts_R[other_row_R[is_swapped_R]] + offset
        second_lengths_R[is_swapped_R] = pool.lengths_R[other_row_R[is_swapped_R]]
        id_arrays.append(pool.ids_F)
    return Pairs(
        np.concatenate(id_arrays),
        contexts.starts_R,
        contexts.lengths_R,
        second_starts_R,
        second_lengths_R,
        ~is_swapped_R,
        keys_R,
    )


def cut(lengths_R: Ints, tokens: int, rng: np.random.Generator) -> list[Ints]:
    """Rows of micro-batches of similar length: `tokens` at most, padding included, in random order.

    Raises ValueError if a row has more tokens than that.
    """
    order_R = rng.permutation(len(lengths_R))
    order_R = order_R[np.argsort(lengths_R[order_R], kind="stable")]
    sorted_R = lengths_R[order_R]
    if len(sorted_R) and sorted_R[-1] > tokens:
        raise ValueError(f"a pair has {sorted_R[-1]} tokens, a micro-batch {tokens}")
    batches, start = list[Ints](), 0
    while start < len(sorted_R):
        # The longest is the last: no more rows than fit at the first one's length.
        sizes = sorted_R[start : start + tokens // int(sorted_R[start])]
        row_count = np.searchsorted(sizes * np.arange(1, len(sizes) + 1), tokens, side="right")
        batches.append(order_R[start : start + row_count])
        start += int(row_count)
    return [batches[number] for number in rng.permutation(len(batches))]


def layout(pairs: Pairs, rows_B: Ints, vocabulary: Vocabulary) -> tuple[Ints, Ints, Ints]:
    """(ids_BT, lengths_B, second_start_B: the second text's place) of [CLS] context [SEP] response [SEP]."""
    context_length_B = pairs.context_lengths_R[rows_B]
    second_length_B = pairs.second_lengths_R[rows_B]
    lengths_B = context_length_B + second_length_B + 3
    places_T = np.arange(lengths_B.max())
    ends_B = context_length_B + 1
    from_context_B = pairs.context_starts_R[rows_B] - 1
    from_second_B = pairs.second_starts_R[rows_B] - ends_B - 1
    source_BT = places_T + np.where(
        places_T <= context_length_B[:, None], from_context_B[:, None], from_second_B[:, None]
    )
    ids_BT: Ints = pairs.ids_F.take(source_BT, mode="clip").astype(np.int64)
    ids_BT[places_T >= lengths_B[:, None]] = vocabulary.pad
    number_B = np.arange(len(rows_B))
    ids_BT[:, 0] = vocabulary.cls
    ids_BT[number_B, ends_B] = vocabulary.sep
    ids_BT[number_B, lengths_B - 1] = vocabulary.sep
    return ids_BT, lengths_B, ends_B + 1


def layout_single_texts(pairs: Pairs, rows_B: Ints, vocabulary: Vocabulary) -> tuple[Ints, Ints]:
    """(ids [2B, T], lengths [2B]) of B rows [CLS] context [SEP] and then B rows [CLS] response [SEP]."""
    starts = np.concatenate([pairs.context_starts_R[rows_B], pairs.second_starts_R[rows_B]])
    text_lengths = np.concatenate([pairs.context_lengths_R[rows_B], pairs.second_lengths_R[rows_B]])
    lengths = text_lengths + 2
    places_T = np.arange(lengths.max())
    ids: Ints = pairs.ids_F.take(starts[:, None] + places_T - 1, mode="clip").astype(np.int64)
    ids[places_T >= lengths[:, None]] = vocabulary.pad
    ids[:, 0] = vocabulary.cls
    ids[np.arange(len(ids)), lengths - 1] = vocabulary.sep
    return ids, lengths


def keep(config: PretrainConfig) -> tuple[int, int]:
    """Tokens of a context and of a response that are kept, special tokens not counted."""
    return config.max_context_tokens - 2, config.max_response_tokens - 2
