"""Rankers as scorers: each candidate encoded once, each question's scores its own."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline import progress
from pipeline.engine.actors import Actors
from pipeline.evaluation import ranking, results
from pipeline.evaluation.baselines import BM25, Chance, TfIdf
from pipeline.evaluation.metrics import pessimistic_ranks
from pipeline.evaluation.protocols import PROTOCOLS
from pipeline.evaluation.questions import Question, Questions
from pipeline.evaluation.ranking import (
    RankerScorer,
    join_rankings,
    latency,
    own_scores,
    rank,
    scorer,
)
from pipeline.evaluation.results import Measurement
from pipeline.ranking.ranker import Ranker

ASKED = [
    Question("a", ["w1 w2"], ["w3", "w4 w5", "w6"], 0),
    Question("b", ["w7", "w8 w9 w10"], ["w6", "w11", "w3"], 2),
    Question("c", ["w12"], ["w13 w14 w15 w16", "w4 w5", "w6"], 1),
]
SHARED = ["w20 w21", "w22", "w6", "w23 w24 w25", "w26"]
ARCHITECTURES = ["bi", "poly", "cross"]


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """float32, and small bounds, so that there are several blocks and parts of everything."""
    monkeypatch.setenv("POLYRANK_PROCESSOR", "avx2")
    monkeypatch.setattr(ranking, "_TEXTS_AT_ONCE", 2)
    monkeypatch.setattr(ranking, "_NUMBERS_AT_ONCE", 16)
    monkeypatch.setattr(ranking, "_PAIRS_AT_ONCE", 9)
    monkeypatch.setattr(ranking, "_QUESTIONS_AT_ONCE", 2)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("shared", [(), SHARED])
def test_a_rankers_scores_are_those_of_each_question_alone(tiny, architecture, shared):
    scorer = RankerScorer(tiny.ranker(architecture=architecture), batch_tokens=50)
    asked = Questions.of(ASKED, shared)
    together = scorer.prepare(asked)(asked)
    assert together.shape == (3, 3 + len(shared))
    assert together.dtype == np.float32
    for scores, question in zip(together, ASKED, strict=True):
        candidates = [*question.candidates, *shared]
        # Another order of candidates, all of them its own: the same scores in that order.
        turned = Questions.of([question._replace(candidates=candidates[::-1])])
        alone = scorer.prepare(turned)(turned)[0]
        np.testing.assert_allclose(scores[::-1], alone, rtol=0, atol=1e-5)
    twice = 3 * bool(shared)  # "w6" is in both
    assert len(np.unique(together.round(5))) == 3 * (3 + len(shared)) - twice


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_questions_may_have_different_numbers_of_candidates(tiny, architecture):
    """The right one's rank and loss are those among the question's own."""
    ranker = tiny.ranker(architecture=architecture)
    uneven = [ASKED[0], Question("d", ["w7"], ["w6", "w11"], 1), ASKED[2]]
    asked = Questions.of(uneven)
    found = rank(RankerScorer(ranker).prepare(asked), asked)
    each = own_scores(ranker, [q.context for q in uneven], [q.candidates for q in uneven])
    for number, (question, scores) in enumerate(zip(uneven, each, strict=True)):
        one = Questions.of([question])
        alone = RankerScorer(ranker).prepare(one)(one)[0].astype(np.float64)
        np.testing.assert_allclose(scores, alone, rtol=0, atol=1e-5)
        right = alone[question.label]
        assert found.ranks_N[number] == (alone >= right).sum()
        assert found.losses_N[number] == pytest.approx(
            np.log(np.exp(alone - right).sum()), abs=1e-5
        )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_questions_that_share_all_candidates_are_ranked_as_with_their_own(tiny, architecture):
    """The right one is one of the shared ones."""
    texts = [*SHARED, "w3", "w11"]
    asked = [Question("a", ["w1 w2"], texts, 3), Question("b", ["w7", "w8"], texts, 0)]
    shared = Questions.of([one._replace(candidates=[]) for one in asked], texts)
    scorer = RankerScorer(tiny.ranker(architecture=architecture))
    own = Questions.of(asked)
    expected, found = (rank(scorer.prepare(each), each) for each in (own, shared))
    assert found.ranks_N.tolist() == expected.ranks_N.tolist()
    assert found.top_NT.tolist() == expected.top_NT.tolist()
    np.testing.assert_allclose(found.losses_N, expected.losses_N, atol=1e-5)
    for baseline in (Chance(), TfIdf.fit(texts), BM25.fit(texts)):
        scores = [baseline.prepare(each)(each) for each in (own, shared)]
        np.testing.assert_allclose(scores[0], scores[1], atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_evaluated_is_what_python_and_the_service_compute(
    tiny, tmp_path, monkeypatch, architecture, precision
):
    """In bf16 these had bf16 weights, and an evaluation autocast of float32 ones: other scores."""
    monkeypatch.setattr(ranking, "_TEXTS_AT_ONCE", 8)  # one batch, as there
    tiny.ranker(architecture=architecture).save(tmp_path)
    model = SimpleNamespace(local=lambda: tmp_path)
    asked = Questions.of([ASKED[1]])
    evaluated = scorer(model, precision=precision).prepare(asked)(asked)[0]
    ranker = Ranker.load(tmp_path, precision=precision, device="cpu")
    served = ranker.rank(ASKED[1].context, ASKED[1].candidates)
    assert sorted(evaluated.tolist(), reverse=True) == [result.score for result in served.results]


@pytest.mark.parametrize("architecture", ["bi", "poly"])
def test_no_more_vectors_of_candidates_are_gathered_than_the_bound(tiny, monkeypatch, architecture):
    """10,001 sampled candidates of 256 contexts took 7.9 GB: only their logits were counted."""
    ranker = tiny.ranker(architecture=architecture)
    asked = Questions.of([*ASKED, *ASKED], SHARED)
    prepared = RankerScorer(ranker).prepare(asked)
    expected = prepared(asked)
    gathered, scores = [], ranker.dual.scores

    def recorded(vectors_BMD, mask_BM, candidates):
        if candidates.dim() == 3:
            gathered.append(candidates.numel())
        return scores(vectors_BMD, mask_BM, candidates)

    monkeypatch.setattr(ranker.dual, "scores", recorded)
    own = asked.places_NK.shape[1] * ranker.dual.dimensions  # numbers of one question
    monkeypatch.setattr(ranking, "_NUMBERS_AT_ONCE", 2 * own)
    np.testing.assert_allclose(prepared(asked), expected, rtol=0, atol=1e-5)
    assert gathered == [2 * own] * 3


@pytest.mark.parametrize("architecture", ["bi", "poly"])
def test_each_candidate_text_is_encoded_once(tiny, monkeypatch, architecture):
    ranker = tiny.ranker(architecture=architecture)
    rows = []
    encode = ranker.network.encode_candidates
    monkeypatch.setattr(
        ranker.network,
        "encode_candidates",
        lambda tokens: rows.append(len(tokens.ids_BT)) or encode(tokens),
    )
    asked = Questions.of([Question("a", ["w1"], ["w2", "w3"], 0)] * 50, ["w4", "w3", "w5"])
    ready = RankerScorer(ranker).prepare(asked)
    rank(ready, asked)
    rank(ready, asked)
    assert sum(rows) == 4


def test_a_machine_hears_how_far_an_evaluation_is_and_nothing_of_a_validation(
    tiny, monkeypatch, capsys
):
    """Evaluations showed bars whatever --progress said."""
    monkeypatch.setenv(progress.VARIABLE, "json")
    ranker, asked = tiny.ranker(architecture="bi"), Questions.of(ASKED)
    for label in ("", "bi"):
        rank(RankerScorer(ranker, label).prepare(asked), asked, label)
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    stages = [(event["stage"], event["done"], event["total"]) for event in events]
    texts = len(asked.texts)
    assert stages == [
        ("bi: candidates", 0, texts), ("bi: candidates", texts, texts), ("bi: rank", 0, 3), ("bi: rank", 3, 3)
    ]  # fmt: skip


def test_ranks_and_the_best_five_of_every_question(fixed):
    rng = np.random.default_rng(0)
    scores = rng.permuted(np.tile(np.arange(9.0), (11, 1)), axis=1)
    asked = Questions.of(
        [Question(str(n), [], [f"{n} {k}" for k in range(4)], n % 4) for n in range(11)],
        [f"s{k}" for k in range(5)],
    )
    ready = fixed({str(n): row.tolist() for n, row in enumerate(scores)})
    found = rank(ready, asked)
    assert found.ranks_N.tolist() == pessimistic_ranks(scores, asked.label_N).tolist()
    assert found.right_scores_N.tolist() == scores[np.arange(11), np.arange(11) % 4].tolist()
    assert found.top_NT.tolist() == np.argsort(-scores, axis=1)[:, :5].tolist()
    assert found.top_scores_NT.tolist() == [[8, 7, 6, 5, 4]] * 11


def test_a_wrong_candidate_with_the_right_ones_text_ties_however_it_is_rounded(fixed):
    asked = Questions.of(
        [Question("a", [], ["x", "y", "x"], 0), Question("b", [], ["u", "s1", "v"], 1)],
        ["s0", "s1"],
    )
    below, above = np.nextafter(2.0, [0.0, 3.0])
    ready = fixed({"a": [2.0, 1.0, below, 0.0, 0.0], "b": [1.0, 2.0, 1.5, 0.0, above]})
    found = rank(ready, asked)
    assert asked.unanswerable_count() == 2
    assert found.ranks_N.tolist() == [2, 2]
    ready = fixed({"a": [2.0, 3.0, above, 0.0, 0.0], "b": [1.0, 2.0, 2.5, 0.0, below]})
    assert rank(ready, asked).ranks_N.tolist() == [3, 3]


def test_fewer_than_five_candidates_and_scores_that_are_no_numbers(fixed):
    asked = Questions.of([Question("a", [], ["x", "y", "z"], 2)])
    found = rank(fixed({"a": [np.nan, 1.0, 2.0]}), asked)
    assert found.ranks_N.tolist() == [2]
    assert found.top_NT.tolist() == [[2, 1, 0]]


def test_rankings_of_parts_are_joined_in_order(fixed):
    asked = Questions.of([Question(str(n), [], ["x", "y"], n % 2) for n in range(7)])
    ready = fixed({str(n): [n, 3.5] for n in range(7)})
    parts = [rank(ready, asked.part(numbers)) for numbers in np.array_split(np.arange(7), 3)]
    for field, whole in vars(rank(ready, asked)).items():
        assert getattr(join_rankings(parts), field).tolist() == whole.tolist()


class Clock:
    """Says that every question takes as many seconds as its number, and counts them."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.asked = 0.0, list[int]()
        monkeypatch.setattr(ranking.time, "perf_counter", lambda: self.now)

    def __call__(self, asked):
        assert len(asked) == 1  # batch size 1
        self.asked.append(int(asked.ids[0]))
        self.now += self.asked[-1] / 100
        return np.zeros((1, 2))


def test_latency_is_that_of_single_questions_from_all_over_after_a_warm_up(monkeypatch):
    clock = Clock(monkeypatch)
    asked = Questions.of([Question(str(n), [], ["x", "y"], 0) for n in range(101)])
    found = latency(clock, asked, 16)
    assert clock.asked == [*range(0, 101, 5)]  # five to warm up, then 16
    measured = 10.0 * np.array(clock.asked[5:])
    assert found.queries == 16
    assert found.median == pytest.approx(np.median(measured))
    assert found.p95 == pytest.approx(np.quantile(measured, 0.95))


def test_latency_stops_after_20_seconds(monkeypatch):
    clock = Clock(monkeypatch)
    asked = Questions.of([Question("900", [], ["x", "y"], 0)] * 100)
    assert latency(clock, asked, 50).queries == 3  # of 9 seconds each
    assert len(clock.asked) == 4  # the warm-up ends after 5 seconds


# On a cluster


@pytest.fixture
def measurement():
    asked = Questions.of(
        [Question(f"q{n}", [f"w{n % 7}"], [f"w{n % 30}", "w40", "w41"], 0) for n in range(9)],
        ["w50", "w51"],
    )
    return Measurement(asked, PROTOCOLS["convai2"], queries=2, seed=0)


@pytest.mark.long  # 39 s on two slow cores
def test_shares_on_a_cluster_give_the_same_ranking(
    local_ray, tiny_ranker, measurement, monkeypatch
):
    """More shares than there are questions; one at a time, by a process that imports torch once."""
    for name in ("_TEXTS_AT_ONCE", "_NUMBERS_AT_ONCE", "_QUESTIONS_AT_ONCE"):
        monkeypatch.setattr(ranking, name, 1000)

    make = functools.partial(ranking.scorer, tiny_ranker("poly"))
    here = measurement.of("poly", make)
    there = measurement.of("poly", make, actors=Actors(actors=20, cpus_per_actor=2))
    # bf16 hardware rounds a text as its batch is padded.
    np.testing.assert_allclose(there.ranking.right_scores_N, here.ranking.right_scores_N, atol=0.2)
    agree = (there.ranking.ranks_N == here.ranking.ranks_N).mean()
    assert agree > 0.7
    assert there.latency.queries == 2
    assert list(there.metrics) == list(here.metrics) == list(there.intervals)


def test_numbers_of_a_result_are_its_metrics_intervals_and_times(measurement):
    timed = measurement.of("chance", Chance).numbers()
    assert list(timed)[:2] == ["R_at_1/20", "R_at_2/20"]
    assert {"R_at_1/20.low", "R_at_1/20.high", "MRR.low", "ms.median", "ms.p95"} <= set(timed)
    untimed = measurement.of("chance", Chance, timed=False)
    assert untimed.latency is None
    assert set(timed) - set(untimed.numbers()) == {"ms.median", "ms.p95"}


def test_every_two_results_are_compared(measurement):
    found = [measurement.of(f"chance {seed}", lambda s=seed: Chance(s)) for seed in range(3)]
    pairs = [(pair.first, pair.second) for pair in results.compare_all(found, 0)]
    names = [result.name for result in found]
    assert pairs == [(names[0], names[1]), (names[0], names[2]), (names[1], names[2])]
