"""Masking, and the losses of both pre-training heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.models.pretraining import IGNORED, PretrainingModel, hide_tokens
from pipeline.models.tokens import Tokens

PAD, CLS, SEP, MASK = 0, 2, 3, 4
SPECIAL = torch.tensor([0, 1, 2, 3, 4])
VOCABULARY = 1000


@pytest.fixture(scope="module")
def big():
    """400 rows of 100 to 300 ordinary tokens between special ones."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(100, 301, (400, 1), generator=generator)
    place = torch.arange(302)
    ids = torch.randint(5, VOCABULARY, (400, 302), generator=generator)
    ids[:, 0] = CLS
    ids[place == lengths + 1] = SEP
    mask = place < lengths + 2
    return Tokens(ids.masked_fill(~mask, PAD), mask, tuple((lengths[:, 0] + 2).tolist()))


def hide(tokens, share=0.15, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return hide_tokens(tokens, SPECIAL, MASK, VOCABULARY, share, generator)


def ordinary(tokens):
    return tokens.mask_BT & ~torch.isin(tokens.ids_BT, SPECIAL)


def share_of(part, whole):
    return part.sum().item() / whole.sum().item()


def test_15_percent_are_predicted_80_10_10_as_mask_random_and_itself(big):
    hidden, labels = hide(big)
    chosen = labels != IGNORED
    # Of some 80,000 tokens, 12,000 chosen: six standard deviations are 0.0076 and 0.022.
    assert share_of(chosen, ordinary(big)) == pytest.approx(0.15, abs=0.008)
    masked = chosen & (hidden.ids_BT == MASK)
    same = chosen & (hidden.ids_BT == big.ids_BT)
    other = chosen & ~masked & ~same
    assert share_of(masked, chosen) == pytest.approx(0.8, abs=0.023)
    assert share_of(same, chosen) == pytest.approx(0.1, abs=0.017)
    assert share_of(other, chosen) == pytest.approx(0.1, abs=0.017)
    assert len(hidden.ids_BT[other].unique()) > 500  # from the whole vocabulary


def test_special_tokens_and_pads_are_never_hidden(big):
    hidden, labels = hide(big, share=0.9)
    untouched = ~ordinary(big)
    assert (labels[untouched] == IGNORED).all()
    assert torch.equal(hidden.ids_BT[untouched], big.ids_BT[untouched])


def test_labels_are_the_true_ids_and_all_else_stays(big):
    hidden, labels = hide(big)
    chosen = labels != IGNORED
    assert torch.equal(labels[chosen], big.ids_BT[chosen])
    assert torch.equal(hidden.ids_BT[~chosen], big.ids_BT[~chosen])
    assert torch.equal(hidden.mask_BT, big.mask_BT)


def test_masks_follow_from_the_generator_alone(big):
    assert torch.equal(hide(big, seed=1)[0].ids_BT, hide(big, seed=1)[0].ids_BT)
    assert not torch.equal(hide(big, seed=1)[0].ids_BT, hide(big, seed=2)[0].ids_BT)


@pytest.mark.parametrize("seed", range(20))
def test_one_token_at_least_is_predicted_so_that_the_loss_is_a_number(seed):
    ids, mask = torch.tensor([[CLS, 7, SEP, PAD]]), torch.tensor([[True, True, True, False]])
    tokens = Tokens(ids, mask, (3,))
    _, labels = hide(tokens, share=0.01, seed=seed)
    assert labels.tolist() == [[IGNORED, 7, IGNORED, IGNORED]]


@pytest.fixture(scope="module")
def model(tiny):
    model = PretrainingModel(tiny.encoder()).eval()
    nn.init.normal_(model.bias_V)
    return model


def log_softmax(logits):
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def test_losses_are_means_over_predicted_tokens_and_over_pairs(tiny, model):
    tokens = tiny.tokenizer().pairs([[2, 7, 8, 3], [2, 9, 3]], [[2, 10, 3], [2, 11, 12, 13, 3]])
    labels = torch.full_like(tokens.ids_BT, IGNORED)
    labels[0, 1], labels[0, 4], labels[1, 5] = 20, 21, 22
    is_next = np.array([1.0, 0.0])
    with torch.no_grad():
        mlm, nup = model.losses(tokens, labels, torch.tensor(is_next) > 0)
        hidden = model.encoder(tokens)
        transformed = model.transform(hidden).double().numpy()
        logits = model.next(hidden[:, 0])[:, 0].double().numpy()
    embedding = model.encoder.hf.get_input_embeddings().weight.detach().double().numpy()
    bias = model.bias_V.detach().double().numpy()
    expected = [
        -log_softmax(embedding @ transformed[row, place] + bias)[label]
        for row, place, label in ((0, 1, 20), (0, 4, 21), (1, 5, 22))
    ]
    assert mlm.item() == pytest.approx(np.mean(expected), rel=1e-4)
    probability = 1 / (1 + np.exp(-logits))
    binary = -(is_next * np.log(probability) + (1 - is_next) * np.log(1 - probability))
    assert nup.item() == pytest.approx(binary.mean(), rel=1e-4)


def test_every_weight_of_encoder_and_heads_learns(tiny, model):
    """A weight without gradient would make DistributedDataParallel wait for ever."""
    tokens = tiny.tokenizer().pairs([[2, 7, 8, 3]], [[2, 10, 3]])
    labels = torch.where(tokens.ids_BT == 7, 7, IGNORED)
    sum(model.losses(tokens, labels, torch.tensor([True]))).backward()
    assert [name for name, value in model.named_parameters() if value.grad is None] == []
    model.zero_grad()
