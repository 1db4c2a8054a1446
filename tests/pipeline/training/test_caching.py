"""Gradient caching: the gradients of the whole batch, dropout included, in less memory."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from pipeline.models.encoder import Encoder, set_dropout
from pipeline.models.heads import PolyEncoder
from pipeline.models.settings import PolyConfig, Shape
from pipeline.models.tokens import Tokens
from pipeline.training.data import TEACHER_COLUMNS, DualBatch, DualCollator, PairCollator
from pipeline.training.guide import Guide
from pipeline.training.objectives import DualModule, PairModule, backward, cached_backward
from pipeline.training.settings import Distillation, FinetuneConfig, GuideLimits
from tests.helpers import collated, memory_kib, restart_peak_memory, run_in_processes

ROWS = [
    {"context": [f"w{n} w3", "w4 " * (n % 4)], "response": f"w{10 + n % 6} " * (1 + n % 3),
     "candidates": [f"w{20 + n} w{30 + other}" for other in range(4)],
     "teacher_scores": [n / 3 - other for other in range(4)],
     "teacher_context": np.array([n, 1], "<f2").tobytes(),
     "teacher_response": np.array([-1, n / 2], "<f2").tobytes()}
    for n in range(11)
]  # fmt: skip
KINDS = {
    "poly, given": ({"architecture": "poly"}, {"negatives_from": "given"}),
    "poly, shared": (
        {"architecture": "poly"},
        {"negatives_from": "both", "share_negatives": True},
    ),
    "bi, taught": ({"architecture": "bi"}, {"distill": Distillation(loss="kl", over="batch")}),
    "matryoshka": ({"matryoshka": (4,), "projection": 8, "share_towers": True}, {}),
    "heads": ({"candidate_attention": "multi_head"}, {}),
    "bi, guided": (
        {"architecture": "bi"},
        {"negatives_from": "both", "guide": GuideLimits(margin=0.01)},
    ),
    "cross, taught": ({"architecture": "cross"}, {"distill": Distillation(loss="kl")}),
}


def made(tiny, kind, dropout=0.0):
    """An objective in training, and a batch."""
    settings, more = KINDS[kind]
    ranker, config, guide = tiny.ranker(**settings), FinetuneConfig(**more), None
    if "guide" in more:
        guide = Guide(tiny.ranker(architecture="poly"), config.guide)
    set_dropout(ranker, dropout)
    if kind.startswith("cross"):
        objective = PairModule(ranker.cross, config, guide)
        collator = PairCollator(ranker, 3, TEACHER_COLUMNS["candidates"])
    else:
        given = 3 if "negatives_from" in more else 0
        objective = DualModule(ranker.dual, config, guide)
        collator = DualCollator(ranker, given, TEACHER_COLUMNS["batch"], guide=guide)
    batch = collated(collator, ROWS)
    if guide is not None:
        batch = replace(batch, guide=guide.vectors(batch.guide_rows, torch.device("cpu")))
    return objective.train(), batch


def gradients(objective):
    return {name: value.grad for name, value in objective.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_whole_batch(tiny, kind):
    """Of eleven rows in chunks of four."""
    objective, batch = made(tiny, kind)
    direct = backward(objective, batch, nullcontext())
    expected = gradients(objective)
    objective.zero_grad()
    found = cached_backward(objective, 4)(objective, batch, nullcontext())
    torch.testing.assert_close(found, direct)
    largest = 0.0
    for name, gradient in gradients(objective).items():
        # Sums in another order differ by 1.5e-6 on some CPUs.
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=3e-6, msg=name)
        largest = max(largest, float(gradient.abs().max()))
    assert largest > 0.01


def test_both_encodings_draw_the_same_dropout(tiny):
    """Beside the whole graph of chunks that are encoded with the same seeds."""
    objective, batch = made(tiny, "poly, given", dropout=0.3)
    torch.manual_seed(7)
    seeds = torch.randint(1 << 62, (3,)).tolist()
    chunks = []
    for number, seed in enumerate(seeds):
        torch.manual_seed(seed)
        chunks.append(objective.encode(batch.part(number * 4, number * 4 + 4)))
    rows = [torch.cat(tensors) for tensors in zip(*chunks, strict=True)]
    objective.loss(rows, batch)[0].backward()
    expected = gradients(objective)
    for seed, same in ((7, True), (8, False)):
        objective.zero_grad()
        torch.manual_seed(seed)
        cached_backward(objective, 4)(objective, batch, nullcontext())
        found = gradients(objective)
        close = [torch.allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)
                 for name in expected]  # fmt: skip
        assert all(close) is same


def test_frozen_weights_get_no_gradient(tiny):
    objective, batch = made(tiny, "poly, given")
    objective.network.context_encoder.requires_grad_(False)
    cached_backward(objective, 4)(objective, batch, nullcontext())
    grads = gradients(objective)
    assert all((value is None) is ("context_encoder" in name) for name, value in grads.items())


def measure_memory(examples, chunk, folder, number):
    """Writes the KiB that a step takes at its peak; in a process of its own."""
    shape, special = (
        Shape(layers=2, width=64, heads=2, positions=64),
        {"pad": 0, "cls": 2, "sep": 3},
    )
    towers = (Encoder.new(shape, 100, special) for _ in range(2))
    model = DualModule(PolyEncoder(*towers, PolyConfig(m=4)))

    def tokens(rows):
        mask = torch.ones(rows, 48, dtype=torch.bool)
        return Tokens(torch.randint(5, 99, (rows, 48)), mask, (48,) * rows)

    none = torch.zeros(examples, 0)
    batch = DualBatch(
        tokens(examples), tokens(examples), torch.arange(examples)[:, None], tokens(0), none.long(),
        none, none, teacher_BC=torch.zeros(examples, 1),
    )  # fmt: skip
    restart_peak_memory()
    before = memory_kib("VmRSS")
    (cached_backward(model, chunk) if chunk else backward)(model, batch, nullcontext())
    (folder / "kib").write_text(str(memory_kib("VmHWM") - before))


@pytest.mark.long
def test_memory_grows_less_than_linearly_with_the_negatives(tmp_path):
    """Of 31 and 511."""

    def peak(examples, chunk):
        run_in_processes(partial(measure_memory, examples, chunk), tmp_path, 1, timeout_s=200)
        return int((tmp_path / "kib").read_text())

    few, many, direct = peak(32, 16), peak(512, 16), peak(512, 0)
    assert many < 4 * few  # for 16 times as many
    assert many < direct / 4
