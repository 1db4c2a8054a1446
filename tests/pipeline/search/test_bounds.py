"""Bounds of products, against the products in float64; what a pool keeps of its vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import BadInput
from pipeline.pools.sketch import CODED, MISCODED, MISSED, fit_rotation, is_orthonormal, sketch
from pipeline.pools.vector_format import FILE_DTYPES, LENGTH, decode, encode
from pipeline.search import bounds as module
from pipeline.search.bounds import sketch_columns, upper_bounds, vector_columns

DTYPES = list(FILE_DTYPES)
LARGEST = {"float32": 3e38, "bfloat16": 3e38, "float16": 6e4, "int8": 3e38}


@st.composite
def rows_and_contexts(draw):
    """(dtype, rows, contexts): up to the ends of what a type holds, zeros, duplicates, near vectors."""
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n, d, m, q = (draw(st.integers(1, top)) for top in (40, 80, 70, 10))
    powers = st.sampled_from([-45, -38, -30, -10, 0, 4, 20, 37])
    rows = rng.normal(size=(n, d)) * 10.0 ** draw(powers)
    if draw(st.booleans()):  # as the rounding of bfloat16 likes it least
        rows = np.sign(rows) * (1 + 2.0**-8 - 1e-6) * 10.0 ** draw(powers)
    rows *= rng.random((n, 1)) < 0.9
    rows = rows.clip(-LARGEST[dtype], LARGEST[dtype]).astype(np.float32)
    spread = draw(st.sampled_from([0, 1e-4, 0.1, 1]))
    contexts = rng.normal(size=(q, 1, d)) + spread * rng.normal(size=(q, m, d))
    if draw(st.booleans()):  # parallel to a row: Cauchy-Schwarz is tight
        contexts[0, 0] = rows[0].astype(np.float64) / max(np.abs(rows[0]).max(), 1e-45)
    contexts = (contexts * 10.0 ** draw(powers)).astype(np.float32).astype(np.float64)
    return dtype, rows, list(contexts)


def exceeds(bounds_QN, rows, contexts) -> bool:
    """Whether a product is above its bound; NaN bounds nothing."""
    products_QN = np.stack([(rows @ context.T).max(axis=1) for context in contexts])
    with np.errstate(over="ignore"):
        # What is compared with a bound is a score that was rounded to float32.
        return bool((products_QN.astype(np.float32) > bounds_QN.numpy()).any())


@pytest.mark.slow
@settings(max_examples=150)
@given(rows_and_contexts(), st.integers(1, 80))
def test_no_product_exceeds_its_bound(task, centres):
    dtype, rows, contexts = task
    layer = encode(rows, dtype)
    stored = decode(layer, np.float64)
    longest = float(layer.norms[LENGTH].max())
    found = upper_bounds(layer, vector_columns(contexts, dtype, longest, centres))
    assert found.shape == (len(contexts), len(rows))
    assert not exceeds(found, stored, contexts)
    rotation = fit_rotation(stored[::2])
    about = sketch(stored, rotation)
    columns = sketch_columns(contexts, rotation, longest, centres)
    assert not exceeds(upper_bounds(about, columns), stored, contexts)


@pytest.mark.parametrize("matrix_units", [True, False])
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_no_product_exceeds_its_bound_whatever_the_hardware_multiplies(
    monkeypatch, matrix_units, precision
):
    monkeypatch.setattr(module, "use_bf16", lambda device: matrix_units)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        rng = np.random.default_rng(0)
        rows = rng.normal(size=(500, 300)).astype(np.float32)
        contexts = [rng.normal(size=(9, 300)).astype(np.float32).astype(np.float64)]
        layer = encode(rows, "float32")
        columns = vector_columns(contexts, "float32", float(layer.norms[LENGTH].max()), 9)
        assert not exceeds(upper_bounds(layer, columns), rows.astype(np.float64), contexts)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_come_near_the_products(dtype):
    """A bound that holds but says nothing would make a search slow."""
    rng = np.random.default_rng(1)
    scale = 1 / np.sqrt(1 + np.arange(128))
    rows = (rng.normal(size=(400, 128)) * scale).astype(np.float32)
    contexts = list((rng.normal(size=(3, 8, 128)) * scale).astype(np.float32).astype(np.float64))
    layer = encode(rows, dtype)
    stored = decode(layer, np.float64)
    longest = layer.norms[LENGTH].max()
    sizes = np.outer([np.linalg.norm(c, axis=1).max() for c in contexts], layer.norms[LENGTH])
    products = np.stack([(stored @ context.T).max(axis=1) for context in contexts])
    found = upper_bounds(layer, vector_columns(contexts, dtype, float(longest), 8)).numpy()
    assert ((found - products.clip(0)) / sizes).max() < 0.02
    rotation = fit_rotation(stored)
    columns = sketch_columns(contexts, rotation, float(longest), 8)
    found = upper_bounds(sketch(stored, rotation), columns).numpy()
    assert ((found - products) / sizes).max() < 0.15


# What a pool keeps


@settings(max_examples=100)
@given(rows_and_contexts())
def test_what_is_kept_is_near_and_stays_as_it_is(task):
    dtype, rows, _ = task
    layer = encode(rows, dtype)
    stored = decode(layer)
    assert layer.matrix.dtype == FILE_DTYPES[dtype]
    relative = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11, "int8": 0}[dtype]
    absolute = {"float16": 3e-8, "bfloat16": 1e-40}.get(dtype, 0) * np.ones((len(rows), 1))
    if dtype == "int8":
        absolute = np.abs(rows).max(axis=1, keepdims=True) / 127 * 0.51 + 2.0**-118
    error = np.abs(stored.astype(np.float64) - rows)
    assert (error <= relative * np.abs(rows.astype(np.float64)) + absolute).all()
    np.testing.assert_array_equal(decode(layer, np.float64), stored)
    again = encode(stored, dtype)
    np.testing.assert_array_equal(decode(again), stored)
    exact = np.linalg.norm(stored.astype(np.float64), axis=1)
    assert (layer.norms[LENGTH] >= exact).all()
    assert (layer.norms[LENGTH] <= exact * (1 + 1e-6) + 1e-44).all()


def test_bfloat16_rounds_to_the_nearest_and_ties_to_even():
    rows = np.float32([[1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-9]])
    expected = torch.from_numpy(rows).bfloat16().float().numpy()
    np.testing.assert_array_equal(decode(encode(rows, "bfloat16")), expected)


def test_numbers_too_large_for_a_type_are_refused():
    rows = np.float32([[1, -7e4]])
    for dtype in ("float32", "bfloat16", "int8"):
        encode(rows, dtype)
    with pytest.raises(
        BadInput, match=r"embed.dtype: 'float16' .* 65504; a vector has 70000; allowed"
    ):
        encode(rows, "float16")


@settings(max_examples=100)
@given(rows_and_contexts())
def test_the_parts_of_a_sketch_are_as_long_as_it_says(task):
    _, rows, _ = task
    stored = rows.astype(np.float64)
    rotation = fit_rotation(stored)
    assert is_orthonormal(rotation)
    about = sketch(stored, rotation)
    turned, coded = stored @ rotation, decode(about, np.float64)
    rest = stored - turned @ rotation.T
    for at, part in ((CODED, coded), (MISCODED, turned - coded), (MISSED, rest)):
        assert (about.norms[at] >= np.linalg.norm(part, axis=1)).all()


def test_the_directions_hold_nearly_all_energy_in_as_few_as_needed():
    rng = np.random.default_rng(4)
    rows = rng.normal(size=(2000, 256)) * np.r_[np.ones(60), np.full(196, 0.01)]
    rotation = fit_rotation(rows)
    assert rotation.shape == (256, 64)
    assert np.linalg.norm(rows @ rotation) ** 2 / np.linalg.norm(rows) ** 2 > 0.95
    assert fit_rotation(np.zeros((0, 256))).shape[0] == 256
