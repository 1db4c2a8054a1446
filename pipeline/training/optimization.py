"""How weights move: the optimizer, the learning rate of each step, and the limit on gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config import require
from pipeline.training.settings import LoopConfig


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
        if treats_apart:
            norm = nn.utils.get_total_norm(
                [value.grad for value in parameters if value.grad is not None]
            )
            nn.utils.clip_grad_norm_(token_tables, config.max_gradient_norm)
            _decay_used_rows(token_tables, config.weight_decay)
        else:
            norm = nn.utils.clip_grad_norm_(parameters, config.max_gradient_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of sharded weights

    new_ids, table_ids = {id(value) for value in new_weights}, {id(value) for value in token_tables}
    return Optimization(
        _optimizer(config, parameters, new_ids, table_ids if treats_apart else set()),
        config.learning_rate,
        lambda step: lr_multiplier(step, steps, config),
        clip,
    )


def _decay_used_rows(tables: Iterable[nn.Parameter], decay: float) -> None:
    """Adds the gradient of decay · w² / 2 over the rows that have a gradient.

    AdaDelta would move all other rows too, as fast as these: it divides a gradient by its own size.
    """
    for table in tables:
        if table.grad is not None:
            is_used_V1 = (table.grad != 0).any(dim=1, keepdim=True)
            table.grad.addcmul_(table.detach(), is_used_V1, value=decay)


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


def _optimizer(
    config: LoopConfig,
    parameters: Iterable[nn.Parameter],
    new_ids: set[int],
    undecayed_ids: set[int],
) -> torch.optim.Optimizer:
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in parameters:
        decays = parameter.dim() > 1 and id(parameter) not in undecayed_ids
        decay = config.weight_decay if decays else 0.0
        factor = config.head_lr_factor if id(parameter) in new_ids else 1.0
        groups.setdefault((decay, factor), []).append(parameter)
    param_groups: list[dict[str, Any]] = [
        {"params": members, "weight_decay": decay, "factor": factor}
        for (decay, factor), members in groups.items()
    ]
    common: dict[str, Any] = {"lr": config.learning_rate, "eps": config.epsilon}
    if config.optimizer == "adadelta":
        return torch.optim.Adadelta(param_groups, rho=config.betas[0], **common)
    if config.optimizer == "adamax":
        return torch.optim.Adamax(param_groups, betas=config.betas, **common)
    return torch.optim.AdamW(param_groups, betas=config.betas, fused=True, **common)
