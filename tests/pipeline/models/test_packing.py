"""Packed rows compute what padded batches do."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    ElectraConfig,
    ElectraModel,
    ModernBertConfig,
    ModernBertModel,
    RobertaConfig,
    RobertaModel,
)

from pipeline.models import cpu, packing
from pipeline.models.encoder import Encoder, prepare_for_training, set_dropout
from pipeline.models.packing import Packing
from pipeline.models.tokens import Tokens

SIZES = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 32, "max_position_embeddings": 24, "pad_token_id": 1, "initializer_range": 0.3,
}  # fmt: skip
OF_ITS_OWN = {"bos_token_id": 0, "cls_token_id": 0, "eos_token_id": 2, "sep_token_id": 2}
MODELS = {
    "bert": (BertModel, BertConfig, {}),
    "electra": (ElectraModel, ElectraConfig, {"embedding_size": 16}),
    "roberta": (RobertaModel, RobertaConfig, {}),  # its positions start at pad + 1
    "modernbert": (ModernBertModel, ModernBertConfig, {"global_attn_every_n_layers": 1, **OF_ITS_OWN}),
}  # fmt: skip
LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=7)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(packing, "_GROUP_TOKENS", 20)
    monkeypatch.setattr(packing, "_ROW_TOKENS", 8)


@pytest.fixture(scope="module", params=MODELS)
def encoder(request):
    return encoder_of(*MODELS[request.param])


def encoder_of(model, config, more):
    torch.manual_seed(0)
    encoder = Encoder(model(config(**SIZES, **more))).train()
    set_dropout(encoder, 0.0)
    encoder.packs = cpu.accelerate(encoder.hf)
    return encoder


def tokens_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(3, 50, mask.shape, generator=generator).masked_fill(~mask, 1)
    segments = (torch.arange(max(lengths)) >= 4).long().expand(mask.shape)
    return Tokens(ids, mask, tuple(lengths), segments)


def outputs_and_gradients(encoder, tokens):
    """Of a random product of the outputs that are no pads'."""
    encoder.zero_grad()
    hidden = encoder(tokens)
    factors = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(
        hidden.device
    )
    hidden = hidden * tokens.mask_BT[..., None]
    (hidden * factors).sum().backward()
    return hidden.detach(), {
        name: value.grad.clone()
        for name, value in encoder.named_parameters()
        if value.grad is not None
    }


@given(LENGTHS, st.integers(0, 99))
@settings(max_examples=6)
def test_outputs_and_gradients_are_those_of_the_padded_batch(encoder, lengths, seed):
    tokens = tokens_of(lengths, seed)
    found, gradients = outputs_and_gradients(encoder, tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)  # which packs nothing
        wanted, wanted_gradients = outputs_and_gradients(encoder, tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-4, msg=name)


def test_batches_together_compute_what_each_does(encoder):
    batches = [tokens_of([5, 9, 12, 3]), tokens_of([2, 2], seed=1), tokens_of([7, 1, 1], seed=2)]
    rows = []
    encoder.hf.register_forward_pre_hook(lambda hf, given: rows.append(1))
    together = encoder.forward_together(batches)
    assert len(rows) == 1
    for tokens, found in zip(batches, together, strict=True):
        assert found.shape[:2] == tokens.ids_BT.shape
        mask = tokens.mask_BT[..., None]
        torch.testing.assert_close(found * mask, encoder(tokens) * mask, rtol=1e-4, atol=1e-5)


def packed_rows(encoder, tokens, monkeypatch):
    """How many rows went through the model as one."""
    seen = []
    of = Packing.of
    with monkeypatch.context() as patch:
        patch.setattr(
            Packing, "of", lambda *given: seen.append(sum(map(len, given[0]))) or of(*given)
        )
        encoder(tokens)
    return sum(seen)


@pytest.mark.parametrize("training", [True, False])
def test_texts_are_packed_where_a_row_has_fewer_tokens_than_their_batch(
    encoder, monkeypatch, training
):
    encoder.train(training)
    assert packed_rows(encoder, tokens_of([5, 9, 12]), monkeypatch) == 3  # 32 tokens of 36
    assert packed_rows(encoder, tokens_of([9, 9, 9]), monkeypatch) == 0
    assert packed_rows(encoder, tokens_of([12, 5]), monkeypatch) == 0  # 24 of 24
    encoder.train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MODELS)
def test_in_inference_packed_rows_are_the_padded_batch_in_float64(kind, dtype, monkeypatch):
    tokens = tokens_of([5, 9, 12, 1, 3])
    mask = tokens.mask_BT[..., None]
    wanted = encoder_of(*MODELS[kind]).eval().double()
    wanted.packs = False
    encoder = encoder_of(*MODELS[kind]).eval().to(dtype)
    encoder.hf.set_attn_implementation("sdpa")
    encoder.packs = cpu.prepare_inference(encoder)
    with torch.inference_mode():
        assert packed_rows(encoder, tokens, monkeypatch) == 5
        found, expected = encoder(tokens) * mask, wanted(tokens) * mask
    near = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=near)


@pytest.mark.parametrize(
    "model", [
        (ModernBertModel, ModernBertConfig, {"global_attn_every_n_layers": 2, **OF_ITS_OWN}),
        (DistilBertModel, DistilBertConfig, {"dim": 16, "hidden_dim": 32, "n_heads": 4, "n_layers": 1}),
    ], ids=["windows of attention", "not known to pack"],
)  # fmt: skip
def test_other_models_get_padded_batches(model, monkeypatch):
    encoder = encoder_of(*model)
    assert packed_rows(encoder, tokens_of([5, 9, 12]), monkeypatch) == 0


@given(LENGTHS, st.integers(1, 40))
def test_groups_keep_to_their_budget_and_a_row_holds_every_token_once(lengths, budget):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_GROUP_TOKENS", budget)
        packed = Packing.of([lengths], [max(lengths) + 2])
        groups = packed.groups.groups
    assert sum(group.texts for group in groups) == len(lengths)
    for group in groups:
        assert group.texts == 1 or group.texts * group.length <= budget
    tokens = sum(lengths)
    padded = torch.arange(len(lengths))[:, None] * 100 + torch.arange(max(lengths) + 2)
    assert len(packed.pack([padded])[0]) == tokens // 8 * 8 + 8  # more than there are tokens
    rows = packed.pack([padded])[0, : sum(lengths)]
    assert sorted(rows.tolist()) == [
        row * 100 + place for row, length in enumerate(lengths) for place in range(length)
    ]
    assert (rows % 100).tolist() == packed.position_R[: sum(lengths)].tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", MODELS)
def test_a_gpu_computes_packed_rows_as_a_cpu_does(kind):
    """bf16 has three digits: on a CPU its outputs are off by 1.7 % and the direction of its gradients by a
    cosine of 0.9991 here."""
    torch.manual_seed(0)
    model, config, more = MODELS[kind]
    encoder = Encoder(model(config(**{**SIZES, "hidden_size": 32}, **more))).train()
    set_dropout(encoder, 0.0)
    tokens, device = tokens_of([5, 12, 12, 1, 7]), torch.device("cuda")
    expected, expected_gradients = outputs_and_gradients(encoder, tokens)
    prepare_for_training(encoder.to(device), device, "bf16")
    assert encoder.packs
    with torch.autocast("cuda", torch.bfloat16):
        found, gradients = outputs_and_gradients(encoder, tokens.to(device))
    assert (found.cpu() - expected).norm() < 0.04 * expected.norm()
    here, there = (
        torch.cat([each[name].flatten().cpu() for name in expected_gradients])
        for each in (expected_gradients, gradients)
    )
    assert torch.nn.functional.cosine_similarity(here, there, dim=0) > 0.997
    assert float(there.norm() / here.norm()) == pytest.approx(1, abs=0.03)
