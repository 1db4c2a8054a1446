"""CPUs compute what `transformers` and torch compute; in inference within the rounding of bf16."""

from __future__ import annotations

import copy
import math
import platform
import re
import resource
import threading
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pipeline.models import cpu, torch_operators
from pipeline.models.cpu import Dropout, attend_in_inference, drop
from pipeline.models.encoder import Encoder, set_dropout
from pipeline.models.precision import use_bf16
from pipeline.models.settings import Shape
from pipeline.models.tokens import Tokens
from pipeline.processor import processor_has
from tests.helpers import run_in_processes


@pytest.fixture
def encoder(plain) -> Encoder:
    """The same weights, with the plug-in."""
    encoder = copy.deepcopy(plain)
    encoder.packs = cpu.accelerate(encoder.hf)
    return encoder


@pytest.fixture(params=["bert", "modernbert"])
def plain(request) -> Encoder:
    torch.manual_seed(0)
    shape = Shape(
        architecture=request.param, layers=2, width=32, heads=4, positions=32, init_std=0.2
    )
    return Encoder.new(shape, 100, {"pad": 0, "cls": 1, "sep": 2})


@pytest.fixture
def tokens() -> Tokens:
    torch.manual_seed(1)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[1, 7:] = False
    return Tokens(torch.randint(3, 100, (3, 12)), mask, (12, 7, 12))


def outputs_and_gradients(encoder, tokens):
    encoder.zero_grad()
    hidden = encoder(tokens) * tokens.mask_BT[..., None]
    hidden.pow(2).sum().backward()
    return hidden.detach(), {n: p.grad.clone() for n, p in encoder.named_parameters()}


@pytest.mark.skipif(not use_bf16(torch.device("cpu")), reason="no bf16 here")
def test_padding_that_no_window_reaches_leaves_gradients_finite():
    """Of a text of 5 tokens beside one of 150, padding behind token 69 sees no token at all."""
    torch.manual_seed(0)
    shape = Shape(architecture="modernbert", layers=3, width=32, heads=4, positions=160,
                  global_attention_every=3, dropout=0.0, init_std=0.2)  # fmt: skip
    plain = Encoder.new(shape, 100, {"pad": 0, "cls": 1, "sep": 2}).train()
    encoder = copy.deepcopy(plain)
    encoder.packs = cpu.accelerate(encoder.hf)
    mask = torch.ones(2, 150, dtype=torch.bool)
    mask[1, 5:] = False
    tokens = Tokens(torch.randint(3, 100, (2, 150)), mask, (150, 5))
    with torch.autocast("cpu", torch.bfloat16):
        ours, our_gradients = outputs_and_gradients(encoder, tokens)
    theirs, their_gradients = outputs_and_gradients(plain, tokens)
    torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.1)
    for name, gradient in their_gradients.items():
        difference = (our_gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-3)
        assert difference < 0.1, (name, difference)


@pytest.mark.parametrize("padded", [True, False])
def test_outputs_and_gradients_are_those_of_the_library(plain, encoder, tokens, padded):
    """To accelerate twice is to accelerate once."""
    if not padded:
        mask = torch.ones_like(tokens.mask_BT)
        tokens = tokens._replace(mask_BT=mask, lengths=(12, 12, 12))
    for part in (plain.train(), encoder.train()):
        set_dropout(part, 0.0)
    assert encoder.hf.config._attn_implementation == "polyrank"
    encoder.packs = cpu.accelerate(encoder.hf)
    ours, our_gradients = outputs_and_gradients(encoder, tokens)
    theirs, their_gradients = outputs_and_gradients(plain, tokens)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for name, gradient in their_gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, rtol=1e-3, atol=1e-3, msg=name)


def test_an_encoder_is_the_librarys_own_until_it_is_accelerated_and_when_saved(
    plain, encoder, tmp_path
):
    assert plain.hf.config._attn_implementation == "sdpa"
    assert not any(type(part).__module__.startswith("pipeline") for part in plain.hf.modules())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in plain.modules())
    encoder.save(tmp_path)
    assert "polyrank" not in (tmp_path / "config.json").read_text()


def test_layers_that_are_computed_again_have_the_same_gradients(encoder, tokens):
    """Those of the packed row, with the same numbers dropped."""
    found = []
    for recompute in (False, True):
        if recompute:
            encoder.recompute_layers()
        torch.manual_seed(0)
        found.append(outputs_and_gradients(encoder.train(), tokens))
    assert torch.equal(found[0][0], found[1][0])
    for name, gradient in found[0][1].items():
        assert torch.equal(found[1][1][name], gradient), name


SIZES = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 9), st.sampled_from([4, 8]))


def with_gradients(function, inputs, d_out):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    return out.detach(), torch.autograd.grad(out, leaves, d_out)


def formula(q, k, v, mask, scale=0.3):
    return (q @ k.mT * scale).masked_fill(~mask, -torch.inf).softmax(-1) @ v


@given(SIZES, st.integers(0, 1000), st.sampled_from([1, 200, 1 << 20]), st.booleans())
@settings(max_examples=25)
def test_attention_without_dropout_is_the_formula_in_float64(size, seed, at_once, masked):
    """Whether its way back takes one text at a time, or all of them."""
    texts, _, length, _ = size
    generator = torch.Generator().manual_seed(seed)
    q, k, v, d_out = (torch.randn(*size, generator=generator) for _ in range(4))
    count = torch.randint(1, length + 1, (texts,), generator=generator)
    mask = (torch.arange(length) < count[:, None])[:, None, None, :].expand(-1, 1, length, -1)
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    if not masked:
        mask, added = torch.ones_like(mask), None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_WEIGHTS_AT_ONCE", at_once)
        out, found = with_gradients(
            lambda q, k, v: cpu._Attention.apply(q, k, v, added, 0.3), (q, k, v), d_out
        )
    doubles = [tensor.double() for tensor in (q, k, v)]
    wanted_out, wanted = with_gradients(
        lambda q, k, v: formula(q, k, v, mask), doubles, d_out.double()
    )
    torch.testing.assert_close(out.double(), wanted_out, rtol=1e-5, atol=1e-5)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [0.2, 3.0])  # logits up to 5, and up to 70
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_in_training_is_as_exact_as_its_numbers(dtype, scale):
    """Large logits: their log-sums, rounded to bf16, would be wrong by a tenth of a nat."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(4, 3, 60, 32, generator=generator).to(dtype) for _ in range(4))
    mask = (torch.arange(60) < torch.tensor([60, 50, 20, 1])[:, None])[:, None, None]
    module = nn.Module()
    module.is_causal = False

    def ours(q, k, v):
        out, _ = cpu.attend_in_training(module, q, k, v, mask, scaling=scale)
        return out.transpose(1, 2)

    out, found = with_gradients(ours, (q, k, v), d_out)
    doubles = [tensor.double() for tensor in (q, k, v)]
    wanted_out, wanted = with_gradients(
        lambda q, k, v: formula(q, k, v, mask, scale), doubles, d_out.double()
    )
    allowed = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for one, other in zip((out, *found), (wanted_out, *wanted), strict=True):
        assert (one.double() - other).norm() < allowed * other.norm()


def test_a_dropped_share_is_zero_and_the_rest_makes_up_for_it():
    values = torch.ones(1000, 333, requires_grad=True)
    torch.manual_seed(0)
    dropped = drop(values, 0.1)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.1, abs=0.003)
    assert dropped[dropped > 0].unique().tolist() == pytest.approx([1 / 0.9], rel=1e-4)
    assert dropped.mean().item() == pytest.approx(1, abs=0.003)
    # Every place and every quarter of a drawn number alike.
    assert (dropped.view(-1)[:332_000].view(-1, 4) == 0).float().mean(0).tolist() == pytest.approx(
        [0.1] * 4, abs=0.005
    )
    dropped.sum().backward()
    assert torch.equal(values.grad, dropped.detach())


def test_nothing_is_dropped_in_evaluation(encoder, tokens):
    set_dropout(encoder, 0.5)
    encoder.eval()
    assert torch.equal(encoder(tokens), encoder(tokens))
    assert any(isinstance(part, Dropout) for part in encoder.modules())
    with torch.inference_mode():
        torch.testing.assert_close(encoder(tokens), encoder(tokens))


@pytest.mark.skipif(not use_bf16(torch.device("cpu")), reason="no matrix units for bf16")
def test_packed_weights_give_the_outputs_of_the_library(encoder, tokens):
    encoder.eval().to(torch.bfloat16)
    with torch.inference_mode():
        expected = encoder(tokens).float()
        cpu.prepare_inference(encoder.hf)
        assert not any(type(part) is nn.Linear for part in encoder.modules())
        found = encoder(tokens).float()
    kept = tokens.mask_BT[..., None]
    torch.testing.assert_close(found * kept, expected * kept, rtol=0.03, atol=0.03)


def page_faults(folder, number):
    """Of ten steps, before and after memory is kept; in a process of its own."""
    for name, keep in (("let go", False), ("kept", True)):
        thread = threading.Thread(target=train_steps, args=(folder / name, keep))  # as Ray Train's
        thread.start()
        thread.join()


def train_steps(file, keep):
    def pages():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    def steps(count):
        for _ in range(count):
            torch.ones(10 << 20), torch.ones(1 << 20)  # 40 MiB, more than glibc keeps, and 4

    if keep:
        cpu.keep_memory()
    steps(20)
    before = pages()
    steps(10)
    file.write_text(str(pages() - before))


@pytest.mark.long  # 19 s on two slow cores
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_that_is_kept_is_not_mapped_again_at_each_step(tmp_path):
    run_in_processes(page_faults, tmp_path, 1, timeout_s=200)
    let_go, kept = (int((tmp_path / name).read_text()) for name in ("let go", "kept"))
    assert let_go > 10 * kept


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
    if mask is None:
        mask = torch.ones(len(q), 1, 1, q.shape[2], dtype=torch.bool)
    return formula(q.double(), k.double(), v.double(), mask, scale).transpose(1, 2).numpy()


@pytest.fixture
def fused(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of what was left to the fused attention."""
    shapes = []

    def recorded(module, query, *rest, **options):
        shapes.append(tuple(query.shape))
        return sdpa_attention_forward(module, query, *rest, **options)

    monkeypatch.setattr(cpu, "sdpa_attention_forward", recorded)
    return shapes


@settings(max_examples=25)
@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 40), st.integers(0, 99),
    st.booleans(), st.sampled_from([1, 300, 1 << 19]), st.sampled_from([None, 0.1, 1.0]),
)  # fmt: skip
def test_it_is_the_formula_in_float64(texts, heads, length, seed, masked, at_once, scale):
    q, k, v = inputs(texts, heads, length, seed)
    mask = padding(texts, length, seed) if masked else None
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(cpu, "_LOGITS_AT_ONCE", at_once)
        patch.setattr(cpu, "sdpa_attention_forward", None)
        output, _ = attend_in_inference(ENCODER, q, k, v, mask, scaling=scale)
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
        first, _ = attend_in_inference(ENCODER, q, k, v.masked_fill(hidden, 0.0), mask)
        second, _ = attend_in_inference(ENCODER, q, k, v.masked_fill(hidden, math.inf), mask)
    assert hidden.any() and torch.equal(first, second) and not fused


def test_large_keys_in_common_cost_no_precision(fused):
    """A vector that all keys have in common changes no softmax; in the logits it would be rounded away."""
    q, k, v = inputs(2, 2, 12, seed=3)
    k = (k.float() + 4).bfloat16()
    expected = float64_attention(q, k, v, None, 8**-0.5)
    with torch.inference_mode():
        output, _ = attend_in_inference(ENCODER, q, k, v, None)
    assert np.abs(output.double().numpy() - expected).max() < 0.03 and not fused


def test_only_heads_with_large_logits_are_left_to_the_fused_one(fused):
    q, k, v = inputs(2, 3, 6, seed=4)
    q[:, 1] *= 40
    expected = float64_attention(q, k, v, None, 8**-0.5)
    with torch.inference_mode():
        output, _ = attend_in_inference(ENCODER, q, k, v, None)
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
        output, _ = attend_in_inference(module, q, k, v, mask, **options)
        torch.manual_seed(0)
        expected, _ = sdpa_attention_forward(module, q, k, v, mask, **options)
    assert fused == [(2, 2, 6, 8)]
    torch.testing.assert_close(output, expected, equal_nan=True)


@pytest.mark.parametrize("masked", [True, False])
def test_without_torchs_private_operators_the_numbers_are_the_same(monkeypatch, masked):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 8, generator=generator) for _ in range(3))
    mask = torch.zeros(2, 1, 1, 5).masked_fill(torch.arange(5) > 3, -1e9) if masked else None
    rows, weight = (
        torch.randint(-127, 128, (4, 8), generator=generator).to(torch.int8) for _ in range(2)
    )

    small_weight = weight.clamp(-torch_operators.MOST_LEVEL, torch_operators.MOST_LEVEL)

    def results():
        products = [
            torch_operators.linear(
                q.bfloat16(), torch_operators.lay_out(weight.bfloat16() / 99), bias, activation
            )
            for activation in ("none", "gelu", "swish")
            for bias in (None, torch.arange(4).bfloat16())
        ]
        attended = torch_operators.attention(q, k, v, mask, 0.3)
        sums = torch.empty(4, 4, dtype=torch.int32)
        assert torch_operators.int8_mm(rows, weight.T, out=sums) is sums
        laid_out = torch_operators.lay_out_int8(small_weight)
        product = torch_operators.int8_linear(rows, small_weight, torch.ones(4), laid_out)
        return [*products, *attended, sums, product]

    private = results() if processor_has("avx512") else None
    for name in ("_lay_out", "_linear", "_attention", "_int8_product", "_int8_linear"):
        monkeypatch.setattr(torch_operators, name, None)
    public = results()
    for sums, factor in zip(public[-2:], (weight, small_weight), strict=True):
        assert torch.equal(sums.long(), rows.long() @ factor.long().T)
    for one, other in zip(private or public, public, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=1e-5)


def test_no_other_module_names_a_private_operator_of_torch():
    pattern = re.compile(r"torch\.ops\b|\baten\.|torch\._[a-z]")
    root = Path(cpu.__file__).parents[2]
    files = [f for room in ("pipeline", "jobs", "serve") for f in (root / room).rglob("*.py")]
    assert [f.name for f in files if pattern.search(f.read_text())] == ["torch_operators.py"]
