"""Training on CPUs computes what `transformers` and torch compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.models import cpu
from pipeline.models.tokens import Tokens
from pipeline.models.transformer import Encoder, Shape, set_dropout


@pytest.fixture(params=["bert", "modernbert"])
def encoder(request) -> Encoder:
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
    return Tokens(torch.randint(3, 100, (3, 12)), mask)


def outputs_and_gradients(encoder, tokens):
    encoder.zero_grad()
    hidden = encoder(tokens) * tokens.mask_BT[..., None]
    hidden.pow(2).sum().backward()
    return hidden.detach(), {n: p.grad.clone() for n, p in encoder.named_parameters()}


@pytest.mark.parametrize("padded", [True, False])
def test_attention_and_its_gradients_are_those_of_the_library(encoder, tokens, padded):
    if not padded:
        tokens = tokens._replace(mask_BT=torch.ones_like(tokens.mask_BT))
    encoder.train()
    set_dropout(encoder, 0.0)
    assert encoder.hf.config._attn_implementation == "polyrank"
    ours, our_gradients = outputs_and_gradients(encoder, tokens)
    encoder.hf.set_attn_implementation("eager")
    theirs, their_gradients = outputs_and_gradients(encoder, tokens)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for name, gradient in their_gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, rtol=1e-3, atol=1e-3, msg=name)


def test_it_is_not_what_a_saved_model_says(encoder, tmp_path):
    encoder.save(tmp_path)
    assert "polyrank" not in (tmp_path / "config.json").read_text()


def test_a_dropped_share_is_zero_and_the_rest_makes_up_for_it():
    values = torch.ones(1000, 333, requires_grad=True)
    torch.manual_seed(0)
    dropped = cpu._drop(values, 0.1)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.1, abs=0.003)
    assert dropped[dropped > 0].unique().tolist() == pytest.approx([1 / 0.9], rel=1e-4)
    assert dropped.mean().item() == pytest.approx(1, abs=0.003)
    # Every place and every quarter of a drawn number alike.
    assert (dropped.view(-1)[:332_000].view(-1, 4) == 0).float().mean(0).tolist() == pytest.approx(
        [0.1] * 4, abs=0.005
    )
    dropped.sum().backward()
    assert torch.equal(values.grad, dropped.detach())


def test_dropout_follows_the_generator(encoder, tokens):
    encoder.train()
    set_dropout(encoder, 0.5)
    found = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        found.append(encoder(tokens))
    assert torch.equal(found[0], found[2])
    assert not torch.allclose(found[0], found[1])


def test_nothing_is_dropped_in_evaluation(encoder, tokens):
    set_dropout(encoder, 0.5)
    encoder.eval()
    assert torch.equal(encoder(tokens), encoder(tokens))
    assert any(isinstance(part, nn.Dropout) for part in encoder.modules())
    with torch.inference_mode():
        torch.testing.assert_close(encoder(tokens), encoder(tokens))
