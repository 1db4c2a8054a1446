"""ConveRT's tokenizer against TensorFlow's graph, and texts that nobody expects."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from farmhash import Fingerprint64
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import BadInput
from pipeline.models.convert_rt.tokenizer import (
    MARK,
    VOCABULARY,
    ConvertTokenizer,
    Subwords,
    join_earlier,
    load_vocabulary,
    runs,
    token_ids,
)

SUBWORDS = [MARK, "a", "t", f"{MARK}the", f"{MARK}cat", "at", " ", f"{MARK}, "]


@pytest.mark.shared
def test_fingerprints_are_farmhashs(golden):
    about = golden.about["hash"]
    hashes = [Fingerprint64(piece.encode()) for piece in about["pieces"]]
    assert [f"{one:016x}" for one in hashes] == about["fingerprint64_hex"]
    for buckets in (7, 1000):
        assert [one % buckets for one in hashes] == golden.arrays[f"hash.bucket_{buckets}"].tolist()
    sizes = {len(piece.encode()) for piece in about["pieces"]}
    assert all(any(low <= size <= high for size in sizes)
               for low, high in ((1, 3), (4, 7), (8, 16), (17, 32), (33, 64), (65, 10_000)))  # fmt: skip


@pytest.mark.shared
def test_ids_and_pieces_are_those_of_the_graph(golden):
    about = golden.about["tokenizer"]
    texts = [case["text"] for case in about["texts"]]
    ids_BT, mask_BT = token_ids(texts, about["vocabulary"], about["hash_buckets"])
    np.testing.assert_array_equal(ids_BT, golden.arrays["tokenizer.ids"])
    np.testing.assert_array_equal(mask_BT, golden.arrays["tokenizer.mask"])
    subwords = Subwords(about["vocabulary"], about["hash_buckets"])
    for case in about["texts"]:
        assert [p for run in runs(case["text"]) for p in subwords.pieces(run)] == case["pieces"]
    for case in about["long_words"]["cases"]:
        ids = subwords.ids(case["repeat"] * case["count"])
        found = (len(ids), ids[0], ids[-1])
        assert found == (case["number_of_pieces"], case["first_id"], case["last_id"])


@pytest.mark.shared
def test_earlier_turns_are_joined_as_in_the_client(golden):
    about, arrays = golden.about["tokenizer"], golden.arrays
    cases = golden.about["pairs"]["cases"]
    for case in cases:
        assert join_earlier(case["earlier"], 10, case["prefixes"]) == case["joined"]
    joined = [case["joined"] for case in cases]
    ids_BT, _ = token_ids(joined, about["vocabulary"], about["hash_buckets"])
    np.testing.assert_array_equal(ids_BT, arrays["pairs.extra_ids"])


def test_words_marks_and_single_spaces():
    assert list(runs("The CAT,  Ä $5")) == ["﹏the", "﹏cat", "﹏,  ", "﹏Ä", "﹏$5"]
    assert list(runs(" a ")) == ["﹏ ", "﹏a", "﹏ "]


def test_a_vocabulary_of_an_earlier_version_keeps_its_long_pieces():
    """Its model was trained with them."""
    subwords = Subwords([MARK, f"{MARK}understand", "understand"], 3)
    assert subwords.ids("Understand") == [1]


@given(st.text(max_size=40))
def test_every_text_has_ids_below_the_pad_and_its_pieces_are_the_text(text):
    subwords = Subwords(SUBWORDS, 3)
    assert all(0 <= number < subwords.pad for number in subwords.ids(text))
    joined = "".join(run.removeprefix(MARK) for run in runs(text))
    lower = "".join(c.lower() if c.isascii() else c for c in text)
    assert joined.replace(" ", "") == lower.replace(" ", "")
    assert bool(text) == bool(subwords.ids(text))


@given(st.text(alphabet="the cat,.😀é", max_size=60), st.integers(1, 12))
def test_the_first_ids_are_those_of_the_whole_text(text, most):
    subwords = Subwords(SUBWORDS, 3)
    assert subwords.ids(text, most) == subwords.ids(text)[:most]


TEXTS = {
    "empty": "",
    "spaces": "   ",
    "unknown": "жжж",
    "emoji": "😀👩‍👩‍👧",
    "long": "a" * 10_000,
    "long words": "the cat " * 1250,
    "right to left": "שלום, עולם",
    "surrogate": "\ud800",
}


@pytest.mark.parametrize("name", TEXTS)
def test_odd_texts_have_a_row_of_at_most_so_many_tokens(name):
    tokenizer = ConvertTokenizer(SUBWORDS, 3, earlier_turns=2, numbered=False)
    (candidate,) = tokenizer.candidates([TEXTS[name]], 60)
    assert 1 <= len(candidate) <= 60
    (context,) = tokenizer.contexts([[TEXTS[name], TEXTS[name]]], 60)
    assert 1 <= len(context) <= 60 + 1 + 60
    tokens = tokenizer.batch([candidate, [1, 2, 3]])
    assert tokens.mask_BT[0].any() == bool(TEXTS[name].strip())


def test_a_context_is_its_newest_turn_and_the_earlier_ones_newest_first():
    tokenizer = ConvertTokenizer(SUBWORDS, 3, earlier_turns=2, numbered=False)
    (row,) = tokenizer.contexts([["the", "cat", "a", "at the"]], 60)
    newest, earlier = tokenizer.candidates(["at the", "a cat"], 60)
    assert row == [*newest, tokenizer.pad, *earlier]
    tokens = tokenizer.batch([row, newest])
    assert tokens.segments_BT[0].tolist() == [0] * len(newest) + [1] * (1 + len(earlier))
    assert tokens.mask_BT[0].tolist() == [number != tokenizer.pad for number in row]
    assert tokenizer.contexts([["the", "at the"]], 2) == [[*newest[:2], tokenizer.pad, 3]]
    single = ConvertTokenizer(SUBWORDS, 3, earlier_turns=0, numbered=False)
    assert single.contexts([["the", "cat", "at the"]], 60) == [newest]
    counted = ConvertTokenizer(SUBWORDS, 3, earlier_turns=2, numbered=True)
    (numbered,) = counted.contexts([["the", "cat", "a"]], 60)
    assert numbered[-1] == 3 and len(numbered) > 8


@pytest.mark.parametrize("numbered", [False, True])
def test_empty_turns_and_spaces_around_them_do_not_count(numbered):
    tokenizer = ConvertTokenizer(SUBWORDS, 3, earlier_turns=2, numbered=numbered)
    expected = tokenizer.contexts([["the", "cat", "at the"], ["at the"]], 60)
    spaced = [[" the\n", "", "cat ", " ", " at the "], [" ", "", "at the", ""]]
    assert tokenizer.contexts(spaced, 60) == expected
    candidates = tokenizer.candidates(["at the", " at the\n", " ", ""], 60)
    assert candidates == [expected[1], expected[1], [tokenizer.pad], [tokenizer.pad]]


def test_pieces_read_as_the_text():
    tokenizer = ConvertTokenizer(SUBWORDS, 3, earlier_turns=2, numbered=False)
    (row,) = tokenizer.contexts([["cat, at", "the cat, at 😀"]], 60)
    assert "".join(tokenizer.pieces(row)) == "the cat,  at \ufffd\n cat,  at"


@pytest.mark.parametrize("text", ["{", '{"a": 1}', '["a", "a"]', '["a", 1]', '["a", ""]'])
def test_a_bad_vocabulary_is_refused_in_one_line(tmp_path, text):
    (tmp_path / VOCABULARY).write_text(text)
    with pytest.raises(BadInput, match=VOCABULARY) as caught:
        load_vocabulary(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_vocabulary_is_refused(tmp_path):
    with pytest.raises(BadInput, match="no vocabulary"):
        load_vocabulary(tmp_path)


def test_right_to_left_text_is_read_in_the_order_in_which_it_is_stored():
    """Beside other text, too. Its direction marks are tokens."""
    subwords = Subwords(SUBWORDS, 9)

    def pieces(text):
        return [piece for run in runs(text) for piece in subwords.pieces(run)]

    assert pieces("cat שלום") == [f"{MARK}cat", MARK, *"שלום"]
    assert pieces("שלום cat") == [MARK, *"שלום", f"{MARK}cat"]
    assert pieces("\u200fשל\u200f") == [MARK, "\u200f", *"של", "\u200f"]


@pytest.mark.parametrize("letter", ["漢", "'"])
def test_of_a_run_of_megabytes_the_beginning_decides(letter, monkeypatch):
    sizes = []
    monkeypatch.setattr(
        "pipeline.models.convert_rt.tokenizer.Fingerprint64",
        lambda data: sizes.append(len(data)) or Fingerprint64(data),
    )
    ids = Subwords(["a"], 1000).ids(letter * 1_000_000)
    assert len(ids) == 1 and max(sizes) < 1 << 20


def test_of_a_long_run_no_more_is_looked_up_than_is_kept(monkeypatch):
    """A line of base64 cost 0.2 s, of which the model reads 60 pieces."""
    hashed = []
    monkeypatch.setattr(
        "pipeline.models.convert_rt.tokenizer.Fingerprint64",
        lambda data: hashed.append(data) or Fingerprint64(data),
    )
    assert len(Subwords(["a"], 1000).ids("漢" * 16_000, 60)) == 60
    assert len(hashed) == 60


@pytest.mark.parametrize("text", ["漢" * 400_000, "a" * 400_000, "." * 70_000 + " a" * 150_000])
def test_of_a_long_text_no_more_is_read_than_its_tokens_need(text, monkeypatch):
    tokenizer = ConvertTokenizer(SUBWORDS, 3, earlier_turns=2, numbered=False)
    whole = Subwords(SUBWORDS, 3).ids(text)[:60]
    read = []
    real_runs = runs
    monkeypatch.setattr(
        "pipeline.models.convert_rt.tokenizer.runs",
        lambda text: read.append(len(text)) or real_runs(text),
    )
    assert tokenizer.candidates([text], 60) == tokenizer.contexts([[text]], 60) == [whole]
    assert max(read) < 300_000


def test_long_runs_are_not_remembered():
    subwords = Subwords(["a"], 1000)
    subwords.ids("a")
    tracemalloc.start()
    try:
        for number in range(8):
            subwords.ids(str(number) * 70_000)
        assert tracemalloc.get_traced_memory()[0] < 300_000
    finally:
        tracemalloc.stop()
