"""Whatever a task brings moves its weights: other optimizers, schedules, clipping rules and hooks."""

from __future__ import annotations

import copy
import gc
import math
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeline.config import BadInput
from pipeline.training.loop import (
    Listener,
    Optimization,
    Saved,
    Task,
    lr_multiplier,
    optimization,
    train,
)
from pipeline.training.objectives import backward
from pipeline.training.settings import LoopConfig

CPU = torch.device("cpu")


class Ids:
    """Batches of ids that follow from the step."""

    steps_per_epoch = 10

    def start(self, cursors):
        for step in range(cursors[0] if cursors else 0, 1000):
            yield torch.tensor([step % 7, (3 * step + 1) % 7]), step + 1


class Embedded(nn.Module):
    """As ConveRT's recipe: a scale that grows, and L2 on the rows that a batch looks up."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 4)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, ids):
        rows = self.table(ids)
        scores = self.scale * F.normalize(self.layer(rows), dim=1) @ F.normalize(rows, dim=1).T
        regularised = 1e-2 * self.table(ids.unique()).pow(2).sum()
        return F.cross_entropy(scores, torch.arange(len(ids))) + regularised, {}


def convert_like(steps):
    """AdaDelta, a warm-up and a cosine, and only the embeddings' gradient is limited."""
    module = Embedded()

    def optimize():
        def clip():
            return nn.utils.clip_grad_norm_([module.table.weight], 0.05)

        def share(step):
            if step < 4:
                return 0.1 + 0.9 * step / 4
            return (1 + math.cos(math.pi * (step - 4) / (steps - 4))) / 2

        return Optimization(torch.optim.Adadelta(module.parameters(), rho=0.9), 1.0, share, clip)

    def anneal(step):
        module.scale.fill_(1 + min(1.0, step / 5))

    return Task(module=module, batches=Ids(), steps=steps, optimize=optimize, backward=backward,
                save=lambda folder: None, before_step=anneal)  # fmt: skip


def by_hand(steps):
    """The same in plain PyTorch, without the loop."""
    module, batches = Embedded(), Ids().start(())
    optimizer = torch.optim.Adadelta(module.parameters(), rho=0.9)
    for step in range(steps):
        rate = 0.1 + 0.9 * step / 4 if step < 4 else (
            1 + math.cos(math.pi * (step - 4) / (steps - 4))) / 2  # fmt: skip
        for group in optimizer.param_groups:
            group["lr"] = rate
        module.scale.fill_(1 + min(1.0, step / 5))
        module(next(batches)[0])[0].backward()
        nn.utils.clip_grad_norm_([module.table.weight], 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return module


def test_a_task_brings_its_own_optimizer_schedule_clipping_and_hook_also_when_resumed():
    saved = {0: None}

    def keep(state, cursor):
        saved[state["step"]] = Saved(copy.deepcopy(state), [cursor])

    config, expected = (
        LoopConfig(precision="fp32", checkpoint_every_steps=5),
        by_hand(12).state_dict(),
    )
    for step in (0, 5):
        task = convert_like(12)
        listener = Listener(checkpoint=keep)
        train(task, task.module, config, CPU, 0, listener, lambda step=step: saved[step])
        for name, value in task.module.state_dict().items():
            assert torch.equal(value, expected[name]), (step, name)


@pytest.mark.slow
def test_a_resumed_run_lets_go_of_the_checkpoint():
    """It is as large as the model and the optimizer's moments, for the whole run."""
    held, alive = [], []
    task = convert_like(4)
    optimizer = task.optimize().optimizer

    def resume():
        state = {"module": {name: value.clone() for name, value in task.module.state_dict().items()},
                 "optimizer": optimizer.state_dict(), "selection": {}, "refresh": {},
                 "step": 2}  # fmt: skip
        held.extend(weakref.ref(value) for value in state["module"].values())
        return Saved(state, [2])

    def look(step):
        gc.collect()
        alive.append(sum(reference() is not None for reference in held))

    task.before_step = look
    train(task, task.module, LoopConfig(precision="fp32"), CPU, 0, Listener(), resume)
    assert held
    assert set(alive) == {0}


def expected_share(schedule, step, steps, warmup, final=0.0, decay=0.1):
    """Each schedule as its formula says, in float64."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    left = (steps - step) / (steps - warmup + 1)
    return {
        "linear": final + (1 - final) * left,
        "cosine": final + (1 - final) * np.sin(np.pi / 2 * left) ** 2,
        "inverse_sqrt": np.sqrt(warmup / (step + 1)),
        "wsd": final + (1 - final) * min(1, (steps - step) / (round(decay * steps) + 1)),
        "constant": 1.0,
    }[schedule]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "inverse_sqrt", "wsd", "constant"])
@pytest.mark.parametrize(("warmup", "resolved"), [(20, 20), (0.05, 10), (0, 1)])
def test_schedules_are_their_formulas(schedule, warmup, resolved):
    config = LoopConfig(schedule=schedule, warmup_steps=warmup, final_rate_share=0.01)
    for step in (0, 5, 9, 10, 19, 20, 21, 100, 179, 181, 199):
        wanted = expected_share(schedule, step, 200, resolved, final=0.01)
        assert lr_multiplier(step, 200, config) == pytest.approx(wanted), step


def test_a_longer_run_has_the_same_rates_so_far_where_the_schedule_has_no_end():
    """So that more steps continue the same run."""
    for schedule in ("inverse_sqrt", "constant", "wsd"):
        config = LoopConfig(schedule=schedule, warmup_steps=10)
        short, long = ([lr_multiplier(s, n, config) for s in range(80)] for n in (100, 1000))
        assert short == long


@pytest.mark.parametrize(("name", "kind"), [
    ("adamw", torch.optim.AdamW), ("adamax", torch.optim.Adamax), ("adadelta", torch.optim.Adadelta),
])  # fmt: skip
def test_settings_reach_the_optimizer(name, kind):
    module = Embedded()
    config = LoopConfig(optimizer=name, learning_rate=0.3, epsilon=1e-5, betas=(0.7, 0.8),
                        weight_decay=0.2, head_lr_factor=3.0)  # fmt: skip
    made = optimization(config, module, 10, [module.layer.weight])
    assert type(made.optimizer) is kind
    made.set_rate(0.1)
    groups = {
        id(value): group for group in made.optimizer.param_groups for value in group["params"]
    }
    assert groups[id(module.layer.weight)]["lr"] == pytest.approx(0.3)
    assert groups[id(module.table.weight)]["lr"] == 0.1
    assert groups[id(module.table.weight)]["weight_decay"] == 0.2
    assert groups[id(module.layer.bias)]["weight_decay"] == 0.0
    for group in made.optimizer.param_groups:
        assert group["eps"] == 1e-5
        assert group.get("betas", (0.7, 0.8)) == (0.7, 0.8)
        assert group.get("rho", 0.7) == 0.7


@pytest.mark.parametrize("optimizer", ["adadelta", "adamw"])
def test_token_tables_apart_are_all_that_is_limited_and_only_their_looked_up_rows_decay(optimizer):
    torch.manual_seed(0)
    table, layer = nn.Embedding(5, 3), nn.Linear(3, 1)
    module = nn.Sequential(table, layer)
    config = LoopConfig(
        optimizer=optimizer, token_tables="apart", max_gradient_norm=0.1, weight_decay=0.5
    )
    made = optimization(config, module, 10, token_tables=[table.weight])
    before = table.weight.detach().clone()
    (100 * module(torch.tensor([1, 3]))).sum().backward()
    layer_gradient = layer.weight.grad.clone()
    gradient = table.weight.grad.clone()
    total = torch.cat([value.grad.flatten() for value in module.parameters()]).norm()
    torch.testing.assert_close(made.clip(), total)
    assert torch.equal(layer.weight.grad, layer_gradient)
    expected = gradient * 0.1 / (gradient.norm() + 1e-6)
    expected[[1, 3]] += 0.5 * before[[1, 3]]
    torch.testing.assert_close(table.weight.grad, expected)
    made.optimizer.step()
    assert torch.equal(table.weight[[0, 2, 4]], before[[0, 2, 4]])
    assert not torch.equal(table.weight[[1, 3]], before[[1, 3]])
    with pytest.raises(BadInput, match=r"loop\.token_tables"):
        optimization(config, module, 10)


def test_a_warm_up_may_start_above_0():
    config = LoopConfig(warmup_steps=9, initial_rate_share=0.1, schedule="constant")
    shares = [lr_multiplier(step, 100, config) for step in range(11)]
    assert shares[0] == pytest.approx(0.19) and shares[8] == pytest.approx(0.91)
    assert np.allclose(np.diff(shares[:10]), 0.09) and shares[9:] == [1.0, 1.0]
