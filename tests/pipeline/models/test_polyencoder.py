"""The poly-encoder's head against ParlAI's numbers and against plain loops in float64."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.models.biencoder import BiEncoder
from pipeline.models.polyencoder import (
    PolyEncoder,
    first_m_vectors,
    last_m_and_first_vectors,
    last_m_vectors,
    learnt_code_vectors,
    poly_scores,
)
from pipeline.models.settings import BiConfig, PolyConfig

HIDDEN = [[1, 0], [0, 1], [1, 1]]
CODES = [[1, 0], [0, 2]]
CANDIDATES = [[1, 1], [2, -1]]


def softmax(logits):
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


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


def test_learnt_codes_on_small_numbers():
    hidden, codes, candidates = tensor([HIDDEN]), tensor(CODES), tensor([CANDIDATES])
    vectors, mask = learnt_code_vectors(hidden, torch.ones(1, 3, dtype=torch.bool), codes)
    close(vectors[0], [[0.844638, 0.577681], [0.531689, 0.936621]], 1e-6)
    close(poly_scores(vectors, mask, candidates)[0], [1.445843, 0.843784], 1e-6)


def test_first_m_on_small_numbers_masks_the_missing_fourth():
    vectors, mask = first_m_vectors(tensor([HIDDEN]), torch.ones(1, 3, dtype=torch.bool), 4)
    assert mask.tolist() == [[True, True, True, False]]
    assert vectors[0, 3].tolist() == [0, 0]
    close(poly_scores(vectors, mask, tensor([CANDIDATES]))[0], [1.576117, 1.635146], 1e-6)


@given(cases())
def test_learnt_codes_are_the_papers_formula(case):
    vectors, mask = learnt_code_vectors(
        tensor(case["hidden"]), tensor(case["mask"]), tensor(case["codes"]), case["attention"]
    )
    expected = oracle_code_vectors(case["hidden"], case["mask"], case["codes"], case["attention"])
    close(vectors, expected)
    assert mask.all()
    assert mask.shape == vectors.shape[:2]


@given(cases(), st.integers(1, 12))
def test_first_m_are_the_first_tokens_then_nothing(case, m):
    vectors, mask = first_m_vectors(tensor(case["hidden"]), tensor(case["mask"]), m)
    assert vectors.shape[:2] == mask.shape == (len(case["hidden"]), m)
    for row, keep, own, own_mask in zip(case["hidden"], case["mask"], vectors, mask, strict=True):
        expected = row[keep][:m]
        assert own_mask.tolist() == [place < len(expected) for place in range(m)]
        close(own[own_mask], expected, 1e-6)


def check_taken(case, made, expected_places):
    """`made` (vectors, mask) holds each row's outputs at the places given, None where masked."""
    vectors, mask = made
    for row, keep, own, own_mask in zip(case["hidden"], case["mask"], vectors, mask, strict=True):
        places = expected_places(int(keep.sum()))
        assert own_mask.tolist() == [place is not None for place in places]
        close(own[own_mask], row[[place for place in places if place is not None]], 1e-6)


@given(cases(), st.integers(1, 12))
def test_last_m_are_the_last_tokens_in_order_then_nothing(case, m):
    def places(count):
        kept = list(range(count))[-m:]
        return kept + [None] * (m - len(kept))

    check_taken(case, last_m_vectors(tensor(case["hidden"]), tensor(case["mask"]), m), places)


@given(cases(), st.integers(1, 12))
def test_last_m_and_first_counts_no_output_twice(case, m):
    def places(count):
        kept = list(range(count))[-m:]
        return [0 if 0 not in kept else None, *kept, *[None] * (m - len(kept))]

    made = last_m_and_first_vectors(tensor(case["hidden"]), tensor(case["mask"]), m)
    check_taken(case, made, places)


@given(cases())
def test_with_m_above_all_lengths_all_outputs_count_whatever_they_are_called(case):
    """m > N: first m, last m, and last m with h1 are then the same set of vectors."""
    hidden, mask, candidates = (tensor(case[name]) for name in ("hidden", "mask", "candidates"))
    expected = oracle_scores(case["hidden"], case["mask"], case["candidates"])
    for make in (first_m_vectors, last_m_vectors, last_m_and_first_vectors):
        scores = poly_scores(*make(hidden, mask, 30), candidates)
        close(scores, expected, 1e-3)


@given(cases())
def test_short_form_is_the_papers_score(case):
    given = [case[name] for name in ("hidden", "mask", "candidates")]
    scores = poly_scores(*map(tensor, given), case["attention"])
    close(scores, oracle_scores(*given, case["attention"]), 1e-3)


@given(cases())
def test_score_lies_between_mean_and_maximum_product(case):
    """What exact search prunes by (design, decision 9)."""
    vectors, mask = case["hidden"], case["mask"]
    scores = poly_scores(tensor(vectors), tensor(mask), tensor(case["candidates"])).numpy()
    for row, keep, texts, own in zip(vectors, mask, case["candidates"], scores, strict=True):
        products = texts @ row[keep].T
        assert (own <= products.max(axis=1) + 1e-4).all()
        assert (own >= products.mean(axis=1) - 1e-4).all()


@given(cases(), st.integers(1, 5), st.sampled_from([0.0, 1e3, -1e3]))
def test_pads_change_nothing_whatever_stands_there(case, pads, value):
    hidden, mask, codes = (tensor(case[name]) for name in ("hidden", "mask", "codes"))
    candidates = tensor(case["candidates"])
    longer = torch.nn.functional.pad(hidden, (0, 0, 0, pads), value=value)
    longer[:, : hidden.shape[1]][~mask] = value
    longer_mask = torch.nn.functional.pad(mask, (0, pads))
    for make in (
        lambda states, keep: learnt_code_vectors(states, keep, codes),
        lambda states, keep: first_m_vectors(states, keep, 5),
        lambda states, keep: last_m_vectors(states, keep, 5),
        lambda states, keep: last_m_and_first_vectors(states, keep, 5),
    ):
        close(
            poly_scores(*make(longer, longer_mask), candidates),
            poly_scores(*make(hidden, mask), candidates),
        )


@given(cases(), st.randoms(use_true_random=False))
def test_permuting_candidates_permutes_scores(case, random):
    vectors, mask, candidates = (tensor(case[name]) for name in ("hidden", "mask", "candidates"))
    order = list(range(candidates.shape[1]))
    random.shuffle(order)
    scores = poly_scores(vectors, mask, candidates, case["attention"])
    permuted = poly_scores(vectors, mask, candidates[:, order], case["attention"])
    close(permuted, scores[:, order].numpy(), 1e-5)


def test_one_list_of_candidates_for_all_contexts_is_that_list_for_each():
    torch.manual_seed(0)
    vectors, mask = torch.randn(3, 4, 8), torch.ones(3, 4, dtype=torch.bool)
    candidates_CD = torch.randn(5, 8)
    each = poly_scores(vectors, mask, candidates_CD.expand(3, 5, 8))
    torch.testing.assert_close(poly_scores(vectors, mask, candidates_CD), each)


def test_large_products_neither_overflow_nor_lose_the_maximum():
    vectors = torch.tensor([[[200.0, 0.0], [0.0, 200.0]]])
    scores = poly_scores(vectors, torch.ones(1, 2), torch.tensor([[200.0, 100.0]]))
    assert scores.item() == 200.0 * 200.0


def test_context_without_a_single_vector_scores_a_number():
    scores = poly_scores(torch.ones(1, 3, 2), torch.zeros(1, 3), torch.ones(2, 2))
    assert scores.isfinite().all()


def test_scores_of_bf16_vectors_are_float32():
    vectors, candidates = torch.ones(1, 3, 2).bfloat16(), torch.ones(2, 2).bfloat16()
    assert poly_scores(vectors, torch.ones(1, 3), candidates).dtype == torch.float32


POLY = [
    {},
    {"context_codes": "first_m"},
    {"context_codes": "last_m"},
    {"context_codes": "last_m_and_first"},
    {"code_attention": "multi_head", "candidate_attention": "scaled_dot"},
    {"candidate_attention": "multi_head", "projection": 8},
]


@pytest.mark.parametrize("architecture", ["bert", "modernbert"])
@pytest.mark.parametrize("settings", POLY)
def test_longer_neighbours_in_the_batch_change_no_poly_score(tiny, architecture, settings):
    check_padding(tiny.ranker(architecture, architecture="poly", m=6, **settings))


@pytest.mark.parametrize("architecture", ["bert", "modernbert"])
@pytest.mark.parametrize("reduction", ["first", "mean", "mean_first_m"])
def test_longer_neighbours_in_the_batch_change_no_bi_score(tiny, architecture, reduction):
    check_padding(tiny.ranker(architecture, architecture="bi", reduction=reduction, reduction_m=3))


def check_padding(ranker):
    contexts = ranker.context_rows([["w1 w2"], ["w3", "w4 w5 w6 w7 w8 w9 w10 w11 w12"], [""]])
    candidates = ranker.candidate_rows(["w9", "w1 w2 w3 w4 w5 w6 w7", ""])
    batch = ranker.tokenizer.batch
    with torch.no_grad():
        vectors, mask = ranker.dual.encode_contexts(batch(contexts))
        encoded = ranker.dual.encode_candidates(batch(candidates))
        together = ranker.dual.scores(vectors, mask, encoded)
        for place, context in enumerate(contexts):
            one = ranker.dual.encode_contexts(batch([context]))
            alone = [ranker.dual.encode_candidates(batch([row])) for row in candidates]
            scores = ranker.dual.scores(*one, torch.cat(alone))[0]
            torch.testing.assert_close(together[place], scores, rtol=0, atol=1e-5)
    assert together.std() > 0.1  # else anything would agree


def towers(tiny):
    tokens = tiny.tokenizer().batch([[2, 7, 8, 3], [2, 9, 3]])
    return tiny.encoder().eval(), tiny.encoder(init_std=0.1).eval(), tokens


@pytest.mark.parametrize("reduction", ["first", "mean"])
def test_bi_encoder_is_a_poly_encoder_of_one_vector(tiny, reduction):
    """m = 1: the first output alone, or a code of zeros, which attends to all tokens equally."""
    contexts, candidates, tokens = towers(tiny)
    codes = "first_m" if reduction == "first" else "learnt"
    config = PolyConfig(m=1, context_codes=codes, reduction=reduction, output_scaling=0.5)
    bi, poly = BiEncoder(contexts, candidates, config), PolyEncoder(contexts, candidates, config)
    with torch.no_grad():
        if reduction == "mean":
            poly.codes_MD.zero_()
        scores = [
            network.scores(*network.encode_contexts(tokens), network.encode_candidates(tokens))
            for network in (bi, poly)
        ]
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=1e-5)


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
