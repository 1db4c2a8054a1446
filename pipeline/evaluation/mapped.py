"""PolyAI's two baselines on a frozen encoder: its vectors as they are (SIM), and mapped (MAP).

Both compare unit vectors of the context's newest turn, x, and of the response, y:

    SIM = x · y,    MAP = x · (W + α I) y

W starts orthogonal and α at 1. Adagrad trains them on pairs of the train split, by the softmax over the
responses of a batch. A fifth of the pairs is kept apart: the learning rate and the factor of |W|² / 2 are
those with the highest R@1 on it (conversational-datasets, baselines/vector_based.py).

N questions, T texts, K and S candidates as in `questions.py`, D dimensions, B pairs in a batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.arrays import Floats
from pipeline.artifact import Artifact
from pipeline.evaluation.drawn_rows import draw_places, read_rows
from pipeline.evaluation.questions import Questions
from pipeline.evaluation.ranking import PreparedScorer

PAIRS = 10_000
"""Pairs of the train split that a map is trained on."""
_RATES, _DECAYS = (10.0, 3.0, 1.0, 0.3, 0.01), (0.0, 0.1, 0.01, 0.001)
_BATCH, _MOST_EPOCHS, _PATIENCE = 256, 100, 5
_SMOOTHING, _DEV_SHARE = 0.2, 0.2
_FIRST_SQUARES = 0.1  # TensorFlow's Adagrad starts from this sum of squares


class TextVectors(Protocol):
    """Texts to vectors [N, D]."""

    def vectors(self, texts: Sequence[str]) -> Tensor: ...


@dataclass(frozen=True)
class Mapped:
    """Cosines of an encoder's vectors; with a map [D, D], of which the responses' vectors go through it."""

    encoder: TextVectors
    map_DD: Tensor | None = None

    def prepare(self, questions: Questions) -> PreparedScorer:
        responses_TD = unit_vectors(self.encoder, questions.texts)
        if self.map_DD is not None:
            responses_TD = responses_TD @ self.map_DD
        return _Vectors(self.encoder, responses_TD)


def unit_vectors(encoder: TextVectors, texts: Sequence[str]) -> Tensor:
    """[N, D] of length 1, float32."""
    return F.normalize(encoder.vectors(texts).float(), dim=1)


def train_pairs(corpus: Artifact, seed: int, limit: int = PAIRS) -> tuple[list[str], list[str]]:
    """(newest turns, responses) of examples of the train split, drawn at random."""
    places = draw_places(corpus.rows("train/"), limit, seed)
    rows = read_rows(corpus, "train", sorted(places))
    order = np.random.default_rng(seed).permutation(len(rows))
    rows = [rows[place] for place in order]
    return [row["context"][-1] for row in rows], [row["response"] for row in rows]


def fit_map(contexts_ND: Tensor, responses_ND: Tensor, seed: int) -> Tensor:
    """The map W + α I, transposed, [D, D], of unit vectors of pairs: that of the best settings."""
    dev = max(1, round(_DEV_SHARE * len(contexts_ND)))
    settings = itertools.product(_RATES, _DECAYS)
    pairs = (contexts_ND[dev:], responses_ND[dev:], contexts_ND[:dev], responses_ND[:dev])
    results = (_fit(*pairs, rate, decay, seed) for rate, decay in settings)
    return max(results, key=lambda result: result[0])[1]


class _Map(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(width, width)))
        self.residual = nn.Parameter(torch.ones(()))

    def forward(self, contexts_BD: Tensor, responses_BD: Tensor) -> Tensor:
        mapped_BD = responses_BD @ self.weight + self.residual * responses_BD
        return contexts_BD @ mapped_BD.T


def _fit(
    contexts_ND: Tensor,
    responses_ND: Tensor,
    dev_contexts_ND: Tensor,
    dev_responses_ND: Tensor,
    rate: float,
    decay: float,
    seed: int,
) -> tuple[float, Tensor]:
    """(R@1 among a batch's responses on the pairs apart, the map that has it)"""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _Map(contexts_ND.shape[1])
        optimizer = torch.optim.Adagrad(
            network.parameters(), lr=rate, initial_accumulator_value=_FIRST_SQUARES
        )
        best, weights, epochs_since_best = -1.0, torch.empty(0), 0
        for _ in range(_MOST_EPOCHS):
            for places_B in torch.split(torch.randperm(len(contexts_ND)), _BATCH):
                scores_BB = network(contexts_ND[places_B], responses_ND[places_B])
                targets_B = torch.arange(len(places_B))
                loss = F.cross_entropy(scores_BB, targets_B, label_smoothing=_SMOOTHING)
                loss = loss + decay * network.weight.square().sum() / 2
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            with torch.no_grad():
                recall = _recall_at_1(network, dev_contexts_ND, dev_responses_ND)
                epochs_since_best += 1
                if recall > best:
                    identity_DD = torch.eye(len(network.weight))
                    best, epochs_since_best = recall, 0
                    weights = network.weight + network.residual * identity_DD
            if epochs_since_best >= _PATIENCE:
                break
    return best, weights


def _recall_at_1(network: _Map, contexts_ND: Tensor, responses_ND: Tensor) -> float:
    hits = 0
    for contexts_BD, responses_BD in zip(
        torch.split(contexts_ND, _BATCH), torch.split(responses_ND, _BATCH), strict=True
    ):
        best_B = network(contexts_BD, responses_BD).argmax(dim=1)
        hits += int((best_B == torch.arange(len(best_B))).sum())
    return hits / len(contexts_ND)


@dataclass(frozen=True)
class _Vectors:
    """The responses' vectors, mapped where there is a map."""

    encoder: TextVectors
    responses_TD: Tensor

    def scores(self, questions: Questions) -> Floats:
        contexts_ND = unit_vectors(self.encoder, [context[-1] for context in questions.contexts])
        # Question by question: of 10,000 candidates each, all vectors at once would be gigabytes.
        own_scores_NK = torch.stack(
            [
                self.responses_TD[places_K] @ context_D
                for places_K, context_D in zip(
                    torch.from_numpy(questions.places_NK), contexts_ND, strict=True
                )
            ]
        )
        shared_NS = contexts_ND @ self.responses_TD[: questions.shared].T
        scores_NC: Floats = torch.cat([own_scores_NK, shared_NS], dim=1).double().numpy()
        return scores_NC
