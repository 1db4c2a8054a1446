"""Tables and blocks of 8 bits: their formulas, gradients and files, and how little encodings change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from pipeline.config import BadInput
from pipeline.models import inference
from pipeline.models.convert_rt.folder import WEIGHTS
from pipeline.models.convert_rt.quantisation import Table, dequantise, quantise, value_range
from pipeline.models.int8 import Int8Linear
from pipeline.models.ranker import load_ranker, new_ranker

NUMBERS = st.floats(-5, 5, width=32)


def test_the_range_has_room_for_a_tenth_or_a_hundredth():
    assert value_range(torch.tensor([-1.0, 0.0, 1.0])) == pytest.approx((-1.2, 1.2))
    assert value_range(torch.tensor([-0.01, 0.01])) == pytest.approx((-0.02, 0.02))


@given(st.lists(NUMBERS, min_size=1, max_size=30))
def test_values_are_off_by_half_a_level_at_most(values):
    weights = torch.tensor(values)
    low, high = (torch.tensor(one) for one in value_range(weights))
    levels = quantise(weights, low, high)
    assert levels.dtype == torch.uint8
    off = (dequantise(levels, low, high) - weights).abs().max().item()
    assert off <= (high - low).item() / 255 / 2 + 1e-6
    expected = np.rint((np.array(values) - low.item()) / ((high - low).item() / 255))
    assert (
        np.abs(levels.numpy() - expected).max() <= 1
    )  # float32 may fall on the other side of a half


def test_a_table_is_exact_until_a_range_is_set_and_then_rounded_with_gradients_unchanged():
    table, ids = Table(5, 3, 0.5), torch.tensor([1, 3, 1])
    assert torch.equal(table(ids), table.weight[ids])
    table.set_range()
    rows = table(ids)
    assert not torch.equal(rows, table.weight[ids])
    (rows * torch.arange(9.0).view(3, 3)).sum().backward()
    expected = torch.zeros(5, 3)
    expected[1], expected[3] = torch.tensor([6.0, 8.0, 10.0]), torch.tensor([3.0, 4.0, 5.0])
    assert torch.equal(table.weight.grad, expected)
    frozen = Table(5, 3, 0.5)
    frozen.freeze(*table.to_levels())
    torch.testing.assert_close(frozen(ids), rows.detach())
    assert not list(frozen.parameters())


TEXTS = ["the cat.", "", "😀 жж", "a longer text than the others, it is", "at"]


def candidates(ranker):
    ranker.precision = "fp32"
    return inference.candidate_vectors(ranker, TEXTS)


def test_a_quantised_model_encodes_nearly_the_same_and_comes_back(convert, tmp_path):
    ranker = convert(earlier_turns=2)
    before = candidates(ranker)
    ranker.save(tmp_path / "float16")
    ranker.quantise()
    after = candidates(ranker)
    assert ((before * after).sum(dim=1) > 0.99).all() and not torch.equal(before, after)
    ranker.save(tmp_path / "int8")
    loaded = load_ranker(tmp_path / "int8")
    assert loaded.config.block_weights == "int8"
    torch.testing.assert_close(candidates(loaded), after, rtol=0, atol=2e-2)
    alone = [inference.candidate_vectors(loaded, [text])[0] for text in TEXTS]
    torch.testing.assert_close(torch.stack(alone), candidates(loaded), rtol=0, atol=1e-5)
    stored = load_file(tmp_path / "int8" / WEIGHTS)
    blocks = [name for name in stored if name.startswith("blocks.") and name.endswith("levels")]
    assert len(blocks) == 4 * 3 and all(stored[name].dtype in (torch.int8,) for name in blocks)
    loaded.save(tmp_path / "again")
    assert torch.equal(candidates(load_ranker(tmp_path / "again")), candidates(loaded))


def test_a_model_that_trains_is_saved_in_8_bits_and_one_of_8_bits_is_trained_on(convert, tmp_path):
    ranker = convert(block_weights="int8")
    assert not any(isinstance(part, Int8Linear) for part in ranker.modules()), "it is to be trained"
    ranker.save(tmp_path)
    loaded = load_ranker(tmp_path)
    assert sum(isinstance(part, Int8Linear) for part in loaded.modules()) == 4 * 3
    further = new_ranker(ranker.config, tmp_path, seed=0)
    weight = further.network.blocks.layers[0].feed_forward.wide.weight
    levels = loaded.network.blocks.layers[0].feed_forward.wide
    assert weight.requires_grad
    torch.testing.assert_close(weight.detach(), levels.levels_OI * levels.scale_O1)


def test_bf16_runs_beside_blocks_of_8_bits(convert):
    ranker = convert()
    ranker.quantise()
    expected = candidates(ranker)
    inference.to_bf16(ranker)
    found = inference.candidate_vectors(ranker, TEXTS)
    assert ((found * expected).sum(dim=1) > 0.99).all()


def test_other_models_are_refused(convert, tiny):
    for ranker in (convert(quantised=False), tiny.ranker(architecture="bi")):
        with pytest.raises(BadInput, match="int8"):
            ranker.quantise()
