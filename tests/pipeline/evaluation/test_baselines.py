"""TF-IDF and BM25 against their formulas, word by word, and chance."""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np
import pytest

from pipeline.evaluation.baselines import BM25, Chance, TfIdf, known_texts
from pipeline.evaluation.metrics import recall_at
from pipeline.evaluation.questions import Question, Questions
from pipeline.evaluation.ranking import rank

TEXTS = ["the cat sat on a mat", "a dog sat", "the dog and the cat", "birds sing in the morning"]
CANDIDATES = [
    ["the cat, the cat", "a dog", "birds", "unheard words", ""],
    ["the morning", "birds sing, and sing", "a", "Unheard-of!", "the the the the"],
]
CONTEXTS = [["Where is the cat? unheard", "the CAT sat: on the mat"], ["birds that sing"]]
SHARED = ["the dog", "a mat and a cat on a mat", "nothing in common"]


def asked(shared=()) -> Questions:
    return Questions.of((Question(str(n), CONTEXTS[n], CANDIDATES[n], n) for n in range(2)), shared)


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.lower()))


def documents(word: str) -> int:
    return sum(word in words(text) for text in TEXTS)


def tf_idf(context: str, candidate: str) -> float:
    def vector(text):
        weights = {
            word: (1 + math.log(count)) * (math.log(5 / (1 + documents(word))) + 1)
            for word, count in words(text).items()
        }
        length = math.sqrt(sum(weight**2 for weight in weights.values()))
        return {word: weight / length for word, weight in weights.items()}

    wanted = vector(context)
    return sum(weight * wanted.get(word, 0) for word, weight in vector(candidate).items())


def bm25(context: str, candidate: str) -> float:
    average = sum(words(text).total() for text in TEXTS) / len(TEXTS)
    counts = words(candidate)
    total = 0.0
    for word in set(words(context)):
        idf = math.log(1 + (len(TEXTS) - documents(word) + 0.5) / (documents(word) + 0.5))
        slowed = 2.0 * (1 - 0.75 + 0.75 * counts.total() / average)
        total += idf * counts[word] * (2.0 + 1) / (counts[word] + slowed)
    return total


@pytest.mark.parametrize(("scorer", "formula"), [(TfIdf, tf_idf), (BM25, bm25)])
@pytest.mark.parametrize("shared", [(), SHARED])
def test_scores_are_those_of_the_formula(scorer, formula, shared):
    questions = asked(shared)
    scores = scorer.fit(TEXTS).prepare(questions)(questions)
    expected = [
        [formula("\n".join(context), text) for text in (*candidates, *shared)]
        for context, candidates in zip(CONTEXTS, CANDIDATES, strict=True)
    ]
    np.testing.assert_allclose(scores, expected, rtol=1e-9, atol=1e-12)
    some = questions.rows(np.array([1]))
    ready = scorer.fit(TEXTS).prepare(questions)
    np.testing.assert_allclose(ready(some), expected[1:], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scorer", [TfIdf, BM25])
def test_shared_words_win_unknown_ones_too_and_none_earn_nothing(scorer):
    questions = Questions.of([
        Question("0", ["where is the cat"], CANDIDATES[0], 0),
        Question("1", CONTEXTS[1], CANDIDATES[1], 1),
        Question("2", ["unheard of"], CANDIDATES[0], 3),
        Question("3", ["no word in common"], ["the cat", "a dog", "birds", "sing", "mat"], 2),
    ])  # fmt: skip
    assert rank(scorer.fit(TEXTS).prepare(questions), questions).ranks_N.tolist() == [1, 1, 1, 5]


@pytest.mark.parametrize("scorer", [TfIdf, BM25])
def test_words_of_one_letter_count(scorer):
    """sklearn's own pattern drops them: of "a" and "i", much of a dialogue."""
    questions = Questions.of([Question("0", ["i"], ["i am", "a b"], 0)])
    scores = scorer.fit(["i am", "a b c"]).prepare(questions)(questions)
    assert scores[0, 0] > scores[0, 1] == 0


@pytest.mark.parametrize("candidates", [2, 10])
def test_chance_is_right_once_in_c(candidates):
    texts = [f"x{n}" for n in range(candidates)]
    questions = Questions.of(Question(str(n), [], texts, n % candidates) for n in range(4000))
    found = rank(Chance().prepare(questions), questions).ranks_N
    # Four standard deviations among 4,000 are at most 0.032.
    for k in range(1, candidates):
        assert recall_at(found, k) == pytest.approx(k / candidates, abs=0.032)
    expected = sum(1 / rank for rank in range(1, candidates + 1)) / candidates
    assert (1 / found).mean() == pytest.approx(expected, abs=0.032)


def test_chance_follows_from_its_seed():
    questions = Questions.of([Question("0", [], [*"abcdefgh"], 0)], [*"xyz"])
    first, same, other = (Chance(seed).prepare(questions)(questions).tolist() for seed in (1, 1, 2))
    assert len(first[0]) == 11
    assert first == same
    assert first != other


def test_weights_come_from_the_first_responses_of_train(tiny):
    corpus = tiny.corpus([{"response": f"r{n}"} for n in range(50)], rows_per_file=20)
    assert known_texts(corpus, limit=33) == [f"r{n}" for n in range(33)]
    assert len(known_texts(corpus)) == 50
    assert known_texts(tiny.corpus([{}], split="valid")) == []
