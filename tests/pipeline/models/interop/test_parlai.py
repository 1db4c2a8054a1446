"""A ParlAI poly-encoder made here of random weights, against its formulas in float64."""

from __future__ import annotations

import itertools
import json
import math
import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from pipeline.models import inference
from pipeline.models.interop import from_parlai
from pipeline.models.ranker import load_ranker
from tests import helpers

WIDTH, HEADS, LAYERS, CODES = 8, 2, 2, 5
MERGES = ["l o", "lo w</w>", "e r</w>", "lo w", "n e", "ne w", "low er</w>", "_ _", "__ n"]
SPECIAL = ["__null__", "__start__", "__end__", "__unk__"]
# "ne@@" and "__n@@" are pieces on the way that the dictionary never saw: unknown to ParlAI.
WORDS = [*SPECIAL, "low", "lower", "er", "low@@", "lo@@", "l@@", "o@@", "w", "w@@", "n@@", "e", "e@@",
         "new@@", "!", "?", "o", "s", "__newln__", "_@@", "__@@", "_"]  # fmt: skip
OPTIONS = {
    "n_heads": HEADS, "n_layers": LAYERS, "variant": "xlm", "activation": "gelu", "dropout": 0.1,
    "attention_dropout": 0.1, "reduction_type": "mean", "output_scaling": 0.5,
    "embeddings_scale": False, "polyencoder_type": "codes", "poly_n_codes": CODES,
    "poly_attention_type": "basic", "codes_attention_type": "basic", "dict_tokenizer": "bpe",
    "dict_lower": True, "dict_endtoken": "__start__", "text_truncate": 20, "label_truncate": 9,
}  # fmt: skip
CONTEXTS = [["Lower new!", "low"], ["x?"], ["newer " * 30, "so low"], [""]]
CANDIDATES = ["low", "new lower?", "", "o s"]


def words_of(options):
    """The dictionary's: without "__end__" where the same token opens and closes a text."""
    return [word for word in WORDS if word != "__end__" or options["dict_endtoken"] == "__end__"]


def tensors(options, seed=0):
    """Random weights by ParlAI's names."""
    generator = torch.Generator().manual_seed(seed)

    def linear(name, rows, columns=WIDTH):
        return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}

    shapes = {}
    for side in ("encoder_ctxt", "encoder_cand"):
        shapes[f"{side}.embeddings.weight"] = (len(words_of(options)), WIDTH)
        shapes[f"{side}.position_embeddings.weight"] = (40, WIDTH)
        shapes[f"{side}.segment_embeddings.weight"] = (2, WIDTH)
        shapes |= {f"{side}.norm_embeddings.{part}": (WIDTH,) for part in ("weight", "bias")}
        for layer in range(LAYERS):
            at = f"{side}.layers.{layer}"
            for part in ("q_lin", "k_lin", "v_lin", "out_lin"):
                shapes |= linear(f"{at}.attention.{part}", WIDTH)
            for norm in ("norm1", "norm2"):
                shapes |= {f"{at}.{norm}.{part}": (WIDTH,) for part in ("weight", "bias")}
            shapes |= linear(f"{at}.ffn.lin1", 12) | linear(f"{at}.ffn.lin2", WIDTH, 12)
    if options["polyencoder_type"] == "codes":
        shapes["codes"] = (CODES, WIDTH)
        if options["codes_attention_type"] == "multihead":
            for part in ("q_lin", "k_lin", "v_lin", "out_lin"):
                shapes |= linear(f"code_attention.{part}", WIDTH)
    if options["poly_attention_type"] == "multihead":
        for part in ("q_lin", "k_lin", "v_lin", "out_lin"):
            shapes |= linear(f"attention.{part}", WIDTH)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def checkpoint(tmp_path):
    """Writes ParlAI's four files; returns the folder and the weights."""

    def write(**changes):
        options = {**OPTIONS, **changes}
        state = tensors(options)
        torch.save({"model": state, "optimizer": {"lr": 0.1}}, tmp_path / "model")
        (tmp_path / "model.opt").write_text(json.dumps(options))
        lines = [f"{word}\t{number}\n" for number, word in enumerate(words_of(options))]
        (tmp_path / "model.dict").write_text("".join(lines), encoding="utf-8")
        (tmp_path / "model.dict.codecs").write_text("\n".join(["#version: 0.2", *MERGES, ""]))
        return tmp_path, {name: value.double() for name, value in state.items()}, options

    return write


def pieces(text):
    """subword-nmt's: the earliest merge of a word, everywhere in it, until there is none."""
    ranks = {tuple(merge.split()): rank for rank, merge in enumerate(MERGES)}
    for word in re.findall(r"\w+|[^\w\s]", text.lower().replace("\n", " __newln__ ")):
        parts = [*word[:-1], word[-1] + "</w>"]
        while pairs := [pair for pair in itertools.pairwise(parts) if pair in ranks]:
            left, right = min(pairs, key=ranks.__getitem__)
            merged = []
            while parts:
                if parts[:2] == [left, right]:
                    merged, parts = [*merged, left + right], parts[2:]
                else:
                    merged, parts = [*merged, parts[0]], parts[1:]
            parts = merged
        yield from (f"{part}@@" for part in parts[:-1])
        yield parts[-1].removesuffix("</w>")


def ids(text, options):
    """Of the pieces, without [S]."""
    places = {word: place for place, word in enumerate(words_of(options))}
    return [places.get(piece, places["__unk__"]) for piece in pieces(text)]


def attention(state, at, queries, keys, heads):
    """Scaled dot product in heads, one batch row."""

    def linear(part, rows):
        return rows @ state[f"{at}.{part}.weight"].T + state[f"{at}.{part}.bias"]

    split = [linear(part, rows).view(len(rows), heads, -1).transpose(0, 1)
             for part, rows in (("q_lin", queries), ("k_lin", keys), ("v_lin", keys))]  # fmt: skip
    logits = split[0] @ split[1].transpose(1, 2) / math.sqrt(queries.shape[1] / heads)
    seen = (logits.softmax(dim=-1) @ split[2]).transpose(0, 1).reshape(len(queries), -1)
    return linear("out_lin", seen)


def tower(state, side, tokens, options):
    """Outputs [T, D] of one text, scaled."""

    def norm(name, rows):
        weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        return F.layer_norm(rows, (WIDTH,), weight, bias, eps=1e-5)

    table = state[f"{side}.embeddings.weight"]
    hidden = table[tokens] * (math.sqrt(WIDTH) if options["embeddings_scale"] else 1)
    hidden = hidden + state[f"{side}.position_embeddings.weight"][: len(tokens)]
    hidden = norm(f"{side}.norm_embeddings", hidden + state[f"{side}.segment_embeddings.weight"][0])
    for layer in range(LAYERS):
        at = f"{side}.layers.{layer}"
        hidden = norm(
            f"{at}.norm1", hidden + attention(state, f"{at}.attention", hidden, hidden, HEADS)
        )
        inner = hidden @ state[f"{at}.ffn.lin1.weight"].T + state[f"{at}.ffn.lin1.bias"]
        inner = F.gelu(inner) if options["activation"] == "gelu" else F.relu(inner)
        inner = inner @ state[f"{at}.ffn.lin2.weight"].T + state[f"{at}.ffn.lin2.bias"]
        hidden = norm(f"{at}.norm2", hidden + inner)
    return hidden * options["output_scaling"]


def attend(state, name, kind, queries, keys):
    if kind == "multihead":
        return attention(state, name, queries, keys, 4)
    scale = math.sqrt(WIDTH) if kind == "sqrt" else 1
    return (queries @ keys.T / scale).softmax(dim=-1) @ keys


def score(state, context, candidate, options):
    """One context and one candidate."""
    start, end = 1, words_of(options).index(options["dict_endtoken"])
    kept = ids("\n".join(context), options)[-options["text_truncate"] :]
    hidden = tower(state, "encoder_ctxt", [start, *kept, end], options)
    if options["polyencoder_type"] == "codes":
        kind = options["codes_attention_type"]
        vectors = attend(state, "code_attention", kind, state["codes"], hidden)
    else:
        vectors = hidden[:CODES]
    kept = ids(candidate, options)[: options["label_truncate"] - 2]
    outputs = tower(state, "encoder_cand", [start, *kept, end], options)
    vector = outputs[:1] if options["reduction_type"] == "first" else outputs.mean(0, keepdim=True)
    seen = attend(state, "attention", options["poly_attention_type"], vector, vectors)
    return (seen * vector).sum().item()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {},
    {"embeddings_scale": True, "activation": "relu", "reduction_type": "first",
     "polyencoder_type": "n_first", "poly_attention_type": "sqrt"},
    {"codes_attention_type": "sqrt", "dict_endtoken": "__end__"},
    {"codes_attention_type": "multihead", "poly_attention_type": "multihead"},
])  # fmt: skip
def test_scores_are_parlais_formulas(checkpoint, monkeypatch, changes):
    monkeypatch.setenv("POLYRANK_PROCESSOR", "avx2")
    folder, state, options = checkpoint(**changes)
    ranker = from_parlai.load(folder)
    vectors, mask = inference.context_vectors(ranker, CONTEXTS)
    with torch.no_grad():
        ours = ranker.dual.scores(vectors, mask, inference.candidate_vectors(ranker, CANDIDATES))
    expected = [[score(state, one, text, options) for text in CANDIDATES] for one in CONTEXTS]
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)
    assert np.std(expected) > 0.005


TEXTS = [
    "low Lower newest",
    "a_b __newln__\nlow",
    "",
    "ünï_lo 日本 x² l!o",
    "__start__ low",
    "  lo\tw\r\n?",
]


def test_texts_have_parlais_tokens(checkpoint):
    folder, _, options = checkpoint()
    tokenizer = from_parlai.load(folder).tokenizer
    unknown, words = WORDS.index("__unk__") - 1, len(words_of(options))
    for text, row in zip(TEXTS, tokenizer.ids(TEXTS), strict=True):
        assert [number if number < words else unknown for number in row] == ids(text, options)


def test_what_is_read_is_a_ranker_like_any_other(checkpoint, tmp_path):
    folder, _, _ = checkpoint()
    ranker = from_parlai.load(folder)
    ranker.save(tmp_path / "ranker")
    again = load_ranker(tmp_path / "ranker")
    assert again.config == ranker.config
    assert (again.config.max_context_tokens, again.config.max_candidate_tokens) == (22, 9)
    assert again.context_rows(CONTEXTS) == ranker.context_rows(CONTEXTS)
    assert again.context_rows([["low"]])[0][0] == again.context_rows([["low"]])[0][-1] == 1


def refusal(folder):
    return helpers.refusal(from_parlai.load, folder)


@pytest.mark.parametrize(("changes", "message"), [
    ({"variant": "prelayernorm"}, "variant: 'prelayernorm' is not allowed; allowed: xlm"),
    ({"reduction_type": "max"}, "reduction_type: 'max' is not allowed; allowed: first, mean"),
    ({"polyencoder_type": "n_last"}, "allowed: codes, n_first"),
    ({"polyencoder_attention_keys": "position"}, "polyencoder_attention_keys"),
    ({"dict_tokenizer": "gpt2"}, "dict_tokenizer: 'gpt2' is not allowed; allowed: bpe"),
    ({"n_layers": 3}, "encoder_ctxt has not the tensors of 3 layers"),
    ({"n_heads": None}, "n_heads: None is not allowed"),
    ({"poly_n_codes": 9}, "codes_MD"),
    ({"codes_attention_type": "multihead", "poly_attention_type": "multihead",
      "poly_attention_num_heads": 2, "codes_attention_num_heads": 4}, "allowed: the same number"),
])  # fmt: skip
def test_what_a_ranker_does_not_do_is_refused_by_name(checkpoint, changes, message):
    folder, _, _ = checkpoint(**changes)
    assert message in refusal(folder)


class Surprise:
    """A pickle of it calls a function when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_pickles_of_anything_but_tensors_are_not_loaded(checkpoint):
    folder, state, _ = checkpoint()
    torch.save({"model": state, "hook": Surprise(folder / "ran")}, folder / "model")
    assert "not to be read as tensors" in refusal(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("content", [{}, {"model": {"codes": 1}}, [1]])
def test_checkpoints_of_something_else_are_refused(checkpoint, content):
    folder, _, _ = checkpoint()
    torch.save(content, folder / "model")
    assert "not a checkpoint of ParlAI" in refusal(folder)


@pytest.mark.parametrize("name", ["model", "model.opt", "model.dict", "model.dict.codecs"])
def test_missing_and_empty_files_are_named(checkpoint, name):
    folder, _, _ = checkpoint()
    (folder / name).write_text("")
    assert f"{folder}/model" in refusal(folder)
    (folder / name).unlink()
    assert f"{folder}/model" in refusal(folder)


def test_a_dictionary_of_another_model_is_refused(checkpoint):
    folder, _, options = checkpoint()
    with (folder / "model.dict").open("a") as stream:
        stream.write("more\t1\n")
    words = len(words_of(options))
    assert f"embeddings of {words} words, {words + 1} in model.dict" in refusal(folder)


@pytest.mark.parametrize(("name", "message"), [
    ("encoder_cand.layers.0.norm3.weight", "no place for the tensor encoder_cand.layers.0.norm3"),
    ("extra", "does not fit model.opt"),
])  # fmt: skip
def test_tensors_that_have_no_place_are_refused(checkpoint, name, message):
    folder, state, _ = checkpoint()
    torch.save({"model": {**state, name: torch.zeros(2)}}, folder / "model")
    assert message in refusal(folder)
