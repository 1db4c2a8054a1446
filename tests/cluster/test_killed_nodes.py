"""A node dies while a job runs, and then the driver: the same command ends with what one process makes.

The short form of test_chaos.py, which kills a node at a random moment of every job, for the two jobs whose
tasks take no long training. Two nodes of one core on this machine, each a raylet of its own.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard

from pipeline.artifact import open_artifact
from pipeline.config import BadInput
from pipeline.corpora.raw import Reading, read_lines
from pipeline.pools.pool import Pool
from tests.helpers import wait_until

from .conftest import Nodes, nodes_of_one_core

pytestmark = [pytest.mark.ray, pytest.mark.long]  # the corpus takes 217 s on two slow cores


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with nodes_of_one_core(2) as made:
        yield made


@pytest.fixture
def killed_in_mid_run(nodes: Nodes, start_job) -> Callable[..., None]:
    """`killed_in_mid_run(marks, verb, …)`: starts a job, and kills a node when it has done a task, and the
    driver when it has done three more without that node."""

    def run(marks: Callable[[], list[Path]], verb: str, *arguments: object) -> None:
        process = start_job(verb, *arguments, cluster=nodes.address)
        wait_until(marks, process)
        nodes.kill(0)
        enough = len(marks()) + 3
        # A driver that was connected to the dead node ends by itself.
        wait_until(lambda: len(marks()) >= enough or process.poll() is not None, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait() != 0
        nodes.add()

    return run


def names_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_pool_is_that_of_an_undisturbed_run(
    killed_in_mid_run, run_job_here, tiny_ranker, tmp_path
):
    pools, texts = tmp_path / "pools", tmp_path / "texts.jsonl"
    rows = ({"id": str(number), "text": f"another text {number}"} for number in range(200))
    texts.write_text("\n".join(map(json.dumps, rows)))
    command = ("embed_pool", "--model", tiny_ranker("poly").uri, "--candidates", texts, "--name", "p",
               "--embed.rows-per-shard", 2, "--resources.actors", 2,
               "--resources.cpus-per-actor", 1, "--pools")  # fmt: skip

    def marks() -> list[Path]:
        return list(pools.glob("p/*.partial/_tasks/part-*.json"))

    killed_in_mid_run(marks, *command, pools)
    assert 0 < len(marks()) < 100
    (partial,) = (pools / "p").iterdir()  # and no CURRENT
    with pytest.raises(BadInput, match="unfinished"):
        Pool.open(str(partial).removesuffix(".partial"))

    resumed = run_job_here(*command, pools).summary  # where a job resumes does not matter
    whole = run_job_here(*command, tmp_path / "undisturbed").summary
    assert (resumed["already_done"], whole["already_done"]) == (False, False)
    assert resumed["fingerprint"] == whole["fingerprint"]
    assert resumed["counts"] == {"records": 200, "candidates": 200, "shards": 100}
    assert (pools / "p" / "CURRENT").read_text().strip() == whole["version"]
    ours, theirs = (Pool.open(summary["pool"]).artifact for summary in (resumed, whole))
    assert ours.manifest["files"] == theirs.manifest["files"]
    assert names_below(Path(ours.uri)) == names_below(Path(theirs.uri))


def test_a_corpus_is_that_of_an_undisturbed_run(
    killed_in_mid_run, run_job_here, sample_files, tmp_path
):
    output, dumps = tmp_path / "out", tmp_path / "in"
    dumps.mkdir()
    lines = [
        line
        for _, line in read_lines(str(sample_files / "reddit_dump" / "RC_2011-01.zst"), Reading())
    ]
    for part in range(40):
        data = "".join(f"{line}\n" for line in lines[part::40]).encode()
        (dumps / f"RC_{part:02d}.zst").write_bytes(zstandard.compress(data))
    command = (
        "prepare_corpus",
        "--corpus",
        "reddit",
        "--authors",
        "plain",
        "--input",
        dumps,
        "--output",
    )

    def marks() -> list[Path]:
        return list(Path(f"{output}.partial").glob("_tasks/block-*.json"))

    killed_in_mid_run(marks, *command, output)
    assert 0 < len(marks()) < 40
    assert not output.exists()
    with pytest.raises(BadInput, match="unfinished"):
        open_artifact(str(output), "corpus")

    resumed = run_job_here(*command, output).summary
    whole = run_job_here(*command, tmp_path / "whole").summary
    assert (resumed["already_done"], whole["already_done"]) == (False, False)
    assert resumed["fingerprint"] == whole["fingerprint"]
    assert resumed["counts"] == whole["counts"]
    assert names_below(output) == names_below(tmp_path / "whole")
