"""The baselines that a ranker has to beat: chance, and shared words by TF-IDF and BM25.

Words are hashed, so a word that is in no known text counts as rare, not as unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer

from pipeline import storage
from pipeline.arrays import Floats
from pipeline.artifact import Artifact
from pipeline.evaluation.questions import Questions
from pipeline.evaluation.ranking import Scores

Sparse = Any
"""scipy's csr_matrix, which has no types."""
_HASH = HashingVectorizer(
    n_features=2**20, alternate_sign=False, norm=None, token_pattern=r"(?u)\b\w+\b"
)


def known_texts(corpus: Artifact, limit: int = 200_000) -> list[str]:
    """The first responses of the train split, from which the weights are computed."""
    texts: list[str] = []
    for uri in corpus.files("train/", ".parquet"):
        with storage.open_input(uri) as stream:
            for batch in pq.ParquetFile(stream).iter_batches(columns=["response"]):
                if len(texts) >= limit:
                    return texts[:limit]
                texts += batch.column(0).to_pylist()
    return texts[:limit]


@dataclass(frozen=True)
class Chance:
    """Random scores. A call continues where the one before has ended."""

    seed: int = 0

    def prepare(self, questions: Questions) -> Scores:
        rng = np.random.default_rng(self.seed)
        return lambda asked: rng.random((len(asked), asked.candidates))


@dataclass(frozen=True)
class TfIdf:
    """Cosine of TF-IDF vectors: 1 + ln tf, times ln((1 + N) / (1 + df)) + 1 (sklearn's form)."""

    weights: TfidfTransformer

    @classmethod
    def fit(cls, texts: Iterable[str]) -> TfIdf:
        """Takes N and df from the texts."""
        return cls(TfidfTransformer(sublinear_tf=True).fit(_HASH.transform(texts)))

    def prepare(self, questions: Questions) -> Scores:
        return _word_scores(questions, self._vectors, self._vectors)

    def _vectors(self, texts: Iterable[str]) -> Sparse:
        return self.weights.transform(_HASH.transform(texts))


@dataclass(frozen=True)
class BM25:
    """Robertson's BM25, the sum over the different words that stand in the context and in the candidate, of

        idf · tf (k1 + 1) / (tf + k1 (1 - b + b · words / average words)),
        idf = ln(1 + (N - df + 0.5) / (df + 0.5))

    with k1 = 2.0 and b = 0.75 as PolyAI's baseline has them. A word counts once however often the
    context has it: a dialogue is no query, its "i" and "you" would decide (ConvAI2, R@1/20: 0.468, and
    0.331 with repetitions). The "1 +" (Lucene's form) keeps a word of most texts from counting against.
    """

    idf_V: Floats
    average_words: float
    k1: float = 2.0
    b: float = 0.75

    @classmethod
    def fit(cls, texts: Iterable[str]) -> BM25:
        """Takes N, df and the average length from the texts."""
        counts_NV = _HASH.transform(texts)
        text_count = counts_NV.shape[0]
        df_V = np.bincount(counts_NV.indices, minlength=counts_NV.shape[1])
        idf_V = np.log1p((text_count - df_V + 0.5) / (df_V + 0.5))
        return cls(idf_V, max(1.0, counts_NV.sum() / text_count))

    def prepare(self, questions: Questions) -> Scores:
        return _word_scores(questions, self._candidates, _binary_counts)

    def scorer(self, texts: Iterable[str]) -> Callable[[str], Floats]:
        """A function of a query: the scores of all texts."""
        weights_VT = self._candidates(texts).T.tocsr()

        def scores(query: str) -> Floats:
            scores_T: Floats = (_binary_counts([query]) @ weights_VT).toarray()[0]
            return scores_T

        return scores

    def _candidates(self, texts: Iterable[str]) -> Sparse:
        weights = _HASH.transform(texts)
        words_N = np.asarray(weights.sum(axis=1))[:, 0]
        saturation_N = self.k1 * (1 - self.b + self.b * words_N / self.average_words)
        counts = weights.data
        words_per_text = np.diff(weights.indptr)
        weights.data = (
            self.idf_V[weights.indices] * counts * (self.k1 + 1)
            / (counts + np.repeat(saturation_N, words_per_text))
        )  # fmt: skip
        return weights


def _word_scores(
    questions: Questions,
    vectorise_candidates: Callable[[Iterable[str]], Sparse],
    vectorise_contexts: Callable[[Iterable[str]], Sparse],
) -> Scores:
    """Products of the contexts' and the candidates' sparse vectors."""
    vectors_TV = vectorise_candidates(questions.texts)
    shared_VS = vectors_TV[: questions.shared].T.tocsr()

    def scores(asked: Questions) -> Floats:
        count, own_count = asked.places_NK.shape
        contexts_NV = vectorise_contexts("\n".join(turns) for turns in asked.contexts)
        repeated = contexts_NV[np.repeat(np.arange(count), own_count)]
        products = vectors_TV[asked.places_NK.ravel()].multiply(repeated).sum(axis=1)
        own_scores_NK = np.asarray(products).reshape(count, own_count)
        return np.hstack([own_scores_NK, (contexts_NV @ shared_VS).toarray()])

    return scores


def _binary_counts(texts: Iterable[str]) -> Sparse:
    counts = _HASH.transform(texts)
    counts.data[:] = 1
    return counts
