"""R@1 and loss in training: they are those of the ranker's own scores, whoever shares the questions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.evaluation.questions import Question, Questions, validation_questions
from pipeline.models import inference
from pipeline.training.finetuning import Validation


@pytest.fixture(autouse=True)
def float32(monkeypatch):
    monkeypatch.setenv("POLYRANK_PROCESSOR", "avx2")


def asked_with(counts) -> list[Question]:
    """Questions with so many candidates each, two at least."""
    return [
        Question(f"e{n}", [f"w{n}"], [f"w{n + other} w7" for other in range(0, 10 * count, 10)], n % 2)
        for n, count in enumerate(counts)
    ]  # fmt: skip


@pytest.mark.parametrize("architecture", ["bi", "poly", "cross"])
def test_r1_and_loss_are_those_of_the_scores(tiny, architecture):
    """Of questions with 2, 3 or 4 candidates. Two ranks' shares, put together, are the whole."""
    ranker = tiny.ranker(architecture=architecture)
    listed = asked_with([2 + n % 3 for n in range(11)])
    hits, losses = [], []
    for question in listed:
        if architecture == "cross":
            (scores,) = inference.pair_scores(ranker, [question.context], [question.candidates])
        else:
            vectors = inference.context_vectors(ranker, [question.context])
            candidates = inference.candidate_vectors(ranker, question.candidates)
            scores = ranker.dual.scores(*vectors, candidates)[0].detach()
        row = scores.double().numpy()
        hits.append(int(row.argmax()) == question.label)
        losses.append(np.log(np.exp(row - row[question.label]).sum()))
    asked = Questions.of(listed)
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
    asked = Questions.of([Question("e", ["w1"], ["w2", "w3"], 0)])
    assert Validation(ranker, asked, 0, 1)().metrics["r1"] == 0


def test_each_candidate_text_is_encoded_once_for_all_questions(tiny, monkeypatch):
    rows = [{"context": [f"w{n}"], "response": f"w{n + 50}"} for n in range(30)]
    asked = validation_questions(tiny.corpus(rows, split="valid"), "valid", 20, 30, seed=0)
    ranker = tiny.ranker()
    encoded = []
    encode = ranker.network.encode_candidates
    monkeypatch.setattr(
        ranker.network,
        "encode_candidates",
        lambda tokens: encoded.append(len(tokens.ids_BT)) or encode(tokens),
    )
    Validation(ranker, asked, 0, 1)()
    assert sum(encoded) == 30
