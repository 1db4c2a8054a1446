"""`jobs.tokenize_corpus`: a corpus and a tokenizer in, ids out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipeline.artifact import open_artifact
from pipeline.models.tokens import Tokenizer
from pipeline.training import tokenized_corpus
from pipeline.training.tokenized_corpus import TokenizedCorpus
from tests.helpers import rows_of

NAMES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")


def tokenizer_folder(folder: Path, size: int = 260, leave_out: str = "") -> Path:
    """Bytes are tokens; further entries of the vocabulary never occur."""
    special = {name: f"[{name[:-6].upper()}]" for name in NAMES if name != leave_out}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    more = [f"<{number}>" for number in range(size - len(special) - len(alphabet))]
    vocabulary = {token: place for place, token in enumerate([*more, *special.values(), *alphabet])}
    fast = FastTokenizer(models.BPE(vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=fast, **special).save_pretrained(str(folder))
    return folder


@pytest.fixture
def tokenize(run_job_here, convai2_corpus, tmp_path):
    def run(*options: object, corpus=convai2_corpus.uri, tokenizer=None, output=tmp_path / "out"):
        tokenizer = tokenizer or tokenizer_folder(tmp_path / "tokenizer")
        return run_job_here("tokenize_corpus", "--corpus", corpus, "--tokenizer", tokenizer,
                       "--output", output, *options)  # fmt: skip

    return run


def test_ids_are_those_of_the_tokenizer_cut_and_in_order(tokenize, convai2_corpus, tmp_path):
    options = ("--tokenize.max-context-tokens", 40, "--tokenize.max-response-tokens", 12)
    summary = tokenize(*options).summary
    made = open_artifact(summary["output"], "tokens")
    theirs = AutoTokenizer.from_pretrained(str(tmp_path / "tokenizer"))
    counts = np.zeros(len(theirs), np.int64)
    for split in ("train", "valid"):
        before, after = rows_of(convai2_corpus, split), rows_of(made, split)
        assert len(before) == len(after) == summary["counts"][f"examples.{split}"]
        for row, ids in zip(before, after, strict=True):
            context = theirs("\n".join(row["context"]), add_special_tokens=False)["input_ids"]
            response = theirs(row["response"], add_special_tokens=False)["input_ids"]
            assert ids == {"context": context[-40:], "response": response[:12]}
        for column in ("context", "response"):
            flat = [token for row in after for token in row[column]]
            assert summary["counts"][f"tokens.{split}.{column}"] == len(flat)
            counts += np.bincount(flat, minlength=len(theirs)) * (split == "train")
    assert (TokenizedCorpus(made).token_counts() == counts).all()


def test_the_manifest_and_the_tokenizer_are_what_a_trainer_needs(tokenize, tmp_path):
    made = TokenizedCorpus.open(tokenize().summary["output"])
    theirs = AutoTokenizer.from_pretrained(str(tmp_path / "tokenizer"))
    facts = made.vocabulary
    assert facts.size == len(theirs)
    special = theirs.convert_tokens_to_ids(["[PAD]", "[CLS]", "[SEP]", "[MASK]"])
    assert [facts.pad, facts.cls, facts.sep, facts.mask] == special
    assert set(facts.special) == set(theirs.all_special_ids)
    limits = made.tokenize_config
    assert limits.max_context_tokens == limits.max_response_tokens == 510
    copy = Tokenizer.load(made.tokenizer().local())
    assert copy.ids(["so it is"]) == [theirs("so it is", add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize(("size", "kind"), [(65_535, pa.uint16()), (65_536, pa.uint32())])
def test_ids_are_as_wide_as_the_vocabulary_needs(tokenize, tmp_path, size, kind):
    folder = tokenizer_folder(tmp_path / "large", size)
    made = open_artifact(tokenize(tokenizer=folder).summary["output"], "tokens")
    (file, *_) = made.files("train/", ".parquet")
    assert pq.read_schema(file).field("context").type.value_type == kind
    ids = [token for row in rows_of(made, "train") for token in row["context"]]
    assert max(ids) >= size - 256


def test_without_a_valid_split_whole_groups_are_held_out(tokenize, reddit_corpus):
    assert not reddit_corpus.paths("valid/")
    done = tokenize("--tokenize.valid-share", 0.2, corpus=reddit_corpus.uri)
    made = open_artifact(done.summary["output"], "tokens")
    before = rows_of(reddit_corpus, "train")
    held = {row["group_id"] for row in before
            if tokenized_corpus.is_held_out(row["group_id"], 0.2)}  # fmt: skip
    groups = {row["group_id"] for row in before}
    assert 0.1 < len(held) / len(groups) < 0.3
    theirs = Tokenizer.load(TokenizedCorpus(made).tokenizer().local())
    for split, wanted in (("valid", True), ("train", False)):
        responses = [row["response"] for row in before if (row["group_id"] in held) == wanted]
        expected = [ids[:510] for ids in theirs.ids(responses)]
        assert [row["response"] for row in rows_of(made, split)] == expected


def test_empty_texts_are_dropped_and_counted(tokenize, tmp_path, write_corpus):
    corpus = write_corpus(
        [{"context": ["a"], "response": "b"}, {"context": [""], "response": "b"},
         {"context": ["a"], "response": ""}, {"context": ["c", ""], "response": "d"}]
    )  # fmt: skip
    summary = tokenize("--tokenize.valid-share", 0, corpus=corpus).summary
    assert summary["dropped"] == {"empty context": 1, "empty response": 1}
    assert summary["counts"]["examples"] == 2
    assert len(rows_of(open_artifact(summary["output"], "tokens"), "train")) == 2
    assert "no example of train/ has a context" in tokenize(
        corpus=write_corpus([{"context": ["a"], "response": ""}]), output=tmp_path / "none"
    ).refusal  # fmt: skip


@pytest.fixture
def write_corpus(convai2_corpus, tmp_path):
    """A corpus of rows of its own: the sample's manifest with one other file."""

    def write(rows, split="train") -> str:
        folder = tmp_path / f"corpus-{len(list(tmp_path.iterdir()))}"
        (folder / split).mkdir(parents=True)
        schema = pq.read_schema(convai2_corpus.files("train/", ".parquet")[0])
        full = [
            {"example_id": f"e{n}", "group_id": f"g{n}", "source": "test", "split": split, **row}
            for n, row in enumerate(rows)
        ]
        path = folder / split / "part.parquet"
        pq.write_table(pa.Table.from_pylist(full, schema=schema), path)
        entry = {"path": f"{split}/part.parquet", "rows": len(rows), "bytes": path.stat().st_size}
        manifest = {**convai2_corpus.manifest, "fingerprint": folder.name, "files": [entry]}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return str(folder)

    return write


def test_bad_input_is_refused_in_one_line_and_nothing_is_written(tokenize, tmp_path, write_corpus):
    row = {"context": ["a"], "response": "b"}
    no_train = write_corpus([row], split="test")
    no_mask = tokenizer_folder(tmp_path / "no-mask", leave_out="mask_token")
    refusals = {
        tokenize(corpus=no_train).refusal: "the corpus has no examples in train/",
        tokenize(tokenizer=no_mask).refusal: "the tokenizer has no mask_token",
        tokenize(tokenizer=tmp_path / "nowhere").refusal: "tokenizer.json is missing",
        tokenize(corpus="nowhere").refusal: "nowhere: not a corpus (there is no such folder)",
        tokenize("--tokenize.valid-share", 1).refusal: "tokenize.valid_share: 1.0 is not allowed",
        tokenize("--tokenize.max-context-tokens", 0).refusal: "max_context_tokens: 0 is not",
    }
    for refusal, message in refusals.items():
        assert message in refusal
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
