"""Attention of bf16 models in inference is softmax attention, within bf16's rounding."""

from __future__ import annotations

import math
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pipeline.models import cpu
from pipeline.models.cpu import attention_bf16
from pipeline.models.cpu.attention_bf16 import attention
from pipeline.models.shape import Shape
from pipeline.models.tokens import Tokens
from pipeline.models.transformer import Encoder

ENCODER = SimpleNamespace(is_causal=False)


def inputs(texts: int, heads: int, length: int, seed: int, size: float = 1.0) -> list[torch.Tensor]:
    """q, k, v as a transformer hands them over: heads lie beside each other."""
    rng = torch.Generator().manual_seed(seed)
    rows = (torch.randn(texts, length, heads, 8, generator=rng) * size for _ in range(3))
    return [row.bfloat16().transpose(1, 2) for row in rows]


def padding(texts: int, length: int, seed: int) -> torch.Tensor:
    """A mask as `transformers` makes it: false where a text, of a token at least, has ended."""
    lengths = np.random.default_rng(seed).integers(1, length + 1, texts)
    return (torch.arange(length) < torch.tensor(lengths)[:, None])[:, None, None]


def float64_attention(q, k, v, mask, scale):
    q, k, v = (part.double().numpy() for part in (q, k, v))
    logits = np.einsum("bhid,bhjd->bhij", q, k) * scale
    if mask is not None:
        logits = np.where(mask.numpy(), logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhij,bhjd->bihd", weights, v)


@pytest.fixture
def fused(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of what was left to the fused attention."""
    shapes = []

    def recorded(module, query, *rest, **options):
        shapes.append(tuple(query.shape))
        return sdpa_attention_forward(module, query, *rest, **options)

    monkeypatch.setattr(attention_bf16, "sdpa_attention_forward", recorded)
    return shapes


@settings(deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 40), st.integers(0, 99),
    st.booleans(), st.sampled_from([1, 300, 1 << 19]), st.sampled_from([None, 0.1, 1.0]),
)  # fmt: skip
def test_it_is_the_formula_in_float64(texts, heads, length, seed, masked, at_once, scale):
    q, k, v = inputs(texts, heads, length, seed)
    mask = padding(texts, length, seed) if masked else None
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(attention_bf16, "_LOGITS_AT_ONCE", at_once)
        patch.setattr(attention_bf16, "sdpa_attention_forward", None)
        output, _ = attention(ENCODER, q, k, v, mask, scaling=scale)
    expected = float64_attention(q, k, v, mask, scale or 8**-0.5)
    assert output.is_contiguous() and output.dtype == torch.bfloat16
    np.testing.assert_allclose(
        output.double().numpy(), expected, atol=0.06 * (1 + 4 * (scale == 1.0))
    )


def test_values_at_padding_do_not_count(fused):
    """Whatever stands there."""
    q, k, v = inputs(2, 2, 6, seed=0)
    mask = padding(2, 6, seed=1)
    hidden = (~mask[:, 0, 0])[:, None, :, None].expand_as(v)
    with torch.inference_mode():
        first, _ = attention(ENCODER, q, k, v.masked_fill(hidden, 0.0), mask)
        second, _ = attention(ENCODER, q, k, v.masked_fill(hidden, math.inf), mask)
    assert hidden.any() and torch.equal(first, second) and not fused


def test_large_keys_in_common_cost_no_precision(fused):
    """A vector that all keys have in common changes no softmax; in the logits it would be rounded away."""
    q, k, v = inputs(2, 2, 12, seed=3)
    k = (k.float() + 4).bfloat16()
    expected = float64_attention(q, k, v, None, 8**-0.5)
    with torch.inference_mode():
        output, _ = attention(ENCODER, q, k, v, None)
    assert np.abs(output.double().numpy() - expected).max() < 0.03 and not fused


def test_only_heads_with_large_logits_are_left_to_the_fused_one(fused):
    q, k, v = inputs(2, 3, 6, seed=4)
    q[:, 1] *= 40
    expected = float64_attention(q, k, v, None, 8**-0.5)
    with torch.inference_mode():
        output, _ = attention(ENCODER, q, k, v, None)
    assert fused == [(2, 1, 6, 8)]
    np.testing.assert_allclose(output.double().numpy(), expected, atol=0.06)


@pytest.mark.parametrize("window", [0, 4])
def test_an_encoder_has_it_unless_its_queries_see_different_keys(fused, window):
    shape = Shape(architecture="modernbert", layers=2, width=32, heads=2, positions=64, init_std=0.2,
                  global_attention_every=2 if window else 1)  # fmt: skip
    torch.manual_seed(0)
    encoder = Encoder.new(shape, 100, {"pad": 0, "cls": 1, "sep": 2}).eval()
    if window:
        encoder.hf.config.sliding_window = window
    mask_BT = torch.arange(12) < torch.tensor([12, 5, 9])[:, None]
    tokens = Tokens(torch.randint(3, 100, (3, 12)), mask_BT, (12, 5, 9))
    with torch.inference_mode():
        expected = encoder(tokens)
        encoder.to(torch.bfloat16)
        cpu.prepare_inference(encoder)
        output = encoder(tokens).float()
    assert len(fused) == (1 if window else 0)  # of two layers
    kept = mask_BT[..., None]
    torch.testing.assert_close(output * kept, expected * kept, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("size", "mask", "module", "options"),
    [
        (12.0, None, ENCODER, {}),  # 2^t would overflow
        (math.nan, None, ENCODER, {}),
        (1.0, torch.ones(2, 1, 6, 6, dtype=torch.bool).tril(), ENCODER, {}),  # as windows have it
        (1.0, torch.zeros(2, 1, 6, 6), ENCODER, {}),
        (1.0, torch.zeros(2, 1, 1, 6), ENCODER, {}),
        (1.0, None, SimpleNamespace(is_causal=True), {}),
        (1.0, None, ENCODER, {"is_causal": True}),
        (1.0, None, ENCODER, {"position_bias": torch.zeros(1, 2, 6, 6, dtype=torch.bfloat16)}),
        (1.0, None, ENCODER, {"dropout": 0.5}),
    ],
)
def test_other_attention_is_left_to_the_fused_one(fused, size, mask, module, options):
    q, k, v = inputs(2, 2, 6, seed=2, size=size)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.bfloat16()
    with torch.inference_mode():
        torch.manual_seed(0)
        output, _ = attention(module, q, k, v, mask, **options)
        torch.manual_seed(0)
        expected, _ = sdpa_attention_forward(module, q, k, v, mask, **options)
    assert fused == [(2, 2, 6, 8)]
    torch.testing.assert_close(output, expected, equal_nan=True)
