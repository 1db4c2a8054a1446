"""The plan of a night: as many rows as the version before, of which 1 % are changed, 1 % new and 1 % gone."""

from __future__ import annotations

import multiprocessing
import resource
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa

from jobs.benchmarks.measure import BenchmarkRow
from pipeline import storage
from pipeline.arrays import Keys
from pipeline.engine import executors
from pipeline.engine.draft import Draft, draft
from pipeline.pools import candidates
from pipeline.pools.plan import PlanInput, TextQuery, make
from pipeline.pools.settings import EmbedConfig
from pipeline.pools.shard import ROWS
from pipeline.storage import npy

_ROWS = {"small": 200_000, "full": 10_000_000}
_NAMES = {"small": "200k", "full": "10m"}
_FILE_ROWS = 16_384


def measure(size: str, work: Path) -> BenchmarkRow:
    folder = work / "plan"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows, out = _ROWS[size], draft(str(folder / "out"), "pool", EmbedConfig(), {})
    assert isinstance(out, Draft)
    # Each in a process of its own: the peak of memory is the plan's.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        sources = pool.submit(_write_keys, folder, out, rows).result()
        seconds, peak_mb, counts = pool.submit(_plan, out, sources).result()
    percent = rows // 100
    assert counts == (percent, percent, rows - 2 * percent, percent), counts
    shutil.rmtree(folder)
    note = f"{rows:,} candidates beside as many rows before, {peak_mb:,.0f} MB of memory."
    return BenchmarkRow.alone(f"pool.plan_{_NAMES[size]}_seconds", seconds, "s", note)


def _write_keys(folder: Path, out: Draft, rows: int) -> PlanInput:
    """Candidates `1 % … 101 %` of the ids, and the version before with `0 % … 100 %`."""
    random, percent = np.random.default_rng(0), rows // 100
    ids = np.array([candidates.id_key(str(n)) for n in range(rows + percent)], np.uint64)
    texts = random.integers(1 << 63, size=rows + percent, dtype=np.uint64)
    now = texts.copy()
    now[percent : 2 * percent] += np.uint64(1 << 63)  # changed
    keys = np.stack([now, now, ids, np.full(len(ids), 60, np.uint64)], axis=1)[percent:]
    parts, files = list[tuple[str, int]](), list[tuple[str, int]]()
    for start in range(0, rows, _FILE_ROWS):
        part, name = keys[start : start + _FILE_ROWS], f"file-{start:09d}"
        storage.write_bytes(out.path(f"_candidates/{name}.npy"), npy.to_bytes(part))
        rows_file = _published(part[:, 1], start + percent)
        storage.write_bytes(out.path(f"_candidates/{name}.arrow"), rows_file)
        parts.append((name, len(part)))
        end = min(rows, start + _FILE_ROWS)
        uri = str(folder / f"before-{start:09d}.arrow")
        storage.write_bytes(uri, _published(texts[start:end], start))
        files.append((uri, end - start))
    return PlanInput(parts, files)


def _published(texts: Keys, first: int) -> pa.Buffer:
    hashes = [f"{key:016x}{0:016x}" for key in texts.tolist()]
    names = [str(first + n) for n in range(len(texts))]
    columns = {"id": names, "text": [""] * len(names), "content_hash": hashes}
    return candidates.arrow_file(pa.table(columns, schema=ROWS))


def _plan(out: Draft, sources: PlanInput) -> tuple[float, float, tuple[int, int, int, int]]:
    began = time.monotonic()
    with executors.in_this_process():
        plan = make(out, sources, _FILE_ROWS, TextQuery(16))
    seconds, changes = time.monotonic() - began, plan.changes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    return seconds, peak, (changes.new, changes.changed, changes.same, changes.gone)
