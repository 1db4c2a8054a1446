"""Tables of 8 bits: their ranges, their rounding and the gradients through it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.models.convert.quantisation import Table, dequantise, quantise, value_range

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
