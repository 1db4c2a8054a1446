"""Measured services: on Ray Serve, the same work in a process of its own, and others' services."""

from __future__ import annotations

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
from ray import serve
from ray.serve.schema import LoggingConfig

from jobs import cluster
from jobs.benchmarks.serving.load import LoadResult
from pipeline.config import BadInput
from serve import app

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
def in_process(actor: type[Any], *arguments: Any) -> Iterator[Any]:
    """The same work in a process with one thread, as the replica has."""
    environment = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    handle = ray.remote(actor).options(num_cpus=0, runtime_env=environment).remote(*arguments)
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


def run_together(
    load: Callable[[], LoadResult], other_load: Callable[[], LoadResult]
) -> tuple[LoadResult, LoadResult]:
    """Two loads at once, each on a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(other_load)
        result = load()
        return result, other.result()
