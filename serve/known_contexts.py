"""The known contexts of a pool's candidates, such as the questions of a FAQ's answers: which one is nearest.

A pool stores their texts, not their vectors. A replica encodes them in a thread after its rehearsal: its
first answers do not wait for them, and the rehearsal measures requests that have the cores for themselves.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from pipeline.models import inference
from pipeline.models.ranker import Ranker
from pipeline.pools.pool import Pool, known_contexts

MOST = 5_000
"""A pool with more rows or known contexts names none: they would take the cores of requests for minutes."""
_AT_ONCE = 64


class KnownContexts:
    """Which known context of a candidate is nearest to a question, by the cosine of their vectors."""

    def __init__(
        self, ranker: Ranker, contexts_of_place: Sequence[Sequence[Sequence[str]]]
    ) -> None:
        """`contexts_of_place`: of each row of the pool its known contexts, as turns. The ranker makes one
        vector of a context."""
        self._contexts = list(itertools.chain.from_iterable(contexts_of_place))
        self._ends = list(itertools.accumulate(map(len, contexts_of_place)))
        self._vectors_KD: Tensor | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._encode, args=[ranker], daemon=True)

    @classmethod
    def of(cls, pool: Pool, ranker: Ranker) -> KnownContexts | None:
        """None: the pool's candidates have none, or there are too many."""
        if len(pool) > MOST or ranker.config.vectors_per_context != 1:
            return None
        contexts_of_place = [contexts for rows in pool.rows for contexts in known_contexts(rows)]
        if not 0 < sum(map(len, contexts_of_place)) <= MOST:
            return None
        return cls(ranker, contexts_of_place)

    def start(self) -> None:
        """Begins to encode them."""
        self._thread.start()

    def nearest(self, vector_D: Tensor, places: Sequence[int]) -> list[list[str] | None]:
        """The nearest known context of the candidate at each place; None: it has none, or they are not all
        encoded yet. `vector_D`: the question's."""
        if self._vectors_KD is None:
            return [None] * len(places)
        cosines_K = self._vectors_KD @ vector_D
        nearest: list[list[str] | None] = []
        for place in places:
            start, end = self._ends[place - 1] if place else 0, self._ends[place]
            best = start + int(torch.argmax(cosines_K[start:end])) if end > start else None
            nearest.append(None if best is None else list(self._contexts[best]))
        return nearest

    def close(self) -> None:
        """Encodes no more of them."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _encode(self, ranker: Ranker) -> None:
        parts = list[Tensor]()
        for start in range(0, len(self._contexts), _AT_ONCE):
            if self._closed.is_set():
                return
            part = self._contexts[start : start + _AT_ONCE]
            vectors_K1D, _ = inference.context_vectors(ranker, part)
            parts.append(normalize(vectors_K1D[:, 0]))
        self._vectors_KD = torch.cat(parts)
