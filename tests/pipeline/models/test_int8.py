"""Linear layers of 8 bits: their formula and memory, and encoders made of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pipeline.config import BadInput
from pipeline.engine.resources import precision_of_tasks
from pipeline.models import inference, int8
from pipeline.models.int8 import Int8Linear
from pipeline.models.precision import resolve_precision

TEXTS = ["zum zum bar", "lorem", "zum ipsum dolor sit amet lorem ipsum"]


@pytest.mark.parametrize("most", [63, 127])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_the_formula(bias, most, monkeypatch):
    monkeypatch.setattr(int8, "_AT_ONCE", 48)  # two rows
    layer, inputs_NI = nn.Linear(24, 40, bias=bias), torch.randn(7, 24)
    inputs_NI[2] = 0
    inputs_NI[4] = 3.0  # with the weights of the first output the largest sums that there are
    layer.weight.data[0] = 1.0

    def levels(rows, most):
        scale = np.abs(rows).max(axis=1, keepdims=True).clip(1e-12) / most
        return np.rint(rows / scale), scale

    x, s_x = levels(inputs_NI.numpy(), 127)
    w, s_w = levels(layer.weight.detach().numpy(), most)
    expected = (x @ w.T) * s_x * s_w.T
    if bias:
        expected += layer.bias.detach().numpy()
    found = Int8Linear.of(layer, most)(inputs_NI)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    exact = layer(inputs_NI).detach()
    assert (found - exact).abs().max() < 0.03 * exact.abs().max()
    assert Int8Linear.of(layer, most)(inputs_NI.bfloat16()).dtype == torch.bfloat16


def test_a_wide_layer_takes_memory_for_its_products_and_its_outputs_alone():
    """Memory for every step between them would take longer than the product."""
    layer, inputs_NI = Int8Linear.of(nn.Linear(8, 512)), torch.randn(256, 8)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        outputs_NO = layer(inputs_NI)
    taken = sum(max(0, event.self_cpu_memory_usage) for event in profiled.events())
    assert taken < 2.5 * outputs_NO.nbytes


@pytest.mark.parametrize("architecture", ["bi", "cross"])
def test_encoders_of_8_bits_compute_nearly_the_same_alone_and_in_a_batch(tiny, architecture):
    def scores(precision: str, texts: list[str]) -> torch.Tensor:
        ranker = inference.prepare(
            tiny.ranker(architecture=architecture), torch.device("cpu"), precision
        )
        assert ranker.precision == precision
        is_int8 = any(isinstance(part, Int8Linear) for part in ranker.modules())
        assert is_int8 == (precision == "int8")
        if architecture == "cross":
            return inference.pair_scores(ranker, [["zum"]], [texts])[0]
        return inference.candidate_vectors(ranker, texts)

    exact, found = scores("fp32", TEXTS), scores("int8", TEXTS)
    assert not torch.equal(found, exact)
    assert torch.cosine_similarity(found, exact, dim=-1).min() > 0.999
    alone = torch.cat([scores("int8", [text]) for text in TEXTS])
    torch.testing.assert_close(alone, found, rtol=1e-4, atol=1e-4)


def test_a_gpu_is_refused_before_any_task_starts():
    assert resolve_precision("int8", torch.device("cpu")) == "int8"
    with pytest.raises(
        BadInput, match="precision: 'int8' is not allowed; allowed: auto, bf16, fp32"
    ):
        resolve_precision("int8", torch.device("cuda"))
    assert precision_of_tasks("int8", gpu=False) == "int8"
    with pytest.raises(BadInput, match="precision: 'int8' is not allowed"):
        precision_of_tasks("int8", gpu=True)


def test_levels_and_scales_are_the_same_where_a_program_has_another_default_type():
    rows_NI = torch.randn(4, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    wanted = int8.to_int8(rows_NI)
    torch.set_default_dtype(torch.float64)
    try:
        found = int8.to_int8(rows_NI)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found[1].dtype == torch.float32
    assert all(map(torch.equal, found, wanted))
