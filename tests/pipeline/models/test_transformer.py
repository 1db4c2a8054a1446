"""New encoders: their shapes, and what is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel, DistilBertConfig, DistilBertModel

from pipeline.config import BadInput
from pipeline.models.shape import Shape
from pipeline.models.tokens import Tokens
from pipeline.models.transformer import Encoder

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
