"""Estimates a training: sizes, steps and memory, and hours at a rate measured on this machine."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipeline.cost import Estimate
from pipeline.models.encoder import prepare_for_training
from pipeline.models.flops import TrainingFlops
from pipeline.models.precision import resolve_precision
from pipeline.training.finetuning import Finetuning
from pipeline.training.loop import Task
from pipeline.training.pretraining import Pretraining
from pipeline.training.settings import LoopConfig, Workers

# Bytes of float32 weights, gradients and the two moments of Adam.
_BYTES_PER_PARAMETER = 16
_MEASURED_SECONDS = 5.0


def estimate_pretraining(
    recipe: Pretraining, workers: Workers, device: torch.device, steps_done: int = 0
) -> tuple[Estimate, dict[str, Any]]:
    """Computes a few micro-batches on `device` to measure its rate; (estimate, further facts).

    `steps_done`: those of the run that this one continues.
    """
    config = recipe.pretrain
    # Steps of one micro-batch each: on a CPU, a step of all of them may take more than an hour.
    lane = config.lane_tokens
    short_steps = replace(config, batch_tokens=lane, micro_batch_tokens=lane)
    task = replace(recipe, pretrain=short_steps).build(0, 1)
    model, start_note = recipe.model()
    parameters = sum(value.numel() for value in model.parameters())
    sharded = workers.workers if workers.shard_weights else 1
    measured = _measure(task, recipe.loop, device, workers, -(-config.lanes // workers.workers))
    memory, memory_is = _pretraining_memory(
        measured, parameters, sharded, device, config.gradient_checkpointing
    )
    rate = measured.work["tokens"] / measured.seconds
    steps = config.steps - steps_done
    step_tokens = config.batch_tokens
    if config.single_texts:  # a step has so many pairs, however short they are
        step_tokens = round(config.lanes * measured.work["tokens"] / measured.steps)
    tokens = steps * step_tokens
    # Of the longest row, with its predicted tokens.
    share = config.masked_share if config.predicts_tokens(step=0) else 0
    predicted = round(share * config.longest_row)
    flops = TrainingFlops.of(model.encoder, model.mlm).step([config.longest_row], predicted)
    cpu_hours, gpu_hours = _hours(tokens / rate / 3600, measured, device)
    corpus_tokens = sum(corpus.train_tokens for corpus in recipe.corpora)
    entries = [e for corpus in recipe.corpora for e in corpus.artifact.manifest["files"]]
    estimate = Estimate(
        input_files=len(entries),
        input_bytes=sum(entry["bytes"] for entry in entries),
        steps=steps,
        memory_bytes=memory,
        cpu_hours=cpu_hours,
        gpu_hours=gpu_hours,
        basis=_basis(measured, "micro-batches", workers, device),
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
    recipe: Finetuning, workers: Workers, device: torch.device, steps_done: int = 0
) -> tuple[Estimate, dict[str, Any]]:
    """Computes a few steps of one worker on `device` to measure its rate; (estimate, further facts).

    `steps_done`: those of the run that this one continues.
    """
    task = recipe.build(0, workers.workers)
    sizes = [(value.numel(), value.requires_grad) for value in task.ranker.parameters()]
    trained = sum(size for size, is_trained in sizes if is_trained)
    weights = sum(size for size, _ in sizes)
    measured = _measure(task, recipe.loop, device, workers)
    steps = task.steps - steps_done
    hours = steps * measured.seconds / measured.steps / 3600
    cpu_hours, gpu_hours = _hours(hours * workers.workers, measured, device)
    on_gpu = device.type == "cuda"
    estimate = Estimate(
        input_files=len(recipe.corpus.paths("train/", ".parquet")),
        input_bytes=sum(entry["bytes"] for entry in recipe.corpus.manifest["files"]),
        rows=recipe.corpus.rows("train/"),
        steps=steps,
        memory_bytes=torch.cuda.max_memory_allocated(device)
        if on_gpu
        else 4 * weights + (_BYTES_PER_PARAMETER - 4) * trained,
        cpu_hours=cpu_hours,
        gpu_hours=gpu_hours,
        basis=_basis(measured, "steps", workers, device),
    )
    return estimate, {
        "memory_is": "the peak of these steps"
        if on_gpu
        else "of weights, gradients and moments; activations come on top",
        "parameters": task.parameters,
        "trained_parameters": trained,
        "examples_per_worker": recipe.finetune.batch_examples // workers.workers,
        "workers": workers.workers,
        "hours": round(hours, 4),
        "hours_are": "of its steps; validations and mining come on top",
    }


def _hours(
    hours: float, measured: _MeasuredSteps, device: torch.device
) -> tuple[float | None, float | None]:
    """(core hours, GPU hours) of a process that takes `hours` on this device."""
    return (None, hours) if device.type == "cuda" else (hours * measured.threads, None)


def _pretraining_memory(
    measured: _MeasuredSteps,
    parameters: int,
    sharded: int,
    device: torch.device,
    recomputes: bool = False,
) -> tuple[int, str]:
    """(bytes of a worker whose weights are sharded over `sharded` workers, what was counted). `recomputes`:
    layers are computed again on the way back (gradient checkpointing)."""
    weights = parameters * _BYTES_PER_PARAMETER
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        return peak - weights + weights // sharded, "the peak of these micro-batches"
    kept = weights // sharded + measured.kept_bytes
    kinds = "of weights, gradients, moments and the activations kept for the way back"
    # What a layer keeps that is computed again is not seen: it is made and dropped within the way back.
    return kept, f"{kinds}; those of one layer come on top" if recomputes else kinds


def _basis(measured: _MeasuredSteps, unit: str, workers: Workers, device: torch.device) -> str:
    basis = f"{measured.steps} {unit}, measured on {device} ({measured.threads} threads)"
    on_cpu = workers.gpu and device.type != "cuda"
    return f"{basis}; GPUs take less" if on_cpu else basis


@dataclass(frozen=True)
class _MeasuredSteps:
    """Measured steps, with their work and their time."""

    steps: int
    work: dict[str, float]
    seconds: float
    threads: int
    kept_bytes: int
    """Bytes that the first step kept for the backward pass, the weights not counted."""


def _measure(
    task: Task, loop: LoopConfig, device: torch.device, workers: Workers, update_every: int = 1
) -> _MeasuredSteps:
    """The rate of one worker with its share of this machine's cores, in some seconds, but at least two steps.
    The first one is not counted.

    `update_every`: steps whose gradients are added up before they change the weights.
    """
    cores = torch.get_num_threads()
    threads = workers.cpus_per_worker or max(1, cores // workers.workers)
    module = task.module.to(device).train()
    prepare_for_training(module, device, loop.precision)
    bf16 = resolve_precision(loop.precision, device) == "bf16"
    optimization = task.optimize()
    batches = task.batches.start(())
    work, began, number = Counter[str](), time.perf_counter(), 0
    kept_by_address = dict[int, int]()

    def note(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        kept_by_address[memory.data_ptr()] = memory.nbytes()
        return tensor

    torch.set_num_threads(threads)
    try:
        for number, (batch, _) in enumerate(batches):
            autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
            with saved_tensors_hooks(note, lambda tensor: tensor) if number == 0 else nullcontext():
                task.backward(module, batch.to(device), autocast)
            if number % update_every == 0:
                optimization.clip()
                optimization.optimizer.step()
                optimization.optimizer.zero_grad(set_to_none=True)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number == 0:  # makes the optimizer's moments and takes memory for the first time
                began = time.perf_counter()
                continue
            work.update(task.work(batch))
            if time.perf_counter() - began > _MEASURED_SECONDS:
                break
    finally:
        batches.close()
        torch.set_num_threads(cores)
    seconds = time.perf_counter() - began
    for parameter in module.parameters():
        kept_by_address.pop(parameter.untyped_storage().data_ptr(), None)
    return _MeasuredSteps(number, dict(work), seconds, threads, sum(kept_by_address.values()))
