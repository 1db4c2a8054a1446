"""From token outputs to vectors: projections, cut vectors, vectors of one length; odd texts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import BadInput
from pipeline.models import inference
from pipeline.models.ranker import load_ranker, new_ranker
from pipeline.models.settings import BiConfig, PolyConfig, ranker_config

KINDS = {
    "bi": {"architecture": "bi"},
    "bi_first_m": {"architecture": "bi", "reduction": "mean_first_m", "reduction_m": 3},
    "learnt": {},
    "first_m": {"context_codes": "first_m"},
    "last_m": {"context_codes": "last_m", "candidate_attention": "scaled_dot"},
    "last_m_and_first": {"context_codes": "last_m_and_first"},
    "code_heads": {"code_attention": "multi_head"},
    "candidate_heads": {"candidate_attention": "multi_head"},
    "projected": {"projection": 8, "vector_length": 2.0, "share_towers": True},
}


@pytest.fixture(autouse=True)
def float32(monkeypatch):
    monkeypatch.setenv("POLYRANK_PROCESSOR", "avx2")


@pytest.fixture(scope="module")
def rankers(tiny):
    """A ranker of each kind with m = 30, more than the longest context has tokens."""
    return {name: tiny.ranker(**{"m": 30, **kind}) for name, kind in KINDS.items()}


def scores(ranker, contexts, candidates):
    vectors, mask = inference.context_vectors(ranker, contexts)
    return ranker.dual.scores(vectors, mask, inference.candidate_vectors(ranker, candidates))


words = st.lists(st.integers(0, 199).map(lambda number: f"w{number}"), max_size=8).map(" ".join)
turns = st.lists(words, max_size=4)


@settings(max_examples=15)
@given(st.lists(turns, min_size=1, max_size=4), st.lists(words, min_size=1, max_size=4), st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_scores_depend_on_nothing_but_the_two_texts(rankers, kind, contexts, candidates, data):
    """Not on the order of candidates, nor on what else is in the batch; and they are numbers."""
    ranker = rankers[kind]
    together = scores(ranker, contexts, candidates)
    assert together.isfinite().all()
    order = data.draw(st.permutations(range(len(candidates))))
    permuted = scores(ranker, contexts, [candidates[place] for place in order])
    torch.testing.assert_close(permuted, together[:, order], rtol=1e-4, atol=1e-4)
    for place, context in enumerate(contexts):
        alone = scores(ranker, [context], candidates[:1])
        torch.testing.assert_close(together[place, :1], alone[0], rtol=1e-4, atol=1e-4)


@settings(max_examples=15)
@given(turns, st.lists(words, min_size=1, max_size=4))
@pytest.mark.parametrize("kind", ["learnt", "last_m", "last_m_and_first", "projected"])
def test_scores_lie_between_the_mean_and_the_largest_product(rankers, kind, context, candidates):
    """Weights of a softmax favour larger products, so the mean of all is the least there can be."""
    ranker = rankers[kind]
    vectors, mask = inference.context_vectors(ranker, [context])
    products = vectors[0][mask[0]] @ inference.candidate_vectors(ranker, candidates).T
    own = scores(ranker, [context], candidates)[0]
    assert (own <= products.amax(dim=0) + 1e-4).all()
    assert (own >= products.mean(dim=0) - 1e-4).all()


@pytest.mark.parametrize("kind", KINDS)
def test_texts_without_tokens_are_scored_by_their_special_tokens(rankers, kind):
    ranker = rankers[kind]
    empty = scores(ranker, [[], [""], ["", " "]], ["", "w1"])
    assert empty.isfinite().all()
    torch.testing.assert_close(empty[0], empty[1], rtol=0, atol=1e-5)


def test_of_10_000_turns_the_newest_count(rankers):
    long = [f"w{number % 200} w{number % 7}" for number in range(10_000)]
    ranker = rankers["learnt"]
    assert ranker.context_rows([long]) == ranker.context_rows([long[-11:]])
    assert len(ranker.context_rows([long])[0]) == ranker.config.max_context_tokens
    torch.testing.assert_close(scores(ranker, [long], ["w1"]), scores(ranker, [long[-11:]], ["w1"]))


def encoded(ranker, side):
    """(vectors of two contexts or candidates, the tower's outputs for them in float64)"""
    texts = ["w1 w2 w3", "w4"]
    if side == "context":
        tokens = ranker.tokenizer.batch(ranker.context_rows([[text] for text in texts]))
        with torch.no_grad():
            vectors = ranker.dual.encode_contexts(tokens)[0][:, 0]
            hidden = ranker.dual.context_encoder(tokens)
    else:
        tokens = ranker.tokenizer.batch(ranker.candidate_rows(texts))
        with torch.no_grad():
            vectors = ranker.dual.encode_candidates(tokens)
            hidden = ranker.dual.candidate_encoder(tokens)
    mean = [
        row[keep].double().mean(dim=0) for row, keep in zip(hidden, tokens.mask_BT, strict=True)
    ]
    return vectors.numpy(), torch.stack(mean).numpy()


def projection_of(ranker, side):
    return getattr(ranker.dual, f"{side}_projection").weight.detach().double().numpy()


@pytest.mark.parametrize("side", ["context", "candidate"])
@pytest.mark.parametrize("shared", [False, True])
def test_vectors_are_projected_cut_and_made_as_long_as_wanted(tiny, side, shared):
    ranker = tiny.ranker(
        architecture="bi", share_towers=shared, projection=8, vector_length=3.0, output_scaling=0.5,
        matryoshka=(5,), dimensions=5,
    )  # fmt: skip
    ours, mean = encoded(ranker, side)
    expected = 0.5 * mean @ projection_of(ranker, side).T
    expected = expected[:, :5]
    expected *= 3 / np.linalg.norm(expected, axis=1, keepdims=True)
    assert ranker.dual.dimensions == 5
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


def test_context_vectors_of_codes_are_projected_after_the_attention(tiny):
    ranker = tiny.ranker(projection=8)
    plain = tiny.ranker()
    with torch.no_grad():
        plain.dual.codes_MD.copy_(ranker.dual.codes_MD)
        plain.dual.context_encoder.load_state_dict(ranker.dual.context_encoder.state_dict())
    vectors, mask = inference.context_vectors(ranker, [["w1 w2 w3"]])
    expected, _ = inference.context_vectors(plain, [["w1 w2 w3"]])
    expected = expected.double().numpy() @ projection_of(ranker, "context").T
    assert mask.all()
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)


def test_new_projections_are_equal_and_keep_products_on_average(tiny):
    config = BiConfig(projection=12, max_context_tokens=24, max_candidate_tokens=12)
    dual = new_ranker(config, tiny.encoder_folder(), 0).dual
    left, right = dual.context_projection.weight, dual.candidate_projection.weight
    assert left is not right
    assert torch.equal(left, right)
    gram = (left @ left.T).detach()
    torch.testing.assert_close(gram, torch.eye(12) * 16 / 12, rtol=0, atol=1e-5)
    shared = new_ranker(dataclasses.replace(config, share_towers=True), tiny.encoder_folder(), 0)
    assert shared.dual.context_projection is shared.dual.candidate_projection


@pytest.mark.slow
@pytest.mark.parametrize("length", [0.0, 2.0])
def test_a_ranker_can_be_cut_to_what_it_was_trained_for(tiny, tmp_path, length):
    ranker = tiny.ranker(matryoshka=(4, 9), vector_length=length)
    whole, _ = inference.context_vectors(ranker, [["w1 w2"]])
    ranker.cut(9)
    ranker.save(tmp_path)
    cut = load_ranker(tmp_path)
    assert cut.dual.dimensions == 9
    assert cut.dual.widths == (4, 9)
    expected = whole[..., :9]
    if length:
        expected = expected * length / expected.norm(dim=2, keepdim=True)
    torch.testing.assert_close(inference.context_vectors(cut, [["w1 w2"]])[0], expected)
    assert inference.candidate_vectors(cut, ["w1"]).shape == (1, 9)
    with pytest.raises(BadInput, match=r"ranker.dimensions: 5 is not allowed; .*\[4, 9\]"):
        cut.cut(5)


@pytest.mark.parametrize(("change", "message"), [
    ({"projection": 17}, "ranker.projection: 17 is not allowed; allowed: at most 16"),
    ({"matryoshka": (4, 16)}, "ranker.matryoshka: 16 is not allowed; allowed: at most 15"),
    ({"projection": 8, "matryoshka": (8,)}, "ranker.matryoshka: 8 is not allowed; allowed: at most 7"),
    ({"code_attention": "multi_head", "attention_heads": 5}, "ranker.attention_heads: 5"),
    ({"candidate_attention": "multi_head", "projection": 6}, "ranker.attention_heads: 4"),
])  # fmt: skip
def test_widths_that_an_encoder_cannot_give_are_refused(tiny, change, message):
    with pytest.raises(BadInput, match=message):
        tiny.ranker(**change)


@pytest.mark.parametrize("change", [
    {"reduction_m": 0}, {"attention_heads": 0}, {"projection": -1}, {"vector_length": -1.0},
    {"matryoshka": (0,)}, {"dimensions": 3},
    {"matryoshka": (8,), "candidate_attention": "multi_head"},
])  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(change):
    with pytest.raises(
        BadInput, match=f"ranker.{next(iter(change))}: .* is not allowed; allowed: "
    ):
        PolyConfig(**change)


@pytest.mark.parametrize(("change", "message"), [
    ({"architecture": "cross"}, "architecture: 'cross' cannot search a pool"),
    ({"candidate_attention": "multi_head"}, "candidate_attention: 'multi_head' cannot search a pool"),
])  # fmt: skip
def test_what_cannot_search_a_pool_is_refused(change, message):
    with pytest.raises(BadInput, match=message):
        _ = ranker_config({"architecture": "poly", **change}).search_attention


def test_a_bi_encoder_searches_by_plain_products():
    assert BiConfig().search_attention == "dot"


class Rounded(torch.nn.Module):
    """A tower whose outputs are those of bf16 layers; what a head makes of them is float32."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.width, self.hf = encoder.width, encoder.hf
        for parameter in encoder.parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens):
        with torch.autocast("cpu", enabled=False):
            return self.encoder(tokens).bfloat16()


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_the_head_is_that_of_float32_on_the_same_outputs(tiny, kind):
    """Codes' logits, context vectors, projections and scores: a bf16 logit of 8 bits ties near scores."""
    ranker = tiny.ranker(**{"m": 5, **KINDS[kind]})
    dual = ranker.dual
    dual.context_encoder, dual.candidate_encoder = map(
        Rounded, (dual.context_encoder, dual.candidate_encoder)
    )
    texts = [f"w{n} w{n + 1} w{n + 2} w{3 * n}" for n in range(12)]
    contexts = ranker.tokenizer.batch(ranker.context_rows([[text] for text in texts]))
    candidates = ranker.tokenizer.batch(ranker.candidate_rows(texts))

    def forward():
        vectors, mask = dual.encode_contexts(contexts)
        encoded = dual.encode_candidates(candidates)
        return vectors, encoded, dual.scores(vectors, mask, encoded)

    with torch.no_grad():
        exact = forward()
        with torch.autocast("cpu", torch.bfloat16):
            found = forward()
    for ours, wanted in zip(found, exact, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, wanted, rtol=0, atol=0)
    assert exact[2].unique().numel() > 100


def test_under_autocast_gradients_reach_the_head_and_the_encoder(tiny):
    ranker = tiny.ranker(code_attention="multi_head", candidate_attention="multi_head").train()
    dual = ranker.dual
    tokens = ranker.tokenizer.batch(ranker.context_rows([["w1 w2"], ["w3"]]))
    with torch.autocast("cpu", torch.bfloat16):
        vectors, mask = dual.encode_contexts(tokens)
        dual.scores(vectors, mask, dual.encode_candidates(tokens)).sum().backward()
    unused = {"pooler"}
    for name, parameter in dual.named_parameters():
        assert parameter.grad is not None or any(part in name for part in unused), name
