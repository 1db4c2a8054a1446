"""What a pre-training starts from, what it validates, and what it refuses."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM

from pipeline.config import BadInput
from pipeline.models.pretraining_heads import PretrainingModel
from pipeline.models.settings import Shape
from pipeline.models.sources import External


@pytest.fixture(scope="module")
def published(tiny, tmp_path_factory):
    """A masked language model as `transformers` publishes it, and its folder."""
    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(5)
    special = {"pad": 0, "cls": 2, "sep": 3}
    model = PretrainingModel.new(Shape(**tiny.shape, dropout=0.1), tiny.vocabulary, special)
    model.save(folder)
    (folder / "next_head.safetensors").unlink()
    tiny.tokenizer().save(folder)
    return AutoModelForMaskedLM.from_pretrained(folder).eval(), folder


def plain_mlm(model, parts):
    """(sum of the cross-entropies, predicted tokens, hits) by `transformers` alone."""
    total, count, hits = 0.0, 0, 0
    for part in parts:
        tokens = part.tokens
        with torch.no_grad():
            logits = model(
                tokens.ids_BT, attention_mask=tokens.mask_BT.long(),
                token_type_ids=tokens.segments_BT,
            ).logits.flatten(0, 1)[part.predicted_N]  # fmt: skip
        total += F.cross_entropy(logits, part.labels_N, reduction="sum").item()
        hits += int((logits.argmax(1) == part.labels_N).sum())
        count += len(part.labels_N)
    return total, count, hits


def test_validation_measures_every_held_out_token_once(pretraining, published):
    model, folder = published
    task = replace(pretraining, start=External(str(folder), "")).build(0, 1)
    measured = task.validation()
    total, count, hits = plain_mlm(model, task.validation.batches)
    assert measured.metrics["mlm_loss"] == pytest.approx(total / count, rel=1e-5)
    assert measured.metrics["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert measured.metrics["mlm_accuracy"] == pytest.approx(hits / count)
    both = measured.metrics["mlm_loss"] + measured.metrics["next_loss"]
    assert measured.metrics["loss"] == pytest.approx(both)
    assert measured.merit[0] == -measured.metrics["loss"]
    again = pretraining.build(1, 2).validation.batches
    assert len(again) == len(task.validation.batches)  # all ranks know all of them


@pytest.mark.parametrize(("objective", "losses", "has_head"), [
    ("alternate", [{"mlm"}, {"next"}], True), ("mlm", [{"mlm"}] * 2, False),
    ("contrastive", [{"next"}] * 2, False), ("contrastive_mlm", [{"mlm", "next"}] * 2, False),
])  # fmt: skip
def test_each_objective_shows_its_losses_and_saves_the_next_head_that_it_trained(
    pretraining, tmp_path, objective, losses, has_head
):
    config = replace(pretraining.pretrain, objective=objective, micro_batch_tokens=80)
    task = replace(pretraining, pretrain=config).build(0, 1)
    walk, names = task.batches.start(()), []
    for step in (0, 1):
        task.before_step(step)
        _, shown = task.backward(task.module, next(walk)[0], torch.autocast("cpu", enabled=False))
        names.append({name.split("_")[0] for name, value in shown.items() if value.weight})
    walk.close()
    assert names == losses
    task.save(tmp_path)
    assert (tmp_path / "next_head.safetensors").exists() == has_head
    assert AutoModelForMaskedLM.from_pretrained(tmp_path).config.vocab_size


def test_a_vocabulary_that_does_not_fit_is_refused(pretraining, tiny, tmp_path):
    special = {"pad": 0, "cls": 2, "sep": 3}
    PretrainingModel.new(Shape(**tiny.shape), tiny.vocabulary - 1, special).save(tmp_path)
    with pytest.raises(BadInput, match=r"--start: the encoder has 204 tokens, .* 205; allowed"):
        replace(pretraining, start=External(str(tmp_path), "")).build(0, 1)


def test_an_encoder_that_knows_the_tokens_by_other_ids_is_refused(pretraining, tiny, tmp_path):
    special = {"pad": 0, "cls": 2, "sep": 3}
    PretrainingModel.new(Shape(**tiny.shape), tiny.vocabulary, special).save(tmp_path)
    other = replace(pretraining, start=External(str(tmp_path), ""))
    tiny.tokenizer().save(tmp_path)
    other.build(0, 1)
    file = tmp_path / "tokenizer.json"
    file.write_text(
        re.sub(r'"w(1|2)": (\d+)', lambda m: f'"w{3 - int(m[1])}": {m[2]}', file.read_text())
    )
    with pytest.raises(BadInput, match=r"--start: 'w1' is token \d+ of .*, and \d+ of the encoder"):
        other.build(0, 1)


def test_pairs_longer_than_the_encoders_positions_are_refused(pretraining, tiny):
    long = replace(
        pretraining.pretrain, max_context_tokens=60, batch_tokens=300, micro_batch_tokens=100
    )
    with pytest.raises(BadInput, match=r"max_context_tokens: 60 .* positions, 64"):
        replace(pretraining, pretrain=long).build(0, 1)


def test_without_a_valid_split_nothing_is_validated(pretraining, tiny):
    corpus = tiny.tokens(tiny.corpus([{"context": ["w1"]}] * 8), valid_share=0.0)
    assert replace(pretraining, corpora=(corpus,)).build(0, 1).validation is None
