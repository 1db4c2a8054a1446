"""Runs named tasks on the cluster, each one once, however often the job is killed.

A task is tried again after an error of the network or the object store (`pipeline.storage.failures`). It is
started again up to 3 times if its process or its node died. A task that still fails stops no other one: the
others run to the end, and then the failed ones are named with their inputs.

Tasks run on the cluster, by Ray Data, or in this process (`pipeline.engine.executors`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

from pipeline import progress
from pipeline.config import BadInput, Stopped
from pipeline.engine import executors, report
from pipeline.engine.actors import Actors
from pipeline.engine.attempts import AttemptCounter, Work, run_task
from pipeline.engine.draft import Draft
from pipeline.engine.records import RecordT, TaskCost
from pipeline.engine.resources import cpus_each, largest_memory
from pipeline.engine.waiting import await_room
from pipeline.storage.failures import DELAYS_S

AddWork = Callable[[Any, AttemptCounter], Any]
"""Adds the work to a dataset of tasks."""
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

    Raises BadInput where a task does, where the store refuses it, and where an earlier version of polyrank
    marked one of `tasks`; Stopped where tasks failed.
    """
    delays_s = DELAYS_S

    def add_work(dataset: Any, counter: AttemptCounter) -> Any:
        def do(row: dict[str, Any]) -> dict[str, Any]:
            return run_task(draft, work, delays_s, counter, row)

        await_room(1)
        bound = min(memory, largest_memory())  # a small machine tries
        return dataset.map(do, **({"memory": bound} if memory else {}))

    return _run_missing(draft, tasks, label, kind, lambda: work, add_work)


def run_tasks_on_actors(
    draft: Draft,
    tasks: Mapping[str, Any],
    make_work: Callable[[], Work[RecordT]],
    label: str,
    kind: type[RecordT],
    actors: Actors,
    rows: Mapping[str, int] | None = None,
    tasks_at_once: int = 1,
) -> list[RecordT]:
    """Like `run_tasks`, on actors. Each actor calls `make_work()` once and does the `work` that it returns.

    `rows`: how many each task has, where that tells better how long it takes. `tasks_at_once`: of an
    actor, each in a thread of its own.
    """
    delays_s = DELAYS_S

    class Actor:
        def __init__(self, counter: AttemptCounter) -> None:
            self._work = make_work()
            self._counter = counter

        def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            return run_task(draft, self._work, delays_s, self._counter, row)

    def add_work(dataset: Any, counter: AttemptCounter) -> Any:
        import ray.data

        min_actors, max_actors = actors.count(len(tasks)), actors.max_count(len(tasks))
        cpus = cpus_each(max_actors, actors.gpu, actors.cpus_per_actor)
        await_room(cpus, int(actors.gpu))
        return dataset.map(
            Actor,
            fn_constructor_args=(counter,),
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

    return _run_missing(draft, tasks, label, kind, make_work, add_work, rows, on_actors=True)


def _run_missing(
    draft: Draft,
    tasks: Mapping[str, Any],
    label: str,
    kind: type[RecordT],
    make_work: Callable[[], Work[RecordT]],
    add_work: AddWork,
    rows: Mapping[str, int] | None = None,
    on_actors: bool = False,
) -> list[RecordT]:
    """`add_work` does the work on the cluster, `make_work()` in this process."""
    finished = draft.finished_tasks()
    missing = [{"task": name, "argument": tasks[name]} for name in tasks if name not in finished]
    sizes, unit = (rows, "row") if rows else (dict.fromkeys(tasks, 1), "task")
    done_size = sum(sizes[name] for name in tasks if name in finished)
    total_size = sum(sizes[name] for name in tasks)
    failed: dict[str, str] = {}
    crashed_hosts_by_task: dict[str, list[str]] = {}
    with progress.bar(label, total_size, done_size, unit) as bar:
        if missing:
            counter = None
            if executor := executors.current():
                ended_tasks = executor.actor_tasks if on_actors else executor.tasks
                outcomes = _run_in_this_process(ended_tasks, draft, missing, make_work())
            else:
                counter = AttemptCounter.begin()
                outcomes = run_on_cluster(missing, add_work, counter)
            failed = failures(outcomes, label, lambda task, _: bar.update(sizes[task]))
            crashed_hosts_by_task = counter.end() if counter else {}
            finished = draft.finished_tasks()
    records = finished.records((name for name in tasks if name in finished), kind)
    cost_by_task = {name: record.cost for name, record in records.items()}
    report.end_stage(report.Stage(label, cost_by_task, failed, crashed_hosts_by_task))
    if failed:
        raise Stopped(describe(failed, tasks, label))
    return [records[name] for name in tasks]


def _run_in_this_process(
    ended_tasks: list[str], draft: Draft, missing: Sequence[dict[str, Any]], work: Work[RecordT]
) -> Generator[dict[str, Any], None, None]:
    """The outcome of each task, as it ends; its name joins `ended_tasks`."""
    for row in missing:
        yield run_task(draft, work, DELAYS_S, None, row)
        ended_tasks.append(row["task"])


def run_on_cluster(
    missing: list[dict[str, Any]], add_work: AddWork, counter: AttemptCounter
) -> Generator[dict[str, Any], None, None]:
    """The rows of `add_work(dataset of the missing, counter)` as they come, such as the outcomes of tasks."""
    import ray.data

    dataset = ray.data.from_items(missing, override_num_blocks=len(missing))
    yield from add_work(dataset, counter).iter_rows()


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
