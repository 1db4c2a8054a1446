"""The frozen encoder's baselines: cosines, and a map that learns which response follows."""

from __future__ import annotations

import numpy as np
import torch

from pipeline.evaluation.mapped import Mapped, fit_map, train_pairs
from pipeline.evaluation.metrics import recall_at
from pipeline.evaluation.questions import Question, Questions
from pipeline.evaluation.ranking import rank

WIDTH = 8


class Numbered:
    """Text "3" has the third of many random vectors, of length 2."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(count, WIDTH, generator=generator)
        self.vectors_ND = 2 * drawn / drawn.norm(dim=1, keepdim=True)

    def vectors(self, texts):
        return self.vectors_ND[[int(text) for text in texts]]


def test_scores_are_cosines_and_those_of_mapped_responses():
    encoder = Numbered(6)
    asked = Questions.of(
        [Question("a", ["5", "0"], ["1", "2"], 0), Question("b", ["3"], ["2", "4"], 1)], ["5", "3"]
    )
    units = encoder.vectors_ND.double().numpy() / 2
    candidates = [[1, 2, 5, 3], [2, 4, 5, 3]]
    map_DD = torch.randn(WIDTH, WIDTH)
    for given, matrix in ((None, np.eye(WIDTH)), (map_DD, map_DD.double().numpy())):
        expected = [
            units[own] @ matrix @ units[x] for x, own in zip((0, 3), candidates, strict=True)
        ]
        scores = Mapped(encoder, given).prepare(asked).scores(asked)
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)


def test_a_map_finds_responses_that_are_the_contexts_turned_around():
    """In space: a response's vector is its context's in other places, so that cosines know nothing."""
    encoder = Numbered(2_000)
    contexts_ND = encoder.vectors_ND[:1_000] / 2
    responses_ND = contexts_ND[:, torch.arange(WIDTH).roll(3)]
    encoder.vectors_ND[1_000:] = responses_ND
    map_DD = fit_map(contexts_ND[:800], responses_ND[:800], seed=0)
    torch.testing.assert_close(map_DD, fit_map(contexts_ND[:800], responses_ND[:800], seed=0))
    asked = Questions.of(
        Question(str(n), [str(n)], [str(1_000 + c) for c in range(900, 1_000)], n - 900)
        for n in range(900, 1_000)
    )
    found = {
        name: recall_at(rank(scorer.prepare(asked), asked).ranks_N, 1)
        for name, scorer in {"sim": Mapped(encoder), "map": Mapped(encoder, map_DD)}.items()
    }
    assert found["sim"] < 0.1 and found["map"] > 0.7, found


def test_pairs_are_newest_turns_and_responses_of_train(tiny):
    rows = [{"context": [f"old{n}", f"x{n}"], "response": f"y{n}"} for n in range(30)]
    contexts, responses = train_pairs(tiny.corpus(rows, rows_per_file=7), seed=1, limit=20)
    assert len(set(contexts)) == 20
    assert [text.replace("x", "y") for text in contexts] == responses
    assert contexts != sorted(contexts, key=lambda text: int(text[1:]))
