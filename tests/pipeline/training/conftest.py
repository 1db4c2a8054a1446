"""A pre-training of a tiny encoder, as several files test it."""

from __future__ import annotations

import pytest

from pipeline.models.settings import Shape
from pipeline.training.pretraining import Pretraining
from pipeline.training.settings import LoopConfig, PretrainConfig


@pytest.fixture(scope="session")
def pretraining(tiny) -> Pretraining:
    """Of pairs of many lengths, without dropout; with a valid split."""
    rows = [
        {"context": [f"w{n}"] * (1 + n % 7), "response": f"w{n} w{n + 60}" + " w9" * (n % 4)}
        for n in range(60)
    ]
    corpus = tiny.tokens(tiny.corpus(rows, rows_per_group=16), valid_share=0.3)
    config = PretrainConfig(
        batch_tokens=160, micro_batch_tokens=40, max_context_tokens=20, max_response_tokens=10,
        window_rows=16, masked_share=0.3, steps=4,
    )  # fmt: skip
    shape = Shape(**{**tiny.shape, "dropout": 0.0})
    return Pretraining((corpus,), (1.0,), shape, config, LoopConfig(precision="fp32"))
