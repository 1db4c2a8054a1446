"""ConveRT's tokenizer: subwords of a vocabulary, and hash buckets for all others (reference 5.1).

    "The cat, 😀"  →  The · cat · ", " · 😀         split where words meet punctuation and spaces
                   →  ﹏the ﹏cat ﹏", " ﹏ 😀        greedy longest match, a mark at every beginning
                   →  ids; 😀, which no vocabulary has, is V + fingerprint(😀) mod buckets

The fingerprint is FarmHash's Fingerprint64, TensorFlow's "fast" hash of strings: it chooses the embedding
row of a piece that the vocabulary lacks, so a model and its tokenizer have to agree on every bit of it.
So nothing is ever unknown, and the pad id is V + buckets, the last row of the embedding table. A single
space between two words has no piece: the mark stands for it.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from farmhash import Fingerprint64
from torch import Tensor

from pipeline.config import BadInput
from pipeline.models.tokens import Tokens, pad_rows

VOCABULARY = "vocabulary.json"
MARK = "﹏"
"""U+FE4F, at the beginning of every run of word characters or of others."""
LONGEST_PIECE = 10
"""Characters of a learnt piece at most, with its mark: PolyAI's tokenizer finds no longer ones. Ours finds
those that vocabularies of earlier versions have, as their models were trained with them."""
_LOWER = str.maketrans({chr(code): chr(code + 32) for code in range(ord("A"), ord("Z") + 1)})
_LONGEST_RUN_BYTES = 65_536  # a longer one, its mark included, is one piece that no vocabulary has
# Characters of a run that is one piece: the ids that models were trained with.
_MOST_HASHED = 262_144
_MOST_CHARACTERS_PER_TOKEN = 64  # 60 tokens of a run of 1.5 million characters took a second
_KEPT_RUNS = 1 << 18  # their ids are remembered: Reddit's 262,144 commonest cover 98 % of its runs
_LONGEST_KEPT_RUN = 256  # characters; runs of megabytes would take all memory
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def token_ids(
    texts: Sequence[str], vocabulary: Sequence[str] | Mapping[str, int], buckets: int
) -> tuple[Tensor, Tensor]:
    """(ids [B, T] int64, padded with V + `buckets` at the right; their mask [B, T], false at pads).

    `vocabulary`: V subwords in the order of their ids, or their ids. Texts are not truncated. Reference 5.1.
    """
    subwords = Subwords(vocabulary, buckets)
    ids_BT = pad_rows([subwords.ids(text) for text in texts], subwords.pad).ids_BT
    return ids_BT, ids_BT != subwords.pad


def runs(text: str) -> Iterator[str]:
    """The marked, lower-cased parts that pieces are looked for in; together with one space between
    words they are the text.

    Only the letters A to Z are lower-cased. Symbols, such as "$" or an emoji, are word characters.
    """
    for match in _run_pattern().finditer(text):
        run = match[0]
        if run != " " or match.start() == 0 or match.end() == len(text):
            yield MARK + (run.lower() if run.isascii() else run.translate(_LOWER))


@lru_cache(maxsize=1)
def _run_pattern() -> re.Pattern[str]:
    """Runs of punctuation and separators (Unicode's categories P and Z), and runs of all others."""
    ranges: list[list[int]] = []
    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code))[0] in "PZ":
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    separators = "".join(
        f"{re.escape(chr(first))}-{re.escape(chr(last))}" for first, last in ranges
    )
    return re.compile(f"[{separators}]+|[^{separators}]+")


class Subwords:
    """Ids of pieces; those of whole runs are remembered, unless the run is long."""

    def __init__(self, vocabulary: Sequence[str] | Mapping[str, int], buckets: int) -> None:
        if not isinstance(vocabulary, Mapping):
            vocabulary = {piece: number for number, piece in enumerate(vocabulary)}
        self._id_of_piece = vocabulary
        self._buckets = buckets
        self._longest = max(map(len, vocabulary), default=1)
        self._ids_of_run = lru_cache(_KEPT_RUNS)(lambda run: tuple(self._look_up(run)))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process remembers ids of its own."""
        return Subwords, (self._id_of_piece, self._buckets)

    @property
    def pad(self) -> int:
        return len(self._id_of_piece) + self._buckets

    def ids(self, text: str, limit: int | None = None) -> list[int]:
        """The ids of a text, or its first `limit`; the rest of the text is not read, nor is what lies beyond
        262,144 characters and 64 for each of them."""
        if limit is not None:
            text = text[: max(_MOST_HASHED, limit * _MOST_CHARACTERS_PER_TOKEN)]
        ids = (
            number
            for run in runs(text)
            for number in (
                self._ids_of_run(run) if len(run) <= _LONGEST_KEPT_RUN else self._look_up(run)
            )
        )
        return list(itertools.islice(ids, limit))

    def pieces(self, run: str) -> Iterator[str]:
        """Greedily the longest that the vocabulary has, from the left; else a character."""
        if len(run) * 4 > _LONGEST_RUN_BYTES and len(run.encode()) > _LONGEST_RUN_BYTES:
            yield run
            return
        start = 0
        while start < len(run):
            ends = range(min(len(run), start + self._longest), start + 1, -1)
            end = next((end for end in ends if run[start:end] in self._id_of_piece), start + 1)
            yield run[start:end]
            start = end

    def _look_up(self, run: str) -> Iterator[int]:
        return map(self._id, self.pieces(run))

    def _id(self, piece: str) -> int:
        number = self._id_of_piece.get(piece)
        if number is not None:
            return number
        # A lone surrogate has no UTF-8; it is hashed as the three bytes that it would have.
        encoded = piece[:_MOST_HASHED].encode("utf-8", "surrogatepass")
        fingerprint: int = Fingerprint64(encoded)
        return len(self._id_of_piece) + fingerprint % self._buckets


def join_earlier(turns: Sequence[str], limit: int, numbered: bool) -> str:
    """The `limit` newest of some earlier turns, oldest first, as one text: newest first (reference 5.6).

    numbered: each has "0: ", "1: ", … before it, 0 for the newest, as PolyAI's model for DSTC7 has it.
    """
    newest = list(reversed(turns))[:limit]
    if numbered:
        newest = [f"{number}: {turn}" for number, turn in enumerate(newest)]
    return " ".join(newest)


class ConvertTokenizer:
    """Rows of token ids for contexts and candidates, as `pipeline.models.tokens.RowTokenizer` says.

    A context's row is its newest turn, and where there are earlier ones and the model reads them: the pad
    id, then the earlier turns as `join_earlier` makes one text of them. Both texts keep their first
    tokens, so that of the earlier turns the newest stay. A text without a token is one pad.
    """

    def __init__(
        self, vocabulary: Sequence[str], buckets: int, earlier_turns: int, numbered: bool
    ) -> None:
        self.vocabulary = list(vocabulary)
        self._subwords = Subwords(self.vocabulary, buckets)
        self._earlier, self._numbered = earlier_turns, numbered
        self.pad = self._subwords.pad

    def __len__(self) -> int:
        """Rows of the embedding table: subwords, buckets, and the pad's."""
        return self.pad + 1

    def save(self, folder: Path) -> None:
        save_vocabulary(self.vocabulary, folder)

    def contexts(self, contexts: Sequence[Sequence[str]], max_tokens: int) -> list[list[int]]:
        """One row per context, with at most `max_tokens` of each of its two texts."""
        return [self._context(turns, max_tokens) for turns in contexts]

    def _context(self, turns: Sequence[str], max_tokens: int) -> list[int]:
        *earlier, newest = [turn.strip() for turn in turns if turn.strip()] or [""]
        return self.context_row(
            newest, join_earlier(earlier, self._earlier, self._numbered), max_tokens
        )

    def context_row(self, newest: str, joined: str, max_tokens: int) -> list[int]:
        """A context whose earlier turns are one text already."""
        row = self._subwords.ids(newest, max_tokens)
        if joined:
            return [*row, self.pad, *self._subwords.ids(joined, max_tokens)]
        return row or [self.pad]

    def candidates(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """One row per candidate, at most `max_tokens`; white space at its ends is no part of it, as of a
        turn."""
        return [self._subwords.ids(text.strip(), max_tokens) or [self.pad] for text in texts]

    def batch(self, rows: Sequence[Sequence[int]]) -> Tokens:
        """Pads rows of `contexts` or `candidates`. Segment 1 are the earlier turns of a context."""
        ids_BT, inside_BT, lengths, _ = pad_rows(rows, self.pad)
        segments_BT = ((ids_BT == self.pad) & inside_BT).cumsum(1)
        return Tokens(ids_BT, ids_BT != self.pad, lengths, segments_BT)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each token as text: "\\ufffd" for one of a hash bucket, a line's end for what stands before the
        earlier turns. Joined they read as the text, lower-cased, where a space has been left out too."""
        return [self._piece(number, place) for place, number in enumerate(ids)]

    def _piece(self, number: int, place: int) -> str:
        if number == self.pad:
            return "\n"
        if number >= len(self.vocabulary):
            return _UNKNOWN
        piece = self.vocabulary[number]
        if not piece.startswith(MARK):
            return piece
        word = piece.removeprefix(MARK)
        return word if place == 0 or (word and not word[0].isalnum()) else f" {word}"


def save_vocabulary(vocabulary: Sequence[str], folder: Path) -> None:
    text = json.dumps(list(vocabulary), ensure_ascii=False, separators=(",", ":"))
    (folder / VOCABULARY).write_text(text, encoding="utf-8")


def load_vocabulary(folder: Path) -> list[str]:
    """The vocabulary that `save_vocabulary` wrote: subwords in the order of their ids.

    Raises BadInput in one line for what is not a list of different texts.
    """
    path = folder / VOCABULARY
    if not path.exists():
        raise BadInput(f"{folder}: no vocabulary of subwords ({VOCABULARY} is missing; jobs.train_tokenizer "
                       "--tokenizer.kind subwords makes one)")  # fmt: skip
    try:
        pieces: list[str] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path}: not JSON ({error})") from None
    are_texts = isinstance(pieces, list) and all(
        isinstance(piece, str) and piece for piece in pieces
    )
    if not are_texts or len(set(pieces)) != len(pieces):
        raise BadInput(f"{path}: not a vocabulary; allowed: a list of different texts, none empty")
    return pieces
