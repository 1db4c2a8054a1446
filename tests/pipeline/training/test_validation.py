"""R@1 in training: which questions are asked, and that the answer is the ranker's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.models import inference
from pipeline.training.validation import Question, Validation, questions_of

GIVEN = [
    {"context": [f"w{n}", f"w{n + 1}"], "response": f"w{n + 20}",
     "candidates": [f"w{n + other}" for other in (10, 20, 30, 10, 20)]}
    for n in range(9)
]  # fmt: skip


@pytest.fixture(autouse=True)
def float32(monkeypatch):
    monkeypatch.setattr(inference, "use_bf16", lambda device: False)


def test_given_candidates_are_asked_once_each(tiny):
    corpus = tiny.corpus([*GIVEN, {"response": "w99", "candidates": None}], split="valid")
    asked = questions_of(corpus, 100, 20, seed=0)
    assert len(asked) == len(GIVEN)
    for question in asked:
        n = int(question.context[0][1:])
        assert question.candidates[question.label] == f"w{n + 20}"
        assert sorted(question.candidates) == sorted(f"w{n + other}" for other in (10, 20, 30))


def test_without_candidates_responses_of_a_group_are_asked(tiny):
    rows = [{"context": [f"c{n}"], "response": f"w{n}"} for n in range(23)]
    corpus = tiny.corpus(rows, split="valid")
    asked = questions_of(corpus, 100, 5, seed=0)
    assert len(asked) == 20
    for question in asked:
        assert question.candidates[question.label] == question.context[0].replace("c", "w")
        assert len(set(question.candidates)) == 5
    assert asked == questions_of(corpus, 100, 5, seed=0) != questions_of(corpus, 100, 5, seed=1)
    assert len(questions_of(corpus, 10, 5, seed=0)) == 10
    assert {len(question.candidates) for question in questions_of(corpus, 100, 99, 0)} == {23}


def test_equal_responses_are_no_question(tiny):
    rows = [{"context": [f"c{n}"], "response": "w1"} for n in range(6)]
    assert questions_of(tiny.corpus(rows, split="valid"), 100, 3, 0) == []
    assert questions_of(tiny.corpus(rows), 100, 3, 0) == []


@pytest.mark.parametrize("architecture", ["bi", "poly", "cross"])
def test_r1_and_loss_are_those_of_the_scores(tiny, architecture):
    """Two ranks' shares, put together, are the whole."""
    ranker = tiny.ranker(architecture=architecture)
    asked = [
        Question([f"w{n}"], [f"w{n + other} w7" for other in range(0, 10 * (2 + n % 3), 10)], n % 2)
        for n in range(11)
    ]
    hits, losses = [], []
    for question in asked:
        if architecture == "cross":
            (scores,) = inference.pair_scores(ranker, [question.context], [question.candidates])
        else:
            vectors = inference.context_vectors(ranker, [question.context])
            candidates = inference.candidate_vectors(ranker, question.candidates)
            scores = ranker.dual.scores(*vectors, candidates)[0].detach()
        row = scores.double().numpy()
        hits.append(int(row.argmax()) == question.label)
        losses.append(np.log(np.exp(row - row[question.label]).sum()))
    found = Validation(ranker.train(), asked, 0, 1)()
    assert found.metrics["r1"] == pytest.approx(np.mean(hits))
    assert found.metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    parts = [Validation(ranker, asked, rank, 2)() for rank in (0, 1)]
    whole = sum(part.metrics["r1"] * size for part, size in zip(parts, (6, 5), strict=True)) / 11
    assert whole == pytest.approx(found.metrics["r1"])
    assert 0 < found.metrics["r1"] < 1 or architecture != "poly"


def test_a_ranker_that_scores_all_alike_earns_nothing(tiny):
    ranker = tiny.ranker(architecture="cross")
    with torch.no_grad():
        ranker.cross.score.weight.zero_()
    assert Validation(ranker, [Question(["w1"], ["w2", "w3"], 0)], 0, 1)().metrics["r1"] == 0
