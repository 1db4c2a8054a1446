"""Text to token ids, the same way in training, embedding and serving.

A context is its turns joined by newlines. It is truncated on the LEFT, to keep the newest turns; a
candidate is truncated on the right; both may lose their middle instead. Special tokens are added afterwards:
[CLS] … [SEP], [CLS] context [SEP] candidate [SEP].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pipeline.config import BadInput
from pipeline.models.settings import CandidateKeeps, ContextKeeps
from pipeline.models.sources import require_fetched

_FILES = ("tokenizer.json", "vocab.txt")

# Of a long text so much is tokenised at first for every token that is kept (English has 4.7 characters a
# token): whole Wikipedia articles cost more to tokenise than a small encoder's 256 tokens to embed.
_CHARACTERS_PER_TOKEN = 6
_SPARE_TOKENS = 8  # those next to a cut are not trusted to be the whole text's
# Next to a cut in a word: WordPiece takes one of over 100 characters as unknown.
_SPARE_TOKENS_IN_WORD = 108
# Of a text with fewer tokens than are kept in so many characters no more is read: to WordPiece a word of 5 MB
# is one token, and spaces are none. For each token that is kept, 64 characters are read at least.
_MOST_CHARACTERS = 65_536
_MOST_CHARACTERS_PER_TOKEN = 64


class Tokens(NamedTuple):
    """A padded batch."""

    ids_BT: Tensor
    """int64; padding at the right."""
    mask_BT: Tensor
    """bool; false at padding."""
    lengths: tuple[int, ...]
    """Tokens of each row: known without waiting for a GPU that holds the tensors."""
    segments_BT: Tensor | None = None
    """int64; 1 for the second text of a pair. None: one text a row."""

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Tokens:
        """The batch with each of its tensors changed."""
        segments = None if self.segments_BT is None else change(self.segments_BT)
        return Tokens(change(self.ids_BT), change(self.mask_BT), self.lengths, segments)

    def to(self, device: torch.device) -> Tokens:
        return self.map_tensors(lambda tensor: copied(tensor, device))

    def widened(self, width: int, pad: int) -> Tokens:
        """The batch with padding up to a width, if it is not as wide."""
        spare = max(0, width - self.ids_BT.shape[1])
        wide = self.map_tensors(lambda tensor_BT: F.pad(tensor_BT, (0, spare)))
        return wide._replace(ids_BT=F.pad(self.ids_BT, (0, spare), value=pad))

    def rows(self, start: int, stop: int) -> Tokens:
        """Rows start to stop, without columns that are padding in all of them."""
        lengths = self.lengths[start:stop]
        width = max(lengths, default=0)
        part = self.map_tensors(lambda tensor_BT: tensor_BT[start:stop, :width])
        return part._replace(lengths=lengths)


def pad_rows(rows: Sequence[Sequence[int]], pad: int) -> Tokens:
    """Rows of ids as a batch."""
    lengths = tuple(map(len, rows))
    mask_BT = torch.arange(max(lengths, default=0)) < torch.tensor(lengths)[:, None]
    ids_BT = torch.full(mask_BT.shape, pad)
    ids_BT[mask_BT] = torch.tensor([token for row in rows for token in row], dtype=torch.long)
    return Tokens(ids_BT, mask_BT, lengths)


class RowTokenizer(Protocol):
    """Texts to rows of token ids, and rows to padded batches."""

    def contexts(self, contexts: Sequence[Sequence[str]], max_tokens: int) -> list[list[int]]:
        """One row of ids per context, its turns oldest first; none is empty."""

    def candidates(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """One row of ids per candidate; none is empty."""

    def batch(self, rows: Sequence[Sequence[int]]) -> Tokens:
        """Pads rows of `contexts` or `candidates`."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each token as text, so that all of them joined read as the text."""

    def save(self, folder: Path) -> None:
        """Writes what `load_ranker` needs."""


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """On a device. A copy to a GPU waits for what the GPU computes, unless it is from pinned memory."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.contiguous().pin_memory()  # an expanded tensor cannot be pinned
    return tensor.to(device, non_blocking=True)


def set_template(tokenizer: PreTrainedTokenizerBase, separators: int = 1) -> None:
    """Makes the tokenizer add the special tokens where polyrank does: [CLS] a [SEP], [CLS] a [SEP] b [SEP].

    polyrank adds their ids and needs no template. Other programs that load the tokenizer do.
    """
    cls, sep = tokenizer.cls_token, tokenizer.sep_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[cls, "$A", sep],
        pair=[cls, "$A", *[sep] * separators, "$B:1", f"{sep}:1"],
        special_tokens=[(cls, tokenizer.cls_token_id), (sep, tokenizer.sep_token_id)],
    )


class Tokenizer:
    """A `transformers` tokenizer with the cuts and the padding of this project."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.hf = tokenizer
        self._fast = tokenizer.backend_tokenizer
        self._fast.no_truncation()  # some come with a limit of their own (all-MiniLM: 128)
        self._fast.no_padding()
        self._fast.encode_special_tokens = True  # "[SEP]" in somebody's text is text
        self.cls: int = _special_id(tokenizer, "cls_token")
        self.sep: int = _special_id(tokenizer, "sep_token")
        self.pad: int = _special_id(tokenizer, "pad_token")

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process has the same settings: tokenizers writes not all of them."""
        return Tokenizer, (self.hf,)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Loads `tokenizer.json`, or the `vocab.txt` of an older BERT, from a local model folder.

        Raises BadInput if there is none, and for one that is damaged.
        """
        path = next((folder / name for name in _FILES if (folder / name).exists()), None)
        if path is None:
            raise BadInput(f"{folder}: the model has no tokenizer (tokenizer.json is missing)")
        require_fetched(path)
        try:
            # Without False it asks at the terminal whether code in the folder may run.
            hf = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # tokenizers raises no class of its own
            reason = " ".join(str(error).split())[:200]
            raise BadInput(f"{folder}: its tokenizer cannot be read ({reason})") from None
        if getattr(hf, "backend_tokenizer", None) is None:
            raise BadInput(
                f"{folder}: its tokenizer is of Python code; allowed: one with a tokenizer.json"
            )
        return cls(hf)

    def save(self, folder: Path) -> None:
        self.hf.save_pretrained(str(folder))

    def __len__(self) -> int:
        return len(self.hf)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens, not cut."""
        encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each token as text, with the space before it, so that all of them joined read as the text.

        Of a character whose bytes are several tokens the last one holds the character.
        """
        pairs = [ids[max(0, place - 1) : place + 1] for place in range(len(ids))]
        firsts = self._fast.decode_batch([pair[:-1] for pair in pairs], skip_special_tokens=False)
        texts = self._fast.decode_batch([list(pair) for pair in pairs], skip_special_tokens=False)
        return [text.removeprefix(first) for text, first in zip(texts, firsts, strict=True)]

    def contexts(
        self,
        contexts: Sequence[Sequence[str]],
        max_tokens: int,
        prompt: str = "",
        keeps: ContextKeeps = "last",
    ) -> list[list[int]]:
        """One row of ids per context, at most `max_tokens` with [CLS] and [SEP], and with the prompt."""
        texts = ["\n".join(turns) for turns in contexts]
        rows = self._cut_ids(texts, max_tokens - 2, keeps, prompt)
        return [[self.cls, *row, self.sep] for row in rows]

    def candidates(
        self,
        texts: Sequence[str],
        max_tokens: int,
        prompt: str = "",
        keeps: CandidateKeeps = "first",
    ) -> list[list[int]]:
        """One row of ids per candidate, at most `max_tokens` with [CLS] and [SEP], and with the prompt."""
        rows = self._cut_ids(texts, max_tokens - 2, keeps, prompt)
        return [[self.cls, *row, self.sep] for row in rows]

    def _cut_ids(
        self, texts: Sequence[str], keep: int, keeps: ContextKeeps | CandidateKeeps, prompt: str
    ) -> list[list[int]]:
        """`keep` ids of each text: those of the prompt, and the last or the first of the rest, or of both
        ends; of a long one no more is tokenised than they need."""
        if keeps != "both_ends":
            return self._ids_of_an_end(texts, keep, keeps == "last", prompt)
        rows = self._ids_of_an_end(texts, keep + 1, False, prompt)  # one more: the text is longer
        long = [place for place, row in enumerate(rows) if len(row) > keep]
        prompt_ids = len(self.ids([prompt.rstrip()])[0]) if prompt else 0
        first = min(keep, prompt_ids + max(0, keep - prompt_ids) // 4)
        ends = self._ids_of_an_end([texts[place] for place in long], keep - first, True, "")
        for place, end in zip(long, ends, strict=True):
            rows[place] = rows[place][:first] + end
        return rows

    def _ids_of_an_end(
        self, texts: Sequence[str], keep: int, newest: bool, prompt: str
    ) -> list[list[int]]:
        prompt_ids = min(keep, len(self.ids([prompt.rstrip()])[0])) if prompt else 0
        rows: list[list[int]] = [[] for _ in texts]
        places, characters = list(range(len(texts))), max(1, keep) * _CHARACTERS_PER_TOKEN
        most_characters = max(_MOST_CHARACTERS, keep * _MOST_CHARACTERS_PER_TOKEN)
        cut_text = _tail if newest else _head
        while places:
            parts = [cut_text(texts[place], characters) for place in places]
            unfinished = []
            for place, part, ids in zip(
                places, parts, self.ids([prompt + part for part in parts]), strict=True
            ):
                surplus = max(0, len(ids) - keep)
                rows[place] = (
                    ids[:prompt_ids] + ids[prompt_ids + surplus :] if newest else ids[:keep]
                )
                is_cut_in_word = len(part) == characters
                spare = _SPARE_TOKENS_IN_WORD if is_cut_in_word else _SPARE_TOKENS
                if len(part) < len(texts[place]) and len(ids) - prompt_ids < keep + spare:
                    unfinished.append(place)
            if characters >= most_characters:
                break
            places, characters = unfinished, min(characters * 4, most_characters)
        return rows

    def batch(self, rows: Sequence[Sequence[int]]) -> Tokens:
        return pad_rows(rows, self.pad)

    def pairs(
        self,
        contexts: Sequence[Sequence[int]],
        candidates: Sequence[Sequence[int]],
        separators: int = 1,
    ) -> Tokens:
        """Pads pairs of a row of `contexts` and a row of `candidates`: [CLS] a [SEP] b [SEP], with as many
        `separators` between them."""
        more = [self.sep] * (separators - 1)
        rows = [[*a, *more, *b[1:]] for a, b in zip(contexts, candidates, strict=True)]
        tokens = pad_rows(rows, self.pad)
        context_length_B = torch.tensor([len(context) + len(more) for context in contexts])
        place_T = torch.arange(tokens.ids_BT.shape[1])
        segments_BT = ((place_T >= context_length_B[:, None]) & tokens.mask_BT).long()
        return tokens._replace(segments_BT=segments_BT)


def _head(text: str, characters: int) -> str:
    """A beginning that ends before a space, and so between words; so many characters where there is none, as
    in Chinese; the whole text if it is short."""
    end = text.rfind(" ", characters // 2, characters) if len(text) > characters else -1
    return text[: characters if end < 0 else end]


def _tail(text: str, characters: int) -> str:
    """An end that begins with a space, and so between words; so many characters where there is none; the
    whole text if it is short."""
    earliest = max(0, len(text) - characters)
    start = text.find(" ", earliest, earliest + characters // 2) if earliest else 0
    return text[earliest if start < 0 else start :]


def _special_id(tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    token = getattr(tokenizer, f"{name}_id")
    if token is None:
        raise BadInput(f"{tokenizer.name_or_path}: the tokenizer has no {name}; allowed: models of texts as "
                       "[CLS] text [SEP], such as BERT, RoBERTa and ModernBERT")  # fmt: skip
    return int(token)
