"""What a service is compared with: the same work in a process, and a deployment that does no work."""

# No `from __future__ import annotations`: FastAPI would look for the question in the query string, and
# answer 422.
import itertools
import time
from collections.abc import Sequence

from fastapi import FastAPI
from pydantic import BaseModel
from ray import serve

from serve.app import Args
from serve.engine import Engine


class InProcess:
    """The same rankings without HTTP and without Serve, in a process with as many threads."""

    def __init__(self, args: Args, pool: str, top_k: int) -> None:
        """`pool`: the name of one of the pools of `args`."""
        self._engine = Engine(args.model, args.pools, args.precision)
        (self._pool,) = (served for served in self._engine.local_pools if served.name == pool)
        self._top_k = top_k

    def time_once(self, context: Sequence[str]) -> float:
        """Seconds of one ranking."""
        began = time.perf_counter()
        self._rank([context])
        return time.perf_counter() - began

    def batch_rate(self, contexts: Sequence[Sequence[str]], seconds: float) -> float:
        """Rankings a second, as many at once as one pass over the pool answers."""
        questions, count, began = itertools.cycle(contexts), 0, time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds:
            self._rank(list(itertools.islice(questions, 16)))
            count += 16
        return count / elapsed

    def _rank(self, contexts: Sequence[Sequence[str]]) -> None:
        engine = self._engine
        vectors = engine.contexts.run(list(engine.ranker.context_rows(contexts)))
        queries = [
            (engine.pool_query(vectors_MD, mask_M, self._top_k), None)
            for vectors_MD, mask_M in vectors
        ]
        self._pool.stage.run(queries)


_app = FastAPI()


class Question(BaseModel):
    """The service's own question."""

    context: list[str]
    pool: str
    top_k: int


@serve.deployment(ray_actor_options={"num_cpus": 1}, max_ongoing_requests=512)
@serve.ingress(_app)
class Noop:
    """Reads a question, and answers with one number of it."""

    @_app.post("/")
    async def answer(self, question: Question) -> dict[str, int]:
        return {"top_k": question.top_k}
