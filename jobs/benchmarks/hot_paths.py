"""Where the time of the three hottest paths goes: embedding texts, searching a pool, starting a job.

One thread, so that the parts add up. A part of a path is the time of the operations of PyTorch that make it,
without those that they call; what no part names is "the rest", Python's own time included.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from jobs import cluster
from jobs.benchmarks import search
from jobs.benchmarks.inputs import read_contexts, read_texts
from jobs.benchmarks.measure import BenchmarkRow
from pipeline.artifact import Artifact
from pipeline.config import digest
from pipeline.models import inference
from pipeline.search import top_rows

_TEXTS = {"small": 4096, "full": 16_384}
_CANDIDATES = {"small": 100_000, "full": 1_000_000}
_QUESTIONS = {"small": 8, "full": 32}

# The first word that stands in an operation's name decides.
_EMBEDDING = {
    "attention": ("attention", "softmax"),
    "matrix products": ("linear", "mm", "matmul"),
    "activation": ("gelu", "relu", "silu"),
    "norms": ("norm",),
    "look-up": ("embedding",),
}
_SEARCH = {
    "matrix products": ("mm", "matmul"),
    "highest product of a row": ("amax", "maximum"),
    "rows to the cache": ("copy_",),
    "bounds from lengths": ("addcmul", "mul", "add", "clamp"),
}
_IMPORTED = ("torch", "transformers", "ray", "pyarrow", "mlflow")
# What a worker of the demo's trainings imports.
_STARTS = "import ray, pipeline.training.finetuning"


def measure(
    size: str, model: Artifact, corpora: Sequence[Artifact], work: Path
) -> list[BenchmarkRow]:
    """A row for each path: its milliseconds, with the share of each part in `detail["shares"]`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [*_profile_paths(size, model, corpora, work), _profile_imports()]
    finally:
        torch.set_num_threads(threads)


def _profile_paths(
    size: str, model: Artifact, corpora: Sequence[Artifact], work: Path
) -> list[BenchmarkRow]:
    ranker = search.poly_encoder(model)
    inference.prepare(ranker, torch.device("cpu"))
    contexts, texts = read_contexts(corpora[0], _QUESTIONS[size]), read_texts(corpora, _TEXTS[size])
    folder = work / "hot_paths" / digest([model.fingerprint, _CANDIDATES[size], texts])
    folder.mkdir(parents=True, exist_ok=True)
    rows_NT = ranker.candidate_rows(texts)
    inference.row_vectors(ranker, rows_NT[:64])  # the first pass allocates
    embedding = _profile(lambda: inference.row_vectors(ranker, rows_NT), _EMBEDDING)
    began = time.perf_counter()
    ranker.candidate_rows(texts)
    embedding["subwords"] = 1e3 * (time.perf_counter() - began)
    real_ND = inference.row_vectors(ranker, rows_NT).numpy()
    questions = inference.context_vectors(ranker, contexts)[0].numpy()
    with cluster.session(for_tasks=True):
        pool = search.pool_of(folder / "pool", model, real_ND, _CANDIDATES[size])
    rows = [_row("profile.embed", embedding, len(texts), "text", f"{len(texts):,} texts")]
    for method in ("exact", "pruned"):

        def ask(method: str = method) -> None:
            for vectors_MD in questions:
                top_rows(pool, vectors_MD[None], 10, method=method)  # type: ignore[arg-type]

        ask()  # the first pass maps pages
        parts = _profile(ask, _SEARCH)
        about = f"{len(questions)} questions, {len(pool):,} candidates"
        rows.append(_row(f"profile.search.{method}", parts, len(questions), "question", about))
    return rows


def _profile(work: Callable[[], object], parts: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Milliseconds of each part, from a profiled run; their sum is that of a run without the profiler."""
    began = time.perf_counter()
    work()
    total = 1e3 * (time.perf_counter() - began)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    milliseconds = dict.fromkeys(parts, 0.0)
    for event in profiler.key_averages():
        part = _part(event.key, parts)
        if part:
            milliseconds[part] += event.self_cpu_time_total / 1e3
    milliseconds["the rest"] = max(0.0, total - sum(milliseconds.values()))
    return milliseconds


def _part(operation: str, parts: Mapping[str, Sequence[str]]) -> str:
    """ "" for an operation that belongs to none."""
    return next((part for part, words in parts.items() if any(w in operation for w in words)), "")


def _profile_imports() -> BenchmarkRow:
    """The imports of a process before it trains; each module counts for its package."""
    command = [sys.executable, "-X", "importtime", "-c", _STARTS]
    subprocess.run(command, check=True, capture_output=True)  # the files are in memory from now on
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stderr.splitlines()
    parts = dict.fromkeys((*_IMPORTED, "the rest"), 0.0)
    for line in lines:
        if line.startswith("import time:") and line[12:].split("|")[0].strip().isdigit():
            self_microseconds, _, module = (field.strip() for field in line[12:].split("|"))
            package = module.partition(".")[0]
            parts[package if package in parts else "the rest"] += int(self_microseconds) / 1e3
    return _row("profile.start", parts, 1, "process", "Imports")


def _row(name: str, parts: Mapping[str, float], count: int, unit: str, about: str) -> BenchmarkRow:
    total = sum(parts.values())
    shares = {part: round(ms / total, 3) for part, ms in parts.items() if ms > 0.005 * total}
    sorted_shares = dict(
        sorted(shares.items(), key=lambda share: (share[0] == "the rest", -share[1]))
    )
    note = ", ".join(
        f"{part} {np.round(100 * share):.0f} %" for part, share in sorted_shares.items()
    )
    detail = {"shares": sorted_shares, "threads": 1, "note": f"{about}: {note}."}
    return BenchmarkRow(name, total / count, f"ms a {unit}", detail=detail)
