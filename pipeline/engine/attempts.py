"""One attempt at a task, and how often each task of a run has been started."""

from __future__ import annotations

import dataclasses
import json
import socket
import traceback
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pipeline.config import BadInput
from pipeline.engine import report
from pipeline.engine.draft import Draft
from pipeline.engine.records import RecordT, TaskRecord
from pipeline.storage.failures import is_transient, storage_failure, store_refusal, with_retries

Work = Callable[[Draft, str, Any], RecordT]

MAX_STARTS = 4
DIED = (
    f"its process died {MAX_STARTS} times; where a node's memory was full, give it less at a time"
)


def run_task(
    draft: Draft,
    work: Work[RecordT],
    delays_s: Sequence[float],
    counter: AttemptCounter | None,
    row: dict[str, Any],
) -> dict[str, Any]:
    """The outcome of a task, which is done and marked. Ray Data keeps only the text of errors, so what went
    wrong is returned.

    `counter`: None where a task starts once only.
    """
    task = row["task"]
    number = counter.add(task) if counter else 1
    if number > 1 and draft.is_marked(task):  # its node died after it had done it
        return _outcome(task)

    def do_and_mark() -> TaskRecord:
        record = report.measured(lambda: work(draft, task, row["argument"]))
        draft.mark(task, record)
        return record

    _, outcome = attempt(task, number, do_and_mark, delays_s)
    return outcome


def attempt(
    task: str, number: int, action: Callable[[], RecordT], delays_s: Sequence[float]
) -> tuple[RecordT | None, dict[str, Any]]:
    """(the record that `action` returns, or None; the task's outcome). `number`: of this start, from 1."""
    if number > MAX_STARTS:
        return None, _outcome(task, failure=DIED)
    try:
        record = with_retries(action, delays_s)
    except Exception as error:
        return None, failed_outcome(task, error)
    return record, _outcome(task, cost=json.dumps(dataclasses.asdict(record.cost)))


def failed_outcome(task: str, error: Exception) -> dict[str, Any]:
    """The outcome of a task that raised this error, which is being handled."""
    if isinstance(error, BadInput):
        return _outcome(task, refusal=str(error))
    if reason := store_refusal(error):  # a hundred other tasks would be refused, too
        return _outcome(task, refusal=f"{reason} (on {socket.gethostname()})")
    if failure := storage_failure(error):
        return _outcome(task, storage=f"{failure} (on {socket.gethostname()})")
    text = " ".join(f"{type(error).__name__}: {error}".split())
    trace = "" if is_transient(error) else traceback.format_exc()
    return _outcome(task, failure=text, traceback=trace)


def _outcome(task: str, **values: str) -> dict[str, Any]:
    empty = {"refusal": "", "storage": "", "failure": "", "traceback": "", "cost": "{}"}
    return {"task": task, **empty, **values}


class _AttemptCounts:
    """An actor: the hosts on which each task of a run has been started. Ray starts a task again without
    end."""

    def __init__(self) -> None:
        self._hosts: dict[str, dict[str, list[str]]] = {}

    def add(self, run_id: str, task: str, host: str) -> int:
        hosts = self._hosts.setdefault(run_id, {}).setdefault(task, [])
        hosts.append(host)
        return len(hosts)

    def end(self, run_id: str) -> dict[str, list[str]]:
        """See `AttemptCounter.end`; the run is forgotten."""
        tasks = self._hosts.pop(run_id, {})
        return {task: hosts[:-1] for task, hosts in tasks.items() if len(hosts) > 1}


@dataclass(frozen=True)
class AttemptCounter:
    """How often the tasks of one run have been started, for its processes on any node."""

    actor: Any
    run_id: str

    @classmethod
    def begin(cls) -> AttemptCounter:
        """Counts a new run."""
        return cls(_counting_actor(), uuid.uuid4().hex)

    def add(self, task: str) -> int:
        """How often the task has been started, this time too."""
        import ray

        return int(ray.get(self.actor.add.remote(self.run_id, task, socket.gethostname())))

    def end(self) -> dict[str, list[str]]:
        """The hosts on which the process of a task has crashed, by task."""
        import ray

        crashed_hosts: dict[str, list[str]] = ray.get(self.actor.end.remote(self.run_id))
        return crashed_hosts


_actor_handles: dict[str, Any] = {}  # an actor ends with the handle that its creator has


def _counting_actor() -> Any:
    """The actor of this driver: one for all its runs, since an actor is a process, and starts in a second
    of CPU (a third of a small jobs.clean_corpus, when each stage had its own)."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    context = ray.get_runtime_context()
    name = f"task starts of job {context.get_job_id()}"
    with suppress(ValueError):
        return ray.get_actor(name)
    this_node = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
    options = {
        "name": name,
        "num_cpus": 0,
        "scheduling_strategy": this_node,
        "max_restarts": -1,  # killed, it forgets the counts; the job goes on
        "max_task_retries": -1,
    }
    _actor_handles["counter"] = ray.remote(_AttemptCounts).options(**options).remote()
    return _actor_handles["counter"]
