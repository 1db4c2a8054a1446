"""Measured services: on Ray Serve, the same work in a process of its own, a deployment that does no work, and
others' services."""

# No `from __future__ import annotations`: FastAPI would look for the question in the query string, and
# answer 422.
import itertools
import operator
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import ray
from fastapi import FastAPI
from pydantic import BaseModel
from ray import serve
from ray.serve.schema import LoggingConfig

from jobs import cluster
from jobs.benchmarks.serving.load import LoadResult
from pipeline.config import BadInput
from serve import app
from serve.engine import Engine

_CPUS = 8  # logical: some parts have several replicas, which are asked in turn
_START_S = 120.0
_LOGGING = LoggingConfig(log_level="ERROR", enable_access_log=False)


@contextmanager
def session() -> Iterator[int]:
    """Ray and Serve's proxy on a free port, which is yielded."""
    # Ray's workers give way to all other processes (nice 15): here those are the clients.
    os.environ.setdefault("RAY_worker_niceness", "0")
    with cluster.session(_CPUS):
        port = free_port()
        options = {"host": "127.0.0.1", "port": port, "request_timeout_s": 65}
        serve.start(http_options=options, logging_config=_LOGGING)
        try:
            yield port
        finally:
            serve.shutdown()


@contextmanager
def ranking(port: int, args: app.Args, **options: Any) -> Iterator[str]:
    """The URL of a service, as long as it is needed. One replica of one core, unless options say more."""
    options = {"ray_actor_options": {"num_cpus": 1}, "num_replicas": 1} | options
    with deployment(port, args.name, app.application(args, **options)) as url:
        yield url


@contextmanager
def deployment(port: int, name: str, application: serve.Application) -> Iterator[str]:
    serve.run(application, name=name, route_prefix=f"/{name}", logging_config=_LOGGING)
    try:
        yield f"http://127.0.0.1:{port}/{name}"
    finally:
        serve.delete(name)


@contextmanager
def in_process(args: app.Args, pool: str, top_k: int) -> Iterator[Any]:
    """An `InProcess` in a process with one thread, as the replica has."""
    environment = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    actor = ray.remote(InProcess).options(num_cpus=0, runtime_env=environment)
    handle = actor.remote(args, pool, top_k)
    try:
        yield handle
    finally:
        ray.kill(handle)


@contextmanager
def other(command_at: Callable[[int], Sequence[str]], cpus: int) -> Iterator[str]:
    """The URL of another service, once it answers GET /health. `command_at(port)` starts it."""
    port = free_port()
    env = {**os.environ, "OMP_NUM_THREADS": str(cpus), "TOKENIZERS_PARALLELISM": "true"}
    command = command_at(port)
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + _START_S
        while not cluster.answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > end:
                raise BadInput(f"{' '.join(command)}: it does not answer")
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def run_together(*loads: Callable[[], LoadResult]) -> list[LoadResult]:
    """Loads at once, each on a thread of its own."""
    with ThreadPoolExecutor(len(loads)) as pool:
        return list(pool.map(operator.call, loads))


class InProcess:
    """The same rankings without HTTP and without Serve, in a process with as many threads."""

    def __init__(self, args: app.Args, pool: str, top_k: int) -> None:
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
