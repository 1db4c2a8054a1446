"""The whole path over an object store that answers late, beside the same path over local files.

The store is moto's S3 server, a process on this machine. Each request waits before it is answered.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from werkzeug.serving import make_server

from jobs import cluster
from jobs.benchmark import Config
from jobs.benchmarks.measure import BenchmarkRow, kill_group
from jobs.demo_stages import SECONDS, run_stage
from pipeline import storage
from pipeline.config import BadInput

_COMMENTS = {"small": 60_000, "full": 200_000}
_ROUNDS = {"small": 1, "full": 2}
_DELAY_S = 0.02
_RECIPE = Path(__file__).parents[1] / "configs" / "finetune" / "convert_small.yaml"
_BUCKET = "s3://lake"


def measure(config: Config, work: Path) -> list[BenchmarkRow]:
    """Both sides in turn. Equal fingerprints show that the jobs' outputs are the same on both."""
    if not (find_spec("moto") and find_spec("boto3")):
        raise BadInput("the packages moto and boto3 are not installed: pip install -e '.[bench]'")
    size = config.size
    sides: dict[str, list[dict[str, float]]] = {"local": [], "store": []}
    fingerprints = set[tuple[str, ...]]()
    with _store(), cluster.session():
        run_stage("A dump", "generate_dump", "--comments", str(_COMMENTS[size]), "--files", "4",
              "--output", str(work / "dump"))  # fmt: skip
        storage.upload(work / "dump", f"{_BUCKET}/dump")
        for number in range(_ROUNDS[size]):
            for side, base in (("local", str(work)), ("store", _BUCKET)):
                SECONDS.clear()
                fingerprints.add(tuple(_path(base, f"{base}/round-{number}-{os.getpid()}")))
                sides[side].append(dict(SECONDS))
    if len(fingerprints) != 1:
        raise BadInput("object store: the artifacts over it are not those of local files")
    seconds = {side: median(sum(run.values()) for run in runs) for side, runs in sides.items()}
    ratio = seconds["store"] / seconds["local"]
    note = (
        f"{_COMMENTS[size]:,} comments: {seconds['store']:.0f} s over {seconds['local']:.0f} s, mostly the "
        f"start of jobs. {1e3 * _DELAY_S:.0f} ms of delay."
    )
    detail = {"note": note, "seconds": seconds, "stages": sides}
    return [
        BenchmarkRow(
            "cluster.s3.time_over_local", ratio, "of the time over local files", detail=detail
        )
    ]


def _path(data: str, out: str) -> Iterator[str]:
    """Dump → corpus → subwords → ranker → evaluation and pool; yields fingerprints of the outputs."""

    def run(title: str, verb: str, *argv: str) -> str:
        return str(run_stage(title, verb, *argv).get("fingerprint", ""))

    yield run("corpus", "prepare_corpus", "--format", "reddit", "--input", f"{data}/dump",
              "--output", f"{out}/corpus")  # fmt: skip
    yield run("subwords", "train_tokenizer", "--corpus", f"{out}/corpus", "--tokenizer.kind", "subwords",
              "--tokenizer.vocabulary", "2000", "--output", f"{out}/subwords")  # fmt: skip
    run("ranker", "finetune", "--config", str(_RECIPE), "--corpus", f"{out}/corpus", "--encoder",
        f"{out}/subwords", "--finetune.batch-examples", "64", "--finetune.max-steps", "50",
        "--loop.warmup-steps", "5", "--loop.validate-every-epochs", "0",
        "--loop.checkpoint-every-steps", "25", "--output", f"{out}/ranker")  # fmt: skip
    run("evaluation", "evaluate", "--model", f"{out}/ranker", "--corpus", f"{out}/corpus", "--protocol",
        "polyai", "--split", "train", "--max-examples", "500")  # fmt: skip
    run("pool", "embed_pool", "--model", f"{out}/ranker", "--candidates", f"{out}/corpus/train",
        "--embed.text-column", "response", "--embed.id-column", "example_id", "--pools", f"{out}/pools",
        "--name", "replies")  # fmt: skip


@contextmanager
def _store() -> Iterator[None]:
    """A server for all clients of this process and of its child processes."""
    command = [sys.executable, "-m", "jobs.benchmarks.object_store"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout
        _reach(process.stdout.readline().strip())
        yield
    finally:
        kill_group(process)


def _reach(address: str) -> None:
    """Makes the bucket, and lets all clients use the server from now on."""
    import boto3

    os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
                   "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
                   "POLYRANK_AUTHOR_SALT": "made-up authors"}  # fmt: skip
    boto3.client("s3").create_bucket(Bucket=_BUCKET.removeprefix("s3://"))


def _serve() -> None:
    """Serves until it is killed, and prints its address."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    application = DomainDispatcherApplication(create_backend_app)

    def delayed(environ: dict[str, Any], start_response: Any) -> Any:
        time.sleep(_DELAY_S)
        return application(environ, start_response)

    server = make_server("127.0.0.1", 0, delayed, threaded=True)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve()
