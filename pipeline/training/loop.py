"""THE training loop: for pre-training and for every architecture.

What is trained, on what, and with which loss come in as a `Task`. Schedules are functions of the
step and of the validations so far, and dropout is seeded by (seed, step, rank), so a checkpoint holds
weights, optimizer state, the step, what validations decided, what was mined and the ranks' cursors, and
a run that was killed ends with the weights of one that was not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config import BadInput, require
from pipeline.models.precision import use_bf16
from pipeline.training.batches import Batches, Cursor
from pipeline.training.caching import Backward
from pipeline.training.selection import Selection
from pipeline.training.validation import Measured


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How weights are updated."""

    learning_rate: float = 5e-5
    """Peak learning rate."""
    new_weights_factor: float = 10.0
    """Learning rate of weights that were not pre-trained (codes, heads), as a multiple."""
    warmup_share: float = 0.1
    """Share of the steps in which the rate rises linearly from 0."""
    schedule: Literal["linear", "inverse_sqrt", "constant", "plateau"] = "linear"
    """How the rate falls after that: to 0 at the last step, with 1/sqrt(step), not at all, or by
    `plateau_decay` whenever the validation loss is not lower than ever (the paper's)."""
    plateau_decay: float = 0.4
    """plateau: factor on the rate."""
    validate_every_epochs: float = 0.5
    """Validate so often, and after the last step; the weights of the best R@1 are the result.
    0: never, the last weights are. Without a valid split nothing is validated."""
    stop_after_validations: int = 10
    """Stop after so many validations in a row without a better R@1 or, where equal, loss; 0: never."""
    optimizer: Literal["adamw", "adamax"] = "adamw"
    """AdamW for BERT-like weights; the paper used Adamax for its own."""
    weight_decay: float = 0.01
    """Not on biases and layer norms."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the optimizer's moments; the paper pre-trained with 0.9, 0.98."""
    max_gradient_norm: float = 1.0
    """Gradients are scaled down to this L2 norm."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16 autocast with float32 weights; auto: where the hardware multiplies bf16."""
    compile: bool = False
    """torch.compile the model: a minute at the start, faster steps on a GPU."""
    checkpoint_every_steps: int = 500
    """A killed run loses at most so many steps."""
    checkpoint_every_minutes: float = 10.0
    """Nor so many minutes, looked at every `log_every_steps`: on CPUs 500 steps take most of an hour. 0:
    the clock does not count."""
    log_every_steps: int = 20
    """Steps between two points of the curves."""
    seed: int = 0
    """Of the order of examples, masks, dropout and new weights."""

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "loop.learning_rate", self.learning_rate, "above 0")
        require(0 <= self.warmup_share < 1, "loop.warmup_share", self.warmup_share, "0 to below 1")
        require(0 < self.plateau_decay < 1, "loop.plateau_decay", self.plateau_decay,
                "between 0 and 1")  # fmt: skip
        for name in ("validate_every_epochs", "stop_after_validations", "checkpoint_every_minutes",
                     "seed"):  # fmt: skip
            require(getattr(self, name) >= 0, f"loop.{name}", getattr(self, name), ">= 0")
        require(self.schedule != "plateau" or self.validate_every_epochs > 0, "loop.schedule",
                self.schedule, "another one where loop.validate_every_epochs is 0")  # fmt: skip
        for name in ("new_weights_factor", "max_gradient_norm"):
            require(getattr(self, name) > 0, f"loop.{name}", getattr(self, name), "above 0")
        for name in ("checkpoint_every_steps", "log_every_steps"):
            require(getattr(self, name) >= 1, f"loop.{name}", getattr(self, name), ">= 1")


class Task(Protocol):
    """What is trained."""

    @property
    def module(self) -> nn.Module:
        """forward(batch) → (loss, {name: number to show})"""

    @property
    def backward(self) -> Backward:
        """How a batch's loss and its gradients are found: at once, or in chunks."""

    batches: Batches[Any]
    """Batches have `to(device)`."""
    new_weights: Iterable[nn.Parameter]
    """Parameters that start at random."""
    validation: Callable[[], Measured] | None
    """Measures `module`; a collective call. None: there is nothing to validate on."""

    refresh: Refresh | None
    """What batches depend on and weights change. None: there is nothing."""

    def save(self, folder: Path) -> None:
        """Writes the trained model."""


class Refresh(Protocol):
    """Something made with the weights of now, again and again, such as hard negatives."""

    every_steps: int

    def __call__(self) -> None:
        """Makes it; a collective call."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: the weights that made it may be gone."""

    def load(self, state: dict[str, Any]) -> None:
        """Takes a `state` back."""


def validation_steps(task: Task, config: LoopConfig) -> int:
    """Steps from one validation to the next; 0: none.

    Raises BadInput for a schedule that waits for validations which never come.
    """
    if task.validation is None:
        if config.schedule == "plateau":
            raise BadInput("loop.schedule: 'plateau' is not allowed; allowed: another one where the "
                           "corpus has no valid split")  # fmt: skip
        return 0
    if not config.validate_every_epochs:
        return 0
    return max(1, round(config.validate_every_epochs * task.batches.steps_per_epoch))


@dataclass(frozen=True)
class Progress:
    """What the loop reports."""

    step: int
    """Steps done."""
    metrics: dict[str, float]
    """Means over the steps since the last report, over all ranks."""


def train(
    task: Task,
    model: nn.Module,
    config: LoopConfig,
    steps: int,
    device: torch.device,
    rank: int,
    on_progress: Callable[[Progress], None],
    on_checkpoint: Callable[[dict[str, Any], Cursor], None],
    state: dict[str, Any] | None = None,
    cursor: Cursor | None = None,
) -> None:
    """Trains up to `steps` steps, and leaves the weights of the best validation in the module.

    `model` is `task.module`, wrapped for its ranks. `on_checkpoint(state, cursor)` is called on
    every rank every `checkpoint_every_steps` and at the end; `state` and `cursor` of an earlier call
    continue it.

    Raises FloatingPointError when the loss or the gradient stops being a number.
    """
    optimizer = _optimizer(task, config)
    every = validation_steps(task, config)
    decay = config.plateau_decay if config.schedule == "plateau" else 1.0
    chosen = Selection(decay, config.stop_after_validations)
    done = 0
    if state:
        task.module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        chosen.load(state["selection"])
        if task.refresh is not None:
            task.refresh.load(state["refresh"])
        done = state["step"]
    batches = task.batches.start(cursor or Cursor())
    bf16 = config.precision == "bf16" or (config.precision == "auto" and use_bf16(device))
    model.train()
    meter = _Meter(device)
    while done < steps and not chosen.stop:
        batch, cursor = meter.timed(next, batches)
        rate = config.learning_rate * rate_share(done, steps, config) * chosen.share
        for group in optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        torch.manual_seed(_step_seed(config.seed, done, rank))
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
        loss, shown = task.backward(model, batch.to(device), autocast)
        norm = nn.utils.clip_grad_norm_(task.module.parameters(), config.max_gradient_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        meter.add({"loss": loss, "gradient_norm": norm.detach(), **shown})

        done += 1
        if task.refresh is not None and done % task.refresh.every_steps == 0 and done < steps:
            task.refresh()
            batches.close()  # it has prepared some ahead
            batches = task.batches.start(cursor)
            model.train()
        validate = every > 0 and (done % every == 0 or done == steps)
        save = done % config.checkpoint_every_steps == 0 or done == steps
        if not (validate or save or done % config.log_every_steps == 0):
            continue
        metrics = meter.read()
        unsaved = metrics.pop(_UNSAVED)
        save |= 0 < config.checkpoint_every_minutes <= unsaved
        for name in ("loss", "gradient_norm"):  # weights may be spoilt before the loss shows it
            if not math.isfinite(metrics[name]):
                raise FloatingPointError(f"step {done}: the {name} is {metrics[name]}")
        if validate and task.validation is not None:
            metrics |= chosen.judge(task.validation(), done, task.module)
            model.train()
        on_progress(Progress(done, {**metrics, "learning_rate": rate}))
        if save or chosen.stop:
            on_checkpoint(
                {
                    "module": task.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "selection": chosen.state(),
                    "refresh": task.refresh.state() if task.refresh is not None else {},
                    "step": done,
                },
                cursor,
            )
            meter.saved()
        if save or validate:
            meter.restart()
    if chosen.weights:
        task.module.load_state_dict(chosen.weights)


_UNSAVED = "minutes_unsaved"


class _Meter:
    """Means of numbers over steps and ranks, without waiting for the device at each step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()
        self.saved()

    def saved(self) -> None:
        """A checkpoint is there."""
        self._saved = time.perf_counter()

    def restart(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._steps = 0
        self._waited_s = 0.0
        self._began = time.perf_counter()

    def timed(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """Calls `function` and counts its time as waiting for data."""
        began = time.perf_counter()
        result = function(argument)
        self._waited_s += time.perf_counter() - began
        return result

    def add(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, torch.zeros_like(value)) + value
        self._steps += 1

    def read(self) -> dict[str, float]:
        """The means since the last call, and minutes since `saved`; a collective call, as every rank has
        the same names."""
        means = {name: value.double() / self._steps for name, value in self._sums.items()}
        minutes = (time.perf_counter() - self._saved) / 60
        means[_UNSAVED] = torch.tensor(minutes, dtype=torch.float64, device=self._device)
        names = sorted(means)
        values = torch.stack([means[name] for name in names])
        if dist.is_initialized():
            dist.all_reduce(values)
            values /= dist.get_world_size()
        seconds = time.perf_counter() - self._began
        speed = {"steps_per_s": self._steps / seconds, "data_wait_share": self._waited_s / seconds}
        self.restart()
        return {**dict(zip(names, values.tolist(), strict=True)), **speed}


def rate_share(step: int, steps: int, config: LoopConfig) -> float:
    """The learning rate of a step (from 0) as a share of the peak."""
    warmup = max(1, round(config.warmup_share * steps))
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.schedule == "linear":
        return (steps - step) / max(1, steps - warmup + 1)
    if config.schedule == "inverse_sqrt":
        return math.sqrt(warmup / (step + 1))
    return 1.0


def _optimizer(task: Task, config: LoopConfig) -> torch.optim.Optimizer:
    new = {id(parameter) for parameter in task.new_weights}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in task.module.parameters():
        if parameter.requires_grad:
            decay = config.weight_decay if parameter.dim() > 1 else 0.0
            factor = config.new_weights_factor if id(parameter) in new else 1.0
            groups.setdefault((decay, factor), []).append(parameter)
    listed = [
        {"params": parameters, "weight_decay": decay, "factor": factor}
        for (decay, factor), parameters in groups.items()
    ]
    if config.optimizer == "adamax":
        return torch.optim.Adamax(listed, lr=config.learning_rate, betas=config.betas)
    return torch.optim.AdamW(listed, lr=config.learning_rate, betas=config.betas, fused=True)


def _step_seed(seed: int, step: int, rank: int) -> int:
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint32)[0])
