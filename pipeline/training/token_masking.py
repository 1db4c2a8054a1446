"""Which tokens of pre-training pairs are predicted, and what stands in their place.

All chance is a hash of (seed, corpus, epoch, example's place in the order of the epoch, token's place in
the pair). The order follows from the seed and the epoch. So an example is masked anew in each epoch, and
alike in whichever batch, on whichever worker and after whichever resume it comes.

B pairs, T tokens of the longest pair, N predicted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.arrays import Bools, Floats, Ints, Keys
from pipeline.models.tokens import Tokenizer
from pipeline.training.settings import PretrainConfig
from pipeline.training.tokenized_corpus import TokenizedCorpus, Vocabulary

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASKED, _RANDOM = 0.8, 0.1  # of the predicted tokens; the others stay as they are
_CHOICE, _REPLACEMENT = 1, 2  # what a hash decides


def hash_keys(keys: Keys) -> Keys:
    """The output function of the splitmix64 generator (Steele et al., 2014): well-mixed 64 bits."""
    mixed = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def derive_keys(keys: Keys, numbers: int | Ints) -> Keys:
    """Keys of their own for each number; those of consecutive numbers are independent."""
    counters: Keys = (np.atleast_1d(np.asarray(numbers)) + 1).astype(np.uint64)
    return hash_keys(keys + counters * _GOLDEN)


def example_keys(seed: int, corpus: int, epoch: int, places_R: Ints) -> Keys:
    """One key per example and epoch, uint64 [R]; `places_R` are the examples' places in the
    order of the epoch."""
    keys: Keys = np.zeros(1, np.uint64)
    for number in (seed, corpus, epoch):
        keys = derive_keys(keys, number)
    return derive_keys(keys, places_R)


def uniform(keys: Keys) -> Floats:
    """Numbers in [0, 1) out of the upper 32 bits."""
    numbers: Floats = (keys >> np.uint64(32)) * 2.0**-32
    return numbers


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


def token_shares(corpora: Sequence[TokenizedCorpus], weights: Sequence[float]) -> Floats:
    """The share of each token among those of a mix of corpora, float64 [V]."""
    counts = [corpus.token_counts() for corpus in corpora]
    parts = [
        weight * counts_V / counts_V.sum() for weight, counts_V in zip(weights, counts, strict=True)
    ]
    shares_V: Floats = np.sum(parts, axis=0) / sum(weights)
    return shares_V


def prediction_probabilities(
    vocabulary: Vocabulary, config: PretrainConfig, shares_V: Floats | None
) -> Floats:
    """The probability with which each token is predicted where it stands in a pair, float64 [V].

    `shares_V` is needed for `rare_token_alpha`: a token that the corpora lack, and so every special one,
    is then never predicted (as in XLM), and the others are predicted with a probability proportional to
    share^-alpha, at most 1, whose mean over the corpora is `masked_share`.
    """
    probability_V = np.full(vocabulary.size, config.masked_share)
    if config.rare_token_alpha and shares_V is not None:
        probability_V = _rare_token_probabilities(
            shares_V, config.masked_share, config.rare_token_alpha
        )
    if config.masking == "bert":
        probability_V[list(vocabulary.special)] = 0.0
    return probability_V


def _rare_token_probabilities(shares_V: Floats, mean: float, alpha: float) -> Floats:
    occurs_V = shares_V > 0
    weight_V: Floats = np.zeros_like(shares_V)
    weight_V[occurs_V] = (shares_V[occurs_V] / shares_V.max()) ** -alpha
    factor = mean / (shares_V * weight_V).sum()
    for _ in range(100):  # until those that are always predicted leave the others their part
        probability_V: Floats = np.minimum(1.0, factor * weight_V)
        factor *= mean / (shares_V * probability_V).sum()
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
