"""The time of jobs on one node over that on four, with work that waits.

The nodes are raylets on this machine, which has too few cores to show that computing scales. So the parser of
a block of comments and the model of an actor wait beside what they do. The jobs are the real ones: what keeps
a node idle is their order of tasks, Ray's scheduling, and the files.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobs import cluster, embed_pool, prepare_corpus
from jobs.benchmark import Config
from jobs.benchmarks import object_store
from jobs.benchmarks.measure import BenchmarkRow, run_job
from pipeline.config import parse
from pipeline.engine.draft import Draft

_NODES = 4
_PARSERS_A_NODE = 2
_BLOCKS = {"small": 32, "full": 96}  # a dump file each
_BLOCK_S = 5.0
_SHARDS = {"small": 16, "full": 48}
_SHARD_S = 5.0
_ROWS_A_SHARD = 20
# Bytes of a node's object store. With 256 MiB Ray Data held one of two parsers back.
_STORE = 1 << 30
_COMMENTS = {"small": 32_000, "full": 96_000}


def measure(config: Config, work: Path) -> list[BenchmarkRow]:
    """The rows of the object store come first, which its missing packages refuse. That of embedding needs a
    model."""
    rows = object_store.measure(config, work)
    size, dumps = config.size, work / "dumps"
    shutil.rmtree(dumps, ignore_errors=True)
    run_job(
        "generate_dump", "--comments", _COMMENTS[size], "--files", _BLOCKS[size], "--output", dumps
    )

    def prepare(output: Path) -> None:
        prepare_corpus.run(_parsed(prepare_corpus, "--format", "reddit", "--input", dumps,
                                   "--output", output / "corpus"))  # fmt: skip

    waiting = _BLOCKS[size] * _BLOCK_S / _PARSERS_A_NODE
    rows.append(_row("reddit", prepare, wait_in_parser, _PARSERS_A_NODE, waiting, work))
    if not config.model:
        return rows
    candidates = work / "candidates.csv"
    texts = (f"candidate {number}" for number in range(_SHARDS[size] * _ROWS_A_SHARD))
    candidates.write_text("\n".join(["text", *texts]))

    def embed(output: Path) -> None:
        embed_pool.run(_parsed(embed_pool, "--model", config.model, "--candidates", candidates,
                               "--embed.id-column", "", "--embed.rows-per-shard", _ROWS_A_SHARD,
                               "--resources.cpus-per-actor", 1, "--pools", output,
                               "--name", "candidates"))  # fmt: skip

    return [*rows, _row("embed", embed, wait_in_model, 1, _SHARDS[size] * _SHARD_S, work)]


def _parsed(job: Any, *options: object) -> Any:
    return parse(job.Config, list(map(str, options)), job.__name__)


def _row(
    name: str, job: Callable[[Path], None], hook: Callable[[], None], cores: int, waiting: float, work: Path
) -> BenchmarkRow:  # fmt: skip
    """`hook`: runs in each of Ray's processes first. `cores`: of a node. `waiting`: seconds of one node."""
    seconds = dict[int, float]()
    for nodes in (1, _NODES):
        output = work / f"{name}-{nodes}"
        shutil.rmtree(output, ignore_errors=True)
        with _nodes(nodes, cores, hook):
            began = time.perf_counter()
            job(output)
            seconds[nodes] = time.perf_counter() - began
    note = (
        f"{seconds[1]:.0f} s on one node and {seconds[_NODES]:.0f} s on four, of which {waiting:.0f} s and "
        f"{waiting / _NODES:.0f} s are waits. Nodes of this machine, with {cores} logical cores each."
    )
    return BenchmarkRow(
        f"cluster.{name}.speedup_{_NODES}_nodes", seconds[1] / seconds[_NODES],
        "times as fast on 4 nodes", detail={"note": note, "seconds": seconds},
    )  # fmt: skip


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


def wait_in_parser() -> None:
    from pipeline.corpora.reddit import partition

    parse_block = partition._parse_block

    def parse_late(*arguments: Any) -> Any:
        time.sleep(_BLOCK_S)
        return parse_block(*arguments)

    partition._parse_block = parse_late  # type: ignore[assignment]


def wait_in_model() -> None:
    from pipeline.pools.embedder import Embedder

    embed_shard = Embedder.__call__

    def embed_late(self: Embedder, draft: Draft, name: str, slices: Any) -> Any:
        with self._model_is_free:
            time.sleep(_SHARD_S)
        return embed_shard(self, draft, name, slices)

    Embedder.__call__ = embed_late  # type: ignore[method-assign]
