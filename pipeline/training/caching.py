"""Gradient caching (GradCache: Gao, Zhang, Han and Callan, 2021): large batches in little memory.

    1. encode the batch in chunks, without a graph         memory: one chunk, and a row per example
    2. the loss of all rows, and its gradient by the rows  memory: the scores
    3. encode each chunk again, with a graph, and go back  memory: one chunk and its graph
       from the gradient of its rows

The gradients are those of the whole batch, because each row comes from its example alone. The price is a
second encoding without a graph: a step takes about a third longer.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.training.loop import Autocast, Backward
from pipeline.training.meter import StepMetrics
from pipeline.training.objectives import Objective


def backward(model: nn.Module, batch: Any, autocast: Autocast) -> tuple[Tensor, StepMetrics]:
    """Computes the loss and its gradients on the whole batch at once."""
    with autocast:
        loss, metrics = model(batch)
    torch.autograd.backward(loss)
    return loss.detach(), metrics


def cached_backward(objective: Objective, chunk_examples: int) -> Backward:
    """A `backward` that works in chunks of `chunk_examples` examples. Its `model` is `objective`, wrapped
    for its ranks.

    Both encodings of a chunk draw the same dropout, which follows from torch's generator.
    """

    def run(model: nn.Module, batch: Any, autocast: Autocast) -> tuple[Tensor, StepMetrics]:
        parts = [
            batch.part(start, start + chunk_examples)
            for start in range(0, len(batch), chunk_examples)
        ]
        seeds = torch.randint(1 << 62, (len(parts),)).tolist()
        chunks = []
        with torch.no_grad(), autocast:
            for part, seed in zip(parts, seeds, strict=True):
                torch.manual_seed(seed)
                chunks.append(objective.encode(part))
        rows = [torch.cat(tensors) for tensors in zip(*chunks, strict=True)]
        floats = [tensor.requires_grad_() for tensor in rows if tensor.is_floating_point()]
        loss, metrics = objective.loss(rows, batch)
        torch.autograd.backward(loss)
        # Weights that only the loss uses have their gradients now. DistributedDataParallel averages
        # those of the weights that it sees in the last chunk.
        loss_parameters = [value for value in objective.parameters() if value.grad is not None]
        gradients = zip(
            *(torch.split(_gradient(tensor), chunk_examples) for tensor in floats), strict=True
        )
        for number, (part, seed, gradient) in enumerate(zip(parts, seeds, gradients, strict=True)):
            is_last = number == len(parts) - 1
            sync_context: Any = nullcontext if is_last else getattr(model, "no_sync", nullcontext)
            torch.manual_seed(seed)
            with sync_context():
                with autocast:
                    stand_in = model(part, gradient)
                if is_last:
                    stand_in = stand_in + sum((value * 0).sum() for value in loss_parameters)
                torch.autograd.backward(stand_in)
        return loss.detach(), metrics

    return run


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
