"""What tasks cost, and which of them are worth a look."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import mlflow
import pytest

from pipeline import progress, tracking
from pipeline.config import Stopped
from pipeline.engine import executors, report
from pipeline.engine.actors import Actors
from pipeline.engine.draft import draft
from pipeline.engine.records import TaskCost, TaskRecord, from_json, to_json
from pipeline.engine.report import Stage
from pipeline.engine.run import run_tasks


def test_a_task_is_measured_where_it_runs():
    def work() -> TaskRecord:
        memory = bytearray(80 << 20)
        memory[::4096] = b"x" * len(memory[::4096])
        file = {"path": "a", "rows": 7, "bytes": 90, "sha256": ""}
        return TaskRecord(files=[file], counts={"records": 50})

    cost = report.measured(work).cost
    assert (cost.rows, cost.bytes, cost.host) == (7, 90, socket.gethostname())
    assert cost.seconds >= 0 and cost.peak_memory_bytes > 80 << 20
    assert report.measured(lambda: TaskRecord(counts={"records": 50})).cost.rows == 50


def test_a_record_keeps_its_cost_and_old_ones_have_none():
    record = TaskRecord(cost=TaskCost(seconds=2.5, rows=3, host="node"))
    assert from_json(TaskRecord, to_json(record)).cost == record.cost
    old = {name: value for name, value in json.loads(to_json(record)).items() if name != "cost"}
    assert from_json(TaskRecord, json.dumps(old)).cost == TaskCost()


def costs_of(*seconds: float) -> dict[str, TaskCost]:
    return {f"t{n}": TaskCost(seconds=each, host=f"h{n}") for n, each in enumerate(seconds)}


def test_a_straggler_takes_three_times_the_median_and_ten_seconds():
    assert list(Stage("s", costs_of(5, 6, 5, 40, 100)).stragglers()) == ["t4", "t3"]
    assert Stage("s", costs_of(1, 1, 1, 9)).stragglers() == {}
    assert Stage("s", costs_of(1, 100)).stragglers() == {}  # too few to say
    assert Stage("s", {}).stragglers() == {}


def test_the_end_of_a_stage_is_told_and_kept(monkeypatch, capsys):
    monkeypatch.setenv(progress.VARIABLE, "json")
    stage = Stage("embed", costs_of(5, 6, 5, 40), {"t9": "full"}, {"t1": ["h7"]})
    with report.collect_stages() as stages:
        report.end_stage(stage)
    assert stages == [stage]
    report.end_stage(stage)  # where nothing is collected
    text = capsys.readouterr().err
    assert "embed: t1 was started again: its process died on h7" in text
    assert "embed: straggler t3: 40 s on h3, median 6 s" in text
    event = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    assert (event["event"], event["stage"], event["task_seconds"]) == ("stage", "embed", 56)
    assert (event["stragglers"], event["failed"], event["died_on"]) == (
        ["t3"], {"t9": "full"}, {"t1": ["h7"]},
    )  # fmt: skip
    assert next(iter(event["slowest_tasks"])) == "t3"


def test_mlflow_keeps_what_tasks_cost_also_of_a_job_that_fails(tmp_path, tracking_uri):
    out = draft(str(tmp_path / "out"), "corpus", Actors(), {})

    def work(draft, name, argument):
        if argument == 0:
            raise ArithmeticError("nought")
        return TaskRecord(files=[draft.write_file(name, b"." * argument, rows=argument)])

    with (
        executors.in_this_process(),
        pytest.raises(Stopped, match="1 of 2 tasks failed"),
        tracking.start("job", out) as run,
    ):
        run_tasks(out, {"good": 5, "bad": 0}, work, "divide", TaskRecord)
    folder = mlflow.artifacts.download_artifacts(run_id=run.run_id, dst_path=str(tmp_path / "run"))
    (stage,) = json.loads((Path(folder) / "tasks.json").read_text())
    assert (stage["stage"], stage["tasks"], stage["rows"], stage["bytes"]) == ("divide", 1, 5, 5)
    assert stage["failed"] == {"bad": "ArithmeticError: nought"}
    cost = stage["slowest_tasks"]["good"]
    assert cost["host"] == socket.gethostname() and cost["peak_memory_bytes"] > 0
