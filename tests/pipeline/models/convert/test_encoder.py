"""Each stage of ConveRT against PolyAI's graphs, and the blocks against plain numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.models.convert.encoder import (
    Blocks,
    FeedForward2,
    Matrix,
    TokenVectors,
    feed_forward_2,
    reduced,
    token_vectors,
    token_weights,
)
from pipeline.models.settings import ConvertConfig

from .conftest import SMALL

WEIGHTS = ("wide", "random", "saved")
GRAPHS = [f"{graph}.{weights}" for graph in ("single", "multi") for weights in WEIGHTS]
TOLERANCE = 1e-5


def close(ours, expected, tolerance=TOLERANCE):
    np.testing.assert_allclose(ours.detach().numpy(), expected, rtol=tolerance, atol=tolerance)


class Stored:
    """The arrays of one graph as tensors."""

    def __init__(self, golden, graph):
        self._arrays, self._graph = golden.arrays, graph

    def __call__(self, name):
        return torch.from_numpy(self._arrays[f"{self._graph}.{name}"])

    def side(self, side):
        start = f"{self._graph}.weights.{side}."
        return {name.removeprefix(start): torch.from_numpy(value)
                for name, value in self._arrays.items() if name.startswith(start)}  # fmt: skip


@pytest.fixture(params=GRAPHS)
def stored(golden, request):
    return Stored(golden, request.param)


@pytest.mark.shared
def test_token_vectors(golden, stored):
    ids_BT = torch.from_numpy(golden.arrays["tokenizer.ids"])
    norm = (stored("weights.token_norm.gamma"), stored("weights.token_norm.beta"))
    found = token_vectors(ids_BT, stored("weights.embedding"), [stored("weights.positions")], *norm)
    close(found, stored("embed.token_vectors"))


@pytest.mark.shared
def test_reduction(golden, stored):
    query, key = stored("weights.reduction.query"), stored("weights.reduction.key")
    mask_BT = torch.from_numpy(golden.arrays["tokenizer.mask"])
    vectors_BTD = stored("embed.token_vectors")
    close(reduced(vectors_BTD, mask_BT, [query], [key]), stored("reduce.r"))
    weights_B1T = token_weights(vectors_BTD, mask_BT, [query], [key])
    close(weights_B1T[:, 0], stored("reduce.token_weight"))
    alone = stored("reduce_only.x"), stored("reduce_only.mask").bool()
    close(reduced(*alone, [query], [key]), stored("reduce_only.r"))


@pytest.mark.shared
def test_reduction_with_two_heads(golden):
    stored = Stored(golden, "two_heads")
    queries = [stored(f"weights.query_{head}") for head in (1, 2)]
    keys = [stored(f"weights.key_{head}") for head in (1, 2)]
    close(reduced(stored("x"), stored("mask"), queries, keys), stored("r"))


@pytest.mark.shared
def test_feed_forward_2(stored):
    skip = stored("weights.skip")
    for side in ("context", "response"):
        for name in ("ff2_only", f"ff2.{side}"):
            r = stored("ff2_only.r" if name == "ff2_only" else "reduce.r")
            expected = stored("ff2_only." + side + ".h" if name == "ff2_only" else f"{name}.h")
            close(feed_forward_2(r, stored.side(side), skip, "relu"), expected)


@pytest.mark.shared
@pytest.mark.parametrize("weights", ["wide", "random", "saved"])
def test_combination_with_earlier_turns(golden, weights):
    stored = Stored(golden, f"multi.{weights}")
    mean = (stored("combine_only.h_x") + stored("combine_only.h_z")) / 2
    found = feed_forward_2(mean, stored.side("combined"), stored("weights.combined.skip"), "relu")
    close(found, stored("combine_only.h"))


# Oracles in float64, text by text, without padding


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def normed(rows, norm):
    centred = rows - rows.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-12)
    return scaled * weight(norm.gamma) + weight(norm.beta)


def weight(parameter):
    return parameter.detach().double().numpy()


def fast_gelu(values):
    return values / (1 + np.exp(-1.702 * values))


def block_oracle(block, rows_TD):
    """Reference 5.2, a pair of tokens at a time."""
    attention, count = block.attention, len(rows_TD)
    q, k, v = np.split(rows_TD @ weight(attention.qkv.weight).T, 3, axis=1)
    bias = weight(attention.bias)
    seen = np.zeros_like(v)
    for i in range(count):
        near = [j for j in range(count) if abs(i - j) <= attention.window]
        logits = [q[i] @ k[j] / np.sqrt(q.shape[1]) + bias[attention.longest - i + j] for j in near]
        seen[i] = softmax(np.array(logits)) @ v[near]
    rows_TD = normed(rows_TD + seen @ weight(attention.out.weight).T, block.norm_1)
    wide = fast_gelu(
        rows_TD @ weight(block.feed_forward.wide.weight).T + weight(block.feed_forward.wide.bias)
    )
    narrow = wide @ weight(block.feed_forward.narrow.weight).T + weight(
        block.feed_forward.narrow.bias
    )
    return normed(rows_TD + narrow, block.norm_2)


def noisy(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return module


@given(st.lists(st.integers(0, 20), min_size=1, max_size=4), st.integers(0, 99))
def test_blocks_are_the_papers_on_every_text_alone(lengths, seed):
    blocks = noisy(Blocks(ConvertConfig(**SMALL)), seed)
    mask_BT = torch.arange(max(1, *lengths)) < torch.tensor(lengths)[:, None]
    vectors_BTD = torch.from_numpy(
        np.random.default_rng(seed).standard_normal((*mask_BT.shape, 16))
    )
    found_BTD = blocks(vectors_BTD.float(), mask_BT)
    for found_TD, rows_TD, length in zip(found_BTD, vectors_BTD.numpy(), lengths, strict=True):
        expected = rows_TD[:length]
        for layer in blocks.layers:
            expected = block_oracle(layer, expected)
        close(
            found_TD[:length], expected, tolerance=5e-5
        )  # float32, and sums whose order threads decide
        assert not found_TD[length:].any()


def test_positions_are_the_sum_of_two_tables_that_repeat():
    tokens = noisy(TokenVectors(ConvertConfig(**SMALL), rows=9))
    ids_BT = torch.tensor([[number % 9 for number in range(25)]])
    first, second = (weight(table.weight) for table in tokens.positions)
    rows = weight(tokens.subwords.weight)
    summed = [rows[i % 9] * 4 + first[i % 7] + second[i % 3] for i in range(25)]  # 4: √16
    close(tokens(ids_BT)[0], normed(np.array(summed), tokens.norm))


@pytest.mark.parametrize("activation", ["relu", "fast_gelu"])
def test_feed_forward_2_is_the_formula(activation):
    skip = Matrix(6, 4)
    network = noisy(FeedForward2(6, (5, 7), 4, skip, activation))
    r = np.random.default_rng(0).standard_normal((3, 6))
    act = fast_gelu if activation == "fast_gelu" else lambda values: np.maximum(values, 0)
    hidden = normed(r, network.norm_in)
    for number in (1, 2):
        layer, norm = getattr(network, f"hidden_{number}"), getattr(network, f"norm_{number}")
        hidden = normed(act(hidden @ weight(layer.weight)), norm)
    summed = normed(hidden @ weight(network.out.weight) + r @ weight(skip.weight), network.norm_out)
    expected = summed / np.linalg.norm(summed, axis=1, keepdims=True)
    close(network(torch.from_numpy(r)), expected)
    assert "skip" not in " ".join(dict(network.named_parameters())), "it belongs to several sides"


def test_a_text_without_a_token_gives_zeros():
    vectors_BTD, query = torch.randn(2, 3, 4), torch.randn(4, 2)
    mask_BT = torch.tensor([[False] * 3, [True, False, False]])
    r = reduced(vectors_BTD, mask_BT, [query], [query])
    assert not r[0].any()
    close(r[1], vectors_BTD[1, 0].numpy())
