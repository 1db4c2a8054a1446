"""The training loop, for pre-training and for every architecture. It knows no model.

A `Task` holds the model, the batches, the optimization and the validation. Schedules
are functions of the step and of the validations so far, and dropout is seeded by (seed, step, rank), so a
checkpoint holds weights, optimizer state, the step, what validations decided, the task's own state and
the ranks' cursors. A killed run, once resumed, ends with the same weights as an undisturbed one.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config import Stopped, require
from pipeline.models.precision import Precision, Trained, resolve_precision
from pipeline.training.checkpoint import (
    Cursor,
    Saved,
    load_training_state,
    load_weights,
    training_state,
    weights_of,
)
from pipeline.training.settings import LoopConfig

ItemT = TypeVar("ItemT")
Autocast = AbstractContextManager[Any]


class Weighted(NamedTuple):
    """A sum and its divisor; a report shows the mean over all steps and ranks, unless the divisor is 0."""

    total: Tensor
    weight: float


StepMetrics = Mapping[str, Tensor | Weighted]
"""Numbers to show by name; a plain tensor is a mean that counts once a step."""
Backward = Callable[[nn.Module, Any, Autocast], tuple[Tensor, StepMetrics]]
"""(model, batch, autocast) → the loss, whose gradients are added up, and numbers to show."""


class Measured(NamedTuple):
    """The result of a validation."""

    metrics: Mapping[str, float]
    """By name; "loss" is among them, in nats."""
    merit: tuple[float, float]
    """The best weights have the greatest."""


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
    before_step: Callable[[int], None] = lambda step: None
    """Called with each step's number, from 0: annealed scales, ranges of quantisation. What it sets
    follows from the step, or lies in the module's buffers: checkpoints hold nothing else of it."""
    work: Callable[[Any], Mapping[str, float]] = lambda batch: {}
    """The work in a rank's batch, such as {"tokens": 4000.0}; shown per second over all ranks."""


@dataclass(frozen=True)
class Listener:
    """The callbacks of a run."""

    progress: Callable[[int, dict[str, float]], None] = lambda step, metrics: None
    """(steps done, means over the steps since the last report and over all ranks)"""
    checkpoint: Callable[[dict[str, Any], Cursor], None] = lambda state, cursor: None
    """(state, this rank's cursor), on every rank; the state's tensors go on training afterwards."""
    save_bad_batch: Callable[[int, Any], str] = lambda step, batch: ""
    """(step, batch) → the URI under which the batch was saved."""
    is_terminated: Callable[[], bool] = lambda: False
    """Whether this rank is to end now; called at each step. If one rank says so, all ranks save after the
    step and end."""


def train(
    task: Task,
    model: nn.Module,
    config: LoopConfig,
    device: torch.device,
    rank: int,
    listener: Listener,
    resume: Callable[[], Saved | None] = lambda: None,
) -> bool:
    """Trains up to `task.steps` steps, and leaves the weights that are the result in the module.

    `model` is `task.module`, wrapped for its ranks. `listener.checkpoint` is called on every rank every
    `checkpoint_every_steps` and at the end; `resume` returns what an earlier run saved.

    Returns whether it has finished. False: a rank was terminated before; all ranks have saved the same step.

    Raises Stopped if the loss or the gradient is not finite `max_skipped_steps` times in a row.
    """
    run = _Run(task, model, config, device, rank, listener)
    cursors, cursor = run.resume(resume()), None
    batches = task.batches.start(cursors)
    model.train()
    run.meter.restart()
    while not run.is_finished and not run.is_terminated:
        # Before a step, not after one: a longer run that goes on from the last step does it, too.
        if task.miner is not None and run.step > 0 and run.step % task.miner.every_steps == 0:
            task.miner()
            batches.close()  # it has prepared some ahead
            batches = task.batches.start(cursors if cursor is None else gather_items([cursor]))
            model.train()
        batch, cursor = run.meter.time_wait(next, batches)
        run.take_step(batch)
        run.report(cursor)
    if run.is_finished and run.selection.weights:
        load_weights(task.module, run.selection.weights)
    return run.is_finished


@dataclass
class _Run:
    """The training of one rank: its state between two steps."""

    task: Task
    model: nn.Module
    config: LoopConfig
    device: torch.device
    rank: int
    listener: Listener
    step: int = 0
    """Steps done."""
    rate: float = 0.0
    """The learning rate of the last step."""
    is_terminated: bool = False

    def __post_init__(self) -> None:
        config = self.config
        self.optimization, self.meter = self.task.optimize(), Meter()
        self.validate_every = validation_steps(self.task, config)
        self.selection = Selection(config)
        self.is_bf16 = resolve_precision(config.precision, self.device) == "bf16"

    @property
    def is_finished(self) -> bool:
        return self.step >= self.task.steps or self.selection.stop

    def resume(self, saved: Saved | None) -> list[Cursor]:
        """Takes a checkpoint's state; returns the cursors of its ranks. Keeps none of its tensors: they are
        twice the model, and more with the optimizer's moments."""
        if saved is None:
            return []
        step = saved.state["step"]
        require(step <= self.task.steps, "steps", self.task.steps,
                f"at least {step}, which the unfinished run has done")  # fmt: skip
        load_training_state(self.task.module, self.optimization.optimizer, saved.state)
        self.selection.load(saved.state["selection"])
        if self.task.miner is not None:
            self.task.miner.load(saved.state["refresh"])
        self.step, self.meter.skipped = step, saved.skipped_steps
        return saved.cursors

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, which `resume` takes back; collective if the weights are sharded."""
        return {
            **training_state(self.task.module, self.optimization.optimizer),
            "selection": self.selection.state(),
            "refresh": self.task.miner.state() if self.task.miner is not None else {},
            "skipped_steps": self.meter.skipped,
            "step": self.step,
        }

    def take_step(self, batch: Any) -> None:
        """Trains on a batch. Changes nothing if the loss or the gradient of a rank is not finite; raises
        Stopped if that was so too often in a row."""
        task, config, optimization, step = self.task, self.config, self.optimization, self.step
        share = optimization.lr_multiplier(step)
        self.rate = optimization.learning_rate * share * self.selection.plateau_factor
        optimization.set_rate(self.rate)
        torch.manual_seed(derived_seed(config.seed, step, self.rank))
        task.before_step(step)
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_bf16)
        loss, metrics = task.backward(self.model, batch.to(self.device), autocast)
        norm = optimization.clip()
        # All ranks decide alike, so their weights stay the same. It waits for the device, because the step
        # must be skipped before the weights move. The second number comes along: a kernel sets it, so
        # nothing is copied to the device.
        is_finite = torch.isfinite(loss.float()) & torch.isfinite(norm.float())
        goes_on = torch.full_like(is_finite, not self.listener.is_terminated())
        flags = torch.stack([is_finite, goes_on]).int()
        all_finite, all_go_on = reduce_over_ranks(flags, dist.ReduceOp.MIN).tolist()
        if all_finite:
            optimization.optimizer.step()
            self.meter.add({"loss": loss, "gradient_norm": norm, **metrics}, task.work(batch))
        else:
            self.meter.skip()
        optimization.optimizer.zero_grad(set_to_none=True)
        self.step, self.is_terminated = step + 1, not all_go_on
        if (count := self.meter.skipped_in_a_row) == config.max_skipped_steps:
            uri = self.listener.save_bad_batch(self.step, batch)
            raise Stopped(f"step {self.step}: the loss or the gradient was not finite {count} times "
                          f"in a row (loss {loss.item()}, gradient norm {norm.item()}); the last "
                          f"batch: {uri}")  # fmt: skip

    def report(self, cursor: Cursor) -> None:
        """Validates, tells the listener, and saves: what is due after this step."""
        task, config, step = self.task, self.config, self.step
        is_last = step == task.steps
        validate = self.validate_every > 0 and (is_last or step % self.validate_every == 0)
        save = is_last or self.is_terminated or step % config.checkpoint_every_steps == 0
        if not (validate or save or step % config.log_every_steps == 0):
            return
        metrics, unsaved_minutes = self.meter.read()
        save |= 0 < config.checkpoint_every_minutes <= unsaved_minutes
        if validate and task.validation is not None:
            measured, copy_weights = task.validation(), partial(weights_of, task.module)
            metrics |= self.selection.update(measured, step, copy_weights)
            self.model.train()
        self.listener.progress(step, {**metrics, "learning_rate": self.rate})
        if save or self.selection.stop:
            self.listener.checkpoint(self.state(), cursor)
            self.meter.mark_saved()
        if save or validate:
            self.meter.restart()


def validation_steps(task: Task, config: LoopConfig) -> int:
    """Steps from one validation to the next; 0: none.

    Raises BadInput for settings that need validations if there are none.
    """
    if task.validation is None:
        config.check_unvalidated("where the corpus has no valid split")
        return 0
    if config.validate_every_steps or not config.validate_every_epochs:
        return config.validate_every_steps
    return max(1, round(config.validate_every_epochs * task.batches.steps_per_epoch))


# Decisions by validations


@dataclass
class Selection:
    """The decisions so far: the rate after a plateau, when to stop, and which weights to keep. Checkpoints
    hold all of it, so a resumed run decides as an undisturbed one does."""

    config: LoopConfig
    plateau_factor: float = 1.0
    """The current factor on the rate."""
    lowest_loss: float = math.inf
    best_merit: tuple[float, float] = (-math.inf, -math.inf)
    best_metrics: dict[str, float] = field(default_factory=dict)
    """The metrics of the best validation."""
    best_step: int = 0
    without_better: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)
    """The weights of the best validation, on the CPU; empty before the first, and with `keep_last`."""

    @property
    def keep_last(self) -> bool:
        """Each validation counts as the best so far, and the last weights are the result."""
        return self.config.keep_weights == "last"

    @property
    def best(self) -> dict[str, float]:
        """The metrics of the best validation, to show; empty before the first one."""
        if not self.best_metrics:
            return {}
        best = {f"best_valid_{name}": value for name, value in self.best_metrics.items()}
        return {**best, "best_step": float(self.best_step)}

    @property
    def stop(self) -> bool:
        return not self.keep_last and 0 < self.config.stop_after_validations <= self.without_better

    def update(
        self, measured: Measured, step: int, weights: Callable[[], dict[str, Tensor]]
    ) -> dict[str, float]:
        """Adds a validation; returns the metrics to show.

        `weights` copies the measured weights. It is called if they are the best so far; all ranks decide that
        alike.
        """
        if measured.metrics["loss"] < self.lowest_loss:
            self.lowest_loss = measured.metrics["loss"]
        elif self.config.schedule == "plateau":
            self.plateau_factor *= self.config.plateau_decay
        self.without_better += 1
        if self.keep_last or measured.merit > self.best_merit:
            self.best_merit, self.best_metrics = measured.merit, dict(measured.metrics)
            self.best_step, self.without_better = step, 0
            self.weights = {} if self.keep_last else weights()
        return {f"valid_{name}": value for name, value in measured.metrics.items()} | self.best

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "config"}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes a `state` back; earlier code called the factor on the rate `share`."""
        names = {"share": "plateau_factor"}
        vars(self).update({names.get(name, name): value for name, value in state.items()})
        if self.config.schedule != "plateau":  # a run that goes on by another schedule
            self.plateau_factor = 1.0
        self.best_merit = (self.best_merit[0], self.best_merit[1])  # a list in checkpoints
        weights = {} if self.keep_last else self.weights
        self.weights = {name: value.cpu() for name, value in weights.items()}
        if not (self.weights or self.keep_last):  # the run so far kept its last ones
            self.best_merit, self.best_metrics = (-math.inf, -math.inf), {}


# The optimizer, the learning rate of each step, and the limit on gradients


@dataclass(frozen=True)
class Optimization:
    """The optimizer of a task, and the functions that the loop calls at each step."""

    optimizer: torch.optim.Optimizer
    """A group's rate is `learning_rate · lr_multiplier(step)`, times the group's "factor" if it has one."""
    learning_rate: float
    """The peak."""
    lr_multiplier: Callable[[int], float]
    """The learning rate of a step (from 0) as a share of the peak."""
    clip: Callable[[], Tensor]
    """Limits the gradients in place and returns their norm before, a scalar on their device."""

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("factor", 1.0)


def optimization(
    config: LoopConfig,
    module: nn.Module,
    steps: int,
    new_weights: Iterable[nn.Parameter] = (),
    token_tables: Collection[nn.Parameter] = (),
) -> Optimization:
    """The optimization by the settings, for the parameters of `module` that are trained.

    `new_weights` start at random and learn `head_lr_factor` times as fast. `token_tables`: the
    tables that the setting of that name is about.

    Raises BadInput where that setting needs some and there are none.
    """
    parameters = [value for value in module.parameters() if value.requires_grad]
    treats_apart = config.token_tables == "apart"
    require(not treats_apart or bool(token_tables), "loop.token_tables", config.token_tables,
            "'as_all' with this model")  # fmt: skip

    def clip() -> Tensor:
        if not treats_apart:
            norm = nn.utils.clip_grad_norm_(parameters, config.max_gradient_norm)
            return (
                norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            )  # of sharded weights
        gradients = [value.grad for value in parameters if value.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        nn.utils.clip_grad_norm_(token_tables, config.max_gradient_norm)
        for table in token_tables:
            if table.grad is not None:
                # The gradient of decay · w² / 2 over the rows that have a gradient. AdaDelta would move all
                # other rows too, as fast as these: it divides a gradient by its own size.
                is_used_V1 = (table.grad != 0).any(dim=1, keepdim=True)
                table.grad.addcmul_(table.detach(), is_used_V1, value=config.weight_decay)
        return norm

    new_ids, table_ids = {id(value) for value in new_weights}, {id(value) for value in token_tables}
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for parameter in parameters:
        decays = parameter.dim() > 1 and not (treats_apart and id(parameter) in table_ids)
        decay = config.weight_decay if decays else 0.0
        factor = config.head_lr_factor if id(parameter) in new_ids else 1.0
        group = {"params": [], "weight_decay": decay, "factor": factor}
        groups.setdefault((decay, factor), group)["params"].append(parameter)
    param_groups = list(groups.values())
    common: dict[str, Any] = {"lr": config.learning_rate, "eps": config.epsilon}
    optimizer: torch.optim.Optimizer
    if config.optimizer == "adadelta":
        optimizer = torch.optim.Adadelta(param_groups, rho=config.betas[0], **common)
    elif config.optimizer == "adamax":
        optimizer = torch.optim.Adamax(param_groups, betas=config.betas, **common)
    else:
        optimizer = torch.optim.AdamW(param_groups, betas=config.betas, fused=True, **common)
    return Optimization(
        optimizer, config.learning_rate, lambda step: lr_multiplier(step, steps, config), clip
    )


def warmup_of(config: LoopConfig, steps: int) -> int:
    """Steps of warm-up, at least 1."""
    share = config.warmup_steps * steps if config.warmup_steps < 1 else config.warmup_steps
    return max(1, round(share))


def lr_multiplier(step: int, steps: int, config: LoopConfig) -> float:
    """The learning rate of a step (from 0) of `steps` as a share of the peak."""
    warmup = warmup_of(config, steps)
    if step < warmup:
        initial = config.initial_rate_share
        return initial + (1 - initial) * (step + 1) / (warmup + 1)
    final = config.final_rate_share
    remaining = (steps - step) / max(1, steps - warmup + 1)  # 1 at the peak, 0 after the last step
    if config.schedule == "linear":
        return final + (1 - final) * remaining
    if config.schedule == "cosine":
        return final + (1 - final) * (1 - math.cos(math.pi * min(1.0, remaining))) / 2
    if config.schedule == "inverse_sqrt":
        return math.sqrt(warmup / (step + 1))
    if config.schedule == "wsd":
        decay = max(1, round(config.decay_share * steps))
        return final + (1 - final) * min(1.0, (steps - step) / (decay + 1))
    return 1.0


# Numbers to show


class Meter:
    """Means of numbers over steps and ranks between two reports, without waiting for the device at each
    step."""

    def __init__(self) -> None:
        self.skipped = self.skipped_in_a_row = 0
        """Steps that changed nothing, of the whole run and since the last other step."""
        self.restart()
        self.mark_saved()

    def mark_saved(self) -> None:
        """Notes the time of a checkpoint."""
        self._saved = time.perf_counter()

    def restart(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weights, self._work = Counter[str](), Counter[str]()
        self._steps, self._waited_s, self._began = 0, 0.0, time.perf_counter()

    def time_wait(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """Calls `function` and counts its time as waiting for data."""
        began = time.perf_counter()
        result = function(argument)
        self._waited_s += time.perf_counter() - began
        return result

    def add(self, metrics: StepMetrics, work: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            total, weight = value if isinstance(value, Weighted) else (value, 1.0)
            total = total.detach()
            self._sums[name] = self._sums.get(name, torch.zeros_like(total)) + total
            self._weights.update({name: weight})
        self._work.update(work)
        self._steps += 1
        self.skipped_in_a_row = 0

    def skip(self) -> None:
        """A step that changed nothing."""
        self._steps += 1
        self.skipped += 1
        self.skipped_in_a_row += 1

    def read(self) -> tuple[dict[str, float], float]:
        """(the means and the rates per second since the last call, and all skipped steps; minutes since
        `mark_saved`). A collective call."""
        own_sums = {
            name: total.item() for name, total in self._sums.items()
        }  # waits for the device
        now = time.perf_counter()
        seconds, unsaved_minutes = now - self._began, (now - self._saved) / 60
        own = (own_sums, self._weights, self._work, self._waited_s / seconds, unsaved_minutes)
        sums, weights, work, waited, minutes = zip(*gather_items([own]), strict=True)
        total = _add_up(sums)
        means = {name: total[name] / weight for name, weight in _add_up(weights).items() if weight}
        rates = {f"{name}_per_s": amount / seconds for name, amount in _add_up(work).items()}
        # All ranks wait for the one whose data comes last.
        speed = {"steps_per_s": self._steps / seconds, "data_wait_share": max(waited)}
        self.restart()
        shown = {**means, **rates, **speed, "skipped_steps": float(self.skipped)}
        return shown, sum(minutes) / len(minutes)


def _add_up(numbers_of_ranks: Iterable[Mapping[str, float]]) -> Counter[str]:
    """By name; a rank may have shown other names than the others."""
    total = Counter[str]()
    for numbers in numbers_of_ranks:
        total.update(numbers)
    return total


# What ranks share. All of these are collective calls; without a process group there is one rank.


def reduce_over_ranks(values: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    """The sum over all ranks, or what `operation` makes of them, in place."""
    if dist.is_initialized():
        dist.all_reduce(values, operation)
    return values


def gather_items(items: list[ItemT]) -> list[ItemT]:
    """The items of all ranks, in the order of ranks, on each rank. Ranks may have different numbers of
    them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return items
    parts: list[list[ItemT]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def agree_on_precision(name: Precision, device: torch.device) -> Trained:
    """What `name` stands for on the hardware of all ranks: bf16 where each of them computes in it."""
    precisions = gather_items([resolve_precision(name, device)])
    return "bf16" if set(precisions) == {"bf16"} else "fp32"


def derived_seed(*numbers: int) -> int:
    """A seed of its own for each sequence of numbers, which are 0 or more."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint32)[0])
