"""The head: its formula and its training beside plain numpy, and what it learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.classification.head import Head, fit
from pipeline.classification.settings import HeadConfig
from pipeline.config import BadInput
from tests.helpers import softmax


def weights(head: Head) -> list[np.ndarray]:
    return [value.detach().double().numpy().copy() for value in head.parameters()]


def test_probabilities_are_those_of_the_formula():
    torch.manual_seed(0)
    head = Head(24, 40, 7)
    vectors = 9 * torch.randn(11, 24)
    w1, b1, w2, b2 = weights(head)
    rows = vectors.double().numpy()
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    expected = softmax(np.maximum(rows @ w1.T + b1, 0) @ w2.T + b2)
    found = head(vectors).detach().double().numpy()
    assert np.abs(found - expected).max() < 1e-6
    assert np.allclose(found.sum(axis=1), 1)


def test_a_vector_of_zeros_has_probabilities_too():
    assert torch.isfinite(Head(4, 5, 3)(torch.zeros(1, 4))).all()


@pytest.mark.parametrize("balanced", [False, True])
def test_training_is_plain_sgd_with_a_rate_that_falls_by_epoch(balanced):
    """Batches and weights come from the generator in a known order; the rest is numpy's."""
    config = HeadConfig(
        hidden=6, dropout=0.0, learning_rate=0.5, batch=4, epochs=3, balanced=balanced
    )
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(10, 5))
    labels = np.array([0, 0, 0, 0, 0, 0, 1, 1, 1, 2])
    head = fit(torch.tensor(rows).float(), torch.tensor(labels), 3, config, seed=5)

    draws = torch.Generator().manual_seed(5)
    start = Head(5, 6, 3)
    start.reset(draws)
    w1, b1, w2, b2 = weights(start)
    share = torch.tensor(1 / np.bincount(labels)[labels]) if balanced else torch.ones(10)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    for epoch in range(3):
        rate = 0.5 * (1 - epoch / 3)
        drawn = torch.multinomial(share.float(), 12, True, generator=draws).view(3, 4).numpy()
        for places in drawn:
            x, y = rows[places], labels[places]
            pre = x @ w1.T + b1
            hidden = np.maximum(pre, 0)
            error = (softmax(hidden @ w2.T + b2) - np.eye(3)[y]) / 4
            back = (error @ w2) * (pre > 0)
            w2, b2 = w2 - rate * error.T @ hidden, b2 - rate * error.sum(0)
            w1, b1 = w1 - rate * back.T @ x, b1 - rate * back.sum(0)
    for found, expected in zip(weights(head), (w1, b1, w2, b2), strict=True):
        assert np.abs(found - expected).max() < 1e-5


def test_dropout_keeps_the_mean_and_ends_with_training():
    rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    labels = (rows[:, 0] > 0).long()
    config = HeadConfig(hidden=32, epochs=200)
    head = fit(rows, labels, 2, config, seed=0)
    assert torch.equal(head(rows), head(rows))
    assert (head(rows).argmax(1) == labels).float().mean() > 0.9


def test_a_head_starts_as_keras_does():
    head = Head(300, 500, 10)
    head.reset(torch.Generator().manual_seed(0))
    bound = np.sqrt(6 / 800)
    weight = head.hidden.weight.detach()
    assert weight.abs().max() <= bound and weight.abs().max() > 0.99 * bound
    assert weight.std().item() == pytest.approx(bound / np.sqrt(3), rel=0.02)
    assert not head.hidden.bias.any() and not head.output.bias.any()


def test_the_seed_decides():
    rows, labels = torch.randn(9, 4), torch.arange(9) % 3
    config = HeadConfig(hidden=5, epochs=4)
    first, same, other = (fit(rows, labels, 3, config, seed) for seed in (1, 1, 2))
    assert torch.equal(first(rows), same(rows))
    assert not torch.equal(first(rows), other(rows))


@pytest.mark.parametrize(
    "values",
    [{"hidden": 0}, {"batch": 0}, {"epochs": 0}, {"dropout": 1.0}, {"dropout": -0.1}, {"learning_rate": 0.0}],
)  # fmt: skip
def test_settings_that_are_not_allowed(values):
    with pytest.raises(BadInput, match=f"head.{next(iter(values))}"):
        HeadConfig(**values)
