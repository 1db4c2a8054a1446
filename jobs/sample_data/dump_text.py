"""Texts without meaning, as fast as they can be compressed: what Reddit's bodies look like as bytes.

A body is a row of tokens drawn from one table: a word with what follows it ("word ", "Word.\\n\\n"),
a quoted line, or a whole notice such as "[deleted]". The table holds each token as it stands inside a
JSON string, with `\\u00e9` and with raw UTF-8. So a body is written by one `take` of Arrow strings,
and bodies are slices of its buffer.
"""

from __future__ import annotations

import functools
import itertools
import json
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.arrays import Bools, Ints

WORDS = 20_000
# Characters of a body: log-normal, median 90, mean 90 exp(1.13² / 2) = 170.
_MEDIAN_CHARACTERS = 90
_SIGMA = 1.13
_CHARACTERS_PER_WORD = 6.4
_MOST_WORDS = 1_500  # Reddit's bound is 10,000 characters
_QUOTES = 1_000
_QUOTE_SHARE = 0.03

_NOTICES = {
    "[deleted]": 0.055,
    "[removed]": 0.01,
    "Your submission has been automatically removed.\n\n*I am a bot, and this action was performed "
    "automatically. Please [contact the moderators](/message/compose/) if you have any questions.*": 0.004,
    'Hi! Please read the [rules](/wiki/rules) before you post:\n\n* no "memes"\n* be kind\n\n*I am a '
    "bot, and this action was performed automatically.*": 0.003,
}
DELETED, REMOVED, *_BOT = range(len(_NOTICES))

# What follows a word within a text, by share, and at a text's end.
_WITHIN = {" ": 0.85, ", ": 0.06, ". ": 0.05, "? ": 0.01, "! ": 0.01, "\n\n": 0.005, ".\n\n": 0.015}
_AT_END = {".": 0.7, "": 0.15, "?": 0.08, "!": 0.07}
_FOLLOWING = (*_WITHIN, *_AT_END)
_ENDS_SENTENCE = np.array([end.strip(" ") not in ("", ",") for end in _FOLLOWING])

_COMMON = """
the to a i and of that it is you in for this not have be on but are with my was as if they
so just do like at or can what one me all would your he more about there from no when an people get out
up we how don't think them know some it's who will their time by really good because has even i'm make
than see only other had could then want any much go their she way his why which most should now been
also that's too work where never something you're those her did him well got very thing can't over same
into need lot say right game still actually first things being use after were take back us going years
sure someone better year doesn't sound new these two anything every before long money best point little
around always love look off feel another didn't maybe though life pretty great probably here
down find day try part person bad fact real give made same old since without yeah"""
_SYLLABLES = """
ba be bi bo bra can cel com con da de den dis do ed el en er es ex fer fi fo gan ge gra ha
hel il im in ing is ka ken ki la lan le li lo lu ma men mi mon na ne ni no nor o on or pa per pla po pre
pro ra re ri ro sa se ser shi si so sta ster su ta te ter ti tion to tra tu un ur va ven vi wa wor za"""
# Every 60th word is none: 0.8 % of a text's words, so one body in five holds some.
_ODD_EVERY = 60
_ODD = (
    "caf\u00e9", "na\u00efve", "{a}\u00e9", "\u00fc{a}", "{a}\u2019s", "\u201c{a}\u201d", "\U0001f602",
    "\U0001f44d\U0001f3fd", "\u2764\ufe0f", "\u6771\u4eac", "\u043f\u0440\u0438\u0432\u0435\u0442",
    '"{a}"', '"{a} {b}"', "C:\\{a}\\{b}.txt", "\u00af\\\\_(\u30c4)_/\u00af", "*{a}*", "**{a} {b}**",
    "[{a} {b}](http://www.{b}.com/{a}_{n})", "http://www.{a}.com/{b}?id={n}", "/r/{a}", "u/{a}_{b}",
    "/u/{a}{n}", "{a}.{b}@example.org", "{n}", "{n},000", "{n}%", "$\t{n}", "&lt;{a}&gt; &amp; {b}",
)  # fmt: skip


class Bodies(NamedTuple):
    """Texts as they stand between the quotes of `"body":"…"`, and the kind of their author."""

    texts: pa.Array
    deleted: Bools
    by_bot: Bools


def bodies(rng: np.random.Generator, rows: int) -> Bodies:
    """Half of the texts are escaped to ASCII, half are raw UTF-8."""
    table = _table()
    notice = np.searchsorted(np.cumsum([*_NOTICES.values()]), rng.random(rows), side="right")
    is_notice = notice < len(_NOTICES)
    is_quoting = ~is_notice & (rng.random(rows) < _QUOTE_SHARE)
    characters = rng.lognormal(np.log(_MEDIAN_CHARACTERS), _SIGMA, rows)
    words = np.clip(np.rint(characters / _CHARACTERS_PER_WORD), 1, _MOST_WORDS).astype(np.int64)
    length = np.where(is_notice, 1, words + is_quoting)
    end = np.cumsum(length)
    first, last = end - length, end - 1

    following = draw(rng, _endings(within=True), end[-1])
    following[last] = draw(rng, _endings(within=False), rows)
    capital = np.empty(len(following), bool)
    capital[1:] = _ENDS_SENTENCE[following[:-1]]
    capital[first] = True
    capital[first[is_quoting] + 1] = True
    token = draw(rng, _zipf(WORDS), end[-1]) + WORDS * (following + len(_FOLLOWING) * capital)
    token[first[is_quoting]] = table.quotes + rng.integers(0, _QUOTES, is_quoting.sum())
    token[first[is_notice]] = table.notices + notice[is_notice]
    token += np.repeat(rng.integers(0, 2, rows) * table.half, length)

    tokens = table.tokens.take(pa.array(token))
    offsets = np.frombuffer(tokens.buffers()[1], np.int32)[np.concatenate([[0], end])]
    texts = pa.Array.from_buffers(
        pa.string(), rows, [None, pa.py_buffer(offsets), tokens.buffers()[2]]
    )
    return Bodies(texts, notice == DELETED, np.isin(notice, _BOT))


def draw(rng: np.random.Generator, quantiles: Ints, count: int) -> Ints:
    """Numbers by the quantiles of their distribution: a look-up each, whatever it is."""
    numbers: Ints = quantiles[rng.integers(0, len(quantiles), count, dtype=np.uint32)]
    return numbers


@functools.cache
def _zipf(count: int) -> Ints:
    """Number r with a probability in proportion to 1 / (r + 3), as words in a language."""
    return quantiles(1 / (np.arange(count) + 3), 1 << 18)


def quantiles(weights: np.ndarray[tuple[int], np.dtype[np.float64]], count: int) -> Ints:
    shares = np.cumsum(weights) / np.sum(weights)
    return np.searchsorted(shares, (np.arange(count) + 0.5) / count).astype(np.int64)


@functools.cache
def _endings(within: bool) -> Ints:
    shares = _WITHIN if within else _AT_END
    numbers = quantiles(np.array([*shares.values()]), 1 << 10)
    return numbers if within else numbers + len(_WITHIN)


class _Table(NamedTuple):
    """Tokens: words × what follows × small or capital, then quotes, then notices; all that twice."""

    tokens: pa.Array
    quotes: int
    notices: int
    half: int


@functools.cache
def _table() -> _Table:
    words = vocabulary()
    cased = [*words, *(word[:1].upper() + word[1:] for word in words)]
    rng = np.random.default_rng(1)
    lines = [
        " ".join(words[place] for place in draw(rng, _zipf(WORDS), 12)) for _ in range(_QUOTES)
    ]
    quotes = [f"&gt; {line[:1].upper()}{line[1:]}.\n\n" for line in lines]
    halves = []
    for ascii_only in (True, False):
        escaped = [pa.array(_escape(texts, ascii_only)) for texts in (cased, _FOLLOWING)]
        case, following, word = np.indices((2, len(_FOLLOWING), WORDS)).reshape(3, -1)
        halves += [
            pc.binary_join_element_wise(
                escaped[0].take(pa.array(word + WORDS * case)),
                escaped[1].take(pa.array(following)),
                "",
            ),
            pa.array(_escape([*quotes, *_NOTICES], ascii_only)),
        ]
    tokens = pa.concat_arrays(halves)
    first_quote = len(halves[0])
    return _Table(tokens, first_quote, first_quote + _QUOTES, len(tokens) // 2)


def _escape(texts: list[str] | tuple[str, ...], ascii_only: bool) -> list[str]:
    return [json.dumps(text, ensure_ascii=ascii_only)[1:-1] for text in texts]


@functools.cache
def vocabulary() -> list[str]:
    """`WORDS` words, the most frequent first: common ones, then made-up ones, the longer the rarer."""
    rng = np.random.default_rng(0)
    words = list(dict.fromkeys(_COMMON.split()))
    syllables, odd_words, known_words = _SYLLABLES.split(), itertools.cycle(_ODD), set(words)
    while len(words) < WORDS:
        if len(words) % _ODD_EVERY == 0:
            a, b = (words[place] for place in rng.integers(100, len(words), 2))
            words.append(next(odd_words).format(a=a, b=b, n=rng.integers(2, 2000)))
            continue
        count = rng.integers(2, 4 + len(words) // 4000)
        word = "".join(syllables[place] for place in rng.integers(0, len(syllables), count))
        if word not in known_words:
            known_words.add(word)
            words.append(word)
    return words
