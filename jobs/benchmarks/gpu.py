"""Measurements that need a GPU, in ten minutes: tests; search; pre-training, fine-tuning, embedding, /rank.

Each part's rows are written at once, so that a run that is stopped keeps them. With the device "cpu" the same
code runs on tiny shapes, to see that it runs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
import torch

from jobs.benchmarks import gpu_search, pretrain
from jobs.benchmarks.measure import BenchmarkRow, run_job
from jobs.benchmarks.paper import trials
from jobs.benchmarks.pretraining_peers import bare_step
from pipeline import storage
from pipeline.artifact import open_artifact
from pipeline.config import BadInput
from pipeline.models import inference
from pipeline.models.flops import TrainingFlops, peak_flops
from pipeline.models.placement import prepare_for_training
from pipeline.models.pretraining_heads import PretrainingModel
from pipeline.models.ranker import load_ranker
from pipeline.models.shape import Shape
from pipeline.models.tokens import Tokens
from pipeline.training.optimization import optimization
from pipeline.training.pretraining_batches import MicroBatch
from pipeline.training.settings import LoopConfig

Device = Literal["cuda", "cpu"]

_ROOT = Path(__file__).parents[2]
_LENGTHS = (128, 512)
_ARCHITECTURES = ("bi", "poly", "cross")
_MASKED_SHARE = 0.15
_WARM_UP_STEPS = 3
_JOB_TOKENS = 65_536  # of a step of jobs.pretrain, one micro-batch


@dataclass(frozen=True)
class _Scale:
    """The amount of work on a device."""

    shape: Shape
    vocabulary: int
    micro_batch_tokens: tuple[int, ...]
    """Tried in turn, until one does not fit."""
    seconds: float
    """Least duration of a measurement."""
    steps: int
    """Steps of jobs.pretrain and jobs.finetune."""
    texts: int
    """Most texts to embed."""
    compiler: str
    """Backend of torch.compile; "eager" traces the model and runs it as it is."""


_SCALES: dict[Device, _Scale] = {
    "cuda": _Scale(
        Shape(), 30_522, (4_096, 16_384, 32_768, 65_536, 131_072), seconds=5.0, steps=100,
        texts=200_000, compiler="inductor",
    ),
    "cpu": _Scale(
        Shape(layers=2, width=64, heads=2), 300, (1_024,), seconds=0.0, steps=4, texts=50,
        compiler="eager",
    ),
}  # fmt: skip


def measure(
    device: Device,
    encoder: str,
    corpus: Sequence[str],
    work: Path,
    keep: Callable[[Sequence[BenchmarkRow]], None] = lambda rows: None,
) -> list[BenchmarkRow]:
    """Rows of one GPU; none, and a line that says so, where there is none. A part that fails is a row that
    says why, and the other parts count nevertheless.

    `corpus`: for pre-training and fine-tuning; none: the sample corpora. `encoder` is fine-tuned; "": the
    output of jobs.pretrain. `keep` gets all rows so far after each part.
    """
    if device == "cuda" and not torch.cuda.is_available():
        print("gpu: there is no GPU here, so nothing is measured", flush=True)
        return []
    work, scale = work / "gpu", _SCALES[device]
    sizes: pretrain.Size = "full" if device == "cuda" else "small"
    rows = list[BenchmarkRow]()

    def measure_part(
        name: str, part: Callable[..., list[BenchmarkRow]], *arguments: object
    ) -> None:
        rows.extend(_attempt(name, part, *arguments))
        keep(rows)

    place, search_scale = torch.device(device), gpu_search.SCALES[device]
    if device == "cuda":
        measure_part("gpu.tests", _run_gpu_tests)
    measure_part("gpu.search", gpu_search.measure, place, search_scale)
    measure_part("gpu.search.peers", gpu_search.measure_peers, place, search_scale)
    for length in _LENGTHS:
        rows.append(_utilisation(length, place, scale))
        keep(rows)
    trained_encoder = work / "encoder"
    tokens = pretrain.tokens(sizes, corpus[0] if corpus else "", work)
    measure_part("gpu.pretrain.job_mfu", _pretraining_job, tokens, trained_encoder, device, scale)
    conversations = corpus[0] if corpus else pretrain.sample_corpora(sizes, work)["convai2"]
    start = encoder or str(trained_encoder)
    for name in _ARCHITECTURES:
        output = work / name
        measure_part(
            f"gpu.finetune.{name}", _finetuning, name, start, conversations, output, device, scale
        )
    measure_part("gpu.embed.texts_per_s", _embedding, work / "bi", conversations, place, scale)
    measure_part(
        "gpu.search.rank", gpu_search.measure_service, work / "poly", work / "cross", conversations,
        work, place, search_scale,
    )  # fmt: skip
    return rows


def _attempt(
    name: str, part: Callable[..., list[BenchmarkRow]], *arguments: object
) -> list[BenchmarkRow]:
    """The part's rows; a row of this name that says why, where its job fails or the device refuses."""
    try:
        return part(*arguments)
    except (BadInput, RuntimeError) as problem:
        return [BenchmarkRow(name, None, "", detail={"failed": str(problem)})]


def _run_gpu_tests() -> list[BenchmarkRow]:
    """The tests that are marked `gpu`; they stand in the checkout only."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    process = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    last_lines = process.stdout.strip().splitlines()[-1:] or [process.stderr.strip()[-200:]]
    counts = {
        name: int(number)
        for number, name in re.findall(r"(\d+) (passed|failed|skipped|error)", last_lines[0])
    }
    passed = counts.get("passed", 0) if process.returncode == 0 else None
    return [BenchmarkRow("gpu.tests", passed, "passed", detail={"pytest": last_lines[0]})]


# -------------------------------------------------------------------------------------------------
# Pre-training


def _utilisation(length: int, device: torch.device, scale: _Scale) -> BenchmarkRow:
    """MFU of joint pre-training on made-up texts of exactly `length` tokens, without Ray.

    The micro-batches grow until one does not fit; the fastest is measured with torch.compile, too.
    """
    rates, failures = dict[str, dict[str, float]](), dict[str, str]()

    def attempt(tokens: int, compiled: bool) -> None:
        name = f"{'compiled' if compiled else 'eager'}, {tokens:,} tokens"
        try:
            rates[name] = _rate(tokens, length, device, scale, compiled)
        except RuntimeError as problem:  # it does not fit, or cannot be compiled here
            failures[name] = f"failed: {problem}"
        torch.cuda.empty_cache()

    for tokens in scale.micro_batch_tokens:
        attempt(tokens, compiled=False)
        if failures:
            break
    if rates:
        fastest = max(rates.values(), key=lambda values: values["mfu"])
        attempt(int(fastest["micro_batch_tokens"]), compiled=True)
    peak = peak_flops(device, "bf16")
    return BenchmarkRow(
        f"gpu.pretrain.mfu_bert_base_{length}",
        max((values["mfu"] for values in rates.values()), default=None), "MFU", floor=1.0,
        detail={**rates, **failures, "peak, TFLOPS": round(peak.flops / 1e12, 1), "peak is": peak.source,
                "device": _device_name(device)},
    )  # fmt: skip


def _rate(
    tokens: int, length: int, device: torch.device, scale: _Scale, compiled: bool
) -> dict[str, float]:
    """Steps of one micro-batch each, with the optimizer."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(0)
    model = PretrainingModel.new(scale.shape, scale.vocabulary, {"pad": 0, "cls": 1, "sep": 2})
    model.to(device).train()
    prepare_for_training(model, device, "bf16")
    step = torch.compile(model, backend=scale.compiler) if compiled else model
    optimizer = optimization(LoopConfig(precision="bf16"), model, steps=1_000)
    batch = made_up_micro_batch(max(1, tokens // length), length, scale.vocabulary).to(device)
    steps, began, elapsed = 0, 0.0, 0.0
    while steps <= _WARM_UP_STEPS or elapsed < scale.seconds:
        if steps == _WARM_UP_STEPS:
            _synchronise(device)
            began = time.perf_counter()
        bare_step(step, [batch], optimizer, device, bf16=True)
        steps += 1
        if steps > _WARM_UP_STEPS:
            _synchronise(device)
            elapsed = time.perf_counter() - began
    per_second = (steps - _WARM_UP_STEPS) / elapsed
    cost = TrainingFlops.of(model.encoder, model.mlm)
    flops = cost.step(batch.tokens.lengths, batch.predicted_count) * per_second
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    return {
        "mfu": flops / peak_flops(device, "bf16").flops,
        "tokens_per_s": round(batch.token_count * per_second),
        "micro_batch_tokens": tokens,
        "memory_gib": round(memory, 1),
    }


def made_up_micro_batch(texts: int, length: int, vocabulary: int) -> MicroBatch:
    """Random ids without padding, with BERT's share of predicted tokens, and a next utterance."""
    draw = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(5, vocabulary, (texts, length), generator=draw)
    predicted = max(1, round(_MASKED_SHARE * ids_BT.numel()))
    predicted_N = torch.randperm(ids_BT.numel(), generator=draw)[:predicted].sort().values
    segments_BT = (torch.arange(length) >= length // 2).long().repeat(texts, 1)
    tokens = Tokens(
        ids_BT, torch.ones_like(ids_BT, dtype=torch.bool), (length,) * texts, segments_BT
    )
    is_next_B = torch.rand(texts, generator=draw) < 0.5
    return MicroBatch(tokens, predicted_N, ids_BT.flatten()[predicted_N], is_next_B)


def _synchronise(device: torch.device) -> None:
    """Calls to a GPU return before it has computed anything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _pretraining_job(
    corpus: str, output: Path, device: Device, scale: _Scale
) -> list[BenchmarkRow]:
    shape = scale.shape
    shutil.rmtree(output, ignore_errors=True)
    tokens = min(_JOB_TOKENS, max(scale.micro_batch_tokens))
    run = run_job(
        "pretrain", "--corpus", corpus, "--output", output,
        "--shape.layers", shape.layers, "--shape.width", shape.width,
        "--shape.heads", shape.heads, "--pretrain.steps", scale.steps,
        "--pretrain.batch-tokens", tokens, "--pretrain.micro-batch-tokens", tokens,
        "--loop.validate-every-steps", 0, "--loop.validate-every-epochs", 0,
        "--loop.log-every-steps", max(1, scale.steps // 4), "--keep-training-state", "false",
        *_resource_options(device),
    )  # fmt: skip
    metrics = run.summary["metrics"]
    names = ("tokens_per_s", "data_wait_share", "peak_memory_mib")
    detail: dict[str, Any] = {name: metrics[name] for name in names}
    return [BenchmarkRow("gpu.pretrain.job_mfu", metrics["mfu"], "MFU", detail=detail)]


# -------------------------------------------------------------------------------------------------
# Rankers


def _finetuning(
    architecture: str, encoder: str, corpus: str, output: Path, device: Device, scale: _Scale
) -> list[BenchmarkRow]:
    shutil.rmtree(output, ignore_errors=True)
    run = run_job(
        "finetune", *trials.recipe("convai2", architecture, "small"), "--corpus", corpus,
        "--encoder", encoder, "--output", output, "--finetune.max-steps", scale.steps,
        *_resource_options(device),
    )  # fmt: skip
    batch = int(
        open_artifact(str(output), "ranker").manifest["config"]["finetune"]["batch_examples"]
    )
    metrics = run.summary["metrics"]
    rate = float(metrics["mean_steps_per_s"]) * batch
    detail = {"steps": metrics["step"], "batch": batch}
    return [
        BenchmarkRow(
            f"gpu.finetune.{architecture}.samples_per_s", rate, "samples/s", detail=detail
        ),
        BenchmarkRow(f"gpu.finetune.{architecture}.valid_r1", metrics["best_valid_r1"], "R@1"),
    ]


def _embedding(
    bi_encoder: Path, corpus: str, device: torch.device, scale: _Scale
) -> list[BenchmarkRow]:
    """Responses of the train split, tokenizing included."""
    artifact = open_artifact(str(bi_encoder), "ranker")
    ranker = inference.prepare(load_ranker(artifact.local()), device)
    texts = list[str]()
    for uri in open_artifact(corpus, "corpus").files("train/", ".parquet"):
        with storage.open_input(uri) as stream:
            texts += pq.read_table(stream, columns=["response"])["response"].to_pylist()
    texts = texts[: scale.texts]
    inference.candidate_vectors(ranker, texts[:1_000])  # the first call loads kernels
    began = time.perf_counter()
    inference.candidate_vectors(ranker, texts)
    seconds = time.perf_counter() - began
    detail = {"texts": len(texts)}
    return [BenchmarkRow("gpu.embed.texts_per_s", len(texts) / seconds, "texts/s", detail=detail)]


def _resource_options(device: Device) -> tuple[str, ...]:
    return ("--resources.gpu", "true") if device == "cuda" else ("--resources.cpus-per-worker", "1")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
