"""Masking, and the losses of both pre-training heads."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    ModernBertConfig,
)

from pipeline.config import BadInput
from pipeline.models import pretraining_heads
from pipeline.models.encoder import Encoder, prepare_for_training, set_dropout
from pipeline.models.pretraining_heads import NEXT_HEAD, PretrainingModel
from pipeline.models.settings import Shape
from tests.helpers import softmax

BOTH = pytest.mark.parametrize("model", ["bert", "modernbert"], indirect=True)


@pytest.fixture
def model(tiny, request):
    """BERT's, unless BOTH says more; its embeddings and biases are not what they are at the start."""
    torch.manual_seed(0)
    special = {"pad": 0, "cls": 2, "sep": 3}
    shape = Shape(**{**tiny.shape, "architecture": getattr(request, "param", "bert")})
    model = PretrainingModel.new(shape, tiny.vocabulary, special)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return model.eval()


PLACES = [(0, 1, 20), (0, 4, 21), (1, 5, 22)]  # row, place and true id


@pytest.fixture
def batch(tiny):
    tokens = tiny.tokenizer().pairs([[2, 7, 8, 3], [2, 9, 3]], [[2, 10, 3], [2, 11, 12, 13, 3]])
    width = tokens.ids_BT.shape[1]
    predicted = torch.tensor([row * width + place for row, place, _ in PLACES])
    labels = torch.tensor([label for *_, label in PLACES])
    return tokens, predicted, labels, torch.tensor([True, False])


def plain(model, folder):
    """The same model as `transformers` loads it, without polyrank."""
    model.save(folder)
    return AutoModelForMaskedLM.from_pretrained(folder).eval()


def inputs(tokens, hf):
    given = {"input_ids": tokens.ids_BT, "attention_mask": tokens.mask_BT.long()}
    if getattr(hf.config, "type_vocab_size", 0) > 1:
        given["token_type_ids"] = tokens.segments_BT
    return given


@BOTH
def test_losses_are_sums_over_predicted_tokens_and_over_pairs(model, batch, tmp_path):
    tokens, *_, is_next = batch
    hf = plain(model, tmp_path)
    with torch.no_grad():
        sums = model(*batch)
        logits = hf(**inputs(tokens, hf)).logits.double().numpy()
        first = hf.base_model(**inputs(tokens, hf)).last_hidden_state[:, 0]
        next_logits = (first @ model.next.weight.T + model.next.bias)[:, 0].double().numpy()
    expected = [-np.log(softmax(logits[row, place])[label]) for row, place, label in PLACES]
    assert sums.mlm_sum.item() == pytest.approx(sum(expected), rel=1e-4)
    assert sums.mlm_count.item() == 3
    right = sum(logits[row, place].argmax() == label for row, place, label in PLACES)
    assert sums.mlm_hits.item() == right
    probability, y = 1 / (1 + np.exp(-next_logits)), is_next.double().numpy()
    binary = -(y * np.log(probability) + (1 - y) * np.log(1 - probability))
    assert sums.next_sum.item() == pytest.approx(binary.sum(), rel=1e-4)
    assert sums.next_hits.item() == ((probability > 0.5) == (y > 0)).sum()
    assert sums.pairs.item() == 2


def test_right_predictions_are_counted(model, batch):
    tokens, predicted, _, _ = batch
    with torch.no_grad():
        hidden = model.encoder(tokens).flatten(0, 1)[predicted]
        best = model.mlm_logits(hidden).argmax(1)
        next_best = model.next(model.encoder(tokens)[:, 0])[:, 0] > 0
        sums = model(tokens, predicted, best, next_best)
        wrong = model(tokens, predicted, best + 1, ~next_best)
    assert (sums.mlm_hits.item(), sums.next_hits.item()) == (3, 2)
    assert (wrong.mlm_hits.item(), wrong.next_hits.item()) == (0, 0)


@pytest.fixture
def texts(tiny):
    """Rows of four contexts and of their responses. The first and the third response are equal, and so are
    the second and the fourth context."""
    rows = [[2, 7, 8, 3], [2, 9, 3], [2, 7, 3], [2, 9, 3],
            [2, 10, 3], [2, 11, 12, 13, 3], [2, 10, 3], [2, 12, 3]]  # fmt: skip
    return tiny.tokenizer().batch(rows), torch.tensor([[1, 5], [2, -6], [3, 5], [2, 7]])


def test_the_contrastive_loss_tells_a_response_from_the_others_of_the_batch(model, texts, tmp_path):
    tokens, keys = texts
    hf = plain(model, tmp_path)
    with torch.no_grad():
        sums = model(tokens, answer_keys_BS=keys)
        hidden = hf.base_model(**inputs(tokens, hf)).last_hidden_state.double().numpy()
    means = np.array(
        [row[:count].mean(0) for row, count in zip(hidden, tokens.lengths, strict=True)]
    )
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    scores = 20 * means[:4] @ means[4:].T
    # Neither the same text nor another reply to the same context is a wrong answer.
    scores[0, 2] = scores[2, 0] = scores[1, 3] = scores[3, 1] = -np.inf
    expected = [-np.log(softmax(scores[row])[row]) for row in range(4)]
    assert sums.next_sum.item() == pytest.approx(sum(expected), rel=1e-4)
    assert sums.next_hits.item() == (scores.argmax(1) == np.arange(4)).sum()
    assert (sums.pairs.item(), sums.mlm_count.item()) == (4, 0)


def gradients(model, *given):
    model.zero_grad(set_to_none=True)
    sums = model(*given)
    (sums.mlm_sum + sums.next_sum).backward()
    return sums, {name: value.grad for name, value in model.named_parameters()}


@pytest.mark.parametrize("left_out", [("mlm",), ("next",), ("mlm", "next")])
def test_an_objective_that_is_left_out_has_gradients_of_zeros(model, batch, texts, left_out):
    """A weight without gradient would make DistributedDataParallel wait for ever. The contrastive loss uses
    neither head."""
    tokens, predicted, labels, is_next = batch
    both, _ = gradients(model, *batch)
    parts = {
        ("mlm",): (tokens, None, None, is_next), ("next",): (tokens, predicted, labels),
        ("mlm", "next"): (texts[0], None, None, None, texts[1]),
    }  # fmt: skip
    sums, found = gradients(model, *parts[left_out])
    assert [name for name, gradient in found.items() if gradient is None] == []
    of_encoder = {id(value) for value in model.encoder.parameters()}
    absent = [value for name in left_out for value in getattr(model, name).parameters()]
    own = [value for value in absent if id(value) not in of_encoder]
    assert own
    assert all((value.grad == 0).all() for value in own)
    assert found["encoder.hf." + next(iter(model.encoder.hf.state_dict()))].any()
    if len(left_out) == 1:
        for name, value in sums._asdict().items():
            kept = name.startswith("mlm") == (left_out == ("next",))
            assert value.item() == (getattr(both, name).item() if kept else 0.0)


def test_chunks_of_predicted_tokens_have_the_losses_and_gradients_of_one(model, batch, monkeypatch):
    whole, wanted = gradients(model, *batch)
    monkeypatch.setattr(pretraining_heads, "_POSITIONS_AT_ONCE", 2)
    sums, found = gradients(model, *batch)
    torch.testing.assert_close(tuple(sums), tuple(whole))
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


SIZES = {
    "vocab_size": 205, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 40, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
PUBLISHED = {
    "bert": BertConfig(**SIZES),
    "modernbert": ModernBertConfig(**SIZES, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3),
    "electra": ElectraConfig(**SIZES, embedding_size=8),  # narrower than the hidden vectors
    "distilbert": DistilBertConfig(
        vocab_size=205, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=40
    ),
    "untied": BertConfig(**SIZES, tie_word_embeddings=False),
}  # fmt: skip


@pytest.fixture(params=PUBLISHED)
def published(request, tmp_path):
    """A masked language model whose every weight differs from a new one's."""
    torch.manual_seed(0)
    hf = AutoModelForMaskedLM.from_config(PUBLISHED[request.param]).eval()
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    hf.save_pretrained(tmp_path / "published")
    return hf, tmp_path / "published"


def test_a_published_model_goes_on_with_its_head_and_is_saved_with_it(published, batch, tmp_path):
    hf, folder = published
    tokens = batch[0]
    model, text = PretrainingModel.from_encoder(folder)
    assert text == "MLM head loaded, next head new"
    model.eval().save(tmp_path / "again")
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "again").eval()
    kept = tokens.mask_BT
    with torch.no_grad():
        wanted = hf(**inputs(tokens, hf)).logits[kept]
        ours = model.mlm_logits(model.encoder(tokens)[kept])
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
        found = again(**inputs(tokens, again)).logits[kept]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        encoder = Encoder.load(tmp_path / "again").eval()
        torch.testing.assert_close(encoder(tokens)[kept], model.encoder(tokens)[kept])


def test_an_encoder_without_heads_gets_new_ones(tiny, model, tmp_path):
    model.encoder.save(tmp_path)
    torch.manual_seed(0)
    found, text = PretrainingModel.from_encoder(tmp_path)
    assert text.startswith("MLM head new (")
    assert text.endswith("), next head new")
    for name, value in model.encoder.state_dict().items():
        assert torch.equal(found.encoder.state_dict()[name], value), name
    shared = found.mlm.get_output_embeddings().weight
    assert shared is found.encoder.hf.get_input_embeddings().weight


@BOTH
def test_what_was_saved_goes_on_with_both_heads(model, batch, tmp_path):
    model.save(tmp_path)
    found, text = PretrainingModel.from_encoder(tmp_path)
    assert text == "MLM head loaded, next head loaded"
    with torch.no_grad():
        torch.testing.assert_close(
            tuple(found.eval()(*batch)), tuple(model(*batch)), rtol=1e-5, atol=1e-5
        )


def test_a_next_head_of_another_width_is_refused(tiny, model, tmp_path):
    model.save(tmp_path)
    save_file({"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}, tmp_path / NEXT_HEAD)
    with pytest.raises(BadInput, match=r"next_head\.safetensors: holds .*\[1, 16\]"):
        PretrainingModel.from_encoder(tmp_path)
    (tmp_path / NEXT_HEAD).write_bytes(b"no")
    with pytest.raises(BadInput, match=r"next_head\.safetensors: not to be read"):
        PretrainingModel.from_encoder(tmp_path)


def test_an_encoder_with_missing_weights_is_refused(model, tmp_path):
    model.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in weights if "layers.1." in name or "layer.1." in name)
    save_file(
        {name: value for name, value in weights.items() if name != lost},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(BadInput, match="the weights lack 1 of the encoder's tensors"):
        PretrainingModel.from_encoder(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_training_step_on_a_gpu_has_the_gradients_of_a_cpu(tiny, model, batch):
    """bf16 with float32 weights there, float32 here; bf16 has three digits."""
    tokens, *targets = batch
    set_dropout(model.train(), 0.0)
    gpu, device = copy.deepcopy(model), torch.device("cuda")
    gpu.to(device)
    prepare_for_training(gpu, device, "bf16")
    expected = model(tokens, *targets)
    (expected.mlm_sum + expected.next_sum).backward()
    with torch.autocast("cuda", torch.bfloat16):
        found = gpu(tokens.to(device), *(target.to(device) for target in targets))
    (found.mlm_sum + found.next_sum).backward()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach().float().cpu(), other.detach(), rtol=0.05, atol=0.05)
    here, there = (
        torch.cat([value.grad.float().cpu().flatten() for value in each.parameters()])
        for each in (model, gpu)
    )
    assert torch.nn.functional.cosine_similarity(here, there, dim=0) > 0.99
    assert float(there.norm() / here.norm()) == pytest.approx(1, abs=0.05)
