"""Tasks that run once each, however often the job is killed. On a real Ray."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from pipeline.actors import Actors
from pipeline.artifact import Draft, draft
from pipeline.config import BadInput
from pipeline.records import TaskRecord
from pipeline.shards import run_tasks, run_tasks_on_actors

pytestmark = pytest.mark.usefixtures("local_ray")
TASKS = {"c": 3, "a": 1, "b": 2, "d": 4}
BEFORE = TaskRecord(counts={"square": -1, "argument": -1})


@pytest.fixture
def out(tmp_path) -> Draft:
    return draft(str(tmp_path / "out"), "pool", Actors(), {})


# Functions inside functions: Ray's workers cannot import the module of a test.


@pytest.fixture
def square():
    """Work: writes a file, and returns a record."""

    def work(draft, name, argument):
        file = draft.write_file(name, b"." * argument)
        return TaskRecord(files=[file], counts={"square": argument**2})

    return work


@pytest.fixture
def make(tmp_path):
    """Makes work that says which process did it; leaves a file every time that it is called."""

    def make():
        tempfile.mkstemp(prefix="made-", dir=tmp_path)

        def work(draft, name, argument):
            return TaskRecord(counts={"process": os.getpid(), "argument": argument})

        return work

    return make


@pytest.fixture
def refusing():
    """Work that refuses the argument 2, and fails for 4."""

    def work(draft, name, argument):
        if argument == 2:
            raise BadInput("task b: 2 is not allowed;\nallowed: others")
        if argument == 4:
            raise ArithmeticError("four")
        return TaskRecord()

    return work


def test_records_come_in_the_tasks_order_and_their_files_are_there(out, square):
    records = run_tasks(out, TASKS, square, "square", TaskRecord)
    assert [record.counts["square"] for record in records] == [9, 1, 4, 16]
    for name, argument in TASKS.items():
        assert Path(out.path(name)).stat().st_size == argument
    assert set(out.marks()) == set(TASKS)


def test_tasks_that_are_marked_are_not_run_again(out, square):
    for name in ("a", "d"):
        out.mark(name, BEFORE)
    out.mark("elsewhere", BEFORE)
    records = run_tasks(out, TASKS, square, "square", TaskRecord)
    assert [record.counts["square"] for record in records] == [9, -1, 4, -1]
    assert not Path(out.path("a")).exists()


def test_with_nothing_left_to_do_no_work_is_started(out):
    for name in TASKS:
        out.mark(name, TaskRecord(notes=[name]))
    work = object()  # cannot be called
    records = [TaskRecord(notes=[name]) for name in TASKS]
    assert run_tasks(out, TASKS, work, "-", TaskRecord) == records
    assert run_tasks_on_actors(out, TASKS, work, "-", TaskRecord, Actors()) == records
    assert run_tasks(out, {}, work, "-", TaskRecord) == []


def test_a_refusal_is_raised_word_for_word_and_its_task_is_not_marked(out, refusing):
    with pytest.raises(BadInput, match=r"^task b: 2 is not allowed;\nallowed: others$"):
        run_tasks(out, {"a": 1, "b": 2}, refusing, "-", TaskRecord)
    assert "b" not in out.marks()


def test_a_failure_is_raised_and_another_run_does_the_rest(out, refusing, square):
    with pytest.raises(Exception, match="ArithmeticError: four"):
        run_tasks(out, {"a": 1, "d": 4}, refusing, "-", TaskRecord)
    assert "d" not in out.marks()
    assert run_tasks(out, {"d": 4}, square, "-", TaskRecord)[0].counts["square"] == 16


@pytest.mark.parametrize("actors", [0, 1, 2])
def test_each_actor_makes_its_work_once_for_all_its_tasks(out, make, tmp_path, actors):
    resources = Actors(actors=actors, cpus_per_actor=1)
    records = run_tasks_on_actors(out, TASKS, make, "-", TaskRecord, resources)
    assert [record.counts["argument"] for record in records] == list(TASKS.values())
    processes = {record.counts["process"] for record in records}
    made = len(list(tmp_path.glob("made-*")))
    # Without a number one for each of the cluster's cores; a quick one may leave the other no work.
    assert len(processes) <= made <= (actors or 2)
    assert os.getpid() not in processes


@pytest.mark.parametrize(
    ("settings", "tasks", "count"),
    [({}, 9, 2), ({}, 1, 1), ({"cpus_per_actor": 2}, 9, 1), ({"cpus_per_actor": 3}, 9, 1),
     ({"actors": 5}, 9, 5), ({"actors": 5}, 3, 3), ({"gpu": True}, 9, 1)],
)  # fmt: skip
def test_there_are_as_many_actors_as_cores_and_no_more_than_tasks(settings, tasks, count):
    """On 2 cores and no GPU, which an autoscaler may still start."""
    assert Actors(**settings).count(tasks) == count


def test_actors_may_grow_in_number_and_their_progress_is_in_rows(out, make, tmp_path, capsys):
    out.mark("a", BEFORE)
    resources = Actors(actors=1, max_actors=2, cpus_per_actor=1)
    rows = {"c": 300, "a": 100, "b": 200, "d": 400}
    records = run_tasks_on_actors(out, TASKS, make, "grow", TaskRecord, resources, rows)
    assert [record.counts["argument"] for record in records] == [3, -1, 2, 4]
    assert 1 <= len(list(tmp_path.glob("made-*"))) <= 2
    shown = capsys.readouterr().err
    assert "100/1000" in shown
    assert "1000/1000" in shown
    assert "row/s" in shown


def test_actors_cannot_shrink_below_their_number():
    with pytest.raises(
        BadInput, match=r"^resources\.max_actors: 2 .* resources\.actors 3 at least"
    ):
        Actors(actors=3, max_actors=2)


@pytest.mark.parametrize("field", ["actors", "cpus_per_actor"])
def test_resources_out_of_range_are_refused(field):
    with pytest.raises(BadInput, match=f"^resources.{field}: -1 is not allowed"):
        Actors(**{field: -1})
