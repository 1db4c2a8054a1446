"""Search on a GPU beside reading its memory once, plain torch, and FAISS' or cuVS' flat index; and /rank.

The candidates are made up: 10 million directions whose numbers get smaller, as those of texts' vectors do.
Only the number of rows that are scored again in float64 depends on that, and `detail` says it.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from jobs.benchmarks.measure import BenchmarkRow
from pipeline.arrays import Floats
from pipeline.artifact import Artifact, open_artifact
from pipeline.models.flops import peak_flops
from pipeline.pools import device_rows
from pipeline.pools.pool import Pool
from pipeline.pools.shard import ROWS, Shard
from pipeline.pools.vector_format import Layer
from pipeline.search import device as device_search
from pipeline.search import device_scores, top_rows

_TOP_K = 10
_TOGETHER = 16
_CHUNK = 1 << 18
_LENGTH = 8.0  # of candidates and vectors: logits of up to 64
_CLIENTS = (1, 8, 32)


@dataclass(frozen=True)
class Scale:
    """The amount of work on a device."""

    candidates: int
    width: int
    vectors: int
    rounds: int
    service_candidates: int
    service_s: float


SCALES = {
    "cuda": Scale(10_000_000, 384, 64, 10, 100_000, 10.0),
    "cpu": Scale(3_000, 32, 8, 1, 300, 1.0),
}


def measure(device: torch.device, scale: Scale) -> list[BenchmarkRow]:
    """One context, 16 contexts, and one vector a context."""
    pool = made_up_pool(device, scale)
    assert pool.on_device is not None
    matrix_ND = pool.on_device.matrix_ND
    questions = _directions(_TOGETHER * scale.vectors, scale.width, device, seed=1)
    questions = questions.view(_TOGETHER, scale.vectors, scale.width).cpu()
    one, bi = questions[:1], questions[:1, :1]
    _require_same_scores(pool, questions)
    words = matrix_ND.view(torch.int64 if scale.width % 4 == 0 else torch.int16)
    ways: dict[str, Callable[[], object]] = {
        "read": lambda: words.sum(),
        "one": lambda: top_rows(pool, one.numpy(), _TOP_K),
        "one, plain torch": lambda: plain_top(matrix_ND, one.to(device)),
        "16": lambda: top_rows(pool, questions.numpy(), _TOP_K),
        "16, plain torch": lambda: plain_top(matrix_ND, questions.to(device)),
        "bi": lambda: top_rows(pool, bi.numpy(), _TOP_K),
        "bi, plain torch": lambda: plain_top(matrix_ND, bi.to(device)),
    }
    ms = {name: 1e3 * seconds for name, seconds in _in_turn(ways, scale.rounds, device).items()}
    flops = 2.0 * len(pool) * scale.width * scale.vectors * _TOGETHER
    peak = peak_flops(device, "bf16")
    contexts = list(questions.double().numpy())
    open_rows = dict(
        device_search.reaching_rows(pool.on_device, contexts, scale.vectors, _TOP_K, 1.0, None)
    )
    detail = {
        "milliseconds": {name: round(value, 3) for name, value in ms.items()},
        "candidates": len(pool), "dimensions": scale.width, "vectors": scale.vectors,
        "GB/s read": round(matrix_ND.nbytes / ms["read"] / 1e6),
        "scored again in float64, rows": [len(open_rows[number]) for number in range(_TOGETHER)],
        "by": "Triton" if any(device_scores._agreement.values()) else "plain torch",
    }  # fmt: skip
    return [
        BenchmarkRow(
            "gpu.search.10m_time_over_read_floor", ms["one"] / ms["read"], "reads of the matrix",
            peer=ms["one, plain torch"] / ms["read"], ratio=ms["one, plain torch"] / ms["one"],
            floor=1.0, share_of_floor=ms["read"] / ms["one"], detail=detail,
        ),
        BenchmarkRow(
            "gpu.search.16_contexts_share_of_peak", flops / (ms["16"] / 1e3) / peak.flops,
            "of the peak of bf16", peer=flops / (ms["16, plain torch"] / 1e3) / peak.flops,
            ratio=ms["16, plain torch"] / ms["16"], floor=1.0,
            detail={"peak, TFLOPS": round(peak.flops / 1e12, 1), "peak is": peak.source},
        ),
        BenchmarkRow(
            "gpu.search.10m_bi_time_over_read_floor", ms["bi"] / ms["read"], "reads of the matrix",
            peer=ms["bi, plain torch"] / ms["read"], ratio=ms["bi, plain torch"] / ms["bi"],
        ),
    ]  # fmt: skip


def measure_peers(device: torch.device, scale: Scale) -> list[BenchmarkRow]:
    """One vector a context beside the flat indices of FAISS and cuVS, as far as they are installed."""
    builders = {"faiss": _faiss, "cuvs": _cuvs}
    installed = [name for name in builders if device.type == "cuda" and _has_gpu_index(name)]
    rows = [
        BenchmarkRow(_peer_row(name), None, "ms", detail={"failed": "not installed for GPUs"})
        for name in builders
        if name not in installed
    ]
    if not installed:
        return rows
    pool, question = made_up_pool(device, scale), _directions(1, scale.width, device, seed=1)
    for name in installed:
        try:
            ways = {
                "ours": lambda: top_rows(pool, question[None].cpu().numpy(), _TOP_K),
                "theirs": builders[name](pool, question),
            }
            ms = {n: 1e3 * seconds for n, seconds in _in_turn(ways, scale.rounds, device).items()}
        except Exception as problem:  # another project's: the next one counts nevertheless
            failed = {"failed": str(problem)[:200]}
            rows.append(BenchmarkRow(_peer_row(name), None, "ms", detail=failed))
            continue
        ratio = ms["theirs"] / ms["ours"]
        rows.append(BenchmarkRow(_peer_row(name), ms["ours"], "ms", peer=ms["theirs"], ratio=ratio))
    return rows


def _peer_row(name: str) -> str:
    return f"gpu.search.10m_bi.vs_{name}"


def measure_service(
    ranker: Path, cross: Path, corpus: str, work: Path, device: torch.device, scale: Scale
) -> list[BenchmarkRow]:
    """/rank: the query encoder, the search and the cross-encoder's second stage share the device."""
    from jobs.benchmarks.serving import services
    from jobs.benchmarks.serving.any_service import request_bodies, require_answers
    from jobs.benchmarks.serving.inputs import contexts_and_texts, embed_texts
    from jobs.benchmarks.serving.load import clients
    from serve.app import Args

    model = open_artifact(str(ranker), "ranker")
    contexts, texts = contexts_and_texts(
        [open_artifact(corpus, "corpus")], 20, scale.service_candidates
    )
    pool = embed_texts(model, texts, "candidates", work)
    args = Args(model=model.uri, pools=[pool], second_stage=str(cross), name="rank")
    bodies = request_bodies(contexts, "candidates")
    options = {"num_cpus": 4, "num_gpus": 1} if device.type == "cuda" else {"num_cpus": 1}
    rows = []
    with (
        services.session() as port,
        services.ranking(port, args, ray_actor_options=options) as url,
    ):
        require_answers(clients(f"{url}/rank", bodies, 1, 0.5))
        for count in _CLIENTS:
            with _busy_share(device) as samples:
                result = clients(f"{url}/rank", bodies, count, scale.service_s)
            require_answers(result)
            detail = {
                "p99, ms": round(result.successes().ms(99), 2),
                "answers/s": round(result.per_s(0, scale.service_s), 1),
                "candidates": len(texts),
                "the GPU is busy, share": round(float(np.mean(samples)) / 100, 3)
                if samples
                else "not measured",
            }
            p50 = result.successes().ms(50)
            rows.append(BenchmarkRow(f"gpu.search.rank_{count}_clients", p50, "ms", detail=detail))
    return rows


# -------------------------------------------------------------------------------------------------
# Made-up input


def made_up_pool(device: torch.device, scale: Scale) -> Pool:
    """A pool in memory, on the device, without files."""
    matrices, lengths = [], []
    for start in range(0, scale.candidates, _CHUNK):
        count = min(_CHUNK, scale.candidates - start)
        rows_ND = _directions(count, scale.width, device, seed=2 + start).bfloat16()
        lengths.append(1.001 * rows_ND.float().norm(dim=1).cpu().numpy())
        matrices.append(rows_ND.view(torch.int16).cpu().numpy().view(np.uint16))
    norms = np.stack([np.ones(scale.candidates, np.float32), np.concatenate(lengths)])
    layer = Layer(np.concatenate(matrices), norms)
    ids = pa.array(np.arange(scale.candidates)).cast(pa.string())
    sketch = Layer(np.empty((scale.candidates, 0), np.int8), norms)
    shard = Shard(pa.table([ids, ids, ids], ROWS), layer, sketch)
    facts = {"dimensions": scale.width, "dtype": "bfloat16"}
    pool = Pool(
        Artifact("made-up", facts), "made-up", "v", (shard,), np.empty((scale.width, 0)),
        (scale.candidates,),
    )  # fmt: skip
    held = device_rows.load("made-up", [shard], "bfloat16", scale.width, device, "bfloat16")
    if held is None:
        raise RuntimeError(f"{scale.candidates:,} vectors do not fit in the memory of {device}")
    return replace(pool, on_device=held)


def _directions(count: int, width: int, device: torch.device, seed: int) -> Tensor:
    draw = torch.Generator(device).manual_seed(seed)
    rows_ND = torch.randn(count, width, generator=draw, device=device)
    rows_ND /= (1 + torch.arange(width, device=device)).sqrt()
    scaled_ND: Tensor = rows_ND * (_LENGTH / rows_ND.norm(dim=1, keepdim=True))
    return scaled_ND


def _require_same_scores(pool: Pool, questions: Tensor) -> None:
    """Raises RuntimeError for an answer that is not certified, or not near that of plain torch."""
    found = top_rows(pool, questions.numpy(), _TOP_K)
    assert pool.on_device is not None
    expected_QK = plain_top(pool.on_device.matrix_ND, questions.to(pool.on_device.device)).cpu()
    is_near = np.allclose(found.scores, expected_QK, rtol=0.05, atol=0.05 * _LENGTH)
    if not (is_near and found.certified.all()):
        raise RuntimeError("the search's scores are not those of plain torch")


# -------------------------------------------------------------------------------------------------
# Other ways


def plain_top(matrix_ND: Tensor, vectors_QMD: Tensor) -> Tensor:
    """[Q, K]: the highest scores, as one would write it: chunks of bfloat16 products, softmax, sum, topk."""
    queries, count, width = vectors_QMD.shape
    vectors_DC = vectors_QMD.reshape(-1, width).to(matrix_ND.dtype).T.contiguous()
    best_QK = torch.full((queries, _TOP_K), -torch.inf, device=matrix_ND.device)
    for start in range(0, len(matrix_ND), _CHUNK):
        logits_NQM = (matrix_ND[start : start + _CHUNK] @ vectors_DC).view(-1, queries, count)
        scores_NQ = (logits_NQM.softmax(2, dtype=torch.float32) * logits_NQM).sum(2)
        best_QK = torch.cat([best_QK, scores_NQ.T], dim=1).topk(_TOP_K).values
    return best_QK


def _has_gpu_index(name: str) -> bool:
    if find_spec(name) is None:
        return False
    return name != "faiss" or hasattr(import_module("faiss"), "StandardGpuResources")


def _faiss(pool: Pool, question_1D: Tensor) -> Callable[[], object]:
    faiss: Any = import_module("faiss")
    options = faiss.GpuIndexFlatConfig()
    options.useFloat16 = True  # 2 bytes a number, as ours
    index = faiss.GpuIndexFlatIP(faiss.StandardGpuResources(), pool.dimensions, options)
    for rows_ND in _float32_chunks(pool):
        index.add(rows_ND)
    return lambda: index.search(question_1D.cpu().numpy(), _TOP_K)


def _cuvs(pool: Pool, question_1D: Tensor) -> Callable[[], object]:
    brute_force: Any = import_module("cuvs.neighbors.brute_force")
    assert pool.on_device is not None
    index = brute_force.build(pool.on_device.matrix_ND.half(), metric="inner_product")
    return lambda: brute_force.search(index, question_1D.half(), _TOP_K)


def _float32_chunks(pool: Pool) -> Iterator[Floats]:
    assert pool.on_device is not None
    for rows_ND in torch.split(pool.on_device.matrix_ND, _CHUNK):
        yield rows_ND.float().cpu().numpy()


# -------------------------------------------------------------------------------------------------
# Clocks


def _in_turn(
    ways: dict[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, float]:
    """Seconds of each way: the median of its rounds, after one that compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in ways.items():
            _synchronise(device)
            began = time.perf_counter()
            run()
            _synchronise(device)
            if number:
                seconds[name].append(time.perf_counter() - began)
    return {name: float(np.median(values)) for name, values in seconds.items()}


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _busy_share(device: torch.device) -> Iterator[Sequence[float]]:
    """Samples of the GPU's utilisation in percent, by NVIDIA's counters; none where these cannot be read."""
    samples: list[float] = []
    tool = shutil.which("nvidia-smi") if device.type == "cuda" else None
    if tool is None:
        yield samples
        return
    query = [tool, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
    process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield samples
    finally:
        process.terminate()
        lines: Any = process.communicate()[0].split()
        samples += [float(line) for line in lines if line.isdigit()]
