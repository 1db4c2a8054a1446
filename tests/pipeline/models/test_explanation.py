"""Attention to tokens and weights of vectors, against plain numpy in float64."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.models import inference
from pipeline.models.inference import Explained, explain
from pipeline.models.ranker import Ranker, load_ranker, new_network
from pipeline.models.settings import BiConfig, PolyConfig
from tests.helpers import softmax

pytestmark = pytest.mark.usefixtures("fp32")

CONTEXT = ["do you sail ?", "a nurse, é 漢"]
TEXTS = ["i paint", "rain again today", "no"]
SHORT = {"max_context_tokens": 48, "max_candidate_tokens": 32}
CODES = {**SHORT, "m": 3, "code_init_std": 1.0}  # wide, so that their attention is not flat
VARIANTS = {
    "bi_first": BiConfig(reduction="first", **SHORT),
    "bi_mean": BiConfig(reduction="mean", **SHORT),
    "bi_mean_first_m": BiConfig(reduction="mean_first_m", reduction_m=5, **SHORT),
    "learnt": PolyConfig(**CODES),
    "learnt_scaled": PolyConfig(
        code_attention="scaled_dot", candidate_attention="scaled_dot", output_scaling=0.5, **CODES
    ),
    "first_m": PolyConfig(context_codes="first_m", m=4, **SHORT),
    "last_m": PolyConfig(context_codes="last_m", m=4, **SHORT),
    "last_m_and_first": PolyConfig(context_codes="last_m_and_first", m=4, **SHORT),
    "more_than_tokens": PolyConfig(context_codes="last_m_and_first", m=60, **SHORT),
    "code_heads": PolyConfig(code_attention="multi_head", **CODES),
    "candidate_heads": PolyConfig(candidate_attention="multi_head", **CODES),
}


@pytest.fixture(scope="module")
def ranker_of(tiny_ranker):
    """`ranker_of("first_m")`: the tiny poly-encoder's towers under one of the VARIANTS."""
    base = load_ranker(Path(tiny_ranker("poly").uri))

    @functools.cache
    def build(name: str) -> Ranker:
        torch.manual_seed(3)
        config = VARIANTS[name]
        network = new_network(config, base.dual.context_encoder, base.dual.candidate_encoder)
        return Ranker(config, base.tokenizer, network).eval()

    return build


def outputs_of(ranker: Ranker) -> np.ndarray:
    """[T, D] float64: the context's token outputs."""
    tokens = ranker.tokenizer.batch(ranker.context_rows([CONTEXT]))
    with torch.inference_mode():
        hidden_TD = ranker.dual.context_encoder(tokens)[0]
    return hidden_TD.double().numpy() * ranker.config.output_scaling


def oracle_attention(ranker: Ranker, outputs_TD: np.ndarray) -> np.ndarray:
    """[M, T], from the definitions."""
    config, count = ranker.config, len(outputs_TD)
    units = np.eye(count)
    if isinstance(config, BiConfig):
        some = {"first": 1, "mean": count, "mean_first_m": config.reduction_m}[config.reduction]
        return units[:some].mean(axis=0, keepdims=True)
    missing = np.zeros((max(0, config.m - count), count))
    if config.context_codes == "first_m":
        return np.concatenate([units[: config.m], missing])
    if config.context_codes == "last_m":
        return np.concatenate([units[-config.m :], missing])
    if config.context_codes == "last_m_and_first":
        first = units[:1] * (count > config.m)
        return np.concatenate([first, units[-config.m :], missing])
    codes_MD = ranker.network.codes_MD.detach().double().numpy()
    scale = outputs_TD.shape[1] ** -0.5 if config.code_attention == "scaled_dot" else 1.0
    return softmax(scale * codes_MD @ outputs_TD.T)


def explained(ranker: Ranker, context: list[str] = CONTEXT) -> Explained:
    (row,) = ranker.context_rows([context])
    vectors_1MD, mask_1M = inference.context_row_vectors(ranker, [row])
    vectors_CD = inference.candidate_vectors(ranker, TEXTS)
    return explain(ranker, row, vectors_1MD[0], mask_1M[0], vectors_CD)


@pytest.mark.parametrize("name", [name for name in VARIANTS if "heads" not in name])
def test_attention_is_that_of_the_definitions_and_makes_the_vectors_of_the_outputs(ranker_of, name):
    ranker = ranker_of(name)
    tokens, attention_MT, _ = explained(ranker)
    assert attention_MT.shape == (ranker.config.vectors_per_context, len(tokens))
    weights_MT = attention_MT.double().numpy()
    expected = oracle_attention(ranker, outputs_of(ranker))
    np.testing.assert_allclose(weights_MT, expected, rtol=0, atol=1e-5)
    (vectors_MD,), (mask_M,) = inference.context_vectors(ranker, [CONTEXT])
    ours = (weights_MT @ outputs_of(ranker))[mask_M.numpy()]
    np.testing.assert_allclose(ours, vectors_MD[mask_M].numpy(), rtol=1e-4, atol=1e-5)
    sums = weights_MT.sum(axis=1)
    np.testing.assert_allclose(sums, mask_M.numpy().astype(float), rtol=0, atol=1e-6)


def test_heads_are_averaged(ranker_of):
    """Of multi-head attention by hand, a head at a time."""
    ranker = ranker_of("code_heads")
    heads, outputs_TD = ranker.network.code_heads, outputs_of(ranker)
    arrays = {name: value.detach().double().numpy() for name, value in heads.named_parameters()}
    codes = ranker.network.codes_MD.detach().double().numpy()
    queries = codes @ arrays["q.weight"].T + arrays["q.bias"]
    keys = outputs_TD @ arrays["k.weight"].T + arrays["k.bias"]
    share = queries.shape[1] // heads.heads
    parts = [slice(at * share, (at + 1) * share) for at in range(heads.heads)]
    expected = np.mean(
        [softmax(queries[:, part] @ keys[:, part].T / share**0.5) for part in parts], axis=0
    )
    found = explained(ranker).attention_MT.numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_times_products_are_the_rankers_scores(ranker_of, name):
    ranker = ranker_of(name)
    (vectors_MD,), (mask_M,) = inference.context_vectors(ranker, [CONTEXT])
    candidates_CD = inference.candidate_vectors(ranker, TEXTS)
    weights_CM = explained(ranker).weights_CM
    np.testing.assert_allclose(weights_CM.sum(dim=1), 1.0, rtol=0, atol=1e-5)
    if name == "candidate_heads":  # the mean over its heads
        assert weights_CM.shape == (len(TEXTS), len(vectors_MD))
        return
    assert not weights_CM[:, ~mask_M].any()
    logits_CM = candidates_CD.double().numpy() @ vectors_MD.double().numpy().T
    with torch.inference_mode():
        scores_C = ranker.dual.scores(vectors_MD[None], mask_M[None], candidates_CD)[0]
    found = (weights_CM.double().numpy() * logits_CM).sum(axis=1)
    np.testing.assert_allclose(found, scores_C.numpy(), rtol=1e-5, atol=1e-5)
    scaled = logits_CM
    if getattr(ranker.config, "candidate_attention", "dot") == "scaled_dot":
        scaled = logits_CM * vectors_MD.shape[1] ** -0.5
    expected = softmax(np.where(mask_M.numpy(), scaled, -np.inf))
    np.testing.assert_allclose(weights_CM.numpy(), expected, rtol=0, atol=1e-5)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), length=st.integers(1, 9), pads=st.integers(0, 4))
def test_pads_get_nothing_and_rows_add_up_to_1(ranker_of, seed, length, pads):
    rng = torch.Generator().manual_seed(seed)
    hidden_BTD = 3 * torch.randn(1, length + pads, 16, generator=rng)
    mask_BT = torch.arange(length + pads)[None] < length
    for name in VARIANTS:
        network = ranker_of(name).network
        with torch.inference_mode():
            weights_MT = network.token_weights(hidden_BTD, mask_BT)[0]
            mask_M = network.context_vectors(hidden_BTD, mask_BT)[1][0]
        assert not weights_MT[:, length:].any()
        torch.testing.assert_close(weights_MT.sum(dim=1), mask_M.float(), rtol=0, atol=1e-5)


def test_tokens_are_the_rows_pieces(ranker_of):
    """A byte is a token of the tiny tokenizer, which puts a space between any two."""
    ranker = ranker_of("learnt")
    tokens = explained(ranker, ["ab"]).tokens
    assert tokens == ["[CLS]", " a", " b", " [SEP]"]
    long = explained(ranker, ["x" * 500]).tokens
    assert len(long) == ranker.config.max_context_tokens


def test_a_cut_changes_no_attention(tiny_ranker):
    """The first dimensions of a vector hold the same tokens as all of them."""
    ranker = load_ranker(Path(tiny_ranker("poly").uri))
    whole = explained(ranker).attention_MT
    config = dataclasses.replace(ranker.config, matryoshka=(8,))
    ranker.config = ranker.network.config = config
    ranker.cut(8)
    torch.testing.assert_close(explained(ranker).attention_MT, whole)
