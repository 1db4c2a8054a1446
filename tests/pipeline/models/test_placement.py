"""CPUs get the plug-in; GPUs get the library's SDPA, or FlashAttention-2 where it can run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.models import placement
from pipeline.models.placement import prepare_for_training


@pytest.fixture
def chosen(tiny, monkeypatch):
    """The implementation that an encoder inside a module is given; None: it keeps its own."""

    def choose(device, precision="auto", flash=True, model_has_flash=True, matrix_units=True):
        encoder = tiny.encoder()
        calls = []
        encoder.hf._supports_flash_attn = model_has_flash
        encoder.hf.set_attn_implementation = calls.append
        monkeypatch.setattr(placement, "find_spec", lambda name: flash or None)
        monkeypatch.setattr("pipeline.models.precision.use_bf16", lambda device: matrix_units)
        prepare_for_training(nn.Sequential(encoder), torch.device(device), precision)
        assert len(calls) <= 1
        assert device != "cuda" or not encoder.hf._forward_pre_hooks  # nothing of ours
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
