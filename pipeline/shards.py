"""Work cut into named tasks that run on the cluster once each, however often the job is killed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray.data
from tqdm import tqdm

from pipeline.artifact import Draft

Work = Callable[[Draft, str, Any], dict[str, Any]]


def run_tasks(draft: Draft, tasks: Mapping[str, Any], work: Work, label: str) -> list[dict[str, Any]]:
    """Runs `work(draft, name, argument)` for every task that is not marked yet.

    `work` writes files of its own into the draft and returns a record (JSON-ready), with which the
    task is marked. Returns the records of all `tasks`, in their order.
    """
    done = draft.records()
    missing = [{"task": name, "argument": tasks[name]} for name in tasks if name not in done]
    progress = tqdm(desc=label, total=len(tasks), initial=len(tasks) - len(missing), unit="task")
    if missing:

        def run(row: dict[str, Any]) -> dict[str, Any]:
            draft.mark(row["task"], work(draft, row["task"], row["argument"]))
            return {"task": row["task"]}

        dataset = ray.data.from_items(missing, override_num_blocks=len(missing)).map(run)
        for _ in dataset.iter_rows():
            progress.update()
        done = draft.records()
    progress.close()
    return [done[name] for name in tasks]
