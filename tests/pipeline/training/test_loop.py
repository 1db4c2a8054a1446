"""The loop: killed and resumed it ends the same; it learns; it stops at what is no number."""

from __future__ import annotations

import functools
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipeline.artifact import Artifact
from pipeline.config import BadInput, Stopped
from pipeline.models.encoder import prepare_for_training
from pipeline.models.settings import Shape, ranker_config
from pipeline.models.sources import External
from pipeline.training import loop
from pipeline.training.checkpoint import read_saved, read_state, weights_of, write_state
from pipeline.training.finetuning import Finetuning
from pipeline.training.loop import Listener, Measured, Task, lr_multiplier, optimization, train
from pipeline.training.losses import backward
from pipeline.training.pretraining import Pretraining
from pipeline.training.settings import FinetuneConfig, LoopConfig, Mining, PretrainConfig

CPU = torch.device("cpu")


class Killed(Exception):
    """Stands for a SIGKILL right after a checkpoint."""


class Run:
    """A training, what it reported, and its checkpoints as bytes, as a disk keeps them."""

    def __init__(self, make, steps, *, kill_at=0, checkpoint=None, disk=None, **config):
        """`make(config, steps)` builds the task."""
        self.progress, self.checkpoints = [], {} if disk is None else disk
        self.bad_batches = []
        settings = {"checkpoint_every_steps": 5, "log_every_steps": 1, "precision": "fp32"}
        loop_config = LoopConfig(**{**settings, **config})
        self.task = make(loop_config, steps)

        def resume():
            if not checkpoint:
                return None
            with tempfile.TemporaryDirectory() as folder:
                for name, data in checkpoint.items():
                    (Path(folder) / name).write_bytes(data)
                return read_saved(Path(folder))

        def on_checkpoint(state, cursor):
            with tempfile.TemporaryDirectory() as folder:
                write_state(state, Path(folder))
                (Path(folder) / "cursor-00000.json").write_text(json.dumps(cursor))
                files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
            self.checkpoints[state["step"]] = files
            if state["step"] == kill_at:
                raise Killed

        def on_bad_batch(step, batch):
            self.bad_batches.append((step, batch))
            return "there"

        listener = Listener(self.progress.append, on_checkpoint, on_bad_batch)
        prepare_for_training(self.task.module, CPU)
        train(self.task, self.task.module, loop_config, CPU, 0, listener, resume)

    @property
    def weights(self):
        return self.task.module.state_dict()

    def shown(self, name):
        return [progress.metrics[name] for progress in self.progress]


def cursor_in(checkpoint):
    return json.loads(checkpoint["cursor-00000.json"])


def in_mid_epoch(cursor):
    if isinstance(cursor, dict):  # by lane; (epoch, window, micro-batch) of each corpus
        return any(
            window or batch for lane in cursor.values() for _, window, batch in lane["corpora"]
        )
    _, _, batch, _ = cursor
    return batch > 0


def state_in(checkpoint):
    with tempfile.TemporaryDirectory() as folder:
        for name, data in checkpoint.items():
            (Path(folder) / name).write_bytes(data)
        return read_state(Path(folder))


def echoes(tiny, count=40):
    """Responses that repeat a word of their context, in contexts of various lengths."""
    rows = [
        {"context": [f"w{number}"] * (1 + number % 5), "response": f"w{number} w{number + 60}"}
        for number in range(count)
    ]
    return tiny.corpus(rows, rows_per_group=16)


def marked(tiny):
    """As `echoes`, and given candidates of which only the right one has the word w199."""
    rows = [
        {"context": [f"w{number}"], "response": f"w{number} w199",
         "candidates": [f"w{other} w{198 if other != number else 199}" for other in range(40)]}
        for number in range(40)
    ]  # fmt: skip
    return tiny.corpus(rows)


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


TASKS = {
    "poly": lambda tiny, corpus, **more: finetuning(tiny, corpus, architecture="poly", **more),
    "cross": lambda tiny, corpus, **more: finetuning(tiny, corpus, architecture="cross", **more),
    "pretraining": pretraining,
}


def same(left, right):
    assert left.keys() == right.keys()
    return all(torch.equal(torch.as_tensor(left[n]), torch.as_tensor(right[n])) for n in left)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TASKS)
def test_killed_in_mid_epoch_and_resumed_ends_with_the_same_weights(tiny, kind):
    """Bit for bit, dropout on; 13 steps, killed at 5 or 10, where an epoch is 5 or so."""
    corpus = echoes(tiny, 44)

    def run(**more):
        return Run(TASKS[kind](tiny, corpus), 13, learning_rate=1e-3, **more)

    whole = run()
    assert list(whole.checkpoints) == [5, 10, 13]
    cursors = [cursor_in(saved) for saved in whole.checkpoints.values()]
    assert any(in_mid_epoch(cursor) for cursor in cursors[:2])
    for step in (5, 10):
        resumed = run(checkpoint=whole.checkpoints[step])
        assert same(resumed.weights, whole.weights)
        assert [progress.step for progress in resumed.progress] == list(range(step + 1, 14))
        assert resumed.shown("loss") == whole.shown("loss")[step:]


@pytest.mark.slow
def test_a_run_that_dies_twice_ends_with_the_same_weights(tiny):
    corpus, disk = echoes(tiny), {0: None}

    def run(**more):
        return Run(TASKS["poly"](tiny, corpus), 12, checkpoint_every_steps=3, **more)

    for kill_at in (3, 9):
        with pytest.raises(Killed):
            run(kill_at=kill_at, checkpoint=disk[max(disk)], disk=disk)
    assert same(run(checkpoint=disk[max(disk)]).weights, run().weights)


def test_weights_depend_on_the_seeds_of_data_and_dropout(tiny):
    """Else the tests above would pass whatever was restored."""
    corpus = echoes(tiny)
    runs = [
        Run(finetuning(tiny, corpus, data_seed=data, architecture="bi"), 5, seed=dropout).weights
        for data, dropout in ((0, 0), (0, 0), (1, 0), (0, 1))
    ]
    assert same(runs[0], runs[1])
    assert not same(runs[0], runs[2])
    assert not same(runs[0], runs[3])


def test_a_finished_run_has_nothing_left_to_do(tiny):
    corpus = echoes(tiny)
    whole = Run(TASKS["poly"](tiny, corpus), 5)
    again = Run(TASKS["poly"](tiny, corpus), 5, checkpoint=whole.checkpoints[5])
    assert again.progress == []
    assert same(again.weights, whole.weights)


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


# A rate that is too high: the loss stops falling after two or three validations.
VALIDATED = {"schedule": "plateau", "learning_rate": 0.2, "warmup_steps": 0}


@pytest.fixture(scope="module")
def plateau(tiny):
    """`plateau("poly")`: a run of 18 steps with nine validations; with `checkpoint`, its rest."""
    corpus = validated(tiny)

    @functools.cache
    def whole(kind):
        return run(kind)

    def run(kind, **more):
        return Run(TASKS[kind](tiny, corpus), 18, checkpoint_every_steps=4, **VALIDATED, **more)

    return lambda kind, **more: run(kind, **more) if more else whole(kind)


@pytest.mark.slow
def test_validations_survive_a_kill(plateau):
    """Rates after a plateau, what is best so far, and the weights of the best in the end."""
    whole = plateau("poly")
    steps = [p.step for p in whole.progress if "valid_r1" in p.metrics]
    assert steps == [2, 4, 6, 8, 10, 12, 14, 16, 18]  # an epoch is five steps; half of it: two
    assert len(set(whole.shown("learning_rate"))) > 2  # the plateau has been met
    for step in (4, 8, 12):
        resumed = plateau("poly", checkpoint=whole.checkpoints[step])
        assert same(resumed.weights, whole.weights), step
        for name in ("learning_rate", "loss"):
            assert resumed.shown(name) == whole.shown(name)[step:], step
        assert resumed.progress[-1].metrics["best_step"] == whole.progress[-1].metrics["best_step"]


def test_the_result_is_the_best_validation_measured_again(plateau):
    run = plateau("poly")
    last = run.progress[-1].metrics
    found = {p.step: p.metrics["valid_r1"] for p in run.progress if "valid_r1" in p.metrics}
    assert last["best_valid_r1"] == max(found.values()) == found[last["best_step"]]
    assert len(set(found.values())) > 1
    assert run.task.validation().metrics["r1"] == last["best_valid_r1"]


def test_no_validation_where_it_is_switched_off_or_there_is_no_split(tiny):
    off = Run(TASKS["poly"](tiny, validated(tiny)), 4, validate_every_epochs=0)
    none = Run(TASKS["poly"](tiny, echoes(tiny)), 4)
    assert not any("valid_r1" in p.metrics for run in (off, none) for p in run.progress)


def test_patience_without_validations_is_refused(tiny):
    with pytest.raises(BadInput, match=r"loop\.stop_after_validations: 3 .* 0 or 10 .*valid split"):
        Run(TASKS["poly"](tiny, echoes(tiny)), 4, stop_after_validations=3)
    with pytest.raises(BadInput, match=r"loop\.stop_after_validations: 3 .* 0 or 10 where .* is 0"):
        LoopConfig(validate_every_epochs=0, stop_after_validations=3)


def test_a_plateau_without_validations_is_refused(tiny):
    with pytest.raises(BadInput, match=r"loop\.schedule: 'plateau' is not allowed; .*valid split"):
        Run(TASKS["poly"](tiny, echoes(tiny)), 4, schedule="plateau")
    with pytest.raises(BadInput, match=r"loop\.schedule: .*validate_every_epochs is 0"):
        LoopConfig(schedule="plateau", validate_every_epochs=0)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "optimizer"), [("cross", "adamw"), ("poly", "adamax")])
def test_loss_goes_down_on_a_task_that_can_be_learnt(tiny, kind, optimizer):
    run = Run(TASKS[kind](tiny, marked(tiny)), 40, learning_rate=5e-3, optimizer=optimizer)
    losses = run.shown("loss")
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert sum(run.shown("accuracy")[-5:]) > sum(run.shown("accuracy")[:5])


@pytest.mark.slow
def test_masked_words_are_learnt(tiny):
    run = Run(pretraining(tiny, echoes(tiny)), 80, learning_rate=5e-3)
    losses = run.shown("mlm_loss")
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


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
        found = Run(make, 12, checkpoint_every_steps=3, learning_rate=1e-3, **more)
        assert found.task.miner.every_steps == 5
        return found

    whole = run()
    for step in (3, 6, 9):
        resumed = run(checkpoint=whole.checkpoints[step])
        assert same(resumed.weights, whole.weights), step
        assert resumed.shown("loss") == whole.shown("loss")[step:]
        states = [run.task.miner.state() for run in (resumed, whole)]
        pools = [state.pop("pool") for state in states]
        assert pools[0] == pools[1]
        assert same(*states)
    never = finetuning(tiny, corpus, architecture="poly", finetune={
        "negatives_from": "mined", "mine": Mining(every_epochs=2.2)})  # fmt: skip
    losses = Run(never, 12, checkpoint_every_steps=3, learning_rate=1e-3).shown("loss")
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
        return Measured({"r1": r1, "loss": loss}, "r1")

    return toy(count, validation=validation)


def test_rates_fall_whenever_the_loss_is_not_lower_than_ever():
    losses = [3.0, 2.0, 2.5, 2.0, 1.0, 4.0]
    run = Run(told(*((0.5, loss) for loss in losses)), 6, schedule="plateau", warmup_steps=0,
              learning_rate=1.0, plateau_decay=0.4, validate_every_epochs=1)  # fmt: skip
    rates = [rate / lr_multiplier(step, 6, LoopConfig(schedule="plateau", warmup_steps=0))
             for step, rate in enumerate(run.shown("learning_rate"))]  # fmt: skip
    assert rates == pytest.approx([1, 1, 1, 0.4, 0.16, 0.16])


def test_other_schedules_do_not_wait_for_plateaus():
    run = Run(told(*[(0.5, 1.0)] * 6), 6, schedule="constant", validate_every_epochs=1)
    assert len(set(run.shown("learning_rate")[1:])) == 1


def test_a_run_that_goes_on_by_another_schedule_has_the_whole_rate_again():
    settings = {"learning_rate": 1.0, "warmup_steps": 0, "validate_every_epochs": 1}
    losses = [(0.5, 1.0)] * 6
    shorter = Run(told(*losses), 4, schedule="plateau", **settings)
    assert shorter.shown("learning_rate")[-1] < 0.2
    state = shorter.checkpoints[4]
    longer = Run(told(*losses), 6, checkpoint=state, schedule="constant", **settings)
    assert longer.shown("learning_rate") == [1.0, 1.0]


def test_a_checkpoint_of_earlier_code_keeps_its_rate_after_a_plateau():
    """Its factor on the rate was called `share`."""
    selection = loop.Selection(decay=0.4, patience=2)
    state = selection.state()
    state["share"] = state.pop("plateau_factor") * 0.16
    selection.load(state)
    assert selection.plateau_factor == 0.16
    assert selection.state().keys() == loop.Selection().state().keys()


@pytest.mark.parametrize(("found", "patience", "stops", "best"), [
    ([(0.5, 1), (0.6, 1), (0.6, 1), (0.4, 0), (0.9, 1), (0.1, 1)], 2, 4, 2),
    ([(0.5, 1), (0.6, 1), (0.6, 1), (0.4, 0), (0.9, 1), (0.1, 1)], 3, 6, 5),
    ([(0.5, 1), (0.6, 1), (0.6, 1), (0.4, 0), (0.3, 1), (0.1, 1)], 0, 6, 2),
    ([(0.5, 3), (0.5, 2), (0.5, 1), (0.5, 4), (0.5, 0.5), (0.4, 1)], 2, 6, 5),
])  # fmt: skip
def test_stops_after_so_many_validations_without_a_better_one(found, patience, stops, best):
    """Better is a higher R@1 or, where it is equal, a lower loss."""
    plain = {"learning_rate": 1.0, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0}
    config = {**plain, "stop_after_validations": patience, "validate_every_epochs": 1}
    disk = {}
    run = Run(told(*found), 6, disk=disk, **config)
    assert run.progress[-1].step == stops == max(disk)
    assert run.progress[-1].metrics["best_step"] == best
    assert same(run.weights, Run(told(), best, **plain, validate_every_epochs=0).weights)
    again = Run(told(), 6, checkpoint=disk[stops], **config)
    assert again.progress == []
    assert same(again.weights, run.weights)


def test_the_last_weights_are_the_result_whatever_validations_find():
    """A validation of 100 questions has a standard error of 0.04: an early one wins by chance."""
    plain = {"learning_rate": 1.0, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0}
    found = [(0.9, 0), (0.8, 1), (0.7, 2), (0.6, 3)]
    best = Run(told(*found), 4, validate_every_epochs=1, **plain)
    config = {**plain, "keep_weights": "last", "stop_after_validations": 2}
    last = Run(told(*found), 4, validate_every_epochs=1, **config)
    assert same(last.weights, Run(told(), 4, **plain, validate_every_epochs=0).weights)
    assert not same(last.weights, best.weights)
    shown = last.progress[-1].metrics
    assert (shown["best_step"], shown["best_valid_r1"]) == (4, 0.6)
    longer = Run(
        told((0.1, 9)), 5, checkpoint=best.checkpoints[4], validate_every_epochs=1, **config
    )
    assert same(longer.weights, Run(told(), 5, **plain, validate_every_epochs=0).weights)


def test_weights_are_copied_when_a_validation_is_better(monkeypatch):
    """To copy sharded weights, all ranks gather them."""
    copied = []
    monkeypatch.setattr(loop, "weights_of", lambda module: copied.append(1) or weights_of(module))
    found = [(0.5, 1), (0.6, 1), (0.6, 1), (0.4, 0), (0.9, 1), (0.1, 1)]
    Run(told(*found), 6, validate_every_epochs=1)
    assert len(copied) == 3
    Run(told(*found), 6, validate_every_epochs=1, keep_weights="last")
    assert len(copied) == 3


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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_step_whose_loss_is_not_finite_changes_nothing_and_is_counted(value):
    def loss(module, batch):
        return zero(module, batch) + module.bias.sum() * torch.where(batch == 1, value, 1.0)

    plain = {"schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0, "learning_rate": 0.5}
    run = Run(toy(loss), 3, log_every_steps=3, **plain)
    assert run.progress[-1].metrics["skipped_steps"] == 1
    assert same(run.weights, Run(toy(lambda m, b: zero(m, b) + m.bias.sum()), 2, **plain).weights)


@pytest.mark.parametrize("spoilt", ["loss", "gradient"])
def test_several_such_steps_in_a_row_end_the_run_and_keep_the_batch(spoilt):
    """The weights of the last checkpoint are sound; a loss may be finite where its gradient is not."""

    def loss(module, batch):
        if spoilt == "loss":
            return zero(module, batch) + torch.where(batch >= 3, math.nan, 1.0)
        bad = (batch >= 3).float()
        return zero(module, batch) + torch.sqrt((module.bias * 0).sum() + 1 - bad)

    disk, make, seen = {}, toy(loss), []

    def keep(config, steps):
        seen.append(make(config, steps))
        return seen[-1]

    with pytest.raises(Stopped, match=r"step 6: .* not finite 3 times in a row .*: there"):
        Run(keep, 9, checkpoint_every_steps=2, max_skipped_steps=3, disk=disk)
    for saved in disk.values():
        weights = state_in(saved)["module"]
        assert all(torch.isfinite(value).all() for value in weights.values())


def test_the_run_goes_on_after_fewer_such_steps():
    def loss(module, batch):
        return zero(module, batch) + torch.where((batch >= 2) & (batch <= 3), math.nan, 1.0)

    run = Run(toy(loss), 8, max_skipped_steps=3)
    assert run.progress[-1].step == 8
    assert run.progress[-1].metrics["skipped_steps"] == 2
    assert run.bad_batches == []


def test_skipped_steps_are_counted_over_the_whole_run():
    """Over all reports, and over a kill between the two steps."""

    def loss(module, batch):
        return zero(module, batch) + torch.where((batch == 1) | (batch == 5), math.nan, 1.0)

    counts = [0, 1, 1, 1, 1, 2, 2]
    whole = Run(toy(loss), 7, checkpoint_every_steps=3)
    assert whole.shown("skipped_steps") == counts
    resumed = Run(toy(loss), 7, checkpoint=whole.checkpoints[3])
    assert resumed.shown("skipped_steps") == counts[3:]


def test_decay_spares_biases_and_new_weights_learn_faster():
    """Without gradients only weight decay moves anything: by 1 - rate · decay a step."""
    run = Run(toy(zero), 1, learning_rate=0.2, weight_decay=0.1, head_lr_factor=5.0,
              warmup_steps=0, schedule="constant")  # fmt: skip
    rate = run.progress[0].metrics["learning_rate"]
    assert run.weights["matrix"][0, 0].item() == pytest.approx(1 - rate * 0.1)
    assert run.weights["new"][0, 0].item() == pytest.approx(1 - 5 * rate * 0.1)
    assert run.weights["bias"].tolist() == [1, 1]


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


@pytest.mark.parametrize(("name", "value"), [
    ("learning_rate", 0.0), ("warmup_steps", 1.5), ("warmup_steps", -0.1),
    ("head_lr_factor", 0.0), ("max_gradient_norm", 0.0), ("checkpoint_every_steps", 0),
    ("log_every_steps", 0), ("checkpoint_every_minutes", -1.0), ("plateau_decay", 0.0),
    ("plateau_decay", 1.0), ("validate_every_epochs", -0.5), ("stop_after_validations", -1),
])  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(BadInput, match=rf"loop\.{name}: {value} is not allowed; allowed: "):
        LoopConfig(**{name: value})
