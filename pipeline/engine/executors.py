"""Decides where tasks run: in processes of the cluster, or in this process.

By default tasks run on the cluster. To run them in this process, one after the other and without Ray, is for
notebooks, for tests, and for inputs for which the start of a cluster would take longer than the work:

    with executors.in_this_process():
        prepare_corpus.run(config)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

ValueT = TypeVar("ValueT")


@dataclass
class InThisProcess:
    """The tasks that ran in this process."""

    tasks: list[str] = field(default_factory=list)
    """Names of the tasks that ran, in order, without the tasks of actors and of earlier runs."""
    actor_tasks: list[str] = field(default_factory=list)
    """Names of the tasks that actors ran."""


_current: InThisProcess | None = None


def current() -> InThisProcess | None:
    """None: tasks run on the cluster."""
    return _current


@contextmanager
def in_this_process() -> Iterator[InThisProcess]:
    """Tasks and actors (`pipeline.engine.run`) and trainings of all threads run in this process.

    Tasks write the same files as on a cluster. A training has one rank, whatever `--resources.workers` says.
    """
    global _current
    previous = _current
    _current = previous or InThisProcess()  # inside of another one, the same
    try:
        yield _current
    finally:
        _current = previous


@dataclass(frozen=True)
class ObjectRef(Generic[ValueT]):
    """A value for many tasks: the processes of a node read one copy of it."""

    _value: ValueT | None
    _reference: Any  # in Ray's object store

    def get(self) -> ValueT:
        if self._value is not None:
            return self._value
        import ray

        value: ValueT = ray.get(self._reference)
        return value


def put(value: ValueT) -> ObjectRef[ValueT]:
    """The value, in a form that tasks can be given."""
    if current():
        return ObjectRef(value, None)
    import ray

    return ObjectRef(None, ray.put(value))
