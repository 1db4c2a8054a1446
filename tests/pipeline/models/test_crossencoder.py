"""The cross-encoder: one number per pair."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.models.crossencoder import CrossEncoder
from pipeline.models.settings import CrossConfig


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
