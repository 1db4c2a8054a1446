"""Texts to 64-bit hashes of words, characters and n-grams, with no Python loop over any of them.

A sequence x₀ … xₖ₋₁ hashes to mix(Σ xᵢ Bⁱ mod 2⁶⁴), the polynomial of Rabin and Karp. One prefix sum
over all sequences gives each by a difference, shifted back to B⁰ by a power of B's inverse, which an
odd B has. The same function makes bytes to words, words to n-grams and words to whole texts.

64 bits: among 3·10⁸ texts some 0.002 pairs are expected to collide. A text made up for it collides
(Thue-Morse, 2,048 letters); real ones don't.
"""

from __future__ import annotations

import functools
import unicodedata
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.arrays import GOLDEN, Ints, mix

Hashes = np.ndarray[Any, np.dtype[np.uint64]]

_BASE = 0xD1342543DE82EF95  # odd, and 5 mod 8: B - 1 has few factors 2, so swaps keep their bits


def random_hashes(count: int, stream: int) -> Hashes:
    """SplitMix64's numbers: the same on every machine and with every version of numpy."""
    start = stream << 32
    return mix(np.arange(start, start + count, dtype=np.uint64) * GOLDEN)


# A separator is white space, punctuation or a control character (Unicode's Z, P and C); letters,
# digits, marks and symbols, emoji among them, make words. ASCII is decided and lower-cased here, byte
# by byte; other separators are spaces by then, so what is left beyond ASCII is part of a word.
_BYTE = random_hashes(256, stream=1)
_LOWER = _BYTE[[ord(chr(c).lower()) if c < 128 else c for c in range(256)]]
_IN_WORD = np.array([c > 127 or unicodedata.category(chr(c))[0] not in "ZPC" for c in range(256)])
_SPACE = _BYTE[ord(" ")]


@dataclass(frozen=True)
class Tokens:
    """The hashes of N texts' words, characters or n-grams: text i's are those from offset i to i+1."""

    hashes: Hashes
    offsets: Ints
    """[N + 1]"""

    @property
    def counts(self) -> Ints:
        return np.diff(self.offsets)

    def joined(self, offsets: Ints) -> Tokens:
        """Lists of texts as texts: list i is made of the texts from offset i to i+1."""
        return Tokens(self.hashes, self.offsets[offsets])

    def sequence_hashes(self) -> Hashes:
        """[N] One hash of each text: equal for the same tokens in the same order, 0 for none."""
        return segments(self.hashes, self.offsets[:-1], self.offsets[1:])


def segments(values: Hashes, starts: Ints, ends: Ints) -> Hashes:
    """The hash of values[start:end] for each start and end, wherever it lies; 0 for an empty one."""
    powers, inverse_powers = _powers(len(values).bit_length())
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values * powers[: len(values)], out=sums[1:])
    return mix((sums[ends] - sums[starts]) * inverse_powers[starts])


def row_hashes(rows: Hashes) -> Hashes:
    """[N] One hash of each row of [N, K] hashes."""
    starts = np.arange(0, rows.size, rows.shape[1])
    return segments(rows.ravel(), starts, starts + rows.shape[1])


def bucket_of_hash(hashes: Hashes, buckets: int) -> Ints:
    """[N] The bucket of each hash."""
    return (hashes % np.uint64(buckets)).astype(np.int64)


def text_hashes(texts: pa.Array) -> Hashes:
    """[N] One hash of each text's bytes, as they are."""
    data, offsets = _bytes(texts)
    return segments(_BYTE[data], offsets[:-1], offsets[1:])


def whole_texts(texts: pa.Array) -> Tokens:
    """Each text as one token: its bytes, as they are."""
    return Tokens(text_hashes(texts), np.arange(len(texts) + 1))


def words(texts: pa.Array) -> Tokens:
    """The words of texts: normalised as NFKC does, lower-cased, apart at runs of separators."""
    data, offsets = _bytes(_normalise(texts))
    starts, ends = _word_borders(data, offsets)
    return Tokens(segments(_LOWER[data], starts, ends), np.searchsorted(starts, offsets))


def characters(texts: pa.Array) -> Tokens:
    """The code points (of NFKD) of the words of texts, each word with one space before it."""
    data, offsets = _bytes(_normalise(texts))
    word_starts, _ = _word_borders(data, offsets)
    starts = np.flatnonzero(_IN_WORD[data] & (data & 0xC0 != 0x80))
    lead = data[starts]
    length = 1 + (lead >= 0xC0).astype(np.int64) + (lead >= 0xE0) + (lead >= 0xF0)
    hashes = segments(_LOWER[data], starts, starts + length)
    hashes = np.insert(hashes, np.searchsorted(starts, word_starts), _SPACE)
    return Tokens(hashes, np.searchsorted(starts, offsets) + np.searchsorted(word_starts, offsets))


def ngrams(tokens: Tokens, n: int, min_tokens: int = 1) -> Tokens:
    """All runs of n tokens. A shorter text is one run, if it has `min_tokens` tokens at least."""
    size = tokens.counts
    counts = np.where(size >= n, size - n + 1, (size >= min_tokens) & (size > 0))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    starts = np.arange(offsets[-1]) + np.repeat(tokens.offsets[:-1] - offsets[:-1], counts)
    ends = np.minimum(starts + n, np.repeat(tokens.offsets[1:], counts))
    return Tokens(segments(tokens.hashes, starts, ends), offsets)


def concatenate(left: Tokens, right: Tokens) -> Tokens:
    """Each text's tokens of `left`, then those of `right`."""
    hashes = np.empty(len(left.hashes) + len(right.hashes), np.uint64)
    for tokens, other_offsets in ((left, right.offsets[:-1]), (right, left.offsets[1:])):
        hashes[np.arange(len(tokens.hashes)) + np.repeat(other_offsets, tokens.counts)] = (
            tokens.hashes
        )
    return Tokens(hashes, left.offsets + right.offsets)


def distinct_tokens(tokens: Tokens) -> Tokens:
    """Each text's tokens as a set: sorted, each once."""
    text = np.repeat(np.arange(len(tokens.counts)), tokens.counts)
    places = first_of_each(text, tokens.hashes)
    offsets = np.searchsorted(text[places], np.arange(len(tokens.counts) + 1))
    return Tokens(tokens.hashes[places], offsets)


def first_of_each(*keys: Hashes | Ints) -> Ints:
    """The place of the first row with each combination of keys, in the order of the keys."""
    order = np.lexsort(keys[::-1])
    is_new = np.zeros(len(order), bool)
    is_new[:1] = True
    for key in keys:
        is_new[1:] |= key[order[1:]] != key[order[:-1]]
    return order[is_new]


@functools.lru_cache(maxsize=4)
def _powers(bits: int) -> tuple[Hashes, Hashes]:
    """(B^i, B^-i) modulo 2^64 for i from 0 to 2^bits."""

    def powers(base: int) -> Hashes:
        factors = np.full((1 << bits) + 1, base, np.uint64)
        factors[0] = 1
        return np.cumprod(factors, out=factors)

    return powers(_BASE), powers(pow(_BASE, -1, 1 << 64))


def _normalise(texts: pa.Array) -> pa.Array:
    """Texts beyond ASCII in NFKD and lower case, separators as spaces, invisible marks gone.

    Texts have the same NFKD exactly if they have the same NFKC, which Arrow 25 does not compose.
    """
    mask = pc.invert(pc.string_is_ascii(texts))
    if not pc.any(mask).as_py():
        return texts
    normalised = pc.utf8_normalize(texts.filter(mask), form="NFKD")
    normalised = pc.utf8_normalize(pc.utf8_lower(normalised), form="NFKD")
    normalised = pc.replace_substring_regex(normalised, r"\p{Cf}+", "")
    normalised = pc.replace_substring_regex(normalised, r"[\p{Z}\p{P}\p{Cc}]+", " ")
    return pc.replace_with_mask(texts, mask, normalised)


def _bytes(texts: pa.Array) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], Ints]:
    """(UTF-8 of all texts, [N + 1] where each begins)"""
    texts = pc.fill_null(texts, "").cast(pa.large_string())
    _, offset_buffer, data_buffer = texts.buffers()
    if not len(texts) or data_buffer is None:
        return np.zeros(0, np.uint8), np.zeros(len(texts) + 1, np.int64)
    offsets = np.frombuffer(offset_buffer, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]]
    return data, offsets - offsets[0]


def _word_borders(data: np.ndarray[Any, np.dtype[np.uint8]], offsets: Ints) -> tuple[Ints, Ints]:
    """(where each word begins, where it ends): at separators, and where a text ends."""
    inside = np.concatenate([[False], _IN_WORD[data], [False]])
    begins = inside[1:] & ~inside[:-1]
    ends = inside[:-1] & ~inside[1:]
    begins[offsets] = inside[1:][offsets]
    ends[offsets] = inside[:-1][offsets]
    return np.flatnonzero(begins), np.flatnonzero(ends)
