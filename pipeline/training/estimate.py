"""Estimates a training: sizes, steps and memory, and hours at a rate measured on this machine."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipeline.cost import Estimate
from pipeline.engine.resources import best_device
from pipeline.models.encoder import prepare_for_training
from pipeline.models.flops import TrainingFlops
from pipeline.training.finetuning import Finetuning
from pipeline.training.loop import Autocast, Listener, StepMetrics, Task, train
from pipeline.training.pretraining import Pretraining
from pipeline.training.settings import LoopConfig, Workers

# Bytes of float32 weights, gradients and the two moments of Adam.
_BYTES_PER_PARAMETER = 16
_MEASURED_SECONDS = 5.0


def estimate_pretraining(
    recipe: Pretraining, workers: Workers, steps_done: int = 0
) -> tuple[Estimate, dict[str, Any]]:
    """Computes a few micro-batches to measure the rate; (estimate, further facts).

    `steps_done`: those of the run that this one continues.
    """
    config = recipe.pretrain
    # Steps of one micro-batch each: on a CPU, a step of all of them may take more than an hour.
    lane = config.lane_tokens
    short_steps = replace(config, batch_tokens=lane, micro_batch_tokens=lane)
    task = replace(recipe, pretrain=short_steps).build(0, 1)
    model, start_note = recipe.model()
    parameters = sum(value.numel() for value in model.parameters())
    corpus_tokens = sum(corpus.train_tokens for corpus in recipe.corpora)
    # Of the longest row, with its predicted tokens.
    share = config.masked_share if config.predicts_tokens(step=0) else 0
    predicted = round(share * config.longest_row)
    flops = TrainingFlops.of(model.encoder, model.mlm).step([config.longest_row], predicted)
    steps = config.steps - steps_done
    measured = _measure(task, recipe.loop, workers)
    measured_tokens = sum(
        step["tokens_per_s"] / step["steps_per_s"] for step in measured.metrics_of_steps
    )
    step_tokens = config.batch_tokens
    if config.single_texts:  # a step has so many pairs, however short they are
        step_tokens = round(config.lanes * measured_tokens / measured.steps)
    tokens, rate = steps * step_tokens, measured_tokens / measured.seconds
    sharded = workers.workers if workers.shard_weights else 1
    memory, memory_is = _pretraining_memory(
        measured.kept_bytes, parameters, sharded, config.gradient_checkpointing
    )
    entries = [e for corpus in recipe.corpora for e in corpus.artifact.manifest["files"]]
    estimate = measured.estimate(
        tokens / rate / 3600,
        "micro-batches",
        input_files=len(entries),
        input_bytes=sum(entry["bytes"] for entry in entries),
        steps=steps,
        memory_bytes=memory,
    )
    return estimate, {
        "memory_is": memory_is,
        "parameters": parameters,
        "start": start_note,
        "corpus_tokens": corpus_tokens,
        "batch_tokens": config.batch_tokens,
        "micro_batches_per_step": config.lanes,
        "tokens_to_train": tokens,
        "epochs": round(tokens / corpus_tokens, 2),
        "tokens_per_s_per_worker": round(rate),
        "flops_per_token": flops // config.longest_row,
        "workers": workers.workers,
        "hours": round(tokens / rate / workers.workers / 3600, 2),
    }


def estimate_finetuning(
    recipe: Finetuning, workers: Workers, steps_done: int = 0
) -> tuple[Estimate, dict[str, Any]]:
    """Computes a few steps of one worker to measure its rate; (estimate, further facts).

    `steps_done`: those of the run that this one continues.
    """
    task = recipe.build(0, workers.workers)
    sizes = [(value.numel(), value.requires_grad) for value in task.ranker.parameters()]
    trained = sum(size for size, is_trained in sizes if is_trained)
    steps = task.steps - steps_done
    measured = _measure(task, recipe.loop, workers)
    hours = steps * measured.seconds / measured.steps / 3600
    memory, memory_is = torch.cuda.max_memory_allocated(), "the peak of these steps"
    if best_device().type == "cpu":
        memory = 4 * sum(size for size, _ in sizes) + (_BYTES_PER_PARAMETER - 4) * trained
        memory_is = "of weights, gradients and moments; activations come on top"
    estimate = measured.estimate(
        hours * workers.workers,
        "steps",
        input_files=len(recipe.corpus.paths("train/", ".parquet")),
        input_bytes=sum(entry["bytes"] for entry in recipe.corpus.manifest["files"]),
        rows=recipe.corpus.rows("train/"),
        steps=steps,
        memory_bytes=memory,
    )
    return estimate, {
        "memory_is": memory_is,
        "parameters": task.parameters,
        "trained_parameters": trained,
        "examples_per_worker": recipe.finetune.batch_examples // workers.workers,
        "workers": workers.workers,
        "hours": round(hours, 4),
        "hours_are": "of its steps; validations and mining come on top",
    }


def _pretraining_memory(
    kept_bytes: int, parameters: int, sharded: int, recomputes: bool = False
) -> tuple[int, str]:
    """(bytes of a worker whose weights are sharded over `sharded` workers, what was counted). `recomputes`:
    layers are computed again on the way back (gradient checkpointing)."""
    weights = parameters * _BYTES_PER_PARAMETER
    if best_device().type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        return peak - weights + weights // sharded, "the peak of these micro-batches"
    kept = weights // sharded + kept_bytes
    kinds = "of weights, gradients, moments and the activations kept for the way back"
    # What a layer keeps that is computed again is not seen: it is made and dropped within the way back.
    return kept, f"{kinds}; those of one layer come on top" if recomputes else kinds


class _Measured(NamedTuple):
    """The steps of some seconds, but at least two. The first one, which takes memory for the first time, is
    not counted."""

    metrics_of_steps: list[dict[str, float]]
    seconds: float
    kept_bytes: int
    """Bytes that the first step kept for the backward pass, the weights not counted."""
    workers: Workers
    threads: int

    @property
    def steps(self) -> int:
        return len(self.metrics_of_steps)

    def estimate(self, hours: float, unit: str, **quantities: int) -> Estimate:
        """`hours` of one worker after the other."""
        device = best_device()
        on_gpu = device.type == "cuda"
        basis = f"{self.steps} {unit}, measured on {device} ({self.threads} threads)"
        return Estimate(
            cpu_hours=None if on_gpu else hours * self.threads,
            gpu_hours=hours if on_gpu else None,
            basis=f"{basis}; GPUs take less" if self.workers.gpu and not on_gpu else basis,
            **quantities,
        )


def _measure(task: Task, loop: LoopConfig, workers: Workers) -> _Measured:
    """Trains with one worker, which has its share of this machine's cores."""
    cores, device, times = torch.get_num_threads(), best_device(), list[float]()
    threads = workers.cpus_per_worker or max(1, cores // workers.workers)
    metrics_of_steps, kept_by_address = list[dict[str, float]](), dict[int, int]()

    def keep(step: int, metrics: dict[str, float]) -> None:
        times.append(time.perf_counter())
        metrics_of_steps.append(metrics)

    def note(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        kept_by_address[memory.data_ptr()] = memory.nbytes()
        return tensor

    def backward(model: nn.Module, batch: Any, autocast: Autocast) -> tuple[Tensor, StepMetrics]:
        with nullcontext() if times else saved_tensors_hooks(note, lambda tensor: tensor):
            return task.backward(model, batch, autocast)

    prepare_for_training(task.module.to(device), device, loop.precision)
    few = replace(task, backward=backward, steps=max(2, task.steps), validation=None, miner=None)
    listener = Listener(
        keep,
        is_terminated=lambda: bool(times) and time.perf_counter() - times[0] > _MEASURED_SECONDS,
    )
    torch.set_num_threads(threads)
    try:
        few_settings = LoopConfig(precision=loop.precision, log_every_steps=1)
        train(few, task.module, few_settings, device, 0, listener)
    finally:
        torch.set_num_threads(cores)
    for parameter in task.module.parameters():
        kept_by_address.pop(parameter.untyped_storage().data_ptr(), None)
    kept_bytes = sum(kept_by_address.values())
    return _Measured(metrics_of_steps[1:], times[-1] - times[0], kept_bytes, workers, threads)
