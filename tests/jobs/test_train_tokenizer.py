"""`jobs.train_tokenizer`: a corpus in, a tokenizer out."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from pipeline.artifact import open_artifact
from pipeline.models.tokens import Tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture
def train(run_job_here, convai2_corpus, tmp_path):
    def run(*options: object, corpora=(convai2_corpus.uri,), output: Path = tmp_path / "out"):
        return run_job_here("train_tokenizer", "--corpus", *corpora, "--output", output, *options)

    return run


@pytest.fixture(scope="module")
def responses(convai2_corpus) -> list[str]:
    file = convai2_corpus.files("train/", ".parquet")[0]
    return pq.read_table(file, partitioning=None)["response"].to_pylist()[:100]


def test_texts_come_back_from_their_ids(train, responses, tmp_path):
    summary = train("--tokenizer.kind", "bpe", "--tokenizer.vocabulary", 400).summary
    learnt = AutoTokenizer.from_pretrained(str(tmp_path / "out"), local_files_only=True)
    assert summary["counts"] == {"vocabulary": len(learnt)}
    assert 300 < len(learnt) <= 400
    assert learnt.convert_ids_to_tokens(range(5)) == SPECIAL
    rows = Tokenizer.load(tmp_path / "out").candidates(responses, max_tokens=1000)
    for text, row in zip(responses, rows, strict=True):
        assert (row[0], row[-1]) == (2, 3)  # [CLS] text [SEP]
        assert learnt.decode(row, skip_special_tokens=True) == text.lower()
    # It was learnt from these texts: pieces are longer than letters.
    letters = sum(len(text) for text in responses)
    assert sum(len(row) - 2 for row in rows) < letters / 1.5


def test_the_artifact_names_its_corpora_and_the_settings(train, convai2_corpus, reddit_corpus):
    corpora = (convai2_corpus.uri, reddit_corpus.uri)
    summary = train("--tokenizer.vocabulary", 300, corpora=corpora).summary
    found = open_artifact(summary["output"], "tokenizer")
    assert found.fingerprint == summary["fingerprint"]
    assert [found.manifest["inputs"][f"corpus.{n}"]["fingerprint"] for n in range(2)] == [
        convai2_corpus.fingerprint, reddit_corpus.fingerprint
    ]  # fmt: skip
    assert found.manifest["config"]["tokenizer"]["vocabulary"] == 300
    assert "tokenizer.json" in [entry["path"] for entry in found.manifest["files"]]


def test_the_same_again_is_done_already_and_elsewhere_gives_the_same_files(train, tmp_path):
    options = ("--tokenizer.vocabulary", 300)
    first = train(*options).summary
    again = train(*options).summary
    assert again == {**first, "already_done": True}
    elsewhere = train(*options, output=tmp_path / "elsewhere").summary
    assert elsewhere["fingerprint"] == first["fingerprint"]
    other = train("--tokenizer.vocabulary", 301).refusal
    assert "another job (tokenizer.vocabulary: 300 there, 301 here" in other


def test_a_corpus_is_known_by_its_contents_however_its_path_is_spelled(
    train, convai2_corpus, reddit_corpus, monkeypatch
):
    first = train("--tokenizer.vocabulary", 300).summary
    corpus = Path(convai2_corpus.uri)
    monkeypatch.chdir(corpus.parent)
    for spelled in (corpus.name, f"{corpus}/", f"{corpus.parent}/./{corpus.name}"):
        again = train("--tokenizer.vocabulary", 300, corpora=(spelled,)).summary
        assert again == {**first, "already_done": True}
    other = train("--tokenizer.vocabulary", 300, corpora=(reddit_corpus.uri,)).refusal
    assert "--corpus has other contents than it had" in other


@pytest.mark.parametrize(("options", "message"), [
    (("--corpus", "nowhere"), "nowhere: not a corpus (there is no such folder)"),
    (("--corpus", "MODEL"), "kind is 'ranker'; needed here: corpus"),
    (("--tokenizer.vocabulary", "99"), "tokenizer.vocabulary: 99 is not allowed"),
    (("--tokenizer.kind", "words"), "words"),
])  # fmt: skip
def test_bad_usage_is_refused_and_leaves_nothing(train, tiny_ranker, tmp_path, options, message):
    options = [tiny_ranker("poly").uri if option == "MODEL" else option for option in options]
    assert message in train(*options).refusal
    assert list(tmp_path.iterdir()) == []
