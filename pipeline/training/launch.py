"""Runs the training loop on workers of Ray Train or in this process, with checkpoints and restarts."""

from __future__ import annotations

import functools
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import CheckpointUploadMode
from ray.util.queue import Queue

from pipeline import progress, storage
from pipeline.artifact import FileEntry, folder_entries
from pipeline.config import BadInput, Stopped
from pipeline.engine import executors
from pipeline.engine.draft import Draft
from pipeline.engine.messages import listening
from pipeline.engine.resources import best_device, cpus_each
from pipeline.engine.waiting import await_room
from pipeline.models import cpu
from pipeline.models.flops import peak_flops
from pipeline.models.placement import prepare_for_training
from pipeline.models.precision import Resolved, resolve_precision
from pipeline.storage import node_cache
from pipeline.storage.failures import cause_of
from pipeline.training.checkpoints import (
    is_sharded,
    tensors_in,
    weights_of,
    write_state,
)
from pipeline.training.data_parallel import distribute
from pipeline.training.distributed import agree_on_precision
from pipeline.training.loop import Cursor, Listener, Progress, Saved, Task, train
from pipeline.training.pace import Pace
from pipeline.training.restarts import RetryMachinesOnly
from pipeline.training.resuming import (
    last_checkpoint,
    read_saved,
    read_saved_at,
    read_start,
    write_saved,
)
from pipeline.training.selection import Selection
from pipeline.training.settings import TRAINING_STATE, LoopConfig, Workers

if TYPE_CHECKING:
    from pipeline.tracking import Run

_CHECKPOINTS = "_checkpoints"  # a folder of the draft, with one of each attempt
_STEPS_TO_TIDY = 50  # memory on CPUs: all-MiniLM grows from 2.9 GB at step 10 to 4.0 at step 68

Watch = Callable[[int, int], None]
Show = Callable[[int, dict[str, float]], None]
Keep = Callable[[Path, dict[str, float]], None]
"""Takes a checkpoint's folder on this node's disk, and the metrics of now."""


class Recipe(Protocol):
    """Builds a rank's task; a dataclass, which travels to the workers."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def loop(self) -> LoopConfig: ...

    def build(self, rank: int, world: int) -> Task:
        """Raises BadInput for settings that do not fit each other or the inputs."""


@dataclass(frozen=True)
class WorkerSpec:
    """The instructions for every worker."""

    recipe: Recipe
    workers: Workers
    threads: int
    draft: Draft
    attempt: str
    """Name of its folder. Ray Train would go on by its list of checkpoints in a folder that it knows, and
    fail where a kill has truncated the list."""
    checkpoint: str
    """URI of the last checkpoint of earlier attempts; "": none."""
    start: str
    """URI of the state of another run, which this one continues where it has no checkpoint; "": none."""


@dataclass(frozen=True)
class Trained:
    """The result of `fit`."""

    metrics: dict[str, float]
    """The last ones."""
    checkpoint: str
    """URI of the last checkpoint, in the draft; "": there was no step to train."""
    precision: str
    """The precision that the workers trained in: "auto" depends on their hardware."""

    @property
    def delivered(self) -> dict[str, float]:
        """The metrics of the best validation, whose weights are the result; none without validations."""
        return {
            name.removeprefix("best_"): value
            for name, value in self.metrics.items()
            if name.startswith("best_")
        }


def fit(
    recipe: Recipe,
    steps: int,
    workers: Workers,
    draft: Draft,
    run: Run,
    label: str,
    watch: Watch | None = None,
    start: str = "",
) -> Trained:
    """Trains on the cluster, or on one rank in this process, and leaves the model in the draft.

    `watch` is called with the steps done and the steps of the run. `start` is the URI of the state of another
    run (`TRAINING_STATE` of a published model), which this one continues.

    Checkpoints lie in the draft, so the same job, started again, continues from the last one.
    """
    with _progress(label, steps, run, watch) as show:
        threads = torch.get_num_threads()
        if not executors.current():
            threads = cpus_each(workers.workers, workers.gpu, workers.cpus_per_worker)
            await_room(threads, int(workers.gpu), workers.min_workers or workers.workers)
        attempt = f"training_{datetime.now():%Y-%m-%d_%H-%M-%S.%f}"
        checkpoint = last_checkpoint(draft.path(_CHECKPOINTS))
        spec = WorkerSpec(recipe, workers, threads, draft, attempt, checkpoint, start)
        if executors.current():
            return _fit_in_this_process(spec, show)
        with listening(show) as messages:
            return _fit_on_cluster(spec, messages)


def _fit_on_cluster(spec: WorkerSpec, messages: Queue) -> Trained:
    workers, draft = spec.workers, spec.draft
    resources = {"CPU": spec.threads, **({"GPU": 1} if workers.gpu else {})}
    count = (workers.min_workers, workers.workers) if workers.min_workers else workers.workers
    trainer = ray.train.torch.TorchTrainer(
        functools.partial(_work, spec, messages),
        scaling_config=ray.train.ScalingConfig(
            num_workers=count, use_gpu=workers.gpu, resources_per_worker=resources
        ),
        run_config=ray.train.RunConfig(
            name=spec.attempt,
            storage_path=draft.path(_CHECKPOINTS),
            failure_config=ray.train.FailureConfig(max_failures=workers.max_restarts),
            checkpoint_config=ray.train.CheckpointConfig(
                num_to_keep=spec.recipe.loop.keep_checkpoints
            ),
            callbacks=[RetryMachinesOnly()],
        ),
    )
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        result = trainer.fit()
    except SystemExit:  # how Ray ends a run that it has aborted after Ctrl-C
        raise KeyboardInterrupt from None
    except Exception as error:
        if failure := cause_of(error, BadInput, Stopped):
            raise failure from None
        raise
    finally:
        if threading.current_thread() is threading.main_thread():  # Ray leaves its own handler
            signal.signal(signal.SIGINT, on_interrupt)
    uri = spec.checkpoint
    if result.checkpoint:  # None: there was no step to train
        name = Path(result.checkpoint.path).name
        uri = draft.path(_CHECKPOINTS, spec.attempt, name)
    metrics, precision = result.return_value
    return Trained(metrics, uri, precision)


def _fit_in_this_process(spec: WorkerSpec, show: Show) -> Trained:
    """Trains on one rank. It restarts nothing; the same job, started again, continues from the last
    checkpoint."""
    folder = spec.draft.path(_CHECKPOINTS, spec.attempt)
    uris = list[str]()

    def keep(local: Path, metrics: dict[str, float]) -> None:
        uris.append(storage.join(folder, f"checkpoint_{datetime.now():%Y-%m-%d_%H-%M-%S.%f}"))
        storage.upload(local, uris[-1])
        shutil.rmtree(local)
        while len(uris) > spec.recipe.loop.keep_checkpoints:
            storage.delete(uris.pop(0))

    with torch.random.fork_rng(devices=[]):
        rank = _Rank(spec, 0, 1, best_device(), show, keep, lambda: None)
        metrics, precision = _train_rank(rank)
    return Trained(metrics, uris[-1] if uris else spec.checkpoint, precision)


@contextmanager
def _progress(label: str, steps: int, run: Run, watch: Watch | None) -> Iterator[Show]:
    """Shows the (step, metrics) of rank 0 as a bar on the driver's terminal, and logs them to MLflow.

    Workers then need neither access to the MLflow server nor its secret, and start a second sooner.
    """
    # Whoever watches shows it in a way of their own.
    with progress.bar(label, steps, unit="step", hidden=watch is not None) as bar:

        def show(step: int, metrics: dict[str, float]) -> None:
            bar.set_postfix_str(progress_line(metrics), refresh=False)
            bar.update(step - bar.n)  # a restarted worker goes back to its checkpoint
            run.log(metrics, step)
            if watch:
                watch(step, steps)

        yield show


_SHOWN = {
    "loss": ("loss", "{:.3f}"),
    "mlm_loss": ("mlm", "{:.3f}"),
    "next_loss": ("next", "{:.3f}"),
    "gradient_norm": ("|g|", "{:.2f}"),
    "tokens_per_s": ("tok/s", "{:,.0f}"),
    "mfu": ("mfu", "{:.0%}"),
    "data_wait_share": ("wait", "{:.1%}"),
    "skipped_steps": ("skipped", "{:.0f}"),
}


def progress_line(metrics: Mapping[str, float]) -> str:
    """The metrics as one line for a person, beside a bar that shows the steps and the time left."""
    parts = [
        f"{label} {form.format(metrics[name])}"
        for name, (label, form) in _SHOWN.items()
        if name in metrics and (name != "skipped_steps" or metrics[name])
    ]
    return ", ".join(parts)


def collect_model(draft: Draft, checkpoint: str = "") -> list[FileEntry]:
    """Moves the trained model into place and returns its files' manifest entries.

    `checkpoint`: the URI of a checkpoint to keep with the model, so that a longer run can start from it.
    """
    with tempfile.TemporaryDirectory() as folder:
        node_cache.download(draft.path("_model"), Path(folder))
        if checkpoint:
            node_cache.download(checkpoint, Path(folder) / TRAINING_STATE)
        storage.upload(Path(folder), draft.staging)
        return folder_entries(Path(folder))


def _work(spec: WorkerSpec, messages: Queue) -> tuple[dict[str, float], Resolved]:
    """One worker of Ray Train; returns what `_train_rank` returns."""
    context = ray.train.get_context()
    torch.set_num_threads(spec.threads)
    device = best_device()
    if device.type == "cuda":
        device = ray.train.torch.get_device()  # with its number: workers of a node see each other's

    def keep(local: Path, metrics: dict[str, float]) -> None:
        """Uploads the checkpoint from the node's disk while training goes on."""
        ray.train.report(
            metrics,
            checkpoint=ray.train.Checkpoint.from_directory(str(local)),
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=True,
        )

    def send(step: int, metrics: dict[str, float]) -> None:
        messages.put((step, metrics))

    rank, world = context.get_world_rank(), context.get_world_size()
    return _train_rank(_Rank(spec, rank, world, device, send, keep, _read_ray_checkpoint))


@dataclass(frozen=True)
class _Rank:
    """One of the processes that train together, and its ways to the driver."""

    spec: WorkerSpec
    number: int
    world: int
    device: torch.device
    send: Show
    """Called on the first rank alone."""
    keep: Keep
    saved: Callable[[], Saved | None]
    """Reads this attempt's last checkpoint; None: there is none yet."""

    def build_task(self) -> Task:
        return self.spec.recipe.build(self.number, self.world)


def _train_rank(rank: _Rank) -> tuple[dict[str, float], Resolved]:
    """Builds the rank's task, restores the last checkpoint, trains, saves; returns the last metrics and the
    precision."""
    spec, device = rank.spec, rank.device
    if device.type == "cpu":
        cpu.keep_memory()
    precision = agree_on_precision(spec.recipe.loop.precision, device)
    loop = replace(spec.recipe.loop, precision=precision)
    spec = replace(spec, recipe=replace(spec.recipe, loop=loop))
    rank = replace(rank, spec=spec)
    task = rank.build_task()
    prepare_for_training(task.module, device, precision)
    model = distribute(task.module, device, spec.workers.shard_weights)
    if loop.compile:
        model = torch.compile(model)  # type: ignore[assignment]
    reports = _Reports(rank)
    listener = Listener(reports.progress, reports.checkpoint, reports.save_bad_batch)
    train(task, model, loop, device, rank.number, listener, reports.resume)
    sharded = is_sharded(task.module)
    weights = weights_of(task.module) if sharded else {}  # a collective call
    if rank.number == 0:
        if sharded:
            task = rank.build_task()
            task.module.load_state_dict(weights)
        with tempfile.TemporaryDirectory() as folder:
            task.save(Path(folder))
            storage.delete(spec.draft.path("_model"))
            storage.upload(Path(folder), spec.draft.path("_model"))
    return reports.metrics, precision


class _Reports:
    """The reports of a rank to the driver, and its checkpoints."""

    def __init__(self, rank: _Rank) -> None:
        self._rank = rank
        self.metrics: dict[str, float] = {}
        """The last ones."""
        self._pace = Pace(rank.device, 0)
        self._tidied_step = 0

    def resume(self) -> Saved | None:
        """The last checkpoint of this run, or the state that it starts from."""
        saved, spec = self._rank.saved(), self._rank.spec
        if saved is None and spec.checkpoint:
            saved = read_saved_at(spec.checkpoint)
        if saved is None and spec.start:
            saved = read_start(spec.start)
        step = saved.state["step"] if saved else 0
        self._tidied_step = step
        self.metrics = {"step": float(step)}
        if saved:  # a finished run that was killed before it published trains no further step
            self.metrics["skipped_steps"] = float(saved.skipped_steps)
            self.metrics |= Selection.of(saved.state["selection"]).best
        self._pace = Pace(self._rank.device, step)
        return saved

    def progress(self, progress: Progress) -> None:
        if self._rank.device.type == "cpu" and progress.step >= self._tidied_step + _STEPS_TO_TIDY:
            cpu.return_memory()
            self._tidied_step = progress.step
        metrics = {**progress.metrics, **self._pace.measure(progress)}
        if "flops_per_s" in metrics:
            metrics["mfu"] = metrics.pop("flops_per_s") / (self._rank.world * self._peak)
        if self._rank.number == 0:
            self._rank.send(progress.step, metrics)
        self.metrics.update(metrics, step=progress.step)

    @functools.cached_property
    def _peak(self) -> float:
        """Operations a second of this rank's device; measuring them takes a second."""
        return peak_flops(
            self._rank.device,
            resolve_precision(self._rank.spec.recipe.loop.precision, self._rank.device),
        ).flops

    def checkpoint(self, state: dict[str, Any], cursor: Cursor) -> None:
        """Every rank saves its cursor; rank 0 what is the same on all."""
        folder = Path(tempfile.mkdtemp(prefix="checkpoint-"))
        write_saved(folder, state, cursor, self._rank.number, self._rank.world)
        self._rank.keep(folder, dict(self.metrics))

    def save_bad_batch(self, step: int, batch: Any) -> str:
        uri = self._rank.spec.draft.path("_bad_batch", f"step-{step}-rank-{self._rank.number}")
        with tempfile.TemporaryDirectory() as folder:
            write_state(tensors_in(batch), Path(folder))
            storage.upload(Path(folder), uri)
        return uri


def _read_ray_checkpoint() -> Saved | None:
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        return read_saved(Path(folder))
