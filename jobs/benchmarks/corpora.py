"""Reddit dumps to examples: rate and growth of memory with the input; and the reader of the shards."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
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


def measure(config: Config, work: Path) -> Iterator[BenchmarkRow]:
    dumps, runs = dict[int, Path](), dict[int, Run]()
    for comments in _COMMENTS[config.size]:
        dumps[comments], corpus = work / f"dump-{comments}", work / f"corpus-{comments}"
        run_job("generate_dump", "--comments", comments, "--output", dumps[comments])
        shutil.rmtree(corpus, ignore_errors=True)
        runs[comments] = run_job("prepare_corpus", "--format", "reddit", "--input", dumps[comments],
                                 "--output", corpus)  # fmt: skip
    (fewer, first), (most, last) = runs.items()
    peaks = f"{first.peak_mib:,.0f} and {last.peak_mib:,.0f} MiB"
    yield _rate(dumps[most], runs)
    name = "corpora.reddit.memory_growth_3m_to_10m"
    note = f"From {fewer:,} to {most:,} comments: {peaks}."
    yield BenchmarkRow.alone(name, last.peak_mib / first.peak_mib, "peak memory, ratio", note)
    yield _reader(work / f"corpus-{most}")


def _rate(dump: Path, runs: Mapping[int, Run]) -> BenchmarkRow:
    """Of the largest run. The floor: the same files decompressed and parsed by pyarrow.json, on all cores."""
    comments, run = max(runs.items())
    files = sorted(map(str, dump.glob("RC_*")))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(len, files))  # the processes are there
        began = time.perf_counter()
        list(pool.map(_parse, files))
        parse_s = time.perf_counter() - began
    # The line through the times of both sizes has the start of processes at 0 comments.
    start_s = np.polyfit(list(runs), [run.seconds for run in runs.values()], 1)[1]
    note = f"{comments:,} comments in {run.seconds:.1f} s, some {max(0.0, start_s):.0f} s of them the start."
    return BenchmarkRow.beside(
        "corpora.reddit.comments_per_s", comments / run.seconds, _POLYAI_PER_WORKER,
        "comments/s on this machine", floor=comments / parse_s, share_of_floor=parse_s / run.seconds,
        detail={"peer": "PolyAI's Dataflow job, per worker", "note": note},
    )  # fmt: skip


def _parse(file: str) -> None:
    for block in raw.line_blocks(file, 16 << 20):
        parse_comments(block, file, 1, raw.Rejects())


def _reader(corpus: Path) -> BenchmarkRow:
    """Rows/s of what training reads from, beside a scan of the same columns by pyarrow.dataset."""
    columns = ("context", "response")
    rows = Rows.of(open_artifact(str(corpus), "corpus"), "train", columns, 0, 1, seed=0)
    epoch, window = rows.epoch(0), 8192

    def ours() -> None:
        for start in range(0, len(rows), window):
            epoch.read(start, min(start + window, len(rows)))

    def theirs() -> None:
        dataset = arrow_dataset.dataset(corpus / "train")
        for _ in dataset.to_batches(columns=list(columns), batch_size=window):
            pass

    seconds = in_turn({"ours": ours, "theirs": theirs}, 5)
    rate, peer_rate = (len(rows) / min(times) for times in seconds.values())
    name, note = "corpora.reader.vs_pyarrow_dataset", f"{len(rows):,} examples."
    return BenchmarkRow.beside(name, rate, peer_rate, "examples/s", note)
