"""The training loop, for pre-training and for every architecture. It knows no model.

A `Task` holds the model, the batches, the optimization and the validation. Schedules
are functions of the step and of the validations so far, and dropout is seeded by (seed, step, rank), so a
checkpoint holds weights, optimizer state, the step, what validations decided, the task's own state and
the ranks' cursors. A killed run, once resumed, ends with the same weights as an undisturbed one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config import Stopped
from pipeline.models.precision import resolve_precision
from pipeline.training.checkpoints import (
    load_training_state,
    load_weights,
    training_state,
    weights_of,
)
from pipeline.training.meter import UNSAVED, Meter, StepMetrics
from pipeline.training.optimization import Optimization
from pipeline.training.selection import Measured, Selection
from pipeline.training.settings import LoopConfig

Autocast = AbstractContextManager[Any]
Cursor = Any
"""JSON-ready: where a rank stands in its batches."""


Backward = Callable[[nn.Module, Any, Autocast], tuple[Tensor, StepMetrics]]
"""(model, batch, autocast) → the loss, whose gradients are added up, and numbers to show."""


class BatchSource(Protocol):
    """Batches of one rank, for ever. A batch has `to(device)`."""

    @property
    def steps_per_epoch(self) -> float:
        """Steps in a pass over the examples; an estimate where batches hold tokens, not examples."""

    def start(self, cursors: Sequence[Cursor]) -> Generator[tuple[Any, Cursor]]:
        """(batch, the cursor after it), from the saved cursors of all ranks on; none: from the first."""


class NegativeMiner(Protocol):
    """Mines hard negatives again and again with the current weights."""

    every_steps: int

    def __call__(self) -> None:
        """Mines them anew; a collective call."""

    def state(self) -> dict[str, Any]:
        """The state in a checkpoint: the weights that it was mined with may no longer exist."""

    def load(self, state: dict[str, Any]) -> None:
        """Takes a `state` back."""


def no_hook(step: int) -> None:
    """The hook of a task that needs none."""


def no_work(batch: Any) -> Mapping[str, float]:
    """The work of a task that counts none."""
    return {}


@dataclass(kw_only=True)
class Task:
    """The training of one rank."""

    module: nn.Module
    """forward(batch), as `backward` calls it."""
    batches: BatchSource
    optimize: Callable[[], Optimization]
    """Makes the optimizer. Called when the module's weights are where they train, as sharding makes new
    parameters of them."""
    backward: Backward
    steps: int
    """Steps of the whole run."""
    save: Callable[[Path], None]
    """Writes the trained model into a folder."""
    validation: Callable[[], Measured] | None = None
    """Measures `module`; a collective call. None: there is nothing to validate on."""
    miner: NegativeMiner | None = None
    """Mines the batches' hard negatives; None: there are none."""
    before_step: Callable[[int], None] = no_hook
    """Called with each step's number, from 0: annealed scales, ranges of quantisation. What it sets
    follows from the step, or lies in the module's buffers: checkpoints hold nothing else of it."""
    work: Callable[[Any], Mapping[str, float]] = no_work
    """The work in a rank's batch, such as {"tokens": 4000.0}; shown per second over all ranks."""


@dataclass(frozen=True)
class Progress:
    """A report of the loop."""

    step: int
    """Steps done."""
    metrics: dict[str, float]
    """Means over the steps since the last report, over all ranks."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint: the state, which all ranks share, and the cursor of each rank."""

    state: dict[str, Any]
    cursors: list[Cursor]

    @property
    def skipped_steps(self) -> int:
        """Steps so far that changed no weights; states of earlier code do not count them."""
        return int(self.state.get("skipped_steps", 0))


@dataclass(frozen=True)
class Listener:
    """The callbacks of a run."""

    progress: Callable[[Progress], None]
    checkpoint: Callable[[dict[str, Any], Cursor], None]
    """(state, this rank's cursor), on every rank; the state's tensors go on training afterwards."""
    save_bad_batch: Callable[[int, Any], str] = lambda step, batch: ""
    """(step, batch) → the URI under which the batch was saved."""


def validation_steps(task: Task, config: LoopConfig) -> int:
    """Steps from one validation to the next; 0: none.

    Raises BadInput for settings that need validations if there are none.
    """
    if task.validation is None:
        config.check_unvalidated("where the corpus has no valid split")
        return 0
    if config.validate_every_steps:
        return config.validate_every_steps
    if not config.validate_every_epochs:
        return 0
    return max(1, round(config.validate_every_epochs * task.batches.steps_per_epoch))


def train(
    task: Task,
    model: nn.Module,
    config: LoopConfig,
    device: torch.device,
    rank: int,
    listener: Listener,
    resume: Callable[[], Saved | None] = lambda: None,
) -> None:
    """Trains up to `task.steps` steps, and leaves the weights that are the result in the module.

    `model` is `task.module`, wrapped for its ranks. `listener.checkpoint` is called on every rank every
    `checkpoint_every_steps` and at the end; `resume` returns what an earlier run saved.

    Raises Stopped if the loss or the gradient is not finite `max_skipped_steps` times in a row.
    """
    module, steps, optimization = task.module, task.steps, task.optimize()
    validate_every = validation_steps(task, config)
    decay = config.plateau_decay if config.schedule == "plateau" else 1.0
    selection = Selection(decay, config.stop_after_validations, config.keep_weights == "last")
    step, skipped_steps, cursors = _resume(task, optimization.optimizer, selection, resume)
    batches = task.batches.start(cursors)
    bf16 = resolve_precision(config.precision, device) == "bf16"
    model.train()
    meter, skipped_in_a_row = Meter(device, skipped_steps), 0
    cursor: Cursor = None
    while step < steps and not selection.stop:
        # Before a step, not after one: a longer run that goes on from the last step does it, too.
        if task.miner is not None and step > 0 and step % task.miner.every_steps == 0:
            task.miner()
            batches.close()  # it has prepared some ahead
            batches = task.batches.start(cursors if cursor is None else _gather_cursors(cursor))
            model.train()
        batch, cursor = meter.time_wait(next, batches)
        rate = (
            optimization.learning_rate * optimization.lr_multiplier(step) * selection.plateau_factor
        )
        optimization.set_rate(rate)
        torch.manual_seed(_step_seed(config.seed, step, rank))
        task.before_step(step)
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
        loss, step_metrics = task.backward(model, batch.to(device), autocast)
        norm = optimization.clip()
        if _is_finite_on_all_ranks(loss, norm):
            optimization.optimizer.step()
            meter.add({"loss": loss, "gradient_norm": norm, **step_metrics}, task.work(batch))
            skipped_in_a_row = 0
        else:
            skipped_in_a_row += 1
            meter.skip()
        optimization.optimizer.zero_grad(set_to_none=True)
        step += 1
        if skipped_in_a_row == config.max_skipped_steps:
            uri = listener.save_bad_batch(step, batch)
            raise Stopped(f"step {step}: the loss or the gradient was not finite {skipped_in_a_row} times "
                          f"in a row (loss {loss.item()}, gradient norm {norm.item()}); the last "
                          f"batch: {uri}")  # fmt: skip
        validate = validate_every > 0 and (step % validate_every == 0 or step == steps)
        save = step % config.checkpoint_every_steps == 0 or step == steps
        if not (validate or save or step % config.log_every_steps == 0):
            continue
        metrics = meter.read()
        unsaved = metrics.pop(UNSAVED)
        save |= 0 < config.checkpoint_every_minutes <= unsaved
        if validate and task.validation is not None:
            metrics |= selection.update(task.validation(), step, partial(weights_of, module))
            model.train()
        listener.progress(Progress(step, {**metrics, "learning_rate": rate}))
        if save or selection.stop:
            state = {
                **training_state(module, optimization.optimizer),
                "selection": selection.state(),
                "refresh": task.miner.state() if task.miner is not None else {},
                "skipped_steps": meter.skipped,
                "step": step,
            }
            listener.checkpoint(state, cursor)
            meter.mark_saved()
        if save or validate:
            meter.restart()
    if selection.weights:
        load_weights(module, selection.weights)


def _resume(
    task: Task,
    optimizer: torch.optim.Optimizer,
    selection: Selection,
    resume: Callable[[], Saved | None],
) -> tuple[int, int, list[Cursor]]:
    """Loads the saved state; returns the steps done, those of them that were skipped, and the cursors.
    Nothing of it stays referenced: the state is twice the model, and more with the optimizer's moments."""
    saved = resume()
    if saved is None:
        return 0, 0, []
    load_training_state(task.module, optimizer, saved.state)
    selection.load(saved.state["selection"])
    if task.miner is not None:
        task.miner.load(saved.state["refresh"])
    return saved.state["step"], saved.skipped_steps, saved.cursors


def _is_finite_on_all_ranks(loss: Tensor, norm: Tensor) -> bool:
    """Whether the loss and the gradient are finite on all ranks. It waits for the device, because the step
    must be skipped before the weights move. All ranks decide alike, so their weights stay the same."""
    finite = torch.isfinite(loss.float()) & torch.isfinite(norm.float())
    if dist.is_initialized():
        finite = finite.int()
        dist.all_reduce(finite, dist.ReduceOp.MIN)
    return bool(finite)


def _gather_cursors(cursor: Cursor) -> list[Cursor]:
    if not dist.is_initialized():
        return [cursor]
    cursors: list[Cursor] = [None] * dist.get_world_size()
    dist.all_gather_object(cursors, cursor)
    return cursors


def _step_seed(seed: int, step: int, rank: int) -> int:
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint32)[0])
