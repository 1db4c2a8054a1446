"""Learns a tokenizer from corpora: lower-cased WordPiece (BERT's), byte-level BPE, or ConveRT's subwords."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from pipeline import cost, storage
from pipeline.artifact import Artifact
from pipeline.config import BadInput
from pipeline.corpora.schema import example_files
from pipeline.models.convert_rt.folder import save_counts, save_vectors
from pipeline.models.convert_rt.start import fit_bag, rarity
from pipeline.models.convert_rt.tokenizer import LONGEST_PIECE, Subwords, runs, save_vocabulary
from pipeline.models.tokens import set_template
from pipeline.training.data import (
    TEACHER_CONTEXT,
    TEACHER_RESPONSE,
    has_values,
    teacher_dimensions,
    teacher_vectors,
)
from pipeline.training.settings import TokenizerConfig

_SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
            "mask_token": "[MASK]"}  # fmt: skip
_BETWEEN_RUNS = "\0"
_COUNTED_TEXTS = 400_000  # more change little; 20 s
# Memory of a fit: the process with a decoded batch; a text, for each number of a teacher's vector; and an
# example that the subwords were learnt from. A number of a subword's vector has its gradient and moments.
# Measured: 2.3 GB for 236,723 Reddit pairs, whose first 400,000 texts have vectors of 384 numbers, and 20,000
# subwords; 1.8 GB for 200,000 texts, 1.2 GB for 50,000, without learning. The estimates are 2.4, 1.8 and 1.4.
_PROCESS_BYTES, _TEXT_BYTES, _EXAMPLE_BYTES, _NUMBER_BYTES = 1_000_000_000, 6, 1000, 36
_LONG_WORD = re.compile(r"\S{256}(?=\S)")
_LETTERS = 1000  # kinds of letters that have pieces of their own; a text with others has [UNK]


@dataclass(frozen=True)
class LearntSubwords:
    """ConveRT's subwords, in the order of their ids."""

    pieces: list[str]
    holding: list[int]
    """How many texts hold each piece."""
    texts: int
    """How many texts were counted."""
    vectors_VE: Tensor | None = None
    """The vectors that a bag of the pieces has learnt from a teacher."""

    def __len__(self) -> int:
        return len(self.pieces)


def learn(
    corpora: list[Artifact], config: TokenizerConfig
) -> PreTrainedTokenizerFast | LearntSubwords:
    """Learns from the train splits: from equal parts of each, if they have more than `max_examples` examples.

    The same corpora and settings give the same tokenizer. Raises BadInput if a corpus has no train split,
    and with `vectors` if it has no vectors of a teacher.
    """
    _require_inputs(corpora, config)
    share = -(-config.max_examples // len(corpora))

    def texts() -> Iterator[str]:
        """The newest turn of each context and the response: every comment once or twice, not ten times."""
        for corpus in corpora:
            for row in _rows(corpus, share):
                yield _with_short_words(row["context"][-1])
                yield _with_short_words(row["response"])

    if config.kind == "subwords":
        pieces, holding, text_count = _subwords(texts, config), Counter[int](), 0
        subwords = Subwords(pieces, buckets=1)
        for text in itertools.islice(texts(), _COUNTED_TEXTS):
            holding.update(set(subwords.ids(text)))
            text_count += 1
        learnt_subwords = LearntSubwords(
            pieces, [holding[n] for n in range(len(pieces))], text_count
        )
        return _fit_vectors(learnt_subwords, corpora, share) if config.vectors else learnt_subwords
    tokenizer = _word_pieces(texts, config) if config.kind == "wordpiece" else _bpe(texts, config)
    learnt = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_SPECIAL)
    set_template(learnt)  # so that an encoder is usable in transformers and sentence-transformers
    return learnt


def _with_short_words(text: str) -> str:
    """With spaces in words that are longer than any, such as base64: a trainer takes the square of
    a word's length."""
    return _LONG_WORD.sub(r"\g<0> ", text)


def estimate(corpora: Sequence[Artifact], config: TokenizerConfig) -> cost.Estimate:
    """The cost of `learn`, which is one process. Raises BadInput as `learn` does."""
    _require_inputs(corpora, config)
    entries = [example_files(corpus, "train") for corpus in corpora]
    sizes = [entry["bytes"] for of_corpus in entries for entry in of_corpus]
    corpus_rows = [sum(entry["rows"] for entry in of_corpus) for of_corpus in entries]
    share = -(-config.max_examples // len(corpora))
    rows = sum(min(share, count) for count in corpus_rows)
    memory_bytes = None
    if config.vectors:
        share = _taught_share(share, len(corpora))
        texts = 2 * sum(min(share, count) for count in corpus_rows)
        dimensions = max(map(teacher_dimensions, corpora))
        memory_bytes = (
            _PROCESS_BYTES
            + _EXAMPLE_BYTES * rows
            + _TEXT_BYTES * texts * dimensions
            + _NUMBER_BYTES * config.vocabulary * dimensions
        )
    return cost.Estimate(
        input_files=len(sizes),
        input_bytes=sum(sizes),
        rows=rows,
        tasks=1,
        requests=cost.reads(sizes),
        memory_bytes=memory_bytes,
    )


def _require_inputs(corpora: Sequence[Artifact], config: TokenizerConfig) -> None:
    for corpus in corpora:
        if not corpus.files("train/"):
            raise BadInput(f"{corpus.uri}: the corpus has no examples in train/")
        if config.vectors and not has_values(corpus, TEACHER_CONTEXT):
            raise BadInput(f"tokenizer.vectors: True is not allowed; allowed: false, as {corpus.uri} has "
                           "nothing of jobs.score_candidates --teaching.over batch")  # fmt: skip


def _taught_share(share: int, corpora: int) -> int:
    """Examples of each corpus that vectors are fitted to, of the `share` that subwords are learnt from."""
    return min(share, -(-_COUNTED_TEXTS // (2 * corpora)))


def _word_pieces(texts: Callable[[], Iterator[str]], config: TokenizerConfig) -> Tokenizer:
    """BERT's tokenizer.

    By default the trainer numbers the pieces "##a" in the order of a hash table, which differs from run to
    run, and breaks ties by these numbers. So the trainer gets these pieces as special tokens, in order.
    Then the tokenizer is built again from the vocabulary, in which they are no special tokens.
    """
    normalizer = normalizers.BertNormalizer(lowercase=True)
    letters: Counter[str] = Counter()
    for text in texts():
        letters.update(normalizer.normalize_str(text))
    common = sorted(letters, key=lambda letter: (-letters[letter], letter))[:_LETTERS]
    inner = [f"##{letter}" for letter in common if not letter.isspace()]
    special = list(_SPECIAL.values())
    learner = _bert(models.WordPiece(unk_token=_SPECIAL["unk_token"]))
    trainer = trainers.WordPieceTrainer(
        vocab_size=config.vocabulary,
        min_frequency=config.min_frequency,
        special_tokens=special + inner,
        limit_alphabet=_LETTERS,
        show_progress=False,
    )
    learner.train_from_iterator(texts(), trainer)
    tokenizer = _bert(models.WordPiece(learner.get_vocab(), unk_token=_SPECIAL["unk_token"]))
    tokenizer.add_special_tokens(special)
    return tokenizer


def _bert(model: models.WordPiece) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _bpe(texts: Callable[[], Iterator[str]], config: TokenizerConfig) -> Tokenizer:
    """Byte-level BPE, lower-cased."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocabulary,
        min_frequency=config.min_frequency,
        special_tokens=list(_SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def _subwords(texts: Callable[[], Iterator[str]], config: TokenizerConfig) -> list[str]:
    """The pieces of a byte-pair encoding of runs, each with its mark; letters come first.

    ConveRT's tokenizer looks for the longest piece instead of merging pairs, and needs no merges.
    """
    letters: Counter[str] = Counter()
    for text in texts():
        for run in runs(text):
            letters.update(run)
    del letters[_BETWEEN_RUNS]
    common = sorted(letters, key=lambda letter: (-letters[letter], letter))
    common = [letter for letter in common[:_LETTERS] if letters[letter] >= config.min_frequency]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(_BETWEEN_RUNS, "removed")
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocabulary,
        min_frequency=config.min_frequency,
        initial_alphabet=common,
        limit_alphabet=len(common),
        max_token_length=LONGEST_PIECE + 1,  # the trainer's are shorter than that
        show_progress=False,
    )
    tokenizer.train_from_iterator((_BETWEEN_RUNS.join(runs(text)) for text in texts()), trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=lambda piece: ids[piece])


def _fit_vectors(learnt: LearntSubwords, corpora: list[Artifact], share: int) -> LearntSubwords:
    """By the first examples of each train split that a teacher has encoded.

    Raises BadInput for vectors of several lengths, for one that is not finite, and where nothing is found.
    """
    subwords = Subwords(learnt.pieces, buckets=1)
    share = _taught_share(share, len(corpora))
    rows, stored = list[list[int]](), list[bytes]()
    for corpus in corpora:
        for row in _rows(corpus, share, [TEACHER_CONTEXT, TEACHER_RESPONSE]):
            taught = [(row["response"], row.get(TEACHER_RESPONSE))]
            if len(row["context"]) == 1:  # one of several turns has a vector of all together
                taught.insert(0, (row["context"][0], row.get(TEACHER_CONTEXT)))
            for text, vector in taught:
                if vector:
                    ids = subwords.ids(text)
                    rows.append([number for number in ids if number < len(learnt)])
                    stored.append(vector)
    uris = " ".join(corpus.uri for corpus in corpora)
    if not any(rows):
        raise BadInput(f"{uris}: no text with a subword and a teacher's vector among the first {share:,} "
                       "examples of train/ (tokenizer.vectors)")  # fmt: skip
    teacher_NE = teacher_vectors(TEACHER_RESPONSE, stored, np.float16)
    if not teacher_NE.isfinite().all():
        raise BadInput(
            f"{uris}: a teacher's vector is not finite; allowed: none such, or tokenizer.vectors false"
        )
    log_weight_V = rarity(torch.tensor(learnt.holding), learnt.texts)
    return replace(learnt, vectors_VE=fit_bag(rows, teacher_NE, log_weight_V))


def save(learnt: PreTrainedTokenizerFast | LearntSubwords, folder: Path) -> None:
    if isinstance(learnt, LearntSubwords):
        save_vocabulary(learnt.pieces, folder)
        save_counts(learnt.holding, learnt.texts, folder)
        if learnt.vectors_VE is not None:
            save_vectors(learnt.vectors_VE, folder)
    else:
        learnt.save_pretrained(str(folder))


def _rows(
    corpus: Artifact, max_examples: int, columns: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """The first examples of the train split: context, response, and `columns`."""
    remaining = max_examples
    for uri in corpus.files("train/", ".parquet"):
        with storage.open_input(uri) as stream:
            names = ["context", "response", *columns]
            for batch in pq.ParquetFile(stream).iter_batches(columns=names):
                yield from batch.slice(0, remaining).to_pylist()
                remaining -= min(remaining, batch.num_rows)
                if not remaining:
                    return
