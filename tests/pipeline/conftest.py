"""Tiny encoders, rankers and corpora: milliseconds to build, and every word is one token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipeline.artifact import Artifact
from pipeline.corpora.schema import EXAMPLE
from pipeline.models.encoder import Encoder
from pipeline.models.ranker import Ranker, new_ranker
from pipeline.models.settings import Shape, ranker_config
from pipeline.models.sources import External
from pipeline.models.tokens import Tokenizer
from pipeline.training.tokenized_corpus import TokenizedCorpus

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = 200


class Tiny:
    """Words are "w0" to "w199"; the id of a word is its number + 5."""

    vocabulary = len(SPECIAL) + WORDS

    def __init__(self, folder: Path, tokenize: Callable[..., TokenizedCorpus]) -> None:
        self._tokenize = tokenize
        self.shape = {"layers": 2, "width": 16, "heads": 2, "positions": 64, "init_std": 0.2}
        self._folders = (folder / str(number) for number in itertools.count())
        self._encoders: dict[str, Path] = {}

    def hf_tokenizer(self) -> PreTrainedTokenizerFast:
        vocabulary = [*SPECIAL, *(f"w{number}" for number in range(WORDS))]
        places = {word: place for place, word in enumerate(vocabulary)}
        fast = FastTokenizer(models.WordLevel(places, unk_token="[UNK]"))
        fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        return PreTrainedTokenizerFast(
            tokenizer_object=fast, **dict(zip(names, SPECIAL, strict=True))
        )

    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.hf_tokenizer())

    def encoder(self, **shape: Any) -> Encoder:
        torch.manual_seed(0)
        special = {"pad": 0, "cls": 2, "sep": 3}
        return Encoder.new(Shape(**{**self.shape, **shape}), self.vocabulary, special)

    def encoder_folder(self, **shape: Any) -> Path:
        """A `save_pretrained` directory with a tokenizer."""
        key = str(sorted(shape.items()))
        if key not in self._encoders:
            folder = next(self._folders)
            self.encoder(**shape).save(folder)
            self.tokenizer().save(folder)
            self._encoders[key] = folder
        return self._encoders[key]

    def ranker(self, encoder: str = "bert", **config: Any) -> Ranker:
        """A ranker whose towers and head differ, as after training."""
        settings = {
            "architecture": "poly",
            "max_context_tokens": 24,
            "max_candidate_tokens": 12,
            "m": 4,
        }
        folder = self.encoder_folder(architecture=encoder)
        ranker = new_ranker(ranker_config({**settings, **config}), folder, seed=0)
        noise = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in ranker.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=noise)
        return ranker.eval()

    def corpus(
        self,
        rows: Sequence[dict[str, Any]],
        split: str = "train",
        rows_per_file: int = 1000,
        rows_per_group: int = 1000,
    ) -> Artifact:
        """A published corpus; columns that a row lacks are made up."""
        folder = next(self._folders)
        (folder / split).mkdir(parents=True)
        schema, files = EXAMPLE, []
        for name in rows[0].keys() - EXAMPLE.names:  # such as a teacher's
            schema = schema.append(pa.field(name, pa.infer_type([row[name] for row in rows])))
        for start in range(0, len(rows), rows_per_file):
            part = [
                {"example_id": f"e{number}", "group_id": f"g{number}", "context": ["w0"],
                 "response": "w1", "candidates": None, "label": None, "source": "test",
                 "split": split, **row}
                for number, row in enumerate(rows[start : start + rows_per_file], start)
            ]  # fmt: skip
            path = f"{split}/{start:06}.parquet"
            table = pa.Table.from_pylist(part, schema=schema)
            pq.write_table(table, folder / path, row_group_size=rows_per_group)
            files.append({"path": path, "rows": len(part), "bytes": (folder / path).stat().st_size})
        return Artifact(str(folder), {"kind": "corpus", "fingerprint": folder.name, "files": files})

    def tokens(self, corpus: Artifact, **kept: Any) -> TokenizedCorpus:
        """The corpus tokenized for pre-training; without a valid split of its own a share is held out."""
        source = External(str(self.encoder_folder()), "")
        return self._tokenize(corpus, source, next(self._folders), **kept)


@pytest.fixture(scope="session")
def tiny(
    tmp_path_factory: pytest.TempPathFactory, tokenize_in_process: Callable[..., TokenizedCorpus]
) -> Tiny:
    torch.set_num_threads(1)
    return Tiny(tmp_path_factory.mktemp("tiny"), tokenize_in_process)


@pytest.fixture
def fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the hardware has bf16, numbers computed in two ways differ in the third digit."""
    monkeypatch.setenv("POLYRANK_PROCESSOR", "avx2")
