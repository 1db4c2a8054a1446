"""Heads: against the golden numbers, plain loops in float64 and torch's own attention."""

from __future__ import annotations

import dataclasses
import importlib
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import BadInput
from pipeline.models import inference
from pipeline.models.heads import (
    BiEncoder,
    CrossEncoder,
    MultiHead,
    first_m_vectors,
    last_m_and_first_vectors,
    last_m_vectors,
    learnt_code_vectors,
    poly_scores,
)
from pipeline.models.ranker import load_ranker, new_ranker
from pipeline.models.settings import BiConfig, CrossConfig, ranker_config
from pipeline.models.tokens import Tokens
from tests.helpers import softmax

pytestmark = pytest.mark.usefixtures("fp32")


def test_the_former_module_still_imports():
    assert importlib.import_module("pipeline.models.polyencoder").poly_scores is poly_scores


def attend(query, rows, attention):
    """The mean of the rows, weighted by their products with the query."""
    scale = 1 / np.sqrt(rows.shape[1]) if attention == "scaled_dot" else 1.0
    return softmax(scale * (rows @ query)) @ rows


def oracle_code_vectors(hidden, mask, codes, attention="dot"):
    return np.array(
        [[attend(code, row[keep], attention) for code in codes]
         for row, keep in zip(hidden, mask, strict=True)]
    )  # fmt: skip


def oracle_scores(vectors, vector_mask, candidates, attention="dot"):
    """The paper's own form: the attended context, then its product with the candidate."""
    return np.array(
        [[attend(text, row[keep], attention) @ text for text in texts]
         for row, keep, texts in zip(vectors, vector_mask, candidates, strict=True)]
    )  # fmt: skip


@st.composite
def cases(draw):
    """Random hidden states, ragged masks with a token at least, codes and candidates."""
    batch, tokens, width, m, count = (draw(st.integers(1, most)) for most in (3, 9, 8, 6, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = draw(st.lists(st.integers(1, tokens), min_size=batch, max_size=batch))
    scale = draw(st.sampled_from([0.1, 1.0, 3.0]))
    return {
        "hidden": scale * rng.standard_normal((batch, tokens, width)),
        "mask": np.arange(tokens) < np.array(lengths)[:, None],
        "codes": rng.standard_normal((m, width)),
        "candidates": scale * rng.standard_normal((batch, count, width)),
        "attention": draw(st.sampled_from(["dot", "scaled_dot"])),
    }


def tensor(values):
    array = torch.as_tensor(values)
    return array.float() if array.dtype != torch.bool else array


def close(ours, expected, tolerance=1e-4):
    np.testing.assert_allclose(ours.numpy(), expected, rtol=tolerance, atol=tolerance)


GOLDEN = ["learnt_m16", "learnt_m64_short", "learnt_m1", "learnt_m360", "first_m16",
          "first_m16_padded", "learnt_m16_scaled"]  # fmt: skip


@pytest.mark.shared
@pytest.mark.parametrize("name", GOLDEN)
def test_head_reproduces_parlai(shared, name):
    about = json.loads((shared / "golden/polyencoder_head.json").read_text())
    assert [case["name"] for case in about] == GOLDEN
    case = about[GOLDEN.index(name)]
    stored = np.load(shared / "golden/polyencoder_head.npz")
    given = {key.split(".")[1]: stored[key] for key in stored if key.split(".")[0] == name}
    hidden, mask, candidates = (tensor(given[key]) for key in ("hidden", "mask", "candidates"))
    if case["context_codes"] == "learnt":
        vectors, vector_mask = learnt_code_vectors(
            hidden, mask, tensor(given["codes"]), case["attention"]
        )
    else:
        vectors, vector_mask = first_m_vectors(hidden, mask, case["m"])
    assert vectors.shape == given["context_vectors"].shape
    np.testing.assert_array_equal(vector_mask, given["context_vector_mask"])
    real = given["context_vector_mask"]
    np.testing.assert_allclose(vectors[real], given["context_vectors"][real], rtol=0, atol=1e-5)
    scores = poly_scores(vectors, vector_mask, candidates, case["attention"])
    np.testing.assert_allclose(scores, given["scores"], rtol=0, atol=1e-5)


@given(cases())
def test_learnt_codes_are_the_papers_formula(case):
    vectors, mask = learnt_code_vectors(
        tensor(case["hidden"]), tensor(case["mask"]), tensor(case["codes"]), case["attention"]
    )
    expected = oracle_code_vectors(case["hidden"], case["mask"], case["codes"], case["attention"])
    close(vectors, expected)
    assert mask.all()
    assert mask.shape == vectors.shape[:2]


def first_places(count, m):
    return [place if place < count else None for place in range(m)]


def last_places(count, m):
    kept = list(range(count))[-m:]
    return kept + [None] * (m - len(kept))


def last_and_first_places(count, m):
    places = last_places(count, m)
    return [None if 0 in places else 0, *places]  # no output counts twice


@pytest.mark.parametrize(
    ("make", "expected_places"),
    [
        (first_m_vectors, first_places),
        (last_m_vectors, last_places),
        (last_m_and_first_vectors, last_and_first_places),
    ],
)
@given(cases(), st.integers(1, 12))
def test_vectors_of_outputs_are_those_at_the_places_that_their_name_says(
    make, expected_places, case, m
):
    """A place of None is masked: the text has no such token."""
    vectors, mask = make(tensor(case["hidden"]), tensor(case["mask"]), m)
    for row, keep, own, own_mask in zip(case["hidden"], case["mask"], vectors, mask, strict=True):
        places = expected_places(int(keep.sum()), m)
        assert own_mask.tolist() == [place is not None for place in places]
        close(own[own_mask], row[[place for place in places if place is not None]], 1e-6)


@given(cases())
def test_short_form_is_the_papers_score(case):
    """Of candidates of each context's own, and of one list for all."""
    given = [case[name] for name in ("hidden", "mask", "candidates")]
    vectors, mask, candidates = map(tensor, given)
    scores = poly_scores(vectors, mask, candidates, case["attention"])
    close(scores, oracle_scores(*given, case["attention"]), 1e-3)
    shared = poly_scores(vectors, mask, candidates[0], case["attention"])
    given[2] = np.broadcast_to(case["candidates"][:1], case["candidates"].shape)
    close(shared, oracle_scores(*given, case["attention"]), 1e-3)


def test_large_products_neither_overflow_nor_lose_the_maximum():
    vectors = torch.tensor([[[200.0, 0.0], [0.0, 200.0]]])
    scores = poly_scores(vectors, torch.ones(1, 2), torch.tensor([[200.0, 100.0]]))
    assert scores.item() == 200.0 * 200.0


def test_contexts_without_a_single_vector_score_a_number_and_bf16_gives_float32():
    vectors, nothing = torch.ones(1, 3, 8), torch.zeros(1, 3)
    with torch.no_grad():
        for scores in (poly_scores, made(8, 2, 0)[0].scores):
            assert scores(vectors, nothing, torch.ones(2, 8)).isfinite().all()
    rounded = poly_scores(vectors.bfloat16(), torch.ones(1, 3), torch.ones(2, 8).bfloat16())
    assert rounded.dtype == torch.float32


def towers(tiny):
    tokens = tiny.tokenizer().batch([[2, 7, 8, 3], [2, 9, 3]])
    return tiny.encoder().eval(), tiny.encoder(init_std=0.1).eval(), tokens


@pytest.mark.parametrize("reduction", ["first", "mean", "mean_first_m"])
def test_bi_score_is_the_product_of_reduced_and_scaled_outputs(tiny, reduction):
    contexts, candidates, tokens = towers(tiny)
    bi = BiEncoder(
        contexts, candidates, BiConfig(reduction=reduction, reduction_m=2, output_scaling=0.5)
    )
    with torch.no_grad():
        ours = bi.scores(*bi.encode_contexts(tokens), bi.encode_candidates(tokens))
        outputs = [tower(tokens).double().numpy() for tower in (contexts, candidates)]
    counts = {"first": (1, 1), "mean": (4, 3), "mean_first_m": (2, 2)}[reduction]
    left, right = (
        np.array([row[:count].mean(axis=0) for row, count in zip(hidden, counts, strict=True)])
        for hidden in outputs
    )
    close(ours, 0.25 * left @ right.T, 1e-5)


def made(width, heads, seed):
    """Ours with random weights, and torch's with the same."""
    torch.manual_seed(seed)
    ours = MultiHead(width, heads)
    theirs = torch.nn.MultiheadAttention(width, heads, batch_first=True).double()
    with torch.no_grad():
        for layer in (ours.q, ours.k, ours.v, ours.o):
            torch.nn.init.normal_(layer.bias)
        parts = (ours.q, ours.k, ours.v)
        theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        theirs.out_proj.weight.copy_(ours.o.weight)
        theirs.out_proj.bias.copy_(ours.o.bias)
    return ours, theirs


@st.composite
def head_cases(draw):
    heads, share, batch, keys, queries = (draw(st.integers(1, most)) for most in (4, 4, 3, 7, 5))
    lengths = draw(st.lists(st.integers(1, keys), min_size=batch, max_size=batch))
    seed = draw(st.integers(0, 2**31))
    ours, theirs = made(heads * share, heads, seed)
    mask = torch.arange(keys) < torch.tensor(lengths)[:, None]
    sizes = [(batch, keys, heads * share), (batch, queries, heads * share)]
    return ours, theirs, *(torch.randn(size) for size in sizes), mask


def oracle(theirs, queries, keys, mask):
    """What the queries see, float64."""
    keys = keys.double()
    return theirs(queries.double(), keys, keys, key_padding_mask=~mask, need_weights=False)[0]


@given(head_cases())
def test_codes_see_what_torchs_attention_sees(case):
    ours, theirs, keys, queries, mask = case
    with torch.no_grad():
        seen = ours.attend(queries[0], keys, mask)
        expected = oracle(theirs, queries[:1].expand(len(keys), -1, -1), keys, mask)
    torch.testing.assert_close(seen, expected.float(), rtol=1e-4, atol=1e-4)


@given(head_cases())
def test_score_is_the_candidate_times_what_it_sees(case):
    ours, theirs, vectors, candidates, mask = case
    with torch.no_grad():
        scores = ours.scores(vectors, mask, candidates)
        shared = ours.scores(vectors, mask, candidates[0])
        seen = oracle(theirs, candidates, vectors, mask)
        seen_by_shared = oracle(theirs, candidates[:1].expand_as(candidates), vectors, mask)
    expected = (seen * candidates.double()).sum(dim=2).float()
    torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-3)
    expected = (seen_by_shared * candidates[0].double()).sum(dim=2).float()
    torch.testing.assert_close(shared, expected, rtol=1e-3, atol=1e-3)


KINDS = {
    "bi": {"architecture": "bi"},
    "bi_first_m": {"architecture": "bi", "reduction": "mean_first_m", "reduction_m": 3},
    "learnt": {},
    "modernbert": {"encoder": "modernbert"},
    "first_m": {"context_codes": "first_m"},
    "last_m": {"context_codes": "last_m", "candidate_attention": "scaled_dot"},
    "last_m_and_first": {"context_codes": "last_m_and_first"},
    "code_heads": {"code_attention": "multi_head"},
    "candidate_heads": {"candidate_attention": "multi_head"},
    "projected": {"projection": 8, "vector_length": 2.0, "share_towers": True},
}


def scores(ranker, contexts, candidates):
    vectors, mask = inference.context_vectors(ranker, contexts)
    return ranker.dual.scores(vectors, mask, inference.candidate_vectors(ranker, candidates))


BATCH = [[], [""], ["w1 w2"], ["w3", "", "w4 w5 w6 w7 w8 w9 w10"], ["w11 w12 w13"]]
TEXTS = ["w3 w4 w5", "", "w1", "w20 w21 w22 w23 w24 w25 w26"]


@pytest.mark.parametrize("kind", KINDS)
def test_scores_depend_on_nothing_but_the_two_texts(tiny, kind):
    """Not on what else is in the batch; and they are numbers, of empty texts too. A context has fewer than 30
    tokens."""
    ranker = tiny.ranker(**{"m": 30, **KINDS[kind]})
    together = scores(ranker, BATCH, TEXTS)
    assert together.isfinite().all()
    assert together.std() > 0.01  # else anything would agree
    for row, context in enumerate(BATCH):
        column = row % len(TEXTS)
        alone = scores(ranker, [context], [TEXTS[column]])
        torch.testing.assert_close(together[row, column], alone[0, 0], rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize("shared", [False, True])
def test_vectors_are_projected_cut_and_made_as_long_as_wanted(tiny, shared):
    ranker = tiny.ranker(
        architecture="bi", share_towers=shared, projection=8, vector_length=3.0, output_scaling=0.5,
        matryoshka=(5,), dimensions=5,
    )  # fmt: skip
    assert ranker.dual.dimensions == 5
    for side in ("context", "candidate"):
        ours, mean = encoded(ranker, side)
        expected = (0.5 * mean @ projection_of(ranker, side).T)[:, :5]
        expected *= 3 / np.linalg.norm(expected, axis=1, keepdims=True)
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
def test_a_ranker_can_be_cut_to_what_it_was_trained_for(tiny, tmp_path):
    ranker = tiny.ranker(matryoshka=(4, 9), vector_length=2.0)
    whole, _ = inference.context_vectors(ranker, [["w1 w2"]])
    ranker.cut(9)
    ranker.save(tmp_path)
    cut = load_ranker(tmp_path)
    assert cut.dual.dimensions == 9
    assert cut.dual.widths == (4, 9)
    expected = whole[..., :9]
    expected = expected * 2.0 / expected.norm(dim=2, keepdim=True)
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


@pytest.mark.parametrize(("change", "message"), [
    ({"architecture": "cross"}, "architecture: 'cross' cannot search a pool"),
    ({"candidate_attention": "multi_head"}, "candidate_attention: 'multi_head' cannot search a pool"),
])  # fmt: skip
def test_what_cannot_search_a_pool_is_refused(change, message):
    with pytest.raises(BadInput, match=message):
        _ = ranker_config({"architecture": "poly", **change}).search_attention


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


@pytest.mark.parametrize(
    "kind", ["bi", "learnt", "last_m", "code_heads", "candidate_heads", "projected"]
)
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


class Fixed(torch.nn.Module):
    """Stands for an encoder: the same float32 outputs, whatever the tokens."""

    def __init__(self, hidden_BTD):
        super().__init__()
        self.hidden_BTD = hidden_BTD
        self.width = hidden_BTD.shape[-1]

    def forward(self, tokens):
        return self.hidden_BTD


@pytest.mark.parametrize("pooler", [False, True])
def test_score_is_a_linear_function_of_the_first_output_or_of_berts_pooler(pooler):
    hidden = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))
    cross = CrossEncoder(Fixed(hidden), CrossConfig(output_scaling=0.5, pooler=pooler))
    for part in cross.parameters():
        torch.nn.init.normal_(part)
    *pooling, weight, bias = (part.detach().double().numpy() for part in cross.parameters())
    first = 0.5 * hidden[:, 0].double().numpy()
    if pooler:
        matrix, shift = pooling
        first = np.tanh(first @ matrix.T + shift)
    with torch.no_grad():
        np.testing.assert_allclose(
            cross.score_pairs(None), first @ weight[0] + bias, rtol=0, atol=1e-5
        )


def test_two_means_add_the_product_of_both_texts_means():
    """Rows of 3 + 2 tokens, and of 2 + 1 with padding."""
    hidden = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    config = CrossConfig(head="two_means", output_scaling=0.5)
    cross = CrossEncoder(Fixed(hidden), config)
    for part in cross.parameters():
        torch.nn.init.normal_(part)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    segments = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 0, 0]])
    scaled = 0.5 * hidden.double().numpy()
    gain = cross.product_gain.item()
    weight, bias = (part.detach().double().numpy() for part in cross.score.parameters())
    expected = scaled[:, 0] @ weight[0] + bias
    expected[0] += gain * (scaled[0, :3].mean(axis=0) @ scaled[0, 3:].mean(axis=0))
    expected[1] += gain * (scaled[1, :2].mean(axis=0) @ scaled[1, 2])
    with torch.no_grad():
        scores = cross.score_pairs(Tokens(torch.zeros_like(segments), mask, (5, 3), segments))
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", ["bert", "modernbert"])
def test_two_means_start_at_a_bi_encoders_score(tiny, architecture, tmp_path):
    """Of outputs that have read both texts: the score is the product of their means, as a bi-encoder's, and
    the candidate's segment is the one that a bi-encoder knows."""
    tiny.ranker(architecture, architecture="bi", share_towers=True).save(tmp_path / "bi")
    config = CrossConfig(head="two_means", max_context_tokens=16, max_candidate_tokens=8)
    ranker = new_ranker(config, tmp_path / "bi" / "context_encoder", seed=0).eval()
    ranker.save(tmp_path / "cross")
    tokens = ranker.tokenizer.pairs([[2, 7, 9, 3]], [[2, 8, 3]])
    hf = load_ranker(tmp_path / "bi").dual.context_encoder.hf
    with torch.no_grad():
        outputs = hf(input_ids=torch.tensor([[2, 7, 9, 3, 8, 3]])).last_hidden_state[0].double()
        expected = (outputs[:4].mean(0) @ outputs[4:].mean(0)).item()
        for trained in (ranker, load_ranker(tmp_path / "cross")):
            assert trained.cross.score_pairs(tokens).item() == pytest.approx(expected, abs=1e-5)


def test_scores_keep_float32_precision_under_bf16_autocast():
    """bf16 has 8 bits: candidates that differ by less than 1/256 would tie."""
    hidden = torch.ones(64, 1, 8)
    hidden[:, 0, 0] += torch.arange(64) / 10_000
    cross = CrossEncoder(Fixed(hidden), CrossConfig())
    torch.nn.init.ones_(cross.score.weight)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        scores = cross.score_pairs(None)
    assert scores.dtype == torch.float32
    assert len(scores.unique()) == 64
