"""The Ray Train shell around the loop: workers, process group, checkpoints, restarts."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray
import ray.train
import ray.train.torch
import torch
from ray.util.queue import Queue
from tqdm import tqdm

from pipeline import storage
from pipeline.artifact import Draft, folder_entries
from pipeline.config import require
from pipeline.models import cpu
from pipeline.models.placement import prepare_for_training
from pipeline.resources import best_device, cpus_each
from pipeline.task_messages import listening
from pipeline.training.batches import Cursor
from pipeline.training.loop import LoopConfig, Progress, train
from pipeline.training.pace import Pace

if TYPE_CHECKING:
    from pipeline.tracking import Run

_STATE = "state.pt"
_STEPS_TO_TIDY = 50  # memory on CPUs: all-MiniLM grows from 2.9 GB at step 10 to 4.0 at step 68


@dataclass(frozen=True, kw_only=True)
class Workers:
    """What a training runs on. It never changes which settings make a model."""

    workers: int = 1
    """Training processes; on GPUs one each. On CPUs one per core: all-MiniLM, 64 contexts of 160 tokens,
    takes 1.7 s a step by two of one thread, 1.9 s by one of two."""
    cpus_per_worker: int = 0
    """Cores, and threads, of a worker; 0: the cluster's cores shared out among the workers."""
    gpu: bool = False
    """One GPU per worker, NCCL between them; else CPU and gloo."""
    max_restarts: int = 3
    """Times that dead workers are replaced and go on from the last checkpoint."""

    def __post_init__(self) -> None:
        require(self.workers >= 1, "resources.workers", self.workers, ">= 1")
        require(self.cpus_per_worker >= 0, "resources.cpus_per_worker", self.cpus_per_worker,
                ">= 0")  # fmt: skip
        require(self.max_restarts >= 0, "resources.max_restarts", self.max_restarts, ">= 0")


Watch = Callable[[int, int], None]


class Recipe(Protocol):
    """Builds a rank's task; it travels to the workers."""

    def build(self, rank: int, world: int) -> Any:
        """A `Task`."""


@dataclass(frozen=True)
class _Assignment:
    """What every worker is told."""

    recipe: Recipe
    loop: LoopConfig
    steps: int
    threads: int
    model: str
    progress: Queue


def fit(
    recipe: Recipe,
    loop: LoopConfig,
    steps: int,
    workers: Workers,
    draft: Draft,
    run: Run,
    label: str,
    watch: Watch | None = None,
) -> dict[str, float]:
    """Trains on the cluster, leaves the model in the draft, and returns the last metrics.

    `watch` hears of the steps that are done, of how many.

    Checkpoints lie in the draft, so that the same job, started again, goes on from the last one.
    """
    threads = workers.cpus_per_worker or cpus_each(workers.workers)
    per_worker = {"CPU": threads, **({"GPU": 1} if workers.gpu else {})}
    with _progress(label, steps, run, watch) as progress:
        assignment = _Assignment(recipe, loop, steps, threads, draft.path("_model"), progress)
        trainer = ray.train.torch.TorchTrainer(
            functools.partial(_work, assignment),
            scaling_config=ray.train.ScalingConfig(
                num_workers=workers.workers, use_gpu=workers.gpu, resources_per_worker=per_worker
            ),
            run_config=ray.train.RunConfig(
                name="training",
                storage_path=draft.path("_checkpoints"),
                failure_config=ray.train.FailureConfig(max_failures=workers.max_restarts),
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            ),
        )
        metrics = trainer.fit().metrics or {}
    return {"step": 0.0, **{name: float(value) for name, value in metrics.items()}}


@contextmanager
def _progress(label: str, steps: int, run: Run, watch: Watch | None) -> Iterator[Queue]:
    """A queue for rank 0's (step, metrics): a bar on the driver's terminal, and what MLflow logs.

    So workers need no way to the MLflow server and no secret for it, and start a second sooner without it.
    """
    with tqdm(desc=label, total=steps, unit="step") as bar:

        def show(step: int, metrics: dict[str, float]) -> None:
            bar.set_postfix_str(f"loss {metrics['loss']:.3f}", refresh=False)
            bar.update(step - bar.n)  # a restarted worker goes back to its checkpoint
            run.log(metrics, step)
            if watch:
                watch(step, steps)

        with listening(show) as queue:
            yield queue


def collect_model(draft: Draft) -> list[dict[str, Any]]:
    """Moves the trained model into place and returns its files' manifest entries."""
    with tempfile.TemporaryDirectory() as folder:
        storage.download(draft.path("_model"), Path(folder))
        storage.upload(Path(folder), draft.staging)
        return folder_entries(Path(folder))


def _work(assignment: _Assignment) -> None:
    """One worker: builds its task, restores the last checkpoint, trains, saves."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(assignment.threads)
    device = best_device()
    if device.type == "cuda":
        device = ray.train.torch.get_device()  # with its number: workers of a node see each other's
    else:
        cpu.keep_memory()
    task = assignment.recipe.build(rank, world)
    prepare_for_training(task.module, device, assignment.loop.precision)
    state, cursor = _restore(rank, device)
    model = ray.train.torch.prepare_model(task.module, move_to_device=device)
    if assignment.loop.compile:
        model = torch.compile(model)
    last: dict[str, float] = {"step": state["step"] if state else 0}
    pace = Pace(device, last["step"])
    tidied = last["step"]

    def on_progress(progress: Progress) -> None:
        nonlocal tidied
        if device.type == "cpu" and progress.step >= tidied + _STEPS_TO_TIDY:
            cpu.return_memory()
            tidied = progress.step
        metrics = {**progress.metrics, **pace.of(progress)}
        if rank == 0:
            assignment.progress.put((progress.step, metrics))
        last.update(metrics, step=progress.step)

    def on_checkpoint(state: dict[str, Any], cursor: Cursor) -> None:
        _checkpoint(state, cursor, rank, last)

    train(
        task, model, assignment.loop, assignment.steps, device, rank, on_progress, on_checkpoint,
        state, cursor,
    )  # fmt: skip
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            task.save(Path(folder))
            storage.delete(assignment.model)
            storage.upload(Path(folder), assignment.model)


def _checkpoint(
    state: dict[str, Any], cursor: Cursor, rank: int, metrics: dict[str, float]
) -> None:
    """Every rank saves its cursor; rank 0 what is the same on all."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"cursor-{rank}.json").write_text(json.dumps(cursor))
        if rank == 0:
            torch.save(state, Path(folder) / _STATE)
        checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(dict(metrics), checkpoint=checkpoint)


def _restore(rank: int, device: torch.device) -> tuple[dict[str, Any] | None, Cursor | None]:
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None, None
    with checkpoint.as_directory() as folder:
        own = Path(folder) / f"cursor-{rank}.json"
        # With more workers than before, a new one starts where rank 0 stands (Batches.start).
        path = own if own.exists() else Path(folder) / "cursor-0.json"
        cursor = Cursor(*json.loads(path.read_text()))
        state = torch.load(Path(folder) / _STATE, map_location=device, weights_only=True)
    return state, cursor
