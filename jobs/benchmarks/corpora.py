"""Reddit dumps to examples: rate and growth of memory with the input; and the reader of the shards."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.dataset as arrow_dataset

from jobs.benchmark import Config
from jobs.benchmarks.measure import BenchmarkRow, Run, in_turn, run_job
from pipeline.artifact import open_artifact
from pipeline.corpora import raw
from pipeline.corpora.reddit.lines import parse_comments
from pipeline.training.data import Rows

_COMMENTS = {"small": (300_000, 1_000_000), "full": (3_000_000, 10_000_000)}
# PolyAI's Dataflow job: 3,680,746,776 comments in 1 h 38 min on 409 workers
# (github.com/PolyAI-LDN/conversational-datasets, reddit/README.md).
_POLYAI_PER_WORKER = 3_680_746_776 / (98 * 60) / 409


def measure(config: Config, work: Path) -> list[BenchmarkRow]:
    dumps = {n: _dump(n, work) for n in _COMMENTS[config.size]}
    runs = {n: _prepare(dumps[n], work / f"corpus-{n}") for n in dumps}
    largest = max(dumps)
    return [_rate(dumps[largest], runs), _growth(runs), _reader(work / f"corpus-{largest}")]


def _dump(comments: int, work: Path) -> Path:
    run_job("generate_dump", "--comments", comments, "--output", work / f"dump-{comments}")
    return work / f"dump-{comments}"


def _prepare(dump: Path, output: Path) -> Run:
    shutil.rmtree(output, ignore_errors=True)
    return run_job("prepare_corpus", "--format", "reddit", "--input", dump, "--output", output)


def _rate(dump: Path, runs: Mapping[int, Run]) -> BenchmarkRow:
    """Of the largest run."""
    comments, run = max(runs.items())
    files = sorted(map(str, dump.glob("RC_*")))
    parse, rate = _seconds_of(_parse, files), comments / run.seconds
    # The line through the times of both sizes has the start of processes at 0 comments.
    start_s = np.polyfit(list(runs), [run.seconds for run in runs.values()], 1)[1]
    note = f"{comments:,} comments in {run.seconds:.1f} s, some {max(0.0, start_s):.0f} s of them the start."
    return BenchmarkRow(
        "corpora.reddit.comments_per_s", rate, "comments/s on this machine",
        peer=_POLYAI_PER_WORKER, ratio=rate / _POLYAI_PER_WORKER,
        floor=comments / parse, share_of_floor=parse / run.seconds,
        detail={
            "peer": "PolyAI's Dataflow job, per worker",
            "floor": "the same files decompressed and parsed by pyarrow.json, on all cores",
            "note": note,
        },
    )  # fmt: skip


def _growth(runs: Mapping[int, Run]) -> BenchmarkRow:
    (middle, less), (largest, more) = ((n, run.peak_mib) for n, run in runs.items())
    note = f"From {middle:,} to {largest:,} comments: {less:,.0f} and {more:,.0f} MiB."
    row = "corpora.reddit.memory_growth_3m_to_10m"
    return BenchmarkRow(row, more / less, "peak memory, ratio", detail={"note": note})


def _reader(corpus: Path) -> BenchmarkRow:
    """Rows/s of what training reads from, beside a scan of the same columns by pyarrow.dataset."""
    columns = ("context", "response")
    rows = Rows.of(open_artifact(str(corpus), "corpus"), "train", columns, 0, 1, seed=0)
    epoch, window = rows.epoch(0), 8192

    def ours() -> None:
        for start in range(0, len(rows), window):
            epoch.read(start, min(start + window, len(rows)))

    def theirs() -> None:
        for _ in arrow_dataset.dataset(corpus / "train").to_batches(
            columns=list(columns), batch_size=window
        ):
            pass

    seconds = in_turn({"ours": ours, "theirs": theirs}, 5)
    our_rate, peer_rate = (len(rows) / min(times) for times in seconds.values())
    detail = {"note": f"{len(rows):,} examples."}
    return BenchmarkRow("corpora.reader.vs_pyarrow_dataset", our_rate, "examples/s", peer=peer_rate,
                        ratio=our_rate / peer_rate, detail=detail)  # fmt: skip


def _seconds_of(work: Callable[[str], None], files: list[str]) -> float:
    """On all cores, a file each at a time."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(len, files))  # the processes are there
        began = time.perf_counter()
        list(pool.map(work, files))
        return time.perf_counter() - began


def _parse(file: str) -> None:
    for block in raw.line_blocks(file, 16 << 20):
        parse_comments(block, file, 1, raw.Rejects())
