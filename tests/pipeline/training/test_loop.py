"""The loop: killed and resumed it ends the same; it learns; it stops at what is no number."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from pipeline.artifact import Artifact
from pipeline.config import BadInput, Stopped
from pipeline.models.encoder import prepare_for_training
from pipeline.models.settings import Shape, ranker_config
from pipeline.models.sources import External
from pipeline.training import loop
from pipeline.training.checkpoint import read_saved, read_state, weights_of, write_saved
from pipeline.training.finetuning import Finetuning
from pipeline.training.loop import Listener, Measured, Task, lr_multiplier, optimization, train
from pipeline.training.objectives import backward
from pipeline.training.pretraining import Pretraining
from pipeline.training.settings import FinetuneConfig, LoopConfig, Mining, PretrainConfig

CPU = torch.device("cpu")
PLAIN = {"learning_rate": 1.0, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0}


class Report(NamedTuple):
    step: int
    metrics: dict[str, float]


class Run:
    """A training, what it reported, and its checkpoints as bytes, as a disk keeps them."""

    def __init__(self, make, steps, *, checkpoint=None, disk=None, terminated_in=None, **config):
        """`make(config, steps)` builds the task; `checkpoint`: one of an earlier run, which this one
        continues as if it had been killed there. `terminated_in`: the step in which it is told to end."""
        self.progress, self.checkpoints = [], {} if disk is None else disk
        settings = {"checkpoint_every_steps": 5, "log_every_steps": 1, "precision": "fp32"}
        loop_config = LoopConfig(**{**settings, **config})
        self.task = make(loop_config, steps)

        def resume():
            return read(checkpoint, read_saved) if checkpoint else None

        def on_checkpoint(state, cursor):
            with tempfile.TemporaryDirectory() as folder:
                write_saved(Path(folder), state, cursor, rank=0, world=1)
                files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
            self.checkpoints[state["step"]] = files

        in_step = itertools.count(1)
        listener = Listener(
            lambda *report: self.progress.append(Report(*report)), on_checkpoint,
            lambda step, batch: "there", lambda: next(in_step) == terminated_in,
        )  # fmt: skip
        prepare_for_training(self.task.module, CPU)
        module = self.task.module
        self.finished = train(self.task, module, loop_config, CPU, 0, listener, resume)

    @property
    def weights(self):
        return self.task.module.state_dict()

    def shown(self, name):
        return [progress.metrics[name] for progress in self.progress]


def in_mid_epoch(cursor):
    if isinstance(cursor, dict):  # by lane; (epoch, window, micro-batch) of each corpus
        return any(
            window or batch for lane in cursor.values() for _, window, batch in lane["corpora"]
        )
    _, _, batch, _ = cursor
    return batch > 0


def read(checkpoint, function):
    with tempfile.TemporaryDirectory() as folder:
        for name, data in checkpoint.items():
            (Path(folder) / name).write_bytes(data)
        return function(Path(folder))


def echoes(tiny, count=40):
    """Responses that repeat a word of their context, in contexts of various lengths."""
    rows = [
        {"context": [f"w{number}"] * (1 + number % 5), "response": f"w{number} w{number + 60}"}
        for number in range(count)
    ]
    return tiny.corpus(rows, rows_per_group=16)


def finetuning(tiny, corpus, data_seed=None, finetune=None, **ranker):
    settings = {"architecture": "poly", "m": 4, **ranker}
    settings |= {"max_context_tokens": 24, "max_candidate_tokens": 12}
    common = {"batch_examples": 8, "negatives": 3, "dropout": 0.2, "epochs": 100.0}
    source = External(str(tiny.encoder_folder()), "")

    def make(loop_config, steps):
        if data_seed is not None:
            loop_config = replace(loop_config, seed=data_seed)
        config = FinetuneConfig(**{**common, "max_steps": steps, **(finetune or {})})
        recipe = Finetuning(corpus, source, ranker_config(settings), config, loop_config)
        return recipe.build(0, 1)

    return make


def pretraining(tiny, corpus):
    tokens = tiny.tokens(corpus, valid_share=0.0)

    def make(loop_config, steps):
        config = PretrainConfig(
            batch_tokens=80, micro_batch_tokens=40, max_context_tokens=24,
            max_response_tokens=12, window_rows=16, steps=steps,
        )  # fmt: skip
        shape = Shape(**tiny.shape, dropout=0.1)
        return Pretraining((tokens,), (1.0,), shape, config, loop_config).build(0, 1)

    return make


def adapters(tiny, corpus):
    pytest.importorskip("peft")
    return finetuning(tiny, corpus, finetune={"lora_rank": 2})


TASKS = {"poly": finetuning, "adapters": adapters, "pretraining": pretraining}


def same(left, right):
    assert left.keys() == right.keys()
    return all(torch.equal(torch.as_tensor(left[n]), torch.as_tensor(right[n])) for n in left)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TASKS)
def test_killed_in_mid_epoch_and_resumed_ends_with_the_same_weights(tiny, kind):
    """Bit for bit, dropout on, and so after a second kill: its own checkpoints are the same, too. An epoch is
    five steps or so."""
    corpus = echoes(tiny, 44)

    def run(**more):
        return Run(
            TASKS[kind](tiny, corpus), 9, checkpoint_every_steps=3, learning_rate=1e-3, **more
        )

    whole = run()
    assert list(whole.checkpoints) == [3, 6, 9]
    cursors = [json.loads(saved["cursor-00000.json"]) for saved in whole.checkpoints.values()]
    assert any(in_mid_epoch(cursor) for cursor in cursors[:2])
    resumed = run(checkpoint=whole.checkpoints[3])
    assert same(resumed.weights, whole.weights)
    assert [progress.step for progress in resumed.progress] == list(range(4, 10))
    assert resumed.shown("loss") == whole.shown("loss")[3:]
    assert resumed.checkpoints == {step: whole.checkpoints[step] for step in (6, 9)}

    terminated = run(terminated_in=4)
    assert (whole.finished, terminated.finished) == (True, False)
    assert terminated.checkpoints.keys() == {3, 4}
    resumed = run(checkpoint=terminated.checkpoints[4])
    assert same(resumed.weights, whole.weights)
    assert terminated.shown("loss") + resumed.shown("loss") == whole.shown("loss")


def test_a_run_that_is_terminated_in_its_last_step_has_finished(tiny):
    run = Run(told((0.9, 1.0), (0.5, 2.0)), 2, terminated_in=2, validate_every_steps=1)
    assert run.finished
    best = read(run.checkpoints[2], read_state)["selection"]["weights"]
    assert same(run.weights, best)


def test_weights_depend_on_the_seeds_of_data_and_dropout(tiny):
    """Else the tests above would pass whatever was restored."""
    corpus = echoes(tiny)
    runs = [
        Run(finetuning(tiny, corpus, data_seed=data, architecture="bi"), 2, seed=dropout).weights
        for data, dropout in ((0, 0), (0, 0), (1, 0), (0, 1))
    ]
    assert same(runs[0], runs[1])
    assert not same(runs[0], runs[2])
    assert not same(runs[0], runs[3])


def validated(tiny):
    """`echoes`, with a valid split whose candidates are given."""
    rows = [
        {"context": [f"w{number}"], "response": f"w{number} w{number + 60}",
         "candidates": [f"w{other} w{other + 60}" for other in range(number, number + 5)]}
        for number in range(12)
    ]  # fmt: skip
    train_split, valid = echoes(tiny), tiny.corpus(rows, split="valid")
    files = {file["path"]: file for file in train_split.manifest["files"]}
    for file in valid.manifest["files"]:
        target = Path(train_split.uri) / file["path"]
        target.parent.mkdir(exist_ok=True)
        target.write_bytes((Path(valid.uri) / file["path"]).read_bytes())
        files[file["path"]] = file
    return Artifact(train_split.uri, {"fingerprint": "v", "files": list(files.values())})


@pytest.mark.slow
def test_validations_survive_a_kill_and_the_best_one_is_the_result(tiny):
    """Rates after a plateau, what is best so far, and the weights of the best in the end. With a rate that is
    too high the loss stops falling after two or three validations; an epoch is five steps, half of it two."""
    corpus = validated(tiny)

    def run(**more):
        return Run(finetuning(tiny, corpus), 14, checkpoint_every_steps=4, schedule="plateau",
                   learning_rate=0.2, warmup_steps=0, **more)  # fmt: skip

    whole = run()
    found = {p.step: p.metrics["valid_r1"] for p in whole.progress if "valid_r1" in p.metrics}
    assert list(found) == [2, 4, 6, 8, 10, 12, 14]
    assert len(set(whole.shown("learning_rate"))) > 2  # the plateau has been met
    last = whole.progress[-1].metrics
    assert last["best_valid_r1"] == max(found.values()) == found[last["best_step"]]
    assert len(set(found.values())) > 1
    assert whole.task.validation().metrics["r1"] == last["best_valid_r1"]
    for step in (4, 12):
        resumed = run(checkpoint=whole.checkpoints[step])
        assert same(resumed.weights, whole.weights), step
        for name in ("learning_rate", "loss"):
            assert resumed.shown(name) == whole.shown(name)[step:], step
        assert resumed.progress[-1].metrics["best_step"] == last["best_step"]


def test_without_validations_none_is_shown_and_settings_that_need_them_are_refused(tiny):
    off = Run(finetuning(tiny, validated(tiny)), 1, validate_every_epochs=0)
    make = finetuning(tiny, echoes(tiny))
    assert not any("valid_r1" in p.metrics for run in (off, Run(make, 1)) for p in run.progress)
    for setting, message in (
        ({"stop_after_validations": 3}, r"loop\.stop_after_validations: 3 .* 0 or 10"),
        ({"schedule": "plateau"}, r"loop\.schedule: 'plateau' is not allowed; .*"),
    ):
        with pytest.raises(BadInput, match=f"{message} .*valid split"):
            Run(make, 1, **setting)
        with pytest.raises(BadInput, match=f"{message} where .*validate_every_epochs is 0"):
            LoopConfig(validate_every_epochs=0, **setting)


class Numbers:
    """Batches that are the numbers 0, 1, 2, …"""

    steps_per_epoch = 1

    def start(self, cursors):
        first = cursors[0] if cursors else 0
        return ((torch.tensor(float(n)), n + 1) for n in range(first, 1000))


def toy(loss, **more):
    """A module of one matrix, one bias and one new matrix, and the loss that it is given."""

    def make(config, steps):
        module = nn.Module()
        module.matrix = nn.Parameter(torch.ones(2, 2))
        module.new = nn.Parameter(torch.ones(2, 2))
        module.bias = nn.Parameter(torch.ones(2))
        module.forward = lambda batch: (loss(module, batch), {"number": batch})
        return Task(
            module=module,
            batches=Numbers(),
            steps=steps,
            optimize=lambda: optimization(config, module, steps, [module.new]),
            backward=backward,
            save=lambda folder: None,
            **more,
        )

    return make


def zero(module, batch):
    return sum((value * 0).sum() for value in module.parameters())


@pytest.mark.slow
def test_what_was_mined_survives_a_kill(tiny):
    """Found again after every fifth step; killed between two times, and before the first."""
    corpus = echoes(tiny)

    def run(**more):
        finetune = {"negatives_from": "mined", "mine": Mining(top_k=6, max_share=1.0)}
        make = finetuning(tiny, corpus, architecture="poly", finetune=finetune)
        found = Run(make, 11, checkpoint_every_steps=3, learning_rate=1e-3, **more)
        assert found.task.miner.every_steps == 5
        return found

    whole = run()
    for step in (3, 6):
        resumed = run(checkpoint=whole.checkpoints[step])
        assert same(resumed.weights, whole.weights), step
        assert resumed.shown("loss") == whole.shown("loss")[step:]
        states = [run.task.miner.state() for run in (resumed, whole)]
        pools = [state.pop("pool") for state in states]
        assert pools[0] == pools[1]
        assert same(*states)
    never = finetuning(tiny, corpus, architecture="poly", finetune={
        "negatives_from": "mined", "mine": Mining(every_epochs=2.0)})  # fmt: skip
    losses = Run(never, 11, learning_rate=1e-3).shown("loss")
    assert losses[:5] == whole.shown("loss")[:5]
    assert losses[5:] != whole.shown("loss")[5:]


@pytest.mark.slow
def test_a_run_that_ended_when_mining_was_due_goes_on_as_a_longer_one(tiny):
    """It had no use for what it would have found, but its continuation has."""
    finetune = {"negatives_from": "mined", "mine": Mining(every_epochs=0.6, top_k=6, max_share=1.0)}
    make = finetuning(tiny, echoes(tiny), architecture="poly", finetune=finetune)
    config = {"learning_rate": 1e-3, "schedule": "constant", "warmup_steps": 1}
    short, whole = Run(make, 6, **config), Run(make, 8, **config)
    assert short.task.miner.every_steps == 3
    longer = Run(make, 8, checkpoint=short.checkpoints[6], **config)
    assert longer.shown("loss") == whole.shown("loss")[6:]
    assert same(longer.weights, whole.weights)


def told(*measured):
    """Validations find what they are told to, (R@1, loss), one after the other; one each step."""
    answers = iter(measured)

    def count(module, batch):
        return zero(module, batch) + module.bias.sum()

    def validation():
        r1, loss = next(answers)
        return Measured({"r1": r1, "loss": loss}, (r1, -loss))

    return toy(count, validation=validation)


def test_rates_fall_whenever_the_loss_is_not_lower_than_ever():
    losses = [3.0, 2.0, 2.5, 2.0, 1.0, 4.0]
    run = Run(told(*((0.5, loss) for loss in losses)), 6, schedule="plateau", warmup_steps=0,
              learning_rate=1.0, plateau_decay=0.4, validate_every_epochs=1)  # fmt: skip
    rates = [rate / lr_multiplier(step, 6, LoopConfig(schedule="plateau", warmup_steps=0))
             for step, rate in enumerate(run.shown("learning_rate"))]  # fmt: skip
    assert rates == pytest.approx([1, 1, 1, 0.4, 0.16, 0.16])


def test_a_run_that_goes_on_by_another_schedule_has_the_whole_rate_again():
    """Although none of its validations is better than those before."""
    settings = {"learning_rate": 1.0, "warmup_steps": 0, "validate_every_epochs": 1}
    losses = [(0.5, 1.0)] * 6
    shorter = Run(told(*losses), 4, schedule="plateau", **settings)
    assert shorter.shown("learning_rate")[-1] < 0.2
    state = shorter.checkpoints[4]
    longer = Run(told(*losses), 6, checkpoint=state, schedule="constant", **settings)
    assert longer.shown("learning_rate") == [1.0, 1.0]
    # In checkpoints of earlier code the factor on the rate is called `share`.
    selection = loop.Selection(LoopConfig(schedule="plateau"))
    state = selection.state()
    state["share"] = state.pop("plateau_factor") * 0.16
    selection.load(state)
    assert selection.plateau_factor == 0.16
    assert selection.state().keys() == loop.Selection(LoopConfig()).state().keys()


@pytest.mark.parametrize(("found", "patience", "stops", "best"), [
    ([(0.5, 1), (0.6, 1), (0.6, 1), (0.4, 0), (0.9, 1), (0.1, 1)], 2, 4, 2),
    ([(0.5, 1), (0.6, 1), (0.6, 1), (0.4, 0), (0.9, 1), (0.1, 1)], 3, 6, 5),
    ([(0.5, 1), (0.6, 1), (0.6, 1), (0.4, 0), (0.3, 1), (0.1, 1)], 0, 6, 2),
    ([(0.5, 3), (0.5, 2), (0.5, 1), (0.5, 4), (0.5, 0.5), (0.4, 1)], 2, 6, 5),
])  # fmt: skip
def test_stops_after_so_many_validations_without_a_better_one(found, patience, stops, best):
    """Better is a higher R@1 or, where it is equal, a lower loss."""
    config = {**PLAIN, "stop_after_validations": patience, "validate_every_epochs": 1}
    disk = {}
    run = Run(told(*found), 6, disk=disk, **config)
    assert run.progress[-1].step == stops == max(disk)
    assert run.progress[-1].metrics["best_step"] == best
    assert same(run.weights, Run(told(), best, **PLAIN, validate_every_epochs=0).weights)
    again = Run(told(), 6, checkpoint=disk[stops], **config)
    assert again.progress == []
    assert same(again.weights, run.weights)


def test_the_last_weights_are_the_result_whatever_validations_find(monkeypatch):
    """A validation of 100 questions has a standard error of 0.04: an early one wins by chance. No weights are
    copied then; to copy sharded ones, all ranks gather them."""
    copied = []
    monkeypatch.setattr(loop, "weights_of", lambda module: copied.append(1) or weights_of(module))
    found = [(0.9, 0), (0.8, 1), (0.7, 2), (0.6, 3)]
    best = Run(told(*found), 4, validate_every_epochs=1, **PLAIN)
    assert len(copied) == 1  # the first was the best
    config = {**PLAIN, "keep_weights": "last", "stop_after_validations": 2}
    last = Run(told(*found), 4, validate_every_epochs=1, **config)
    assert len(copied) == 1
    assert same(last.weights, Run(told(), 4, **PLAIN, validate_every_epochs=0).weights)
    assert not same(last.weights, best.weights)
    shown = last.progress[-1].metrics
    assert (shown["best_step"], shown["best_valid_r1"]) == (4, 0.6)
    longer = Run(
        told((0.1, 9)), 5, checkpoint=best.checkpoints[4], validate_every_epochs=1, **config
    )
    assert same(longer.weights, Run(told(), 5, **PLAIN, validate_every_epochs=0).weights)


def test_a_run_that_kept_its_last_weights_goes_on_with_the_best_of_those_that_it_has():
    each = {**PLAIN, "validate_every_epochs": 1}
    shorter = Run(told((0.9, 0), (0.8, 1)), 2, keep_weights="last", **each)
    longer = Run(told((0.5, 2), (0.4, 3)), 4, checkpoint=shorter.checkpoints[2], **each)
    shown = longer.progress[-1].metrics
    assert (shown["best_step"], shown["best_valid_r1"]) == (3, 0.5)
    assert same(longer.weights, Run(told(), 3, **PLAIN, validate_every_epochs=0).weights)


def test_checkpoints_and_reports_come_when_they_are_due():
    run = Run(toy(zero), 10, checkpoint_every_steps=4, log_every_steps=3)
    assert list(run.checkpoints) == [4, 8, 10]
    assert [progress.step for progress in run.progress] == [3, 4, 6, 8, 9, 10]
    # Means over the steps since the last report, of the numbers 0 to 9.
    assert run.shown("number") == [1, 3, 4.5, 6.5, 8, 9]


@pytest.mark.parametrize(
    ("minutes", "saved"), [(5, [4, 6, 10]), (4, [2, 4, 6, 8, 10]), (0, [6, 10])]
)
def test_slow_steps_are_saved_by_the_clock(monkeypatch, minutes, saved):
    """Each step takes two minutes; whether it is time is looked at with every second one, the report."""
    now = [0.0]

    def slow(module, batch):
        now[0] += 120
        return zero(module, batch)

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    each = {"checkpoint_every_steps": 6, "log_every_steps": 2}
    run = Run(toy(slow), 10, checkpoint_every_minutes=minutes, **each)
    assert list(run.checkpoints) == saved
    assert all("minutes_unsaved" not in progress.metrics for progress in run.progress)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_step_whose_loss_is_not_finite_changes_nothing_and_is_counted(value):
    def loss(module, batch):
        return zero(module, batch) + module.bias.sum() * torch.where(batch == 1, value, 1.0)

    run = Run(toy(loss), 3, log_every_steps=3, **PLAIN)
    assert run.progress[-1].metrics["skipped_steps"] == 1
    assert same(run.weights, Run(toy(lambda m, b: zero(m, b) + m.bias.sum()), 2, **PLAIN).weights)


@pytest.mark.parametrize("spoilt", ["loss", "gradient"])
def test_several_such_steps_in_a_row_end_the_run_and_keep_the_batch(spoilt):
    """Not fewer, nor those that are not in a row. The weights of the last checkpoint are sound; a loss may be
    finite where its gradient is not."""

    def loss(module, batch):
        is_bad = (batch == 0) | (batch == 1) | (batch >= 3)
        if spoilt == "loss":
            return zero(module, batch) + torch.where(is_bad, math.nan, 1.0)
        return zero(module, batch) + torch.sqrt((module.bias * 0).sum() + 1 - is_bad.float())

    disk = {}
    with pytest.raises(Stopped, match=r"step 6: .* not finite 3 times in a row .*: there"):
        Run(toy(loss), 9, checkpoint_every_steps=2, max_skipped_steps=3, disk=disk)
    for saved in disk.values():
        weights = read(saved, read_state)["module"]
        assert all(torch.isfinite(value).all() for value in weights.values())


def test_skipped_steps_are_counted_over_the_whole_run():
    """Over all reports, and over a kill between the two steps."""

    def loss(module, batch):
        return zero(module, batch) + torch.where((batch == 1) | (batch == 5), math.nan, 1.0)

    counts = [0, 1, 1, 1, 1, 2, 2]
    whole = Run(toy(loss), 7, checkpoint_every_steps=3)
    assert whole.shown("skipped_steps") == counts
    resumed = Run(toy(loss), 7, checkpoint=whole.checkpoints[3])
    assert resumed.shown("skipped_steps") == counts[3:]


def test_gradients_are_clipped_and_their_norm_is_shown():
    """Not clipped, Adamax' second step would be next to nothing beside its first."""

    def loss(module, batch):
        return zero(module, batch) + (module.matrix.sum() * torch.where(batch == 0, 1e3, 1e-2))

    run = Run(toy(loss), 2, optimizer="adamax", betas=(0.0, 0.5), weight_decay=0.0,
              max_gradient_norm=1e-3, learning_rate=0.1)  # fmt: skip
    assert run.shown("gradient_norm") == pytest.approx([2e3, 2e-2], rel=1e-4)
    # Both clipped to the same size, so both steps are full ones.
    moved = 1 - run.weights["matrix"][0, 0].item()
    assert moved == pytest.approx(sum(run.shown("learning_rate")), rel=0.01)
