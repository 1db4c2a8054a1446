"""Tasks that run once each, however often the job is killed. On a real Ray."""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs import cluster, program
from pipeline.config import BadInput, Stopped
from pipeline.engine import executors, report
from pipeline.engine.actors import Actors
from pipeline.engine.attempts import DIED, run_task
from pipeline.engine.draft import Draft, draft
from pipeline.engine.records import TaskRecord
from pipeline.engine.run import run_tasks, run_tasks_on_actors

TASKS = {"c": 3, "a": 1, "b": 2, "d": 4}
BEFORE = TaskRecord(counts={"square": -1, "argument": -1})


@pytest.fixture
def out(tmp_path) -> Draft:
    return draft(str(tmp_path / "out"), "pool", Actors(), {})


@pytest.fixture
def here() -> Iterator[None]:
    with executors.in_this_process():
        yield


@pytest.fixture(params=[pytest.param("local_ray", marks=pytest.mark.ray), "here"])
def anywhere(request) -> None:
    """Tasks run on a cluster, and in this process."""
    request.getfixturevalue(request.param)


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


@pytest.mark.usefixtures("anywhere")
def test_records_come_in_the_tasks_order_and_marked_tasks_are_not_run_again(out, square):
    """On the cluster a task declares its memory, and a small machine tries."""
    out.mark("d", BEFORE)
    out.mark("elsewhere", BEFORE)
    records = run_tasks(out, TASKS, square, "square", TaskRecord, memory=1 << 50)
    assert [record.counts["square"] for record in records] == [9, 1, 4, -1]
    for name in ("a", "b", "c"):
        assert Path(out.path(name)).stat().st_size == TASKS[name]
    assert not Path(out.path("d")).exists()
    assert set(out.finished_tasks()) == {*TASKS, "elsewhere"}


@pytest.mark.usefixtures("here")
def test_with_nothing_left_to_do_no_work_is_started(out):
    for name in TASKS:
        out.mark(name, TaskRecord(notes=[name]))
    work = object()  # cannot be called
    records = [TaskRecord(notes=[name]) for name in TASKS]
    assert run_tasks(out, TASKS, work, "-", TaskRecord) == records
    assert run_tasks_on_actors(out, TASKS, work, "-", TaskRecord, Actors()) == records
    assert run_tasks(out, {}, work, "-", TaskRecord) == []


@pytest.mark.usefixtures("here")
def test_a_refusal_is_raised_word_for_word_and_its_task_is_not_marked(out, refusing):
    with pytest.raises(BadInput, match=r"^task b: 2 is not allowed;\nallowed: others$"):
        run_tasks(out, {"a": 1, "b": 2}, refusing, "-", TaskRecord)
    assert set(out.finished_tasks()) == {"a"}


@pytest.mark.usefixtures("local_ray")
def test_the_actor_that_counts_starts_may_be_killed(out, square):
    def killing(draft, name, argument):
        import ray

        if name == "c":
            context = ray.get_runtime_context()
            counting = ray.get_actor(f"task starts of job {context.get_job_id()}")
            ray.kill(counting, no_restart=False)
        return square(draft, name, argument)

    records = run_tasks(out, TASKS, killing, "square", TaskRecord)
    assert [record.counts["square"] for record in records] == [9, 1, 4, 16]


@pytest.mark.usefixtures("anywhere")
def test_a_task_that_fails_stops_no_other_and_is_named_with_its_input(out, refusing):
    with pytest.raises(Stopped) as stopped:
        run_tasks(out, {"d": 4, "a": 1, "e": 5}, refusing, "square", TaskRecord)
    assert str(stopped.value) == (
        "square: 1 of 3 tasks failed: d (4): ArithmeticError: four; the same command does what is missing"
    )
    assert set(out.finished_tasks()) == {"a", "e"}


@pytest.mark.usefixtures("here")
def test_a_store_that_is_away_for_a_moment_is_asked_again(out, tmp_path, monkeypatch):
    def work(draft, name, argument):
        tempfile.mkstemp(prefix=f"tried-{name}-", dir=tmp_path)
        tries = len(list(tmp_path.glob(f"tried-{name}-*")))
        if tries <= argument:
            raise OSError("Generic S3 error: error sending request")
        return TaskRecord(counts={"tries": tries})

    monkeypatch.setattr("pipeline.engine.run.DELAYS_S", (0.0, 0.0, 0.0))
    records = run_tasks(out, {"a": 0, "b": 3}, work, "-", TaskRecord)
    assert [record.counts["tries"] for record in records] == [1, 4]
    with pytest.raises(Stopped, match=r"c \(9\): OSError: Generic S3 error"):
        run_tasks(out, {"c": 9}, work, "-", TaskRecord)
    assert len(list(tmp_path.glob("tried-c-*"))) == 4


@pytest.mark.usefixtures("here")
def test_a_store_that_refuses_a_task_is_one_line(out, tmp_path, capsys):
    """Such as on a node without the role; it was a traceback for each of 20 tasks."""
    error = "s3://b/k: The operation lacked the necessary privileges: <Code>AccessDenied</Code>"

    def work(draft, name, argument):
        tempfile.mkstemp(prefix="tried-", dir=tmp_path)
        raise OSError(error)

    with pytest.raises(BadInput, match=r"^s3://b/k: the object store refuses access: .* \(on "):
        run_tasks(out, dict.fromkeys("abc", 1), work, "-", TaskRecord)
    assert len(list(tmp_path.glob("tried-*"))) == 1
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("error", [FileNotFoundError(2, "gone"), ArithmeticError("no")])
def test_what_another_try_cannot_mend_is_tried_once(out, tmp_path, error):
    def work(draft, name, argument):
        tempfile.mkstemp(prefix="tried-", dir=tmp_path)
        raise error

    with pytest.raises(Stopped, match="1 of 1 tasks failed"):
        run_tasks(out, {"a": 1}, work, "-", TaskRecord)
    assert len(list(tmp_path.glob("tried-*"))) == 1


@pytest.mark.usefixtures("local_ray")
def test_an_outcome_is_heard_of_while_an_earlier_task_runs(out, tmp_path, monkeypatch):
    """In the tasks' order one straggler would hold back the progress, refusals and failures of all others."""
    heard = tmp_path / "heard"

    def work(draft, name, argument):
        end = time.monotonic() + 120  # on a busy machine a second process of Ray takes over 20 s
        while name == "c" and not heard.exists():  # the first one
            if time.monotonic() > end:
                raise ArithmeticError("nobody has heard of another task")
            time.sleep(0.01)
        return TaskRecord()

    monkeypatch.setattr(report, "count_done", lambda label, cost: heard.touch())
    assert run_tasks(out, TASKS, work, "heard", TaskRecord) == [TaskRecord()] * 4


@pytest.fixture
def dying(tmp_path):
    """Work whose process dies as often as the argument says, as the kernel ends it, or Ray's own memory
    monitor."""

    def work(draft, name, argument):
        tempfile.mkstemp(prefix=f"begun-{name}-", dir=tmp_path)
        if len(list(tmp_path.glob(f"begun-{name}-*"))) <= argument:
            os.kill(os.getpid(), signal.SIGKILL)
        return TaskRecord(counts={"argument": argument})

    return work


@pytest.mark.usefixtures("local_ray")
def test_a_process_that_dies_is_replaced_and_that_is_said(out, dying, capsys):
    records = run_tasks(out, {"a": 1, "c": 0}, dying, "fill", TaskRecord)
    assert [record.counts["argument"] for record in records] == [1, 0]
    said = capsys.readouterr().err
    assert "fill: a was started again: its process died on " in said


@pytest.mark.parametrize(("starts", "failure"), [(4, ""), (5, DIED)])
def test_a_task_is_started_four_times(out, square, starts, failure):
    counter = SimpleNamespace(add=lambda task: starts)
    row = {"task": "a", "argument": 1}
    assert run_task(out, square, (), counter, row)["failure"] == failure


@pytest.mark.long  # each dead process costs a start: 40 s on two slow cores
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("on_actors", [False, True])
def test_a_process_that_dies_is_replaced_three_times(out, dying, tmp_path, capsys, on_actors):
    def run(tasks):
        if on_actors:
            actors = Actors(actors=1, cpus_per_actor=1)
            return run_tasks_on_actors(out, tasks, lambda: dying, "fill", TaskRecord, actors)
        return run_tasks(out, tasks, dying, "fill", TaskRecord)

    others = {"c": 0} if on_actors else {"a": 1, "c": 0}
    with pytest.raises(Stopped, match=r"1 of \d tasks failed: b \(99\): its process died 4 times"):
        run({"b": 99, **others})
    assert set(out.finished_tasks()) == set(others)
    again = "b" if on_actors else "a"
    said = capsys.readouterr().err
    assert f"fill: {again} was started again: its process died on " in said
    assert len(list(tmp_path.glob("begun-b-*"))) == 4


@pytest.mark.usefixtures("local_ray")
def test_a_full_disk_ends_a_job_with_one_line(out, monkeypatch, capfd):
    """Ray's own report of it has 65 lines, the cause in line 58."""

    def work(draft, name, argument):
        raise OSError(errno.ENOSPC, "No space left on device", draft.path(name))

    monkeypatch.setattr(sys, "argv", ["job"])
    with pytest.raises(SystemExit) as ended:
        program.main(Actors, lambda _: run_tasks(out, TASKS, work, "fill", TaskRecord), "job")
    assert ended.value.code == 1
    said = [line for line in capfd.readouterr().err.splitlines() if line and "task/s" not in line]
    assert len(said) == 1, said
    assert said[0].startswith("python -m jobs.job: fill: [Errno 28] No space left on device: ")
    assert said[0].endswith("the same command resumes when it can write")


@pytest.mark.usefixtures("local_ray")
def test_an_actor_makes_its_work_once_and_does_two_tasks_at_once(out, tmp_path, capsys):
    def make():
        import threading

        tempfile.mkstemp(prefix="made-", dir=tmp_path)
        both = threading.Barrier(2)

        def work(draft, name, argument):
            both.wait(timeout=120)
            return TaskRecord(counts={"process": os.getpid(), "argument": argument})

        return work

    one = Actors(actors=1, cpus_per_actor=1)
    rows = {"c": 300, "a": 100, "b": 200, "d": 400}
    records = run_tasks_on_actors(out, TASKS, make, "grow", TaskRecord, one, rows, tasks_at_once=2)
    assert [record.counts["argument"] for record in records] == list(TASKS.values())
    assert len(list(tmp_path.glob("made-*"))) == 1
    (process,) = {record.counts["process"] for record in records}
    assert process != os.getpid()
    shown = capsys.readouterr().err
    assert "1.00k/1.00k" in shown and "rows/s" in shown


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(
    ("settings", "tasks", "counts"),
    [({}, 9, (2, 2)), ({}, 1, (1, 1)), ({"cpus_per_actor": 2}, 9, (1, 1)), ({"actors": 5}, 9, (5, 5)),
     ({"actors": 5}, 3, (3, 3)), ({"actors": 1, "max_actors": 2}, 9, (1, 2))],
)  # fmt: skip
def test_there_are_as_many_actors_as_cores_and_no_more_than_tasks(settings, tasks, counts):
    """On 2 cores: at the start, and at most."""
    actors = Actors(**settings)
    assert (actors.count(tasks), actors.max_count(tasks)) == counts


def test_in_this_process_actors_are_made_once_and_ray_is_not_started(out, make, tmp_path):
    out.mark("a", BEFORE)
    with executors.in_this_process() as here:
        records = run_tasks_on_actors(out, TASKS, make, "-", TaskRecord, Actors(actors=2))
    assert [record.counts["argument"] for record in records] == [3, -1, 2, 4]
    assert {record.counts.get("process") for record in records} == {os.getpid(), None}
    assert len(list(tmp_path.glob("made-*"))) == 1
    assert (here.actor_tasks, here.tasks) == (["c", "b", "d"], [])
    assert executors.current() is None


def test_in_this_process_a_job_starts_no_ray(monkeypatch):
    monkeypatch.setattr("ray.init", None)
    with executors.in_this_process(), cluster.session(for_tasks=True) as dashboard:
        assert dashboard == ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"actors": 3, "max_actors": 2}, r"max_actors: 2 .* resources\.actors 3 at least"),
        ({"actors": -1}, "actors: -1 is not allowed"),
        ({"cpus_per_actor": -1}, "cpus_per_actor: -1 is not allowed"),
    ],
)
def test_resources_out_of_range_are_refused(settings, message):
    with pytest.raises(BadInput, match=rf"^resources\.{message}"):
        Actors(**settings)
