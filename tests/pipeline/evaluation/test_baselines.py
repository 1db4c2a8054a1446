"""TF-IDF against its formula, and chance."""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np
import pytest

from pipeline.evaluation.baselines import Chance, TfIdf
from pipeline.evaluation.metrics import mean_reciprocal_rank, recall_at
from pipeline.evaluation.ranking import Question, ranks

TEXTS = ["the cat sat on a mat", "a dog sat", "the dog and the cat", "birds sing in the morning"]
ASKED = [
    Question("0", ["Where is the cat?", "the CAT sat: on the mat"],
             ["the cat, the cat", "a dog", "birds", "unheard words", ""], 0),
    Question("1", ["birds that sing"], ["the morning", "birds sing, and sing"], 1),
]  # fmt: skip


def vector(text):
    """Sub-linear counts times smoothed inverse document frequencies, of length 1; by word."""
    counts = Counter(re.findall(r"\w+", text.lower()))
    weights = {}
    for word, count in counts.items():
        documents = sum(word in text.split() for text in TEXTS)
        if documents:
            weights[word] = (1 + math.log(count)) * (math.log(5 / (1 + documents)) + 1)
    length = math.sqrt(sum(weight**2 for weight in weights.values()))
    return {word: weight / length for word, weight in weights.items()}


def test_scores_are_cosines_of_tf_idf_vectors():
    for question, scores in zip(ASKED, TfIdf.fit(TEXTS).score(ASKED), strict=True):
        context = vector(" ".join(question.context))
        expected = [
            sum(weight * context.get(word, 0) for word, weight in vector(text).items())
            for text in question.candidates
        ]
        np.testing.assert_allclose(scores, expected, rtol=1e-9, atol=1e-12)


def test_words_of_one_letter_count():
    """sklearn's own pattern drops them: of "a" and "i", much of a dialogue."""
    (scores,) = TfIdf.fit(["i am", "a b c"]).score([Question("0", ["i"], ["i am", "a b"], 0)])
    assert scores[0] > scores[1] == 0


def test_shared_words_win_and_none_earn_nothing():
    found = ranks(TfIdf.fit(TEXTS), ASKED)
    assert found.tolist() == [1, 1]
    nothing = Question("2", ["no word known"], ["the cat", "a dog", "birds"], 0)
    assert ranks(TfIdf.fit(TEXTS), [nothing]).tolist() == [3]


@pytest.mark.parametrize("candidates", [2, 10])
def test_chance_is_right_once_in_c(candidates):
    asked = [Question(str(n), [], ["x"] * candidates, n % candidates) for n in range(4000)]
    found = ranks(Chance(), asked)
    # Four standard deviations among 4,000 are at most 0.032.
    for k in range(1, candidates):
        assert recall_at(found, k) == pytest.approx(k / candidates, abs=0.032)
    expected = sum(1 / rank for rank in range(1, candidates + 1)) / candidates
    assert mean_reciprocal_rank(found) == pytest.approx(expected, abs=0.032)


def test_chance_follows_from_its_seed():
    asked = [Question("0", [], ["x"] * 8, 0)]
    first, same, other = (Chance(seed).score(asked)[0].tolist() for seed in (1, 1, 2))
    assert first == same
    assert first != other
