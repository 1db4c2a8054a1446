"""Measurements that need a GPU: search of 10 million candidates, utilisation by pre-training, and, with an
encoder and a corpus, the share of the time in which jobs.embed_pool lets the GPU compute.

The candidates of the search are made up: directions whose numbers get smaller, as those of texts' vectors do.
Only the number of rows that are scored again in float64 depends on that. With the device "cpu" the same code
runs on tiny shapes, to see that it runs.
"""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from threading import Event
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.benchmark import timer

from jobs.benchmark import Config
from jobs.benchmarks.inputs import embed, read_texts
from jobs.benchmarks.measure import BenchmarkRow, attempt, in_turn, run_job
from jobs.benchmarks.pretrain import bare_step
from pipeline.artifact import Artifact, open_artifact
from pipeline.models.encoder import prepare_for_training
from pipeline.models.flops import TrainingFlops, peak_flops
from pipeline.models.pretraining_heads import PretrainingModel
from pipeline.models.settings import Shape
from pipeline.models.tokens import Tokens
from pipeline.pools import device_rows
from pipeline.pools.pool import Pool
from pipeline.pools.shard import ROWS, Shard
from pipeline.pools.vector_format import Layer
from pipeline.search import device_scores, top_rows
from pipeline.training.loop import optimization
from pipeline.training.pretraining_data import MicroBatch
from pipeline.training.settings import LoopConfig

_MASKED_SHARE = 0.15
_WARM_UP_STEPS = 3
_TOP_K = 10
_TOGETHER = 16
_CHUNK = 1 << 18
_EMBEDDED_TOKENS = 256
_TURNS_OF_A_TEXT = 16
_SECONDS_OF_A_LOOK = 0.2
_LENGTH = 8.0  # of candidates and vectors: logits of up to 64


@dataclass(frozen=True)
class Scale:
    """The amount of work on a device."""

    candidates: int
    dimensions: int
    vectors: int
    """Of a context."""
    rounds: int
    shape: Shape
    vocabulary: int
    micro_batch_tokens: tuple[int, ...]
    """Tried in turn, until one does not fit."""
    seconds: float
    """Least duration of a measurement of training."""
    texts: int
    """That are embedded."""
    compiler: str
    """Backend of torch.compile; "eager" traces the model and runs it as it is."""


SCALES = {
    "cuda": Scale(
        10_000_000, 384, 64, 10,
        Shape(), 30_522, (16_384, 65_536, 131_072), 4.0, 25_000, "inductor",
    ),
    "cpu": Scale(3_000, 32, 8, 1, Shape(layers=2, width=64, heads=2), 300, (1_024,), 0.0, 32, "eager"),
}  # fmt: skip


def measure(config: Config, work: Path) -> Iterator[BenchmarkRow]:
    """Rows of one GPU; none, and a line that says so, where there is none."""
    if config.device == "cuda" and not torch.cuda.is_available():
        print("gpu: there is no GPU here, so nothing is measured", flush=True)
        return
    device, scale = torch.device(config.device), SCALES[config.device]
    parts = {
        "search": measure_search(device, scale),
        "pretrain": measure_pretraining(device, scale),
        "embed": measure_embedding(config, work, scale),
    }
    for step in config.steps:
        yield from attempt(f"gpu.{step}", parts[step])


def measure_search(device: torch.device, scale: Scale) -> Iterator[BenchmarkRow]:
    """One context, 16 contexts, and one vector a context."""
    pool = made_up_pool(device, scale)
    assert pool.on_device is not None
    matrix_ND = pool.on_device.matrix_ND
    questions = directions(_TOGETHER * scale.vectors, scale.dimensions, device, seed=1).cpu()
    questions = questions.view(_TOGETHER, scale.vectors, scale.dimensions)
    _require_same_scores(pool, questions)
    words = matrix_ND.view(torch.int64 if scale.dimensions % 4 == 0 else torch.int16)
    ways: dict[str, Callable[[], object]] = {"read": words.sum}
    inputs = {"one": questions[:1], "16": questions, "bi": questions[:1, :1]}
    for name, vectors in inputs.items():
        ways[name] = functools.partial(top_rows, pool, vectors.numpy(), _TOP_K)
        ways[f"{name}, plain torch"] = functools.partial(plain_top, matrix_ND, vectors)
    ms = {name: 1e3 * median(times) for name, times in in_turn(ways, scale.rounds).items()}
    by = "Triton" if any(device_scores._agreement.values()) else "plain torch"
    about = f"{len(pool):,} candidates of {scale.dimensions}, {scale.vectors} vectors"
    note = f"{about}, by {by} on {device.type}."

    def over_read(row: str, name: str, **more: Any) -> BenchmarkRow:
        ours, plain = (ms[way] / ms["read"] for way in (name, f"{name}, plain torch"))
        unit, ratio = "reads of the matrix", plain / ours
        return BenchmarkRow.beside(row, ours, plain, unit, note, ratio=ratio, **more)

    # The names are those of a GPU's scale.
    share = ms["read"] / ms["one"]
    yield over_read("gpu.search.10m_time_over_read_floor", "one", floor=1.0, share_of_floor=share)
    flops, peak = 2.0 * questions.numel() * len(pool), peak_flops(device, "bf16")
    ours, plain = (flops / (ms[name] / 1e3) / peak.flops for name in ("16", "16, plain torch"))
    name, unit = "gpu.search.16_contexts_share_of_peak", "of the peak of bf16"
    peak_note = f"Peak: {peak.flops / 1e12:.0f} TFLOPS, {peak.source}. {note}"
    yield BenchmarkRow.beside(name, ours, plain, unit, peak_note, floor=1.0)
    yield over_read("gpu.search.10m_bi_time_over_read_floor", "bi")


def made_up_pool(device: torch.device, scale: Scale) -> Pool:
    """A pool in memory, on the device, without files."""
    total, dimensions, matrices, lengths = scale.candidates, scale.dimensions, [], []
    for start in range(0, total, _CHUNK):
        count = min(_CHUNK, total - start)
        rows_ND = directions(count, dimensions, device, seed=2 + start).bfloat16()
        lengths.append(1.001 * rows_ND.float().norm(dim=1).cpu().numpy())
        matrices.append(rows_ND.view(torch.int16).cpu().numpy().view(np.uint16))
    norms = np.stack([np.ones(total, np.float32), np.concatenate(lengths)])
    layer = Layer(np.concatenate(matrices), norms)
    sketch = Layer(np.empty((total, 0), np.int8), norms)
    ids = pa.array(np.arange(total)).cast(pa.string())
    shard = Shard(pa.table([ids, ids, ids], ROWS), layer, sketch)
    artifact = Artifact("made-up", {"dimensions": dimensions, "dtype": "bfloat16"})
    pool = Pool(artifact, "made-up", "v", (shard,), np.empty((dimensions, 0)), (total,))
    held = device_rows.load("made-up", [shard], "bfloat16", dimensions, device, "bfloat16")
    if held is None:
        raise RuntimeError(f"{total:,} vectors do not fit in the memory of {device}")
    return replace(pool, on_device=held)


def directions(count: int, dimensions: int, device: torch.device, seed: int) -> Tensor:
    """[count, dimensions], all equally long."""
    draw = torch.Generator(device).manual_seed(seed)
    rows_ND = torch.randn(count, dimensions, generator=draw, device=device)
    rows_ND /= (1 + torch.arange(dimensions, device=device)).sqrt()
    return _LENGTH * torch.nn.functional.normalize(rows_ND)


def _require_same_scores(pool: Pool, questions: Tensor) -> None:
    """Raises RuntimeError for an answer that is not certified, or not near that of plain torch."""
    answer = top_rows(pool, questions.numpy(), _TOP_K)
    assert pool.on_device is not None
    expected_QK = plain_top(pool.on_device.matrix_ND, questions).cpu()
    is_near = np.allclose(answer.scores, expected_QK, rtol=0.05, atol=0.05 * _LENGTH)
    if not (is_near and answer.certified.all()):
        raise RuntimeError("the search's scores are not those of plain torch")


def plain_top(matrix_ND: Tensor, vectors_QMD: Tensor) -> Tensor:
    """[Q, K]: the highest scores, as one would write it: chunks of bfloat16 products, softmax, sum, topk."""
    queries, count, dimensions = vectors_QMD.shape
    vectors_DC = vectors_QMD.to(matrix_ND).reshape(-1, dimensions).T.contiguous()
    best_QK = torch.full((queries, _TOP_K), -torch.inf, device=matrix_ND.device)
    for rows_ND in torch.split(matrix_ND, _CHUNK):
        logits_NQM = (rows_ND @ vectors_DC).view(-1, queries, count)
        scores_NQ = (logits_NQM.softmax(2, dtype=torch.float32) * logits_NQM).sum(2)
        best_QK = torch.cat([best_QK, scores_NQ.T], dim=1).topk(_TOP_K).values
    return best_QK


def measure_pretraining(device: torch.device, scale: Scale) -> Iterator[BenchmarkRow]:
    yield measure_utilisation(128, device, scale)
    yield measure_utilisation(512, device, scale)
    yield measure_packing(device, scale)


def measure_utilisation(length: int, device: torch.device, scale: Scale) -> BenchmarkRow:
    """MFU of joint pre-training on made-up texts of exactly `length` tokens, without Ray.

    The micro-batches grow until one does not fit; the fastest is measured with torch.compile, too.
    """
    rates, failures = dict[str, dict[str, float]](), dict[str, str]()

    def try_size(tokens: int, compiled: bool) -> None:
        name = f"{'compiled' if compiled else 'eager'}, {tokens:,} tokens"
        lengths = (length,) * max(1, tokens // length)
        try:
            rate = training_rate(lengths, device, scale, compiled)
            rates[name] = {**rate, "micro_batch_tokens": tokens}
        except RuntimeError as problem:  # it does not fit, or cannot be compiled here
            failures[name] = f"failed: {problem}"
        torch.cuda.empty_cache()

    for tokens in scale.micro_batch_tokens:
        try_size(tokens, compiled=False)
        if failures:
            break
    if rates:
        fastest = max(rates.values(), key=lambda values: values["mfu"])
        try_size(int(fastest["micro_batch_tokens"]), compiled=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    note = {"note": f"{scale.shape.layers} layers of {scale.shape.width}, {name}."}
    best = max((values["mfu"] for values in rates.values()), default=None)
    row = f"gpu.pretrain.mfu_bert_base_{length}"
    return BenchmarkRow(row, best, "MFU", floor=1.0, detail={**rates, **failures, **note})


def measure_packing(device: torch.device, scale: Scale) -> BenchmarkRow:
    """MFU on texts of 8 to 512 tokens, packed and padded to the longest, without dropout, which no packed row
    has. Half of the padded tokens are padding."""
    draw = torch.Generator().manual_seed(0)
    count = max(4, scale.micro_batch_tokens[0] // 256)
    lengths = tuple(torch.randint(8, scale.shape.positions + 1, (count,), generator=draw).tolist())
    plain = replace(scale, shape=replace(scale.shape, dropout=0.0))
    packed, padded = (
        training_rate(lengths, device, plain, packs=packs)["mfu"] for packs in (True, False)
    )
    note = f"{count} texts of 8 to {scale.shape.positions} tokens, on {device.type}."
    return BenchmarkRow.beside("gpu.pretrain.packed_over_padded", packed, padded, "MFU", note)


def training_rate(
    lengths: tuple[int, ...],
    device: torch.device,
    scale: Scale,
    compiled: bool = False,
    packs: bool = True,
) -> dict[str, float]:
    """Steps of one micro-batch of texts of these lengths, with the optimizer. `packs`: where it can."""
    torch.manual_seed(0)
    model = PretrainingModel.new(scale.shape, scale.vocabulary, {"pad": 0, "cls": 1, "sep": 2})
    model.to(device).train()
    prepare_for_training(model, device, "bf16")
    model.encoder.packs &= packs
    step = torch.compile(model, backend=scale.compiler) if compiled else model
    optimizer = optimization(LoopConfig(precision="bf16"), model, steps=1_000)
    batch = made_up_micro_batch(lengths, scale.vocabulary).to(device)
    take_step = functools.partial(bare_step, step, [batch], optimizer, device, bf16=True)
    for _ in range(_WARM_UP_STEPS):
        take_step()
    steps, elapsed, began = 0, 0.0, timer()
    while not steps or elapsed < scale.seconds:
        take_step()
        steps, elapsed = steps + 1, timer() - began
    per_second = steps / elapsed
    cost = TrainingFlops.of(model.encoder, model.mlm)
    flops = cost.step(lengths, batch.predicted_count) * per_second
    return {
        "mfu": flops / peak_flops(device, "bf16").flops,
        "tokens_per_s": round(batch.token_count * per_second),
    }


def made_up_micro_batch(lengths: tuple[int, ...], vocabulary: int) -> MicroBatch:
    """Texts of random ids, with BERT's share of predicted tokens, and a next utterance."""
    draw = torch.Generator().manual_seed(0)
    shape = (len(lengths), max(lengths))
    mask_BT = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    ids_BT = torch.randint(5, vocabulary, shape, generator=draw) * mask_BT
    places_N = mask_BT.flatten().nonzero()[:, 0]
    predicted = max(1, round(_MASKED_SHARE * len(places_N)))
    chosen = torch.randperm(len(places_N), generator=draw)[:predicted]
    predicted_N = places_N[chosen].sort().values
    segments_BT = (torch.arange(shape[1]) >= shape[1] // 2).long().repeat(shape[0], 1)
    tokens = Tokens(ids_BT, mask_BT, lengths, segments_BT)
    is_next_B = torch.rand(shape[0], generator=draw) < 0.5
    return MicroBatch(tokens, predicted_N, ids_BT.flatten()[predicted_N], is_next_B)


def measure_embedding(config: Config, work: Path, scale: Scale) -> Iterator[BenchmarkRow]:
    """The share of the time in which the GPU computes, from the first moment with work to the last.

    Before and after them the job starts processes, and plans.
    """
    model, device = work / "gpu-encoder", torch.device(config.device)
    for folder in (model, work / "pools"):
        shutil.rmtree(folder, ignore_errors=True)
    run_job("convert_model", "--model", config.encoder, "--output", model,
            "--max-candidate-tokens", _EMBEDDED_TOKENS)  # fmt: skip
    corpus = open_artifact(config.corpus[0], "corpus")
    turns = read_texts([corpus], scale.texts * _TURNS_OF_A_TEXT)
    starts = range(0, len(turns), _TURNS_OF_A_TEXT)
    texts = itertools.cycle(" ".join(turns[start : start + _TURNS_OF_A_TEXT]) for start in starts)
    # With a number each, as what is alike is embedded once.
    table = {str(number): f"{number} {next(texts)}" for number in range(scale.texts)}
    on_device = ("--resources.gpu", "true") if device.type == "cuda" else ()
    with busy_shares(device) as shares:
        embed(str(model), table, work / "pools", "texts", *on_device)
    facts = Pool.open(str(work / "pools" / "texts")).artifact.manifest["embedded"]
    busy = [place for place, share in enumerate(shares) if share]
    share = mean(shares[busy[0] : busy[-1] + 1]) / 100 if busy else None
    note = f"{len(table):,} texts, of {facts['seconds']:.0f} s {facts['actor_seconds']:.0f} in the model."
    yield BenchmarkRow.alone("gpu.embed.busy_share", share, "of the time", note)


@contextmanager
def busy_shares(device: torch.device) -> Iterator[list[int]]:
    """Per cent of the time in which the GPU computes, five times a second, by the driver's counter (NVML),
    while the context is open; none of a CPU."""
    shares, ended = list[int](), Event()

    def look() -> None:
        while not ended.wait(_SECONDS_OF_A_LOOK):
            shares.append(torch.cuda.utilization(device))

    with ThreadPoolExecutor(1) as thread:
        if device.type == "cuda":
            thread.submit(look)
        try:
            yield shares
        finally:
            ended.set()
