"""Runs named tasks on the cluster, each one once, however often the job is killed.

A task is tried again after an error of the network or the object store (`pipeline.storage.failures`). It is
started again up to 3 times if its process or its node died. A task that still fails stops no other one: the
others run to the end, and then the failed ones are named with their inputs.

Tasks run on the cluster, by Ray Data, or in this process (`pipeline.engine.executors`).
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from pipeline import progress
from pipeline.config import BadInput, Stopped
from pipeline.engine import executors, report
from pipeline.engine.attempts import Starts, Work, run_task, start_counter
from pipeline.engine.draft import Draft
from pipeline.engine.records import RecordT, TaskCost
from pipeline.engine.resources import Actors, cpus_each, largest_memory
from pipeline.engine.waiting import await_room
from pipeline.storage.failures import DELAYS_S

_MAX_FAILED = 20  # of so many tasks the next one will fail too
_SHOWN = 5


def run_tasks(
    draft: Draft,
    tasks: Mapping[str, Any],
    work: Work[RecordT],
    label: str,
    kind: type[RecordT],
    memory: int = 0,
) -> list[RecordT]:
    """Runs `work(draft, name, argument)` for every task that is not marked yet.

    `work` writes files of its own into the draft and returns a record of this `kind`, with which the
    task is marked. Returns the records of all `tasks`, in their order. `memory`: bytes that a task needs,
    so that a node runs no more at once than it holds; 0: not known.

    Raises BadInput where a task does, and where an earlier version of polyrank marked one of `tasks`;
    Stopped where tasks failed.
    """
    delays_s = DELAYS_S

    def run(dataset: Any, starts: Starts) -> Any:
        def do(row: dict[str, Any]) -> dict[str, Any]:
            return run_task(draft, work, delays_s, starts, row)

        await_room(1)
        bound = min(memory, largest_memory())  # a small machine tries
        return dataset.map(do, **({"memory": bound} if memory else {}))

    return _run(draft, tasks, label, kind, lambda: work, run)


def run_tasks_on_actors(
    draft: Draft,
    tasks: Mapping[str, Any],
    make: Callable[[], Work[RecordT]],
    label: str,
    kind: type[RecordT],
    actors: Actors,
    rows: Mapping[str, int] | None = None,
    tasks_at_once: int = 1,
) -> list[RecordT]:
    """Like `run_tasks`, on actors. Each actor calls `make()` once and does the `work` that it returns.

    `rows`: how many each task has, where that tells better how long it takes. `tasks_at_once`: of an
    actor, each in a thread of its own.
    """
    delays_s = DELAYS_S

    class Actor:
        def __init__(self, starts: Starts) -> None:
            self._work = make()
            self._starts = starts

        def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            return run_task(draft, self._work, delays_s, self._starts, row)

    def run(dataset: Any, starts: Starts) -> Any:
        import ray.data

        min_actors, max_actors = actors.count(len(tasks)), actors.max_count(len(tasks))
        cpus = cpus_each(max_actors, actors.gpu, actors.cpus_per_actor)
        await_room(cpus, int(actors.gpu))
        return dataset.map(
            Actor,
            fn_constructor_args=(starts,),
            compute=ray.data.ActorPoolStrategy(
                min_size=min_actors,
                max_size=max_actors,
                # Ray's default is twice as many. A pool that may grow needs them: it grows when they wait.
                max_tasks_in_flight_per_actor=None
                if tasks_at_once == 1 or min_actors < max_actors
                else tasks_at_once,
                max_concurrent_calls_per_actor=tasks_at_once,
                enable_true_multi_threading=tasks_at_once > 1,
            ),
            num_cpus=cpus,
            num_gpus=1 if actors.gpu else None,
        )

    return _run(draft, tasks, label, kind, make, run, rows, on_actors=True)


def _run(
    draft: Draft,
    tasks: Mapping[str, Any],
    label: str,
    kind: type[RecordT],
    make: Callable[[], Work[RecordT]],
    run: Callable[[Any, Starts], Any],
    rows: Mapping[str, int] | None = None,
    on_actors: bool = False,
) -> list[RecordT]:
    """`run(dataset, starts)` adds the work to the dataset of tasks; `make()` is the work in this process."""
    marks = draft.marks()
    missing = [{"task": name, "argument": tasks[name]} for name in tasks if name not in marks]
    sizes, unit = (rows, "row") if rows else (dict.fromkeys(tasks, 1), "task")
    done_size = sum(sizes[name] for name in tasks if name in marks)
    total_size = sum(sizes[name] for name in tasks)
    failed: dict[str, str] = {}
    died_on: dict[str, list[str]] = {}
    with progress.bar(label, total_size, done_size, unit) as bar:
        if missing:
            if executor := executors.current():
                ended_tasks = executor.actor_tasks if on_actors else executor.tasks
                outcomes = _run_in_this_process(ended_tasks, draft, missing, make)
            else:
                outcomes = run_on_cluster(missing, run, died_on)
            failed = failures(outcomes, label, lambda task, _: bar.update(sizes[task]))
            marks = draft.marks()
    records = marks.records((name for name in tasks if name in marks), kind)
    cost_by_task = {name: record.cost for name, record in records.items()}
    report.report(report.Stage(label, cost_by_task, failed, died_on))
    if failed:
        raise Stopped(describe(failed, tasks, label))
    return [records[name] for name in tasks]


def _run_in_this_process(
    ended_tasks: list[str],
    draft: Draft,
    missing: Sequence[dict[str, Any]],
    make: Callable[[], Work[RecordT]],
) -> Generator[dict[str, Any], None, None]:
    """The outcome of each task, as it ends; its name joins `ended_tasks`."""
    work = make()
    for row in missing:
        yield run_task(draft, work, DELAYS_S, None, row)
        ended_tasks.append(row["task"])


def run_on_cluster(
    missing: list[dict[str, Any]],
    run: Callable[[Any, Starts], Any],
    died_on: dict[str, list[str]],
) -> Generator[dict[str, Any], None, None]:
    """The rows of `run(dataset of the missing, starts)`, such as the outcome of each task, as they come; then
    fills in `died_on`."""
    import ray.data

    starts = Starts(start_counter(), uuid.uuid4().hex)
    dataset = ray.data.from_items(missing, override_num_blocks=len(missing))
    with suppress(GeneratorExit):  # nobody waits for the other tasks
        yield from run(dataset, starts).iter_rows()
    died_on.update(starts.end())


def failures(
    outcomes: Generator[dict[str, Any], None, None],
    label: str,
    on_end: Callable[[str, TaskCost], object],
) -> dict[str, str]:
    """Why tasks failed, by task. The others have gone on to the end, unless too many failed.

    Raises BadInput where a task does, and Stopped where a task cannot write.
    """
    failed: dict[str, str] = {}
    with closing(outcomes):
        for row in outcomes:
            if row["refusal"]:
                raise BadInput(row["refusal"])
            if row["storage"]:  # no other task can write either
                raise Stopped(
                    f"{label}: {row['storage']}; the same command resumes when it can write"
                )
            if not row["failure"]:
                cost = TaskCost(**json.loads(row["cost"]))
                report.count_done(label, cost)
                on_end(row["task"], cost)
                continue
            if row["traceback"] and not failed:
                print(row["traceback"], file=sys.stderr, flush=True)
            report.count_failed(label)
            progress.event("task_failed", stage=label, task=row["task"], why=row["failure"])
            failed[row["task"]] = row["failure"]
            if len(failed) >= _MAX_FAILED:
                break
    return failed


def describe(failed: Mapping[str, str], tasks: Mapping[str, Any], label: str) -> str:
    """Describes which tasks failed, and why; `tasks`: all tasks, with their inputs."""
    shown = "; ".join(
        f"{task} ({str(tasks[task])[:200]}): {failed[task]}" for task in list(failed)[:_SHOWN]
    )
    suffix = f"; and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
    return (
        f"{label}: {len(failed)} of {len(tasks)} tasks failed: {shown}{suffix}; the same command does what "
        "is missing"
    )
