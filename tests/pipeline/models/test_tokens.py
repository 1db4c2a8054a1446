"""How texts are cut, framed, padded and paired."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipeline.config import BadInput
from pipeline.models.tokens import Tokenizer

PAD, CLS, SEP = 0, 2, 3
words = st.lists(st.integers(0, 199), max_size=15)


def text(numbers):
    return " ".join(f"w{number}" for number in numbers)


def ids(numbers):
    return [number + 5 for number in numbers]


@given(st.lists(words, min_size=1, max_size=4), st.integers(2, 20))
def test_context_keeps_its_newest_tokens_and_both_special_ones(tiny, turns, max_tokens):
    (row,) = tiny.tokenizer().contexts([[text(turn) for turn in turns]], max_tokens)
    everything = ids([number for turn in turns for number in turn])
    assert len(row) == min(max_tokens, len(everything) + 2)
    assert row == [CLS, *everything[max(0, len(everything) - (max_tokens - 2)) :], SEP]


@given(words, st.integers(2, 20))
def test_candidate_keeps_its_first_tokens_and_both_special_ones(tiny, numbers, max_tokens):
    (row,) = tiny.tokenizer().candidates([text(numbers)], max_tokens)
    assert row == [CLS, *ids(numbers)[: max_tokens - 2], SEP]


def tokenizer_of(fast: FastTokenizer) -> Tokenizer:
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIALS, strict=True))
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, **names))


def word_piece() -> FastTokenizer:
    """BERT's way: lower case, punctuation apart, pieces of words."""
    pieces = [*"abcé.!", *(f"##{letter}" for letter in "abcé"), "ab", "##ca"]
    vocabulary = {token: place for place, token in enumerate([*SPECIALS, *pieces])}
    fast = FastTokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    fast.normalizer = normalizers.BertNormalizer(strip_accents=False)
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return fast


def byte_pairs() -> FastTokenizer:
    """RoBERTa's way: every byte counts, white space too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate([*SPECIALS, *alphabet, "ab", "Ġa"])}
    fast = FastTokenizer(models.BPE(vocabulary, merges=[("a", "b"), ("Ġ", "a")]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return fast


SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


@pytest.mark.parametrize("make", [word_piece, byte_pairs])
@settings(max_examples=20)
@given(
    st.lists(st.text("abcé.! \n\t\u3000漢\u0301", max_size=400), min_size=1, max_size=4),
    st.lists(
        st.sampled_from(["", "   ", "a" * 130, " " * 300, "漢" * 300, "ab.é" * 99]),
        min_size=1,
        max_size=4,
    ),
    st.integers(3, 30),
)
def test_a_long_text_has_the_tokens_of_the_whole(make, pieces, fillers, max_tokens):
    text = "".join(a + b for a, b in itertools.zip_longest(pieces, fillers, fillvalue=""))
    tokenizer = tokenizer_of(make())
    whole = tokenizer.ids([text, "ab", text * 3])
    rows = tokenizer.candidates([text, "ab", text * 3], max_tokens)
    assert [row[1:-1] for row in rows] == [ids[: max_tokens - 2] for ids in whole]
    contexts = tokenizer.contexts([[text], ["ab"], [text * 3]], max_tokens)
    kept = [ids[max(0, len(ids) - max_tokens + 2) :] for ids in whole]
    assert [row[1:-1] for row in contexts] == kept
    first = (max_tokens - 2) // 4
    ends = [
        ids
        if len(ids) <= max_tokens - 2
        else ids[:first] + ids[len(ids) - max_tokens + 2 + first :]
        for ids in whole
    ]
    both = tokenizer.candidates([text, "ab", text * 3], max_tokens, keeps="both_ends")
    assert [row[1:-1] for row in both] == ends
    both = tokenizer.contexts([[text], ["ab"], [text * 3]], max_tokens, keeps="both_ends")
    assert [row[1:-1] for row in both] == ends


def test_a_prompt_stays_where_a_text_is_truncated(tiny):
    tokenizer = tiny.tokenizer()
    short, long = text(range(3)), text(range(100))
    prompt = tokenizer.ids(["w7 w8"])[0]
    contexts = tokenizer.contexts([[short], [long]], 12, "w7 w8 ")
    candidates = tokenizer.candidates([short, long, ""], 12, "w7 w8 ")
    kept = 10 - len(prompt)
    short_ids, long_ids = tokenizer.ids([short, long])
    assert [row[1:-1] for row in contexts] == [prompt + short_ids, prompt + long_ids[-kept:]]
    assert [row[1:-1] for row in candidates] == [
        prompt + short_ids, prompt + long_ids[:kept], prompt
    ]  # fmt: skip
    (both,) = tokenizer.contexts([[long]], 12, "w7 w8 ", "both_ends")
    first = kept // 4
    assert both[1:-1] == prompt + long_ids[:first] + long_ids[first - kept :]
    (row,) = tokenizer.contexts([[long]], 3, "w7 w8 ")  # no room for more than one token
    assert row[1:-1] == prompt[:1]


@pytest.mark.parametrize(("make", "part", "most"), [
    (word_piece, "ab ", 3_000), (word_piece, "漢字", 3_000), (byte_pairs, "abca+", 3_000),
    # WordPiece takes 5 MB of Hangul or of Thai as one unknown word, in 10 s.
    (word_piece, "a", 350_000), (word_piece, " ", 350_000), (word_piece, "é\u0301", 350_000),
])  # fmt: skip
def test_of_a_long_text_no_more_is_tokenised_than_is_kept(make, part, most, monkeypatch):
    """1.5 million characters of Chinese or base64 took 2 s; texts with hardly a token take more."""
    tokenizer, seen = tokenizer_of(make()), []
    ids = tokenizer.ids
    monkeypatch.setattr(tokenizer, "ids", lambda texts: seen.extend(texts) or ids(texts))
    text = part * 300_000
    tokenizer.candidates([text], 40)
    tokenizer.contexts([[text]], 40)
    assert 0 < sum(map(len, seen)) < most
    seen.clear()
    tokenizer.contexts([[text]], 40, keeps="both_ends")
    assert 0 < sum(map(len, seen)) < most


@pytest.mark.parametrize(
    ("make", "decoder", "text", "pieces"),
    [
        (word_piece, decoders.WordPiece(), "ab abca. é", ["ab", " ab", "ca", ".", " é"]),
        (byte_pairs, decoders.ByteLevel(), "ab aé\n!", ["ab", " a", "\N{REPLACEMENT CHARACTER}", "é",
                                                        "\n", "!"]),
    ],
)  # fmt: skip
def test_pieces_read_as_the_text(make, decoder, text, pieces):
    fast = make()
    fast.decoder = decoder
    tokenizer = tokenizer_of(fast)
    (row,) = tokenizer.candidates([text], 64)
    assert [piece.strip() for piece in tokenizer.pieces(row)][:1] == ["[CLS]"]
    assert tokenizer.pieces(row[1:-1]) == pieces


def test_turns_are_joined_by_newlines():
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[PAD]": 3, "a": 4, "b": 5, "\n": 6}
    fast = FastTokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    hf = PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )
    assert Tokenizer(hf).contexts([["a", "ab", "b"]], 20) == [[1, 4, 6, 4, 5, 6, 5, 2]]


def test_a_limit_or_padding_that_the_tokenizer_came_with_is_ignored(tiny, tmp_path):
    hf = tiny.hf_tokenizer()
    hf.backend_tokenizer.enable_truncation(4)
    hf.backend_tokenizer.enable_padding(length=40)
    hf.save_pretrained(tmp_path)
    rows = Tokenizer.load(tmp_path).candidates([text(range(10)), "w1"], 72)
    assert [len(row) for row in rows] == [12, 3]


@given(st.lists(words.map(ids), min_size=1, max_size=5))
def test_batch_pads_at_the_right_and_masks_the_pads(tiny, bodies):
    rows = [[CLS, *body, SEP] for body in bodies]
    tokens = tiny.tokenizer().batch(rows)
    assert tokens.segments_BT is None
    assert tokens.ids_BT.dtype == torch.int64
    assert tokens.mask_BT.dtype == torch.bool
    longest = max(map(len, rows))
    for row, own_ids, own_mask in zip(rows, tokens.ids_BT, tokens.mask_BT, strict=True):
        pads = longest - len(row)
        assert own_ids.tolist() == row + [PAD] * pads
        assert own_mask.tolist() == [True] * len(row) + [False] * pads


@given(st.lists(st.tuples(words, words), min_size=1, max_size=5))
def test_pairs_are_laid_out_as_bert_tokenizers_do(tiny, pairs):
    hf = tiny.hf_tokenizer()
    hf.backend_tokenizer.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    first, second = ([text(pair[side]) for pair in pairs] for side in (0, 1))
    theirs = hf(first, second, padding=True, return_token_type_ids=True)
    tokenizer = tiny.tokenizer()
    contexts = tokenizer.contexts([[one] for one in first], 100)
    ours = tokenizer.pairs(contexts, tokenizer.candidates(second, 100))
    assert ours.ids_BT.tolist() == theirs["input_ids"]
    assert ours.mask_BT.long().tolist() == theirs["attention_mask"]
    assert ours.segments_BT.tolist() == theirs["token_type_ids"]


def test_saved_tokenizer_is_the_same_to_us_and_to_transformers(tiny, tmp_path):
    tiny.tokenizer().save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    sentence = "w1 w199 unheard-of w7"
    assert loaded.ids([sentence]) == [[6, 204, 1, 12]]
    plain = AutoTokenizer.from_pretrained(tmp_path)
    assert plain(sentence, add_special_tokens=False)["input_ids"] == [6, 204, 1, 12]
    assert len(loaded) == len(plain) == tiny.vocabulary


@pytest.mark.parametrize("name", ["cls_token", "sep_token", "pad_token"])
def test_tokenizer_without_a_special_token_is_refused(tiny, name):
    hf = tiny.hf_tokenizer()
    setattr(hf, name, None)
    with pytest.raises(BadInput, match=f"no {name}"):
        Tokenizer(hf)
