"""Settings out of range are refused by name; the sizes of a step of pre-training."""

from __future__ import annotations

import re

import pytest

from pipeline.config import BadInput
from pipeline.training.settings import (
    Distillation,
    FinetuneConfig,
    GuideLimits,
    LoopConfig,
    Mining,
    PretrainConfig,
    TokenizerConfig,
)


def pretraining(**more):
    sizes = {
        "batch_tokens": 160,
        "micro_batch_tokens": 40,
        "max_context_tokens": 9,
        "max_response_tokens": 5,
    }
    return PretrainConfig(**{**sizes, **more})


OUT_OF_RANGE = [
    (LoopConfig, "loop", {
        "learning_rate": 0.0, "warmup_steps": 1.5, "head_lr_factor": 0.0, "max_gradient_norm": 0.0,
        "checkpoint_every_steps": 0, "log_every_steps": 0, "checkpoint_every_minutes": -1.0,
        "plateau_decay": 1.0, "final_rate_share": 1.0, "validate_every_epochs": -0.5,
        "stop_after_validations": -1,
    }),
    (FinetuneConfig, "finetune", {
        "batch_examples": 1, "negatives": 0, "epochs": -1, "max_steps": -1, "dropout": 1.0,
        "valid_examples": 1, "valid_candidates": 1, "chunk_examples": -1, "keep_layers": -1,
    }),
    (GuideLimits, "finetune.guide", {"margin": -0.1, "max_share": 0.0}),
    (Distillation, "finetune.distill", {"weight": 0, "temperature": 0, "teacher_scale": 0}),
    (Mining, "finetune.mine", {
        "every_epochs": 0.0, "responses": 1, "top_k": 0, "margin": -0.1, "max_share": 1.1,
    }),
    (TokenizerConfig, "tokenizer", {"vocabulary": 99, "min_frequency": 0, "max_examples": 0}),
    (pretraining, "pretrain", {
        "batch_tokens": 12, "micro_batch_tokens": 12, "masked_share": 1.0, "random_share": 0.0,
        "rare_token_alpha": -1.0, "max_context_tokens": 2, "steps": 0, "window_rows": 0,
    }),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (kind, f"{prefix}.{name}", value)
        for kind, prefix, values in OUT_OF_RANGE
        for name, value in values.items()
    ],
)
def test_settings_out_of_range_are_refused_by_name(kind, name, value):
    message = f"{name}: {value} is not allowed; allowed: "
    with pytest.raises(BadInput, match=re.escape(message)):
        kind(**{name.split(".")[-1]: value})


@pytest.mark.parametrize(
    ("micro_batch_tokens", "lanes", "tokens"),
    [(0, 2, 16_000), (1000, 32, 1000), (50_000, 1, 32_000)],
)
def test_a_step_has_as_many_micro_batches_as_its_tokens_need(micro_batch_tokens, lanes, tokens):
    config = pretraining(micro_batch_tokens=micro_batch_tokens, batch_tokens=32_000)
    assert (config.lanes, config.lane_tokens) == (lanes, tokens)


def test_a_contrastive_micro_batch_has_room_for_two_pairs_of_the_longest_texts():
    """A pair alone has no wrong response: its loss is 0."""
    with pytest.raises(BadInput, match=r"micro_batch_tokens: 35 .*enough for two pairs, 36"):
        pretraining(objective="contrastive", batch_tokens=70, micro_batch_tokens=35)
    config = pretraining(objective="contrastive", batch_tokens=72, micro_batch_tokens=36)
    assert (config.longest_row, config.lane_tokens, config.lane_pairs) == (9, 36, 2)


@pytest.mark.parametrize(("examples", "epochs"), [
    (1, 10), (4_999, 10), (5_000, 3), (99_999, 3), (100_000, 1), (10_000_000, 1),
])  # fmt: skip
def test_epochs_follow_from_the_number_of_examples_where_none_are_set(examples, epochs):
    assert FinetuneConfig(epochs=None).epochs_over(examples) == epochs
    assert FinetuneConfig(epochs=0.5).epochs_over(examples) == 0.5
