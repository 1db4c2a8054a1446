"""Runs the training loop on workers of Ray Train or in this process, with checkpoints and restarts."""

from __future__ import annotations

import functools
import io
import math
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError
from ray.train import CheckpointUploadMode
from ray.util.queue import Queue
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pipeline import progress, storage
from pipeline.artifact import Artifact, FileEntry, folder_entries
from pipeline.config import BadInput, Stopped, Terminated, digest, max_wait_minutes
from pipeline.engine import executors
from pipeline.engine.draft import Draft
from pipeline.engine.messages import event, listening
from pipeline.engine.report import forget_peak_memory, peak_memory
from pipeline.engine.resources import best_device, cpus_each
from pipeline.engine.waiting import await_room
from pipeline.models import cpu
from pipeline.models.encoder import prepare_for_training
from pipeline.models.flops import peak_flops
from pipeline.storage import node_cache
from pipeline.storage.failures import DETERMINISTIC, cause_of
from pipeline.training.checkpoint import (
    Cursor,
    Saved,
    is_sharded,
    last_checkpoint,
    read_saved,
    read_saved_at,
    read_start,
    weights_of,
    write_saved,
    write_state,
)
from pipeline.training.interface import OverRaysNetwork
from pipeline.training.loop import Listener, Selection, Task, agree_on_precision, train
from pipeline.training.settings import TRAINING_STATE, LoopConfig, Workers
from pipeline.training.termination import on_sigterm

if TYPE_CHECKING:
    from pipeline.tracking import Run

_CHECKPOINTS = "_checkpoints"  # a folder of the draft, with one of each attempt
_NO_ROOM = "WorkerGroupStartupTimeoutError"  # of Ray Train, whose controller raises it
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
    finished: bool
    """False: a worker, or this process, was terminated; the checkpoint is of the step before."""

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
    earlier: Artifact | None = None,
) -> Trained:
    """Trains on the cluster, or on one rank in this process, and leaves the model in the draft.

    `watch` is called with the steps done and the steps of the run. `earlier`: a model with the training state
    of its run, which this run continues.

    Checkpoints lie in the draft, so the same job, started again, continues from the last one.

    Raises Terminated after SIGTERM. If Ray lives on, the step that was under way is saved. If a worker gets
    SIGTERM, or Ray drains its node, others continue from that step. If a worker fails, others continue from
    the last checkpoint, when there is room for them.
    """
    fit_once = _fit_in_this_process if executors.current() else _fit_on_cluster
    terminated = threading.Event()
    least, restarts, is_lost = workers.min_workers or workers.workers, 0, False
    with _progress(label, steps, run, watch) as show:
        while True:
            threads = torch.get_num_threads()
            if not executors.current():
                threads = cpus_each(workers.workers, workers.gpu, workers.cpus_per_worker)
                await_room(threads, int(workers.gpu), least, nodes_may_return=is_lost)
            attempt = f"training_{datetime.now():%Y-%m-%d_%H-%M-%S.%f}"
            checkpoint = last_checkpoint(draft.path(_CHECKPOINTS))
            start = storage.join(earlier.uri, TRAINING_STATE) if earlier else ""
            spec = WorkerSpec(recipe, workers, threads, draft, attempt, checkpoint, start)
            try:
                trained = fit_once(spec, show, terminated)
            except Exception as error:
                if terminated.is_set() and not isinstance(error, BadInput | Stopped):
                    # A Ray that this job has joined may get SIGTERM, too.
                    reason = "terminated, and Ray with it; the same command resumes at the last checkpoint"
                    raise Terminated(reason) from None
                restarts = _restarts_after(error, restarts, workers.max_restarts)
                is_lost = True
                goes_on = (
                    f"the training goes on from its last checkpoint when {least} workers have room"
                )
                print(f"a worker, or its node, has failed; {goes_on} (`ray status`)", flush=True)
                continue
            if trained.finished:
                return trained
            saved = f"step {trained.metrics['step']:.0f} is saved"
            if terminated.is_set():
                raise Terminated(f"terminated; {saved}, and the same command resumes there")
            print(
                f"a worker, or its node, is going; {saved}, and others go on from there", flush=True
            )


def _restarts_after(error: Exception, restarts: int, most: int) -> int:
    """The restarts of a run, this failure's among them. A node that is taken away with notice costs none.

    Raises the error, or what a person should know of it, where the same code would make it again, or after
    `most` restarts. Ray Train itself restarts nothing: with `min_workers` it would wait for ever.
    """
    is_of_workers = isinstance(error, ray.train.WorkerGroupError | ray.train.PreemptionError)
    if not is_of_workers or cause_of(error, *DETERMINISTIC):
        raise error
    death = cause_of(error, RayActorError)
    if isinstance(error, ray.train.PreemptionError) or (death and death.preempted):
        return restarts
    if restarts < most:
        return restarts + 1
    if not death:
        raise error
    raise Stopped(
        f"a worker died, after {most} restarts (resources.max_restarts); where its node's memory was full, "
        "give it less at a time; the same command resumes at the last checkpoint"
    )


def _fit_on_cluster(spec: WorkerSpec, show: Show, terminated: threading.Event) -> Trained:
    driver_terminated = event()

    def notify() -> None:
        terminated.set()
        driver_terminated.set.remote()

    with listening(show) as messages, on_sigterm(notify):
        return _fit_workers(spec, messages, driver_terminated)


def _fit_workers(spec: WorkerSpec, messages: Queue, driver_terminated: Any) -> Trained:
    workers, draft = spec.workers, spec.draft
    resources = {"CPU": spec.threads, **({"GPU": 1} if workers.gpu else {})}
    count = (workers.min_workers, workers.workers) if workers.min_workers else workers.workers
    filesystem, path = storage.locate(draft.path(_CHECKPOINTS))
    trainer = ray.train.torch.TorchTrainer(
        functools.partial(_work, spec, messages, driver_terminated),
        torch_config=OverRaysNetwork(),
        scaling_config=ray.train.ScalingConfig(
            num_workers=count, use_gpu=workers.gpu, resources_per_worker=resources
        ),
        run_config=ray.train.RunConfig(
            name=spec.attempt,
            storage_path=path,
            storage_filesystem=filesystem,  # Ray's own would know other credentials
            failure_config=ray.train.FailureConfig(
                max_preemption_failures=0,  # `fit` restarts workers
                # Of its waits for room, which take a minute each. By default it waits for ever.
                controller_failure_limit=math.ceil(max_wait_minutes()),
            ),
            checkpoint_config=ray.train.CheckpointConfig(
                num_to_keep=spec.recipe.loop.keep_checkpoints
            ),
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
        if type(getattr(error, "controller_failure", None)).__name__ == _NO_ROOM:
            raise Stopped(f"a worker failed, and within {max_wait_minutes():g} minutes there was no room for "
                          "another one; the same command resumes at the last checkpoint, and "
                          "--max-wait-minutes waits longer") from None  # fmt: skip
        raise
    finally:
        if threading.current_thread() is threading.main_thread():  # Ray leaves its own handler
            signal.signal(signal.SIGINT, on_interrupt)
    uri = spec.checkpoint
    if result.checkpoint:  # None: there was no step to train
        name = Path(result.checkpoint.path).name
        uri = draft.path(_CHECKPOINTS, spec.attempt, name)
    trained: Trained = replace(result.return_value, checkpoint=uri)
    return trained


def _fit_in_this_process(spec: WorkerSpec, show: Show, terminated: threading.Event) -> Trained:
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

    with torch.random.fork_rng(devices=[]), on_sigterm(terminated.set):
        rank = _Rank(spec, 0, 1, best_device(), show, keep, lambda: None, terminated.is_set)
        return replace(rank.train(), checkpoint=uris[-1] if uris else spec.checkpoint)


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


@contextmanager
def _progress(label: str, steps: int, run: Run, watch: Watch | None) -> Iterator[Show]:
    """Shows the (step, metrics) of rank 0 as a bar on the driver's terminal, and logs them to MLflow.

    Workers then need neither access to the MLflow server nor its secret, and start a second sooner.
    """
    # Whoever watches shows it in a way of their own.
    with progress.bar(label, steps, unit="step", hidden=watch is not None) as bar:

        def show(step: int, metrics: dict[str, float]) -> None:
            parts = [
                f"{label} {form.format(metrics[name])}"
                for name, (label, form) in _SHOWN.items()
                if name in metrics and (name != "skipped_steps" or metrics[name])
            ]
            bar.set_postfix_str(", ".join(parts), refresh=False)
            bar.update(step - bar.n)  # a restarted worker goes back to its checkpoint
            run.log(metrics, step)
            if watch:
                watch(step, steps)

        yield show


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


def _work(spec: WorkerSpec, messages: Queue, driver_terminated: Any) -> Trained:
    """One worker of Ray Train."""
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

    rank, world = context.get_world_rank(), context.get_world_size()
    sigterm = threading.Event()
    from_driver = [driver_terminated.wait.remote()] if rank == 0 else []

    def is_terminated() -> bool:
        return sigterm.is_set() or bool(from_driver and ray.wait(from_driver, timeout=0)[0])

    with on_sigterm(sigterm.set):
        return _Rank(
            spec, rank, world, device, lambda *shown: messages.put(shown), keep,
            _read_ray_checkpoint, is_terminated, ray.train.get_preemption_info,
        ).train()  # fmt: skip


def _read_ray_checkpoint() -> Saved | None:
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        return read_saved(Path(folder))


@dataclass
class _Rank:
    """One of the processes that train together, its reports to the driver, and its checkpoints."""

    spec: WorkerSpec
    number: int
    world: int
    device: torch.device
    send: Show
    """Called on the first rank alone."""
    keep: Keep
    saved: Callable[[], Saved | None]
    """Reads this attempt's last checkpoint; None: there is none yet."""
    is_terminated: Callable[[], bool]
    """Whether this rank's process, or the driver's, has got SIGTERM."""
    preemption: Callable[[], object] = lambda: None
    """None, unless a node of the ranks is drained: its `ray start` has got SIGTERM, or `ray drain-node` names
    it. A collective call of some milliseconds."""
    preempted: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    """The last ones."""

    def train(self) -> Trained:
        """Builds the task, restores the last checkpoint, trains, saves. Does not know the last checkpoint."""
        spec, device = self.spec, self.device
        self._remove_leftovers()
        if device.type == "cpu":
            cpu.keep_memory()
        self._precision = agree_on_precision(spec.recipe.loop.precision, device)
        loop = replace(spec.recipe.loop, precision=self._precision)
        recipe = replace(spec.recipe, loop=loop)
        task = recipe.build(self.number, self.world)
        prepare_for_training(task.module, device, self._precision)
        model = distribute(task.module, device, spec.workers.shard_weights)
        if loop.compile:
            model = torch.compile(model)  # type: ignore[assignment]
        listener = Listener(
            self._report,
            self._save_checkpoint,
            self._save_bad_batch,
            lambda: self.preempted or self.is_terminated(),
        )
        if not train(task, model, loop, device, self.number, listener, self._resume):
            return Trained(self.metrics, "", self._precision, finished=False)
        sharded = is_sharded(task.module)
        weights = weights_of(task.module) if sharded else {}  # a collective call
        if self.number == 0:
            if sharded:
                task = recipe.build(self.number, self.world)
                task.module.load_state_dict(weights)
            with tempfile.TemporaryDirectory() as folder:
                task.save(Path(folder))
                storage.delete(spec.draft.path("_model"))
                storage.upload(Path(folder), spec.draft.path("_model"))
        return Trained(self.metrics, "", self._precision, finished=True)

    def _resume(self) -> Saved | None:
        """The last checkpoint of this run, or the state that it starts from."""
        saved = self.saved()
        if saved is None and self.spec.checkpoint:
            saved = read_saved_at(self.spec.checkpoint)
        if saved is None and self.spec.start:
            saved = read_start(self.spec.start)
        step = saved.state["step"] if saved else 0
        self.metrics = {"step": float(step)}
        if saved:  # a finished run that was killed before it published trains no further step
            self.metrics["skipped_steps"] = float(saved.skipped_steps)
            selection = Selection(self.spec.recipe.loop)
            selection.load(saved.state["selection"])
            self.metrics |= selection.best
        self._tidied_step, self._pace = step, Pace(self.device, step)
        return saved

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        if self.device.type == "cpu" and step >= self._tidied_step + _STEPS_TO_TIDY:
            cpu.return_memory()
            self._tidied_step = step
        metrics = {**metrics, **self._pace.measure(step, metrics["steps_per_s"])}
        if "flops_per_s" in metrics:
            metrics["mfu"] = metrics.pop("flops_per_s") / (self.world * self._peak_flops)
        self.preempted = self.preemption() is not None
        if self.number == 0:
            self.send(step, metrics)
        self.metrics.update(metrics, step=step)

    @functools.cached_property
    def _peak_flops(self) -> float:
        """Operations a second of this rank's device; measuring them takes a second."""
        return peak_flops(self.device, self._precision).flops

    def _save_checkpoint(self, state: dict[str, Any], cursor: Cursor) -> None:
        folder = Path(tempfile.mkdtemp(prefix=self._prefix))
        try:
            write_saved(folder, state, cursor, self.number, self.world)
            self.keep(folder, dict(self.metrics))
        except BaseException:  # each attempt on a full disk would leave less room on it
            shutil.rmtree(folder, ignore_errors=True)
            raise

    @property
    def _prefix(self) -> str:
        """Of the names of this run's checkpoints on a node's disk."""
        return f"checkpoint-{digest(self.spec.draft.staging)}-"

    def _remove_leftovers(self) -> None:
        """Removes the checkpoints of earlier attempts that a kill, or a store that was away, left on this
        node. No rank has a newer one: the first collective call comes afterwards."""
        for leftover in Path(tempfile.gettempdir()).glob(f"{self._prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _save_bad_batch(self, step: int, batch: Any) -> str:
        uri = self.spec.draft.path("_bad_batch", f"step-{step}-rank-{self.number}")
        with tempfile.TemporaryDirectory() as folder:
            write_state(batch, Path(folder))
            storage.upload(Path(folder), uri)
        return uri


def distribute(module: nn.Module, device: torch.device, shard: bool) -> nn.Module:
    """Moves the module and wraps it for its ranks.

    Whole: DistributedDataParallel, where there are several ranks. Sharded: FSDP2, which makes new parameters
    of the module's own. It moves and shards one layer after the other, so the device never holds the whole
    module.
    """
    if not dist.is_initialized():
        return module.to(device)
    if not shard:
        wrapped: nn.Module = ray.train.torch.prepare_model(module, move_to_device=device)
        return wrapped
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in list(module.modules()):
        if isinstance(part, nn.ModuleList):  # the Transformer's layers
            for layer in part:
                fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


class Pace:
    """The speed and the peak memory of this process from the creation on: a process that resumed from a
    checkpoint counts its own steps."""

    def __init__(self, device: torch.device, step: float) -> None:
        self._device = device
        self._first_step = self._last_step = step
        self._seconds = 0.0
        forget_peak_memory()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def measure(self, step: int, steps_per_s: float) -> dict[str, float]:
        """`mean_steps_per_s`: without validations and checkpoints. `peak_memory_mib`: with them; of a GPU's
        tensors, or on a CPU of the whole process, libraries included."""
        self._seconds += (step - self._last_step) / steps_per_s
        self._last_step = step
        on_gpu = self._device.type == "cuda"
        peak_bytes = torch.cuda.max_memory_allocated(self._device) if on_gpu else peak_memory()
        return {
            "mean_steps_per_s": (self._last_step - self._first_step) / self._seconds,
            "peak_memory_mib": peak_bytes / 2**20,
        }


_PANELS = (
    ("loss (nats)", ("loss", "mlm_loss", "next_loss", "valid_loss", "valid_mlm_loss", "valid_next_loss")),
    ("accuracy", ("mlm_accuracy", "next_accuracy", "accuracy", "valid_mlm_accuracy",
                  "valid_next_accuracy", "valid_r1")),
    ("learning rate", ("learning_rate",)),
    ("gradient norm", ("gradient_norm",)),
)  # fmt: skip
CURVES = tuple(name for _, names in _PANELS for name in names)
"""The metrics that `draw_curves` shows."""


def draw_curves(curves: Mapping[str, Sequence[tuple[int, float]]], title: str) -> bytes:
    """A PNG of curves of (step, value), with a panel for losses, accuracies, the rate and the gradient's
    norm; validations are dots."""
    from matplotlib.figure import Figure  # which workers do not need

    panels = [(label, [name for name in names if curves.get(name)]) for label, names in _PANELS]
    panels = [(label, names) for label, names in panels if names]
    figure = Figure(figsize=(6.4 * max(1, len(panels)) / 1.6, 3.4), layout="constrained")
    figure.suptitle(title, fontsize=10)
    for place, (label, names) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for name in names:
            steps, values = zip(*curves[name], strict=True)
            style = "o-" if name.startswith("valid_") else "-"
            axes.plot(steps, values, style, markersize=3, linewidth=1, label=name)
        axes.set_xlabel("step")
        axes.set_title(label, fontsize=9)
        axes.legend(fontsize=7)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
