"""New encoders: their shapes, and what is refused; and how they compute in training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModel, DistilBertConfig, DistilBertModel

from pipeline.config import BadInput
from pipeline.models import encoder as encoder_module
from pipeline.models.encoder import Encoder, prepare_for_training
from pipeline.models.settings import Shape
from pipeline.models.tokens import Tokens

SPECIAL = {"pad": 0, "cls": 1, "sep": 2}
SMALL = {"layers": 4, "width": 16, "heads": 2, "positions": 300}


def feed_forward_weights(encoder):
    return {
        tuple(value.shape)
        for name, value in encoder.named_parameters()
        if name.endswith(("intermediate.dense.weight", "mlp.Wi.weight"))
    }


@pytest.mark.parametrize(
    ("architecture", "intermediate", "rows"),
    [("bert", 0, 64), ("bert", 24, 24), ("modernbert", 0, 2 * 32), ("modernbert", 24, 2 * 24)],
)
def test_the_feed_forward_layer_is_as_wide_as_asked(architecture, intermediate, rows):
    """That of ModernBERT holds its gate, too."""
    shape = Shape(architecture=architecture, intermediate=intermediate, **SMALL)
    assert feed_forward_weights(Encoder.new(shape, 50, SPECIAL)) == {(rows, 16)}


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_token_far_away_is_seen_by_every_nth_layer_only(every, tmp_path):
    """And the saved directory says so."""
    torch.manual_seed(0)
    shape = Shape(architecture="modernbert", global_attention_every=every, init_std=0.2, **SMALL)
    Encoder.new(shape, 50, SPECIAL).save(tmp_path)
    hf = AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids = torch.randint(3, 50, (1, 200))
    with torch.no_grad():
        attentions = hf(ids, attention_mask=torch.ones_like(ids), output_attentions=True).attentions
    sees = [bool((weights[0, :, 0, 65:] > 0).any()) for weights in attentions]
    assert sees == [layer % every == 0 for layer in range(4)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"intermediate": -1}, "shape.intermediate: -1"),
        ({"architecture": "modernbert", "global_attention_every": 0}, "every: 0"),
        ({"global_attention_every": 3}, "every: 3 is not allowed; allowed: 1, as shape.arch"),
    ],
)
def test_shapes_that_cannot_be_are_refused(options, message):
    with pytest.raises(BadInput, match=message):
        Shape(**{**SMALL, **options})


def test_layers_are_recomputed_on_the_way_back_only_where_asked():
    encoder = Encoder.new(Shape(**SMALL), 50, SPECIAL).train()
    calls = []
    layer = encoder.hf.encoder.layer[1].attention
    layer.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.full((1, 5), 7)
    tokens = Tokens(ids, torch.ones_like(ids, dtype=torch.bool), (5,))
    encoder(tokens).sum().backward()
    assert len(calls) == 1
    encoder.recompute_layers()
    encoder(tokens).sum().backward()
    assert len(calls) == 3


def test_an_architecture_that_cannot_recompute_layers_is_refused(monkeypatch):
    config = DistilBertConfig(vocab_size=50, dim=16, n_layers=1, n_heads=2, hidden_dim=16)
    encoder = Encoder(DistilBertModel(config))
    monkeypatch.setattr(DistilBertModel, "supports_gradient_checkpointing", False)
    with pytest.raises(BadInput, match="gradient checkpointing: DistilBertModel does not support"):
        encoder.recompute_layers()


@pytest.fixture
def chosen(tiny, monkeypatch):
    """The implementation that an encoder inside a module is given; None: it keeps its own."""

    def choose(device, precision="auto", flash=True, model_has_flash=True, matrix_units=True):
        encoder = tiny.encoder()
        calls = []
        encoder.hf._supports_flash_attn = model_has_flash
        encoder.hf.set_attn_implementation = calls.append
        monkeypatch.setattr(encoder_module, "find_spec", lambda name: flash or None)
        monkeypatch.setattr("pipeline.models.precision.use_bf16", lambda device: matrix_units)
        prepare_for_training(nn.Sequential(encoder), torch.device(device), precision)
        assert len(calls) <= 1
        return calls[0] if calls else None

    return choose


def test_only_cpus_get_the_plug_in(chosen):
    assert chosen("cpu") == "polyrank"
    assert chosen("meta") is None


def test_gpus_take_flash_attention_only_where_package_model_and_precision_allow_it(chosen):
    assert chosen("cuda") == "flash_attention_2"
    assert chosen("cuda", "bf16", matrix_units=False) == "flash_attention_2"
    assert chosen("cuda", "fp32") is None
    assert chosen("cuda", flash=False) is None
    assert chosen("cuda", model_has_flash=False) is None
    assert chosen("cuda", matrix_units=False) is None


@pytest.mark.parametrize("architecture", ["bert", "modernbert"])
def test_layers_hand_bf16_on_where_a_gpu_trains(tiny, architecture):
    """Autocast alone would have norms write float32, which each next product reads and rounds."""
    tokens = tiny.tokenizer().batch([[2, 7, 8, 3], [2, 9, 3]])
    encoder = tiny.encoder(architecture=architecture).eval()
    names, expected = list(encoder.state_dict()), encoder(tokens)
    encoder.keep_bf16()
    dtypes = set()
    for part in encoder.modules():
        if isinstance(part, torch.nn.Linear):
            part.register_forward_pre_hook(lambda part, inputs: dtypes.add(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        found = encoder(tokens)
    assert dtypes == {torch.bfloat16} and found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    found.sum().backward()
    assert {value.grad.dtype for value in encoder.parameters() if value.grad is not None} == {
        torch.float32
    }
    assert list(encoder.state_dict()) == names


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("architecture", ["bert", "modernbert"])
def test_a_gpu_computes_what_a_cpu_does(tiny, architecture):
    """With whatever implementation the GPU gets; bf16 has three digits."""
    tokens = tiny.tokenizer().batch([[2, 7, 8, 3], [2, 9, 3]])
    encoder = tiny.encoder(architecture=architecture).eval()
    with torch.inference_mode():
        expected = encoder(tokens)[tokens.mask_BT]
        device = torch.device("cuda")
        encoder.to(device)
        prepare_for_training(encoder, device, "bf16")
        with torch.autocast("cuda", torch.bfloat16):
            found = encoder(tokens.to(device))[tokens.mask_BT.to(device)]
    torch.testing.assert_close(found.float().cpu(), expected, rtol=0.05, atol=0.05)
