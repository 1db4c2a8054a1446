"""Questions whose right answers' places give nothing away, and rankers that answer them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from pipeline.config import BadInput
from pipeline.evaluation.metrics import recall_at
from pipeline.evaluation.ranking import Question, RankerScorer, questions, ranks
from pipeline.models import inference

COUNT = 600
C = 5


@pytest.fixture(scope="module")
def given(tiny):
    """A corpus with candidates of its own; the right one is always last, as in ConvAI2's files."""
    rows = [
        {"context": [f"c{n}"], "response": f"r{n}", "label": C - 1,
         "candidates": [*(f"wrong{n}-{k}" for k in range(C - 1)), f"r{n}"]}
        for n in range(COUNT)
    ]  # fmt: skip
    return tiny.corpus(rows, split="valid", rows_per_file=250)


@pytest.fixture(scope="module")
def sampled(tiny):
    """A corpus without candidates; every second response is the same text."""
    rows = [{"context": [f"c{n}"], "response": f"r{n}" if n % 2 else "yes"} for n in range(COUNT)]
    return tiny.corpus(rows, split="valid", rows_per_file=250)


def ask(corpus, source, candidates=C, max_examples=COUNT, seed=0):
    return questions(corpus, "valid", source, candidates, max_examples, seed)


SOURCES = ["given", "sampled"]


@pytest.fixture(params=SOURCES)
def asked(request):
    """`ask` for both sources in turn."""
    corpus = request.getfixturevalue(request.param)
    return lambda **more: ask(corpus, request.param, **more)


class Constant:
    """Scores that are all the same."""

    def score(self, questions):
        return [np.zeros(len(question.candidates)) for question in questions]


class Always:
    """The candidate at one place, whatever is asked."""

    def __init__(self, place):
        self.place = place

    def score(self, questions):
        return [np.arange(len(q.candidates)) == self.place for q in questions]


class Knows:
    """The right answer to every question."""

    def score(self, questions):
        return [1.0 * (np.arange(len(q.candidates)) == q.label) for q in questions]


def test_every_question_has_its_own_right_answer_once(asked):
    found = asked()
    assert [question.context for question in found] == [[f"c{n}"] for n in range(COUNT)]
    assert [question.example_id for question in found] == [f"e{n}" for n in range(COUNT)]
    for question in found:
        number = int(question.context[0][1:])
        right = question.candidates[question.label]
        assert right in (f"r{number}", "yes")
        assert len(question.candidates) == len(set(question.candidates)) == C


def test_given_candidates_are_the_corpus_own(given):
    for number, question in enumerate(ask(given, "given")):
        own = {f"r{number}", *(f"wrong{number}-{k}" for k in range(C - 1))}
        assert set(question.candidates) == own


def test_sampled_candidates_are_other_responses_of_the_split(sampled):
    pool = {"yes", *(f"r{n}" for n in range(1, COUNT, 2))}
    drawn = Counter()
    for question in ask(sampled, "sampled"):
        assert set(question.candidates) <= pool
        drawn.update(question.candidates)
    # A frequent response is drawn as often as a rare one: the right answer 300 times, and by chance
    # in 4 of 300 of the other questions.
    assert 300 <= drawn["yes"] < 320
    assert max(count for text, count in drawn.items() if text != "yes") < 30


def test_all_responses_can_be_the_candidates(tiny):
    corpus = tiny.corpus([{"response": f"r{n % 6}"} for n in range(30)], split="valid")
    for question in ask(corpus, "sampled", candidates=6):
        assert sorted(question.candidates) == [f"r{n}" for n in range(6)]


def test_the_right_answers_place_is_spread_evenly(asked):
    places = Counter(question.label for question in asked())
    assert set(places) == set(range(C))
    # 120 expected; five standard deviations are 49.
    assert all(71 < count < 169 for count in places.values())


@pytest.mark.parametrize("place", range(C))
def test_who_always_answers_the_same_place_is_right_once_in_c(asked, place):
    assert recall_at(ranks(Always(place), asked()), 1) == pytest.approx(1 / C, abs=0.082)


def test_a_constant_scorer_earns_nothing(asked):
    assert set(ranks(Constant(), asked())) == {C}


def test_who_knows_the_answers_is_first_everywhere(asked):
    assert set(ranks(Knows(), asked())) == {1}


def test_questions_follow_from_the_seed(asked):
    assert asked(seed=1) == asked(seed=1)
    orders = [[question.candidates for question in asked(seed=seed)] for seed in (1, 2)]
    assert sum(left == right for left, right in zip(*orders, strict=True)) < COUNT / 20


def test_a_part_of_the_examples_is_drawn_from_everywhere_and_asks_the_same(asked):
    whole = {question.example_id: question for question in asked()}
    part = asked(max_examples=60)
    names = [question.example_id for question in part]
    assert len(set(names)) == 60
    numbers = [int(name[1:]) for name in names]
    assert min(numbers) < 100
    assert max(numbers) > 500
    assert all(question == whole[question.example_id] for question in part)
    assert {question.example_id for question in asked(max_examples=60, seed=9)} != set(names)


def refusal(corpus, source, **more):
    with pytest.raises(BadInput) as caught:
        ask(corpus, source, **more)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_corpus_without_candidates_of_its_own_is_refused(sampled):
    assert "allowed: a corpus that gives them, or --source sampled" in refusal(sampled, "given")


@pytest.mark.parametrize("candidates", [4, 6])
def test_another_number_of_candidates_than_asked_for_is_refused(given, candidates):
    message = refusal(given, "given", candidates=candidates)
    assert "example e0: 5 candidates; allowed" in message


@pytest.mark.parametrize("label", [-1, C])
def test_label_outside_of_the_candidates_is_refused(tiny, label):
    rows = [{"response": "r", "candidates": ["r", "a", "b", "c", "d"], "label": label}]
    corpus = tiny.corpus(rows, split="valid")
    assert f"label {label} is not allowed; allowed: 0 to 4" in refusal(corpus, "given")


def test_more_candidates_than_different_responses_are_refused(sampled):
    ask(sampled, "sampled", candidates=301, max_examples=2)
    assert "301 different responses" in refusal(sampled, "sampled", candidates=302)


def test_corpus_without_the_split_is_refused(tiny):
    corpus = tiny.corpus([{}], split="train")
    for source in SOURCES:
        assert "no examples in valid/" in refusal(corpus, source)


@pytest.mark.parametrize("architecture", ["bi", "poly", "cross"])
def test_a_rankers_scores_are_those_of_each_question_alone(tiny, monkeypatch, architecture):
    """Candidates that questions share are encoded once; each question gets its own scores."""
    monkeypatch.setattr(inference, "use_bf16", lambda device: False)
    scorer = RankerScorer(tiny.ranker(architecture=architecture), batch_tokens=50)
    asked = [
        Question("a", ["w1 w2"], ["w3", "w4 w5", "w6"], 0),
        Question("b", ["w7", "w8 w9 w10"], ["w6", "w11", "w3"], 2),
        Question("c", ["w12"], ["w13 w14 w15 w16", "w4 w5"], 1),
    ]
    together = scorer.score(asked)
    for question, scores in zip(asked, together, strict=True):
        (alone,) = scorer.score([question])
        assert scores.shape == (len(question.candidates),)
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, alone, rtol=0, atol=1e-5)
        # Another order of candidates: the same scores in that order.
        turned = Question(question.example_id, question.context, question.candidates[::-1], 0)
        np.testing.assert_allclose(scorer.score([turned])[0], alone[::-1], rtol=0, atol=1e-5)
    assert len({float(score) for scores in together for score in scores}) == 8


def test_each_candidate_text_is_encoded_once(tiny, monkeypatch):
    ranker = tiny.ranker(architecture="poly")
    rows = []
    encode = ranker.network.encode_candidates
    monkeypatch.setattr(
        ranker.network,
        "encode_candidates",
        lambda tokens: rows.append(len(tokens.ids_BT)) or encode(tokens),
    )
    RankerScorer(ranker).score([Question("a", ["w1"], ["w2", "w3"], 0)] * 50)
    assert sum(rows) == 2
