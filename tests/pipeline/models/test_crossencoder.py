"""The cross-encoder: one number per pair."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.models.crossencoder import CrossEncoder
from pipeline.models.ranker import load_ranker, new_ranker
from pipeline.models.settings import CrossConfig
from pipeline.models.tokens import Tokens


class Fixed(torch.nn.Module):
    """Stands for an encoder: the same float32 outputs, whatever the tokens."""

    def __init__(self, hidden_BTD):
        super().__init__()
        self.hidden_BTD = hidden_BTD
        self.width = hidden_BTD.shape[-1]

    def forward(self, tokens):
        return self.hidden_BTD


def test_score_is_a_linear_function_of_the_first_output():
    hidden = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))
    cross = CrossEncoder(Fixed(hidden), CrossConfig(output_scaling=0.5))
    torch.nn.init.normal_(cross.score.bias)
    weight, bias = (part.detach().double().numpy() for part in cross.score.parameters())
    expected = 0.5 * hidden[:, 0].double().numpy() @ weight[0] + bias
    with torch.no_grad():
        np.testing.assert_allclose(cross.score_pairs(None), expected, rtol=0, atol=1e-6)


def test_with_a_pooler_the_score_is_berts_classifiers():
    hidden = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))
    cross = CrossEncoder(Fixed(hidden), CrossConfig(pooler=True))
    for part in cross.parameters():
        torch.nn.init.normal_(part)
    pool, shift, weight, bias = (part.detach().double().numpy() for part in cross.parameters())
    expected = np.tanh(hidden[:, 0].double().numpy() @ pool.T + shift) @ weight[0] + bias
    with torch.no_grad():
        np.testing.assert_allclose(cross.score_pairs(None), expected, rtol=0, atol=1e-5)


def test_two_means_add_the_product_of_both_texts_means():
    """Rows of 3 + 2 tokens, and of 2 + 1 with padding."""
    hidden = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    config = CrossConfig(head="two_means", output_scaling=0.5)
    cross = CrossEncoder(Fixed(hidden), config)
    for part in cross.parameters():
        torch.nn.init.normal_(part)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    segments = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 0, 0]])
    scaled = 0.5 * hidden.double().numpy()
    gain = cross.product_gain.item()
    weight, bias = (part.detach().double().numpy() for part in cross.score.parameters())
    expected = scaled[:, 0] @ weight[0] + bias
    expected[0] += gain * (scaled[0, :3].mean(axis=0) @ scaled[0, 3:].mean(axis=0))
    expected[1] += gain * (scaled[1, :2].mean(axis=0) @ scaled[1, 2])
    with torch.no_grad():
        scores = cross.score_pairs(Tokens(torch.zeros_like(segments), mask, (5, 3), segments))
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", ["bert", "modernbert"])
def test_two_means_start_at_a_bi_encoders_score(tiny, architecture, tmp_path):
    """Of outputs that have read both texts: the score is the product of their means, as a bi-encoder's, and
    the candidate's segment is the one that a bi-encoder knows."""
    tiny.ranker(architecture, architecture="bi", share_towers=True).save(tmp_path / "bi")
    config = CrossConfig(head="two_means", max_context_tokens=16, max_candidate_tokens=8)
    ranker = new_ranker(config, tmp_path / "bi" / "context_encoder", seed=0).eval()
    ranker.save(tmp_path / "cross")
    tokens = ranker.tokenizer.pairs([[2, 7, 9, 3]], [[2, 8, 3]])
    hf = load_ranker(tmp_path / "bi").dual.context_encoder.hf
    with torch.no_grad():
        outputs = hf(input_ids=torch.tensor([[2, 7, 9, 3, 8, 3]])).last_hidden_state[0].double()
        expected = (outputs[:4].mean(0) @ outputs[4:].mean(0)).item()
        for trained in (ranker, load_ranker(tmp_path / "cross")):
            assert trained.cross.score_pairs(tokens).item() == pytest.approx(expected, abs=1e-5)


def test_scores_keep_float32_precision_under_bf16_autocast():
    """bf16 has 8 bits: candidates that differ by less than 1/256 would tie."""
    hidden = torch.ones(64, 1, 8)
    hidden[:, 0, 0] += torch.arange(64) / 10_000
    cross = CrossEncoder(Fixed(hidden), CrossConfig())
    torch.nn.init.ones_(cross.score.weight)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        scores = cross.score_pairs(None)
    assert scores.dtype == torch.float32
    assert len(scores.unique()) == 64


@pytest.mark.parametrize("architecture", ["bert", "modernbert"])
def test_longer_neighbours_in_the_batch_change_no_score(tiny, architecture):
    ranker = tiny.ranker(architecture, architecture="cross")
    contexts = ranker.context_rows([["w1 w2"], ["w3", "w4 w5 w6 w7 w8 w9"], [""], ["w8"]])
    candidates = ranker.candidate_rows(["w9", "w1 w2 w3 w4 w5 w6", "w7 w8", ""])
    pairs = ranker.tokenizer.pairs
    with torch.no_grad():
        together = ranker.cross.score_pairs(pairs(contexts, candidates))
        alone = [
            ranker.cross.score_pairs(pairs([context], [candidate]))
            for context, candidate in zip(contexts, candidates, strict=True)
        ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)
    assert together.std() > 0.01


def test_bert_is_told_which_text_is_which(tiny):
    ranker = tiny.ranker("bert", architecture="cross")
    tokens = ranker.tokenizer.pairs([[2, 7, 3]], [[2, 8, 3]])
    with torch.no_grad():
        right = ranker.cross.score_pairs(tokens)
        assert not torch.equal(right, ranker.cross.score_pairs(tokens._replace(segments_BT=None)))
        hidden = ranker.cross.encoder.hf(
            input_ids=torch.tensor([[2, 7, 3, 8, 3]]),
            token_type_ids=torch.tensor([[0, 0, 0, 1, 1]]),
        ).last_hidden_state
        torch.testing.assert_close(right, ranker.cross.score(hidden[:, 0])[:, 0])
