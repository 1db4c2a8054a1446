"""What a ranker has to beat: word overlap and chance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer

from pipeline.arrays import Floats
from pipeline.evaluation.ranking import Question

_WORD = r"(?u)\b\w+\b"


@dataclass(frozen=True)
class TfIdf:
    """Cosine of TF-IDF vectors, weights from the texts given to `fit`."""

    vectorizer: TfidfVectorizer

    @classmethod
    def fit(cls, texts: Iterable[str]) -> TfIdf:
        return cls(TfidfVectorizer(token_pattern=_WORD, sublinear_tf=True).fit(texts))

    def score(self, questions: Sequence[Question]) -> list[Floats]:
        contexts = self.vectorizer.transform("\n".join(q.context) for q in questions)
        found = []
        for number, question in enumerate(questions):
            candidates = self.vectorizer.transform(question.candidates)
            found.append((candidates @ contexts[number].T).toarray()[:, 0])
        return found


@dataclass(frozen=True)
class Chance:
    """Random scores."""

    seed: int = 0

    def score(self, questions: Sequence[Question]) -> list[Floats]:
        rng = np.random.default_rng(self.seed)
        return [rng.random(len(question.candidates)) for question in questions]
