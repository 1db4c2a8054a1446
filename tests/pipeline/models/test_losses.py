"""The in-batch softmax loss against float64 loops, and the exclusion of false negatives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.models.losses import (
    distillation_kl,
    false_negatives,
    margin_mse,
    ranking_loss,
)


@st.composite
def cases(draw):
    """Scores [B, C], labels, and a key per column, some of them the same."""
    batch, columns = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = draw(st.sampled_from([0.1, 1.0, 30.0])) * rng.standard_normal((batch, columns))
    labels = draw(st.lists(st.integers(0, columns - 1), min_size=batch, max_size=batch))
    keys = draw(st.lists(st.integers(-2, 2), min_size=columns, max_size=columns))
    return scores.astype(np.float32), labels, keys


@given(cases())
def test_false_negatives_are_other_columns_with_the_right_text(case):
    _, labels, keys = case
    expected = [
        [key == keys[label] and column != label for column, key in enumerate(keys)]
        for label in labels
    ]
    assert false_negatives(torch.tensor(keys)[:, None], torch.tensor(labels)).tolist() == expected


@st.composite
def taught(draw):
    """Scores of a student and of a teacher, who has none for some of the wrong candidates."""
    batch, columns = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    student, teacher = 3 * rng.standard_normal((2, batch, columns))
    unknown = rng.random((batch, columns)) < draw(st.sampled_from([0.0, 0.4, 1.0]))
    unknown[:, 0] &= draw(st.booleans())
    return student, np.where(unknown, np.nan, teacher)


def log_softmax(row):
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


@given(taught(), st.sampled_from([0.5, 1.0, 4.0]))
def test_kl_is_that_of_the_distributions_over_scored_candidates(case, temperature):
    losses = []
    for student, teacher in zip(*case, strict=True):
        known = ~np.isnan(teacher)
        ours, theirs = (
            log_softmax(row[known] / temperature) if known.any() else np.zeros(0)
            for row in (student, teacher)
        )
        losses.append((np.exp(theirs) * (theirs - ours)).sum() * temperature**2)
    student, teacher = (torch.tensor(part) for part in case)
    student.requires_grad_()
    found = distillation_kl(student, teacher, temperature)
    assert found.item() == pytest.approx(np.mean(losses), abs=1e-9)
    found.backward()
    assert student.grad.isfinite().all()
    assert (student.grad[teacher.isnan()] == 0).all()


@given(taught())
def test_margin_mse_is_that_of_the_margins_that_are_known(case):
    losses = []
    for student, teacher in zip(*case, strict=True):
        gaps = (student[0] - student[1:]) - (teacher[0] - teacher[1:])
        known = gaps[~np.isnan(gaps)] ** 2
        losses.append(known.mean() if len(known) else 0.0)
    student, teacher = (torch.tensor(part) for part in case)
    student.requires_grad_()
    found = margin_mse(student, teacher)
    assert found.item() == pytest.approx(np.mean(losses))
    found.backward()
    assert student.grad.isfinite().all()


@given(cases(), st.integers(0, 99), st.sampled_from([0.0, 0.2]))
def test_loss_leaves_out_columns_and_rows_that_do_not_count(case, seed, smoothing):
    scores, labels, keys = case
    label_B = torch.tensor(labels)
    excluded_BC = false_negatives(torch.tensor(keys)[:, None], label_B)
    counted_B = torch.from_numpy(np.random.default_rng(seed).random(len(labels)) < 0.5)
    total = 0.0
    for row, label, out, counts in zip(scores, labels, excluded_BC, counted_B, strict=True):
        kept = (~out).nonzero().flatten()
        alone = torch.from_numpy(row)[kept][None]
        place = torch.tensor([kept.tolist().index(label)])
        one = torch.nn.functional.cross_entropy(alone, place, label_smoothing=smoothing)
        total += one.item() * counts.item()
    found = ranking_loss(torch.from_numpy(scores), label_B, excluded_BC, smoothing, counted_B)
    assert found.item() == pytest.approx(total / len(labels), rel=1e-4, abs=1e-5)
