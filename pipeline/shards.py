"""Work cut into named tasks that run on the cluster once each, however often the job is killed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tqdm import tqdm

from pipeline.actors import Actors
from pipeline.artifact import Draft
from pipeline.config import BadInput
from pipeline.records import RecordT
from pipeline.resources import cpus_each

Work = Callable[[Draft, str, Any], RecordT]


def run_tasks(
    draft: Draft,
    tasks: Mapping[str, Any],
    work: Work[RecordT],
    label: str,
    kind: type[RecordT],
) -> list[RecordT]:
    """Runs `work(draft, name, argument)` for every task that is not marked yet.

    `work` writes files of its own into the draft and returns a record of this `kind`, with which the
    task is marked. Returns the records of all `tasks`, in their order.

    Raises BadInput where a task does, and where an earlier version of polyrank marked one of `tasks`.
    """

    def run(row: dict[str, Any]) -> dict[str, Any]:
        return _do(draft, work, row)

    return _run(draft, tasks, label, kind, lambda dataset: dataset.map(run))


def run_tasks_on_actors(
    draft: Draft,
    tasks: Mapping[str, Any],
    make: Callable[[], Work[RecordT]],
    label: str,
    kind: type[RecordT],
    actors: Actors,
    rows: Mapping[str, int] | None = None,
) -> list[RecordT]:
    """As `run_tasks`, on actors that each call `make()` once for the `work` they do.

    `rows`: how many each task has, where that tells better how long it takes.
    """
    import ray.data

    least = actors.count(len(tasks))
    most = max(least, actors.max_actors)
    cpus = actors.cpus_per_actor or cpus_each(most)

    class Actor:
        def __init__(self) -> None:
            self._work = make()

        def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            return _do(draft, self._work, row)

    def run(dataset: Any) -> Any:
        return dataset.map(
            Actor,
            compute=ray.data.ActorPoolStrategy(min_size=least, max_size=most),
            num_cpus=cpus,
            num_gpus=1 if actors.gpu else None,
        )

    return _run(draft, tasks, label, kind, run, rows)


def _do(draft: Draft, work: Work[RecordT], row: dict[str, Any]) -> dict[str, Any]:
    """Does a task and marks it. A refusal is returned: Ray Data keeps only the text of errors."""
    try:
        draft.mark(row["task"], work(draft, row["task"], row["argument"]))
    except BadInput as error:
        return {"task": row["task"], "refusal": str(error)}
    return {"task": row["task"], "refusal": ""}


def _run(
    draft: Draft,
    tasks: Mapping[str, Any],
    label: str,
    kind: type[RecordT],
    run: Callable[[Any], Any],
    rows: Mapping[str, int] | None = None,
) -> list[RecordT]:
    import ray.data

    done = draft.marks()
    missing = [{"task": name, "argument": tasks[name]} for name in tasks if name not in done]
    size, unit = (rows, "row") if rows else (dict.fromkeys(tasks, 1), "task")
    started = sum(size[name] for name in tasks if name in done)
    total = sum(size[name] for name in tasks)
    with tqdm(desc=label, total=total, initial=started, unit=unit) as progress:
        if missing:
            dataset = ray.data.from_items(missing, override_num_blocks=len(missing))
            for row in run(dataset).iter_rows():
                if row["refusal"]:
                    raise BadInput(row["refusal"])
                progress.update(size[row["task"]])
            done = draft.marks()
    return [done.record(name, kind) for name in tasks]
