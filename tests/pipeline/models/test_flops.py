"""Operations that are worked out are those that torch counts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeline.models import flops
from pipeline.models.encoder import Encoder
from pipeline.models.flops import TrainingFlops, peak_flops
from pipeline.models.pretraining_heads import PretrainingModel
from pipeline.models.settings import Shape
from pipeline.models.tokens import Tokens

SPECIAL = {"pad": 0, "cls": 2, "sep": 3}
SHAPES = {
    "bert": Shape(layers=3, width=64, heads=4, positions=128),
    "another intermediate size": Shape(layers=1, width=64, heads=4, positions=128, intermediate=96),
    "modernbert": Shape(architecture="modernbert", layers=3, width=64, heads=4, positions=128),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("length", [16, 128])  # 128: attention is a third of it
def test_a_step_costs_what_torch_counts(shape, length):
    model = PretrainingModel.new(shape, 500, SPECIAL)
    model.encoder.hf.set_attn_implementation("eager")  # its products are counted, on any device
    ids = torch.randint(5, 500, (4, length))
    tokens = Tokens(ids, torch.ones_like(ids, dtype=torch.bool), (length,) * 4)
    predicted = torch.arange(0, 4 * length, 6)
    with FlopCounterMode(display=False) as counter:
        model(tokens, predicted, ids.flatten()[predicted]).mlm_sum.backward()
    found = TrainingFlops.of(model.encoder, model.mlm).step(tokens.lengths, len(predicted))
    assert found == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_bert_base_costs_six_operations_for_each_weight_of_its_layers():
    with torch.device("meta"):
        model = PretrainingModel.new(Shape(), 30_522, SPECIAL)
    count = TrainingFlops.of(model.encoder, model.mlm)
    layers = 12 * (4 * 768 * 768 + 2 * 768 * 3072)
    assert count.step([1]) == 6 * layers + 12 * 12 * 768
    # PaLM, appendix B: 12 · layers · width · T more for each token.
    assert count.step([512]) == 512 * (6 * layers + 12 * 12 * 768 * 512)
    assert count.step([], predicted=1) == 6 * (768 * 768 + 768 * 30_522)


@pytest.mark.parametrize("length", [1, 7, 64, 65, 66, 200])
def test_a_window_counts_the_tokens_that_the_librarys_mask_lets_through(length):
    shape = Shape(architecture="modernbert", layers=4, width=8, heads=2, global_attention_every=3)
    encoder = Encoder.new(shape, 50, SPECIAL)
    masks = []
    encoder.hf.set_attn_implementation("eager")
    for layer in encoder.hf.layers:
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: masks.append(kwargs.get("attention_mask", args[-1])),
            with_kwargs=True,
        )
    ids = torch.full((1, length), 5)
    with torch.no_grad():
        encoder(Tokens(ids, torch.ones_like(ids, dtype=torch.bool), (length,)))
    seen = [length**2 if mask is None else int((mask == 0).sum()) for mask in masks]
    count = TrainingFlops.of(encoder)
    assert [flops._pairs(length, window) for window in count.windows] == seen
    assert [window is None for window in count.windows] == [True, False, False, True]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_of_well_known_gpus(name, peak):
    assert flops._stated_flops(name) == peak


def test_a_known_gpu_is_not_measured_and_another_one_is(monkeypatch):
    measured = []
    monkeypatch.setattr(flops, "_measure_flops", lambda *given: measured.append(given) or 1.0)
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: {gpu: "NVIDIA L4"}[device])
    assert peak_flops(gpu, "bf16") == (121e12, "stated")
    assert measured == []
    assert peak_flops(gpu, "fp32") == (1.0, "measured")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Another 9000")
    assert peak_flops(gpu, "bf16") == (1.0, "measured")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_makes_less_than_its_stated_peak(monkeypatch):
    """A device that is not in the table has no stated peak: add a row with its data sheet's number."""
    device = torch.device("cuda")
    monkeypatch.setattr(flops, "_MEASURED_SECONDS", 1.0)  # tests/conftest.py shortens it
    peak = peak_flops(device, "bf16")
    assert peak.source == "stated", torch.cuda.get_device_name(device)
    assert 0.3 < flops._measure_flops(device, "bf16") / peak.flops < 1.05
