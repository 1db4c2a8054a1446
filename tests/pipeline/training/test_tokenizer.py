"""A tokenizer learnt from a corpus."""

from __future__ import annotations

import itertools
import json
import re
import string
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from pipeline.config import BadInput
from pipeline.models.convert_rt.folder import VECTORS
from pipeline.models.convert_rt.start import fit_bag
from pipeline.models.convert_rt.tokenizer import Subwords, load_vocabulary, runs
from pipeline.models.tokens import Tokenizer
from pipeline.training.tokenizer import TokenizerConfig, estimate, learn, save

ROWS = [
    {"context": ["Older turns stay out: xylophone", "The cat sat on the mat."],
     "response": "Where did THE cat sit?"},
    {"context": ["Is there a café in Zürich?"], "response": "Yes, there is a café in Zürich."},
] * 5  # fmt: skip
KINDS = ["wordpiece", "bpe"]


@pytest.fixture(scope="module")
def corpus(tiny):
    return tiny.corpus(ROWS)


@pytest.fixture(scope="module")
def learnt_from_rows(corpus):
    """By kind."""
    return {kind: learnt([corpus], kind) for kind in (*KINDS, "subwords")}


def learnt(corpora, kind="wordpiece", **config):
    return learn(corpora, TokenizerConfig(**{"kind": kind, "vocabulary": 400, **config}))


def pieces(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("kind", KINDS)
def test_frequent_words_are_one_piece_in_any_case(learnt_from_rows, kind):
    tokenizer = learnt_from_rows[kind]
    assert len(pieces(tokenizer, "is there")) == 2
    assert pieces(tokenizer, "iS tHeRe") == pieces(tokenizer, "is there")


def test_wordpiece_strips_accents_and_splits_punctuation_as_bert_does(learnt_from_rows):
    """It learns from the newest turn alone: ten examples of one thread hold its first comment ten times."""
    tokenizer = learnt_from_rows["wordpiece"]
    assert pieces(tokenizer, "CAFÉ,cat") == ["cafe", ",", "cat"]
    assert pieces(tokenizer, "ж") == ["[UNK]"]
    assert pieces(tokenizer, "xylophone") != ["xylophone"]
    assert tokenizer.decode(tokenizer("Where, cat?", add_special_tokens=False)["input_ids"]) == (
        "where, cat?"
    )


@pytest.mark.parametrize("text", ["жук 🐞 never seen", "tab\tand\nnewline", "日本語"])
def test_bpe_knows_every_text_and_gives_it_back(learnt_from_rows, text):
    tokenizer = learnt_from_rows["bpe"]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("kind", KINDS)
def test_vocabulary_is_bounded_and_the_same_texts_give_the_same_one(tiny, kind):
    """Left alone the trainer of `tokenizers` numbers WordPiece's letters by a hash map's order."""
    rows = [{"response": f"{letter}{other}{letter}"} for letter in string.ascii_lowercase
            for other in string.ascii_lowercase]  # fmt: skip
    corpus, size = tiny.corpus(rows), 300
    first, again = (
        learnt([corpus], kind, vocabulary=size, min_frequency=1).get_vocab() for _ in range(2)
    )
    assert sorted(first.values()) == list(range(size))
    assert first == again


def test_rare_pieces_are_not_kept(tiny):
    corpus = tiny.corpus([{"response": "often"}] * 5 + [{"response": "rarely"}])
    without, with_rare = (learnt([corpus], min_frequency=least) for least in (5, 1))
    assert len(pieces(without, "often")) == len(pieces(with_rare, "rarely")) == 1
    assert len(pieces(without, "rarely")) > 1


@pytest.mark.parametrize("kind", [*KINDS, "subwords"])
def test_words_longer_than_any_are_learnt_from_in_pieces(tiny, kind):
    """A trainer takes the square of a word's length: 53 s for 400 kB of base64."""
    word, part = "base" * 150, "base" * 64
    whole, cut = (
        learnt([tiny.corpus([{"response": text}] * 5)], kind)
        for text in (word, f"{part} {part} {'base' * 22}")
    )
    if kind == "subwords":
        assert whole.pieces == cut.pieces
    else:
        assert whole.get_vocab() == cut.get_vocab()


def test_examples_are_limited_in_equal_parts_of_the_corpora(tiny):
    first, second = (
        tiny.corpus([{"context": ["w"], "response": word} for word in words], rows_per_file=2)
        for words in (["aaa"] * 3 + ["bbb"] * 3, ["ccc"] * 3 + ["ddd"] * 3)
    )
    tokenizer = learnt([first, second], max_examples=6, vocabulary=100)
    assert [len(pieces(tokenizer, word)) for word in ("aaa", "ccc")] == [1, 1]
    assert pieces(tokenizer, "bbb") == pieces(tokenizer, "ddd") == ["[UNK]"]


def test_only_the_train_split_is_learnt_from(tiny, corpus):
    with pytest.raises(BadInput, match="no examples in train/"):
        learnt([corpus, tiny.corpus(ROWS, split="valid")])


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_one_has_the_special_tokens_in_other_programs_where_polyrank_puts_them(
    learnt_from_rows, tmp_path, kind
):
    save(learnt_from_rows[kind], tmp_path)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert learnt_from_rows[kind].convert_tokens_to_ids(names) == [0, 1, 2, 3, 4]
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    first, second = ours.ids(["where is it ?", "there !"])
    assert theirs("where is it ?")["input_ids"] == [ours.cls, *first, ours.sep]
    pair = theirs("where is it ?", "there !")["input_ids"]
    assert pair == [ours.cls, *first, ours.sep, *second, ours.sep]
    assert (ours.pad, ours.cls, ours.sep, ours.hf.mask_token_id) == (0, 2, 3, 4)
    assert sorted(ours.hf.all_special_ids) == [0, 1, 2, 3, 4]


def test_subwords_are_marked_pieces_of_the_texts_the_same_every_time(corpus, learnt_from_rows):
    subwords = learnt_from_rows["subwords"]
    assert subwords == learnt([corpus], "subwords")
    found = subwords.pieces
    assert len(found) == len(set(found)) <= 400
    ids = Subwords(found, 10)
    for text, words in (("the cat", 2), ("Where did THE cat", 4)):
        assert len(ids.ids(text)) == words, "frequent words are one piece in any case"
    assert all(number < len(found) for number in ids.ids("yes, there is a café"))
    assert "xylophone" not in "".join(found)
    assert ids.ids("ж")[1] >= len(found)


def with_vectors(rows, lengths=(8,)):
    """The rows with a teacher's vectors: of each text the same, whatever it stands in."""
    texts = sorted({text for row in rows for text in (row["context"][-1], row["response"])})

    def vector(text, length):
        draw = np.random.default_rng(texts.index(text))
        return draw.normal(size=length).astype("<f2").tobytes()

    return [
        {
            **row,
            "teacher_context": vector(row["context"][-1], length),
            "teacher_response": vector(row["response"], length),
        }
        for row, length in zip(rows, itertools.cycle(lengths), strict=False)
    ]


def test_subwords_vectors_follow_the_teachers(tiny, tmp_path):
    """The sums over a text's pieces point where its teacher's vector does."""
    rows = with_vectors(ROWS)
    subwords = learnt([tiny.corpus(rows)], "subwords", vectors=True)
    save(subwords, tmp_path)
    vectors_VE = load_file(tmp_path / VECTORS)["vectors"].float()
    assert vectors_VE.shape == (len(load_vocabulary(tmp_path)), 8)
    ids = Subwords(subwords.pieces, 1).ids
    several, single = with_vectors(ROWS)[:2]
    for row, sides in ((several, ["response"]), (single, ["context", "response"])):
        for side in sides:
            text = row[side] if side == "response" else row[side][0]
            vector = row[f"teacher_{side}"]
            teacher_E = torch.from_numpy(np.frombuffer(vector, "<f2").astype(np.float32))
            sum_E = vectors_VE[ids(text)].sum(dim=0)
            assert torch.nn.functional.cosine_similarity(sum_E, teacher_E, dim=0) > 0.9
    plain = learnt([tiny.corpus(rows)], "subwords")
    assert plain.vectors_VE is None and plain.pieces == subwords.pieces


@pytest.mark.parametrize(("rows", "kind", "reason"), [
    (ROWS, "subwords", "has nothing of jobs.score_candidates --teaching.over batch"),
    (with_vectors(ROWS), "bpe", "True is not allowed; allowed: false with tokenizer.kind 'bpe'"),
    (with_vectors(ROWS, (8, 4)), "subwords", "vectors of several lengths"),
    ([{**row, "teacher_response": np.full(8, np.nan, "<f2").tobytes()} for row in with_vectors(ROWS)],
     "subwords", "a teacher's vector is not finite"),
    ([{**row, "context": ["ж", "ж"], "response": "ж"} for row in with_vectors(ROWS)], "subwords",
     "no text with a subword and a teacher's vector among the first 200,000 examples"),
])  # fmt: skip
def test_vectors_without_a_teacher_are_refused(tiny, rows, kind, reason):
    corpus = tiny.corpus(rows)
    with pytest.raises(BadInput, match=re.escape(reason)):
        learnt([corpus], kind, vectors=True, min_frequency=100)
    if "nothing of jobs" in reason:
        with pytest.raises(BadInput, match=re.escape(reason)):
            estimate([corpus], TokenizerConfig(kind="subwords", vectors=True))


def test_vectors_are_of_texts_that_the_teacher_encoded_alone(tiny):
    """A context of several turns has one vector for all of them; an example that was joined to the corpus
    has none. A limit on examples holds for these, too."""
    rows = with_vectors(ROWS)
    several, single = rows[0], rows[1]
    assert len(several["context"]) == 2 and len(single["context"]) == 1
    wrong = {**several, "teacher_context": np.full(8, 9, "<f2").tobytes()}
    joined = [{**row, "teacher_context": None, "teacher_response": None} for row in ROWS]
    expected = learnt([tiny.corpus([several, single] * 10)], "subwords", vectors=True).vectors_VE
    for corpus in ([wrong, single] * 10, [*joined, *[wrong, single] * 10]):
        everything = tiny.corpus(corpus + rows, rows_per_file=10)
        found = learnt([everything], "subwords", vectors=True, max_examples=len(corpus))
        assert torch.equal(found.vectors_VE, expected)


def test_an_estimate_counts_the_memory_of_the_vectors(tiny):
    config = TokenizerConfig(kind="subwords", vocabulary=400, max_examples=6)
    corpora = [tiny.corpus(with_vectors(ROWS)) for _ in range(2)]
    plain, fitted = estimate(corpora, config), estimate(corpora, replace(config, vectors=True))
    assert plain.rows == fitted.rows == 6 and plain.memory_bytes is None
    more = replace(config, vectors=True, vocabulary=10_400)
    assert estimate(corpora, more).memory_bytes - fitted.memory_bytes == 36 * 10_000 * 8


@pytest.mark.parametrize("texts", [5, 1025])
def test_a_fit_of_few_texts_takes_more_passes(monkeypatch, texts):
    taken, step = [], torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda adam: (taken.append(1), step(adam)))
    fit_bag([[n % 3] for n in range(texts)], torch.ones(texts, 2), torch.zeros(3))
    assert len(taken) == 200


def test_subwords_have_no_more_characters_than_polyais_tokenizer_finds(tiny):
    """10, the mark among them; a longer word is several pieces."""
    row = {
        "context": ["an encyclopedia"],
        "response": "encyclopedias, understandable and dictionary",
    }
    subwords = learnt([tiny.corpus([row] * 5)], "subwords")
    assert max(map(len, subwords.pieces)) == 10
    found = Subwords(subwords.pieces, 1)
    pieces = [list(found.pieces(run)) for run in runs("dictionary and")]
    assert len(pieces[0]) > 1 and "".join(pieces[0]) == "﹏dictionary"
    assert pieces[1] == ["﹏and"]


def test_subwords_are_bounded_and_saved(corpus, learnt_from_rows, tmp_path):
    assert len(learnt([corpus], "subwords", vocabulary=120)) <= 120
    found = learnt_from_rows["subwords"]
    save(found, tmp_path)
    assert load_vocabulary(tmp_path) == found.pieces
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert counts["texts"] == 2 * len(ROWS)
    holding = dict(zip(found.pieces, counts["holding"], strict=True))
    in_both_of_the_first_row = len(ROWS)
    assert holding["﹏the"] == in_both_of_the_first_row, "however often a text has it"
