"""Scorers answer questions: ranks, the best candidates, milliseconds, and an estimate of the whole time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipeline import cost, progress
from pipeline.arrays import Floats, Ints
from pipeline.artifact import Artifact
from pipeline.engine.resources import best_device
from pipeline.evaluation.metrics import cross_entropies, pessimistic_ranks
from pipeline.evaluation.questions import NO_TEXT, Question, Questions
from pipeline.models import inference
from pipeline.models.precision import Precision
from pipeline.models.ranker import Ranker, load_ranker

TOP = 5
_QUESTIONS_AT_ONCE = 256
_SCORES_AT_ONCE = 1 << 25  # of which ranking holds some six arrays: 1 GB
_TEXTS_AT_ONCE = 8192
_PAIRS_AT_ONCE = 4096
# float32: logits, of which scoring holds some four arrays, or vectors of candidates; 256 MB, or 64 MB.
_NUMBERS_AT_ONCE = 1 << 24
_WARM_UP = 5
_WARM_UP_S = 5.0
_LATENCY_S = 20.0
# Of a dry run.
_MEASURED_S = 2.0
_MOST_CANDIDATES = 64  # of a question that is asked here: among 10,001, one would take minutes


Scores = Callable[[Questions], Floats]
"""The scores [N, C] of the candidates of some questions, higher is better; a question's own candidates
first, then the shared ones. The score at a place without a candidate (`NO_TEXT`) has no meaning."""


class Scorer(Protocol):
    """Anything that scores candidates."""

    def prepare(self, questions: Questions) -> Scores:
        """Reads the texts of all questions, and does all work that needs no context. The result scores all
        or some of them."""


@dataclass(frozen=True)
class QuestionRanks:
    """A scorer's results on N questions."""

    ranks_N: Ints
    """The right candidates' ranks, pessimistic."""
    right_scores_N: Floats
    """The right candidates' scores."""
    losses_N: Floats
    """The right candidates' cross-entropies, in nats."""
    top_NT: Ints
    """The best five candidates, best first: columns of `Scores`."""
    top_scores_NT: Floats


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one question alone, from its texts to the scores of its candidates."""

    median: float
    p95: float
    queries: int
    device: str


def rank(scores: Scores, questions: Questions, label: str = "") -> QuestionRanks:
    """Ranks every question's candidates, those of at most 256 questions at once."""
    # Contexts of similar lengths waste little on padding.
    lengths = [sum(map(len, context)) for context in questions.contexts]
    order = np.argsort(lengths, kind="stable")[::-1]
    parts = []
    step = min(_QUESTIONS_AT_ONCE, max(1, _SCORES_AT_ONCE // max(1, questions.candidates)))
    with progress.bar(label and f"{label}: rank", len(questions), unit="question") as bar:
        for start in range(0, len(questions), step):
            batch = questions.rows(order[start : start + step])
            scores_NC = scores(batch)
            own_scores_NK = scores_NC[:, : batch.places_NK.shape[1]]
            own_scores_NK[batch.places_NK == NO_TEXT] = -np.inf
            _tie_copies(scores_NC, batch)
            parts.append(_ranking(scores_NC, batch.label_N))
            bar.update(len(batch))
    inverse = np.argsort(order)
    return QuestionRanks(*(field[inverse] for field in vars(join_rankings(parts)).values()))


def _tie_copies(scores_NC: Floats, questions: Questions) -> None:
    """Gives every copy of the right text its score. A batch of another shape may have rounded it
    differently."""
    own_scores_NK = scores_NC[:, : questions.places_NK.shape[1]]
    right_places_N = questions.right_places()
    right_scores_N1 = np.take_along_axis(scores_NC, questions.label_N[:, None], axis=1)
    own_scores_NK[:] = np.where(
        questions.places_NK == right_places_N[:, None], right_scores_N1, own_scores_NK
    )
    (rows,) = np.nonzero(right_places_N < questions.shared)
    scores_NC[rows, own_scores_NK.shape[1] + right_places_N[rows]] = right_scores_N1[rows, 0]


def join_rankings(parts: Sequence[QuestionRanks]) -> QuestionRanks:
    """The rankings of consecutive questions as one."""
    fields = zip(*(vars(part).values() for part in parts), strict=True)
    return QuestionRanks(*(np.concatenate(field) for field in fields))


def latency(scores: Scores, questions: Questions, queries: int) -> Latency:
    """Measures `queries` questions, spread over all of them, one at a time, after 5 to warm up.

    It stops after 20 seconds with the questions measured by then; the warm-up stops after 5 seconds.
    """
    numbers = np.linspace(0, len(questions) - 1, num=_WARM_UP + queries).astype(np.int64)
    _seconds(scores, questions, numbers[:_WARM_UP], _WARM_UP_S)
    seconds = _seconds(scores, questions, numbers[_WARM_UP:], _LATENCY_S)
    median, p95 = (1000 * np.quantile(seconds, [0.5, 0.95])).tolist()
    return Latency(median, p95, len(seconds), device_name())


def _seconds(scores: Scores, questions: Questions, numbers: Ints, limit_s: float) -> list[float]:
    """Seconds of each question; stops when their sum exceeds `limit_s`."""
    seconds: list[float] = []
    for number in numbers:
        question = questions.rows(np.array([number]))
        began = time.perf_counter()
        scores(question)
        seconds.append(time.perf_counter() - began)
        if sum(seconds) > limit_s:
            break
    return seconds


def device_name() -> str:
    """The device on which the models of this process run."""
    if best_device().type == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


def _ranking(scores_NC: Floats, label_N: Ints) -> QuestionRanks:
    top = min(TOP, scores_NC.shape[1])
    best_NT = np.argpartition(-scores_NC, top - 1, axis=1)[:, :top]
    order_NT = np.argsort(-np.take_along_axis(scores_NC, best_NT, axis=1), axis=1, kind="stable")
    best_NT = np.take_along_axis(best_NT, order_NT, axis=1)
    return QuestionRanks(
        pessimistic_ranks(scores_NC, label_N),
        np.take_along_axis(scores_NC, label_N[:, None], axis=1)[:, 0],
        cross_entropies(scores_NC, label_N),
        best_NT,
        np.take_along_axis(scores_NC, best_NT, axis=1),
    )


@dataclass(frozen=True)
class RankerScorer:
    """A trained ranker. Bi and poly: each candidate text is encoded once for all questions."""

    ranker: Ranker
    label: str = ""
    """Shown beside the progress; none is shown without."""
    batch_tokens: int = inference.BATCH_TOKENS
    as_in_loss: bool = False
    """Whether scores are those that the softmax of the loss takes (`Ranker.loss_scale`)."""
    known_contexts: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    """By the candidate's text; see `inference.toward_contexts`."""

    @property
    def has_vectors(self) -> bool:
        """Whether the model reads each text once; others read each pair of a context and a candidate."""
        return self.ranker.config.has_vectors

    def reads(self, questions: Questions) -> int:
        """The number of texts or pairs that it reads."""
        if self.has_vectors:
            return len(questions.texts) + len(questions)
        return int((questions.places_NK != NO_TEXT).sum()) + len(questions) * questions.shared

    def prepare(self, questions: Questions) -> Scores:
        scale = np.float32(self.ranker.loss_scale if self.as_in_loss else 1.0)
        if not self.has_vectors:  # nothing can be done in advance
            return lambda asked: scale * self._pair_scores(asked)
        parts = []
        name, count = self.label and f"{self.label}: candidates", len(questions.texts)
        with progress.bar(name, count, unit="text") as bar:
            for start in range(0, count, _TEXTS_AT_ONCE):
                texts = questions.texts[start : start + _TEXTS_AT_ONCE]
                vectors_ND = inference.candidate_vectors(self.ranker, texts, self.batch_tokens)
                known = [self.known_contexts.get(text, ()) for text in texts]
                parts.append(
                    inference.toward_contexts(self.ranker, vectors_ND, known, self.batch_tokens)
                )
                bar.update(len(texts))
        vectors_TD = torch.cat(parts).to(self.ranker.device)
        return lambda asked: scale * self._vector_scores(asked, vectors_TD)

    def _vector_scores(self, questions: Questions, vectors_TD: Tensor) -> Floats:
        device, shared, own = self.ranker.device, questions.shared, questions.places_NK.shape[1]
        vectors_NMD, mask_NM = inference.context_vectors(
            self.ranker, questions.contexts, self.batch_tokens
        )
        m, d = vectors_NMD.shape[1:]
        numbers = max(m * max(own, min(shared, _TEXTS_AT_ONCE)), own * d)
        step = max(1, _NUMBERS_AT_ONCE // numbers)
        scores_NC = np.empty((len(questions), own + shared), np.float32)
        with torch.inference_mode():
            for start in range(0, len(questions), step):
                rows = slice(start, start + step)
                context = vectors_NMD[rows].to(device), mask_NM[rows].to(device)
                blocks = [(own + first, vectors_TD[first : min(shared, first + _TEXTS_AT_ONCE)])
                          for first in range(0, shared, _TEXTS_AT_ONCE)]  # fmt: skip
                if own:
                    places = torch.from_numpy(questions.places_NK[rows]).to(device)
                    blocks.append((0, vectors_TD[places]))
                for column, candidates in blocks:
                    scores = self.ranker.dual.scores(*context, candidates).cpu().numpy()
                    scores_NC[rows, column : column + scores.shape[1]] = scores
        return scores_NC

    def _pair_scores(self, questions: Questions) -> Floats:
        row_scores = []
        step = max(1, _PAIRS_AT_ONCE // questions.candidates)
        for start in range(0, len(questions), step):
            numbers = range(start, min(start + step, len(questions)))
            texts = [[questions.texts[place] for place in questions.places(n)] for n in numbers]
            contexts = questions.contexts[start : start + step]
            rows = inference.pair_scores(self.ranker, contexts, texts, self.batch_tokens)
            row_scores += [row.numpy() for row in rows]
        shared_NS = np.ones((len(questions), questions.shared), bool)
        scores_NC = np.full((len(questions), questions.candidates), -np.inf, np.float32)
        scores_NC[np.hstack([questions.places_NK != NO_TEXT, shared_NS])] = np.concatenate(
            row_scores
        )
        return scores_NC


def scorer(
    model: Ranker | Artifact,
    label: str = "",
    precision: Precision = "auto",
    known_contexts: Mapping[str, Sequence[Sequence[str]]] = MappingProxyType({}),
) -> RankerScorer:
    """A ranker's scorer, on the GPU that this process may use, else on the CPU. It computes as the Python
    API, pools and the service do. A ranker that is loaded already has that precision from now on."""
    ranker = model if isinstance(model, Ranker) else load_ranker(model.local())
    prepared = inference.prepare(ranker, best_device(), precision)
    return RankerScorer(prepared, label, known_contexts=known_contexts)


@dataclass(frozen=True)
class MeanScorer:
    """The scorers of several rankers as one, all in this process: the mean of their scores, as
    jobs.score_candidates makes it. Scores are scaled as in each ranker's loss, because a ConveRT model's
    cosines would count for nothing beside a cross-encoder's logits."""

    makers: Sequence[Callable[[], RankerScorer]]

    def prepare(self, questions: Questions) -> Scores:
        scorers = [replace(make(), as_in_loss=True).prepare(questions) for make in self.makers]

        def mean_scores(asked: Questions) -> Floats:
            mean_NC: Floats = np.mean([scores(asked) for scores in scorers], axis=0)
            return mean_NC

        return mean_scores


def own_scores(
    ranker: Ranker,
    contexts: Sequence[Sequence[str]],
    candidates: Sequence[Sequence[str]],
    batch_tokens: int = inference.BATCH_TOKENS,
    as_in_loss: bool = False,
) -> list[Floats]:
    """For each context the scores of its own candidates, [C] each; any number of them, one at least.
    `as_in_loss`: see `RankerScorer`."""
    pairs = zip(contexts, candidates, strict=True)
    questions = Questions.of(
        Question("", list(context), list(texts), 0) for context, texts in pairs
    )
    scorer = RankerScorer(ranker, batch_tokens=batch_tokens, as_in_loss=as_in_loss)
    scores = scorer.prepare(questions)
    context_scores = []
    for start in range(0, len(questions), _QUESTIONS_AT_ONCE):
        batch = questions.rows(np.arange(start, min(len(questions), start + _QUESTIONS_AT_ONCE)))
        rows = zip(scores(batch), batch.places_NK != NO_TEXT, strict=True)
        context_scores += [scores_K[is_candidate_K] for scores_K, is_candidate_K in rows]
    return context_scores


def estimate(questions: Questions, scorers: Mapping[str, RankerScorer]) -> cost.Estimate:
    """Asks each model some of the questions, in this process. Baselines count as free."""
    rates = {name: _rate(scorer, questions) for name, scorer in scorers.items()}
    hours = sum(scorer.reads(questions) / rates[name] for name, scorer in scorers.items()) / 3600
    measured = ", ".join(
        f"{name} {rate:,.0f} {'texts' if scorers[name].has_vectors else 'pairs'} a second"
        for name, rate in rates.items()
    )
    return cost.measured_here(hours, measured, rows=len(questions))


def _rate(scorer: RankerScorer, questions: Questions) -> float:
    """Texts or pairs that the model reads in a second."""
    count = 2
    while True:
        sample = _sample_questions(questions, count)
        began = time.perf_counter()
        rank(scorer.prepare(sample), sample)
        seconds = time.perf_counter() - began
        # The first warms up.
        if count > 2 and (seconds >= _MEASURED_S or len(sample) == len(questions)):
            return scorer.reads(sample) / seconds
        count *= 4


def _sample_questions(questions: Questions, count: int) -> Questions:
    """The first questions, each with a few of its candidates."""
    return Questions.of(
        Question(
            questions.ids[number],
            questions.contexts[number],
            [questions.texts[place] for place in questions.places(number)[:_MOST_CANDIDATES]],
            0,
        )
        for number in range(min(count, len(questions)))
    )
