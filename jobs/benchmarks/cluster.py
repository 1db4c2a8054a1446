"""Jobs on several nodes, with work that waits, and the whole path over an object store that answers late.

The nodes are raylets on this machine, which has too few cores to show that computing scales. So the parser of
a block of comments, the tasks of cleaning and the model of an actor wait beside what they do. The jobs are
the real ones: what keeps a node idle is their order of tasks, Ray's scheduling, and the files. The store is
moto's S3 server, a process on this machine.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from jobs import cluster
from jobs.benchmark import Config
from jobs.benchmarks.measure import BenchmarkRow, run_job, take_turns
from jobs.demo_stages import SECONDS, run_here
from pipeline import storage
from pipeline.config import BadInput
from pipeline.engine.draft import Draft

_NODES = 4
_PARSERS_A_NODE = 2
_BLOCKS = {"small": 32, "full": 96}  # a dump file each
# Long enough that the start of Ray's processes, which all nodes do on this machine's cores, counts little.
_BLOCK_S = {"small": 5.0, "full": 10.0}
_SHARDS = {"small": 16, "full": 48}
_SHARD_S = {"small": 5.0, "full": 20.0}
_ROWS_A_SHARD = 20
_TABLES = {"small": 5, "full": 16}  # a shard of train, of valid and of test each
_PAIRS_A_TABLE = 200
_CLEANING_S = {"small": 1.0, "full": 2.0}  # of each task; six stages read each shard
# Bytes of a node's object store. With 256 MiB Ray Data held one of two parsers back.
_STORE = 1 << 30
_COMMENTS = {"small": 32_000, "full": 96_000}
_COMMENTS_OF_PATH = {"small": 60_000, "full": 200_000}
_ROUNDS = {"small": 1, "full": 2}
_DELAY_S = 0.02  # of each request to the store
_RECIPE = Path(__file__).parents[1] / "configs" / "finetune" / "convert_small.yaml"
_BUCKET = "s3://lake"


def measure(config: Config, work: Path) -> Iterator[BenchmarkRow]:
    """The row of the object store comes first, which its missing packages refuse. That of embedding needs a
    model."""
    yield measure_store(config, work)
    size, dumps = config.size, work / "dumps"
    shutil.rmtree(dumps, ignore_errors=True)
    run_job(
        "generate_dump", "--comments", _COMMENTS[size], "--files", _BLOCKS[size], "--output", dumps
    )

    def prepare(output: str) -> None:
        corpus = f"{output}/corpus"
        run_here("prepare_corpus", "--format", "reddit", "--input", dumps, "--output", corpus)

    hook = wait_before("pipeline.corpora.reddit.partition", "_parse_block", _BLOCK_S[size])
    waits = _waits(_BLOCKS[size] * _BLOCK_S[size] / _PARSERS_A_NODE)
    yield _speedup("reddit", prepare, hook, _PARSERS_A_NODE, waits, work)

    pairs, corpus = work / "pairs", work / "corpus"
    for folder in (pairs, corpus):
        shutil.rmtree(folder, ignore_errors=True)
    _write_tables(pairs, _TABLES[size])
    run_job("prepare_corpus", "--format", "pairs", "--input", pairs, "--output", corpus)

    def clean(output: str) -> None:
        run_here("clean_corpus", "--corpus", corpus, "--output", output)

    hook = wait_before("pipeline.engine.attempts", "run_task", _CLEANING_S[size])
    waits = f"each task waits {_CLEANING_S[size]:g} s"
    yield _speedup("clean", clean, hook, 1, waits, work)
    if not config.model:
        return
    candidates = work / "candidates.csv"
    texts = (f"candidate {number}" for number in range(_SHARDS[size] * _ROWS_A_SHARD))
    candidates.write_text("\n".join(["text", *texts]))

    def embed(output: str) -> None:
        run_here("embed_pool", "--model", config.model, "--candidates", candidates, "--embed.id-column", "",
                 "--embed.rows-per-shard", _ROWS_A_SHARD, "--resources.cpus-per-actor", 1,
                 "--pools", output, "--name", "candidates")  # fmt: skip

    hook = wait_in_model(_SHARD_S[size])
    yield _speedup("embed", embed, hook, 1, _waits(_SHARDS[size] * _SHARD_S[size]), work)


def _write_tables(folder: Path, count: int) -> None:
    """Tables of pairs, of words drawn at random."""
    folder.mkdir()
    draw = random.Random(17)
    for number in range(count):
        lines = ["context,response"]
        for _ in range(_PAIRS_A_TABLE):
            sides = (" ".join(f"w{draw.randrange(10_000)}" for _ in range(12)) for _ in range(2))
            lines.append(",".join(sides))
        (folder / f"{number:02d}.csv").write_text("\n".join(lines))


def _waits(seconds: float) -> str:
    """`seconds`: of one node."""
    return f"of which {seconds:.0f} s and {seconds / _NODES:.0f} s are waits"


def _speedup(
    name: str, job: Callable[[str], None], hook: Callable[[], None], cores: int, waits: str, work: Path
) -> BenchmarkRow:  # fmt: skip
    """`hook`: runs in each of Ray's processes first. `cores`: of a node. `waits`: for the note."""
    seconds = dict[int, float]()
    for nodes in (1, _NODES):
        output = work / f"{name}-{nodes}"
        shutil.rmtree(output, ignore_errors=True)
        with _nodes(nodes, cores, hook):
            began = time.perf_counter()
            job(str(output))
            seconds[nodes] = time.perf_counter() - began
    one, four = seconds.values()
    nodes_are = f"Nodes of this machine, with {cores} logical cores each."
    note = f"{one:.0f} s on one node and {four:.0f} s on four, {waits}. {nodes_are}"
    row, unit = f"cluster.{name}.speedup_{_NODES}_nodes", "times as fast on 4 nodes"
    return BenchmarkRow.alone(row, one / four, unit, note)


@contextmanager
def _nodes(count: int, cores: int, hook: Callable[[], None]) -> Iterator[None]:
    """A Ray of a head without cores and `count` nodes."""
    import ray
    from ray.cluster_utils import Cluster

    options = {"include_dashboard": False, "object_store_memory": _STORE}
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **options})
    try:
        for _ in range(count):
            nodes.add_node(num_cpus=cores, **options)
        ray.init(nodes.address, runtime_env={"worker_process_setup_hook": hook},
                 logging_level="ERROR", log_to_driver=False)  # fmt: skip
        cluster.silence_ray()
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()


def wait_before(module: str, function: str, seconds: float) -> Callable[[], None]:
    """What lets a function of a module wait. A function, because Ray takes no `functools.partial`."""

    def hook() -> None:
        place = import_module(module)
        do = getattr(place, function)

        def do_late(*arguments: Any) -> Any:
            time.sleep(seconds)
            return do(*arguments)

        setattr(place, function, do_late)

    return hook


def wait_in_model(seconds: float) -> Callable[[], None]:
    """What lets the model of each actor wait for each shard."""

    def hook() -> None:
        from pipeline.pools.embedder import Embedder

        embed_shard = Embedder.__call__

        def embed_late(self: Embedder, draft: Draft, name: str, slices: Any) -> Any:
            self._model_is_free.begin()
            with self._model_is_free:
                time.sleep(seconds)
            return embed_shard(self, draft, name, slices)

        Embedder.__call__ = embed_late  # type: ignore[method-assign]

    return hook


def measure_store(config: Config, work: Path) -> BenchmarkRow:
    """The whole path over the store and over local files, in turn. Equal fingerprints show that the outputs
    are the same on both."""
    if not (find_spec("moto") and find_spec("boto3")):
        raise BadInput("the packages moto and boto3 are not installed: pip install -e '.[bench]'")
    comments, rounds, fingerprints = _COMMENTS_OF_PATH[config.size], itertools.count(), set[str]()

    def seconds(base: str) -> float:
        SECONDS.clear()
        fingerprints.add(_path(f"{base}/dump", f"{base}/path-{os.getpid()}-{next(rounds)}"))
        return sum(SECONDS.values())

    with _store(), cluster.session():
        run_here("generate_dump", "--comments", comments, "--files", 4, "--output", work / "dump")
        storage.upload(work / "dump", f"{_BUCKET}/dump")
        ways = {"local": lambda: seconds(str(work)), "store": lambda: seconds(_BUCKET)}
        local, store = map(median, take_turns(ways, _ROUNDS[config.size]).values())
    if len(fingerprints) != 1:
        raise BadInput("object store: the artifacts over it are not those of local files")
    times = f"{store:.0f} s over {local:.0f} s, mostly the start of jobs"
    note = f"{comments:,} comments: {times}. {1e3 * _DELAY_S:.0f} ms of delay."
    name, unit = "cluster.s3.time_over_local", "of the time over local files"
    return BenchmarkRow.alone(name, store / local, unit, note)


def _path(dump: str, out: str) -> str:
    """Dump → corpus → subwords → ranker → evaluation and pool; returns the first two's fingerprints."""
    dump, out = shlex.quote(dump), shlex.quote(out)
    commands = f"""
        prepare_corpus --format reddit --input {dump} --output {out}/corpus
        train_tokenizer --corpus {out}/corpus --tokenizer.kind subwords --tokenizer.vocabulary 2000 \
            --output {out}/subwords
        finetune --config {_RECIPE} --corpus {out}/corpus --encoder {out}/subwords --output {out}/ranker \
            --finetune.batch-examples 64 --finetune.max-steps 50 --loop.warmup-steps 5 \
            --loop.validate-every-epochs 0 --loop.checkpoint-every-steps 25
        evaluate --model {out}/ranker --corpus {out}/corpus --protocol polyai --split train --max-examples 500
        embed_pool --model {out}/ranker --candidates {out}/corpus/train --embed.text-column response \
            --embed.id-column example_id --pools {out}/pools --name replies"""
    lines = map(shlex.split, commands.splitlines()[1:])
    summaries = [run_here(*words) for words in lines]
    return " ".join(summary["fingerprint"] for summary in summaries[:2])


@contextmanager
def _store() -> Iterator[None]:
    """A server with a bucket, for all clients of this process and of its child processes."""
    import boto3

    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    server = spawn.Process(target=serve_store, args=(there,), daemon=True)
    server.start()
    os.environ |= {
        "AWS_ENDPOINT_URL": here.recv(), "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        "POLYRANK_AUTHOR_SALT": "made-up authors",
    }  # fmt: skip
    try:
        boto3.client("s3").create_bucket(Bucket=_BUCKET.removeprefix("s3://"))
        yield
    finally:
        server.kill()
        server.join()


def serve_store(parent: Connection) -> None:
    """Tells its address, and serves until it is killed."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application = DomainDispatcherApplication(create_backend_app)

    def delayed(environ: dict[str, Any], start_response: Any) -> Any:
        time.sleep(_DELAY_S)
        return application(environ, start_response)

    server = make_server("127.0.0.1", 0, delayed, threaded=True)
    parent.send(f"http://127.0.0.1:{server.server_port}")
    server.serve_forever()
