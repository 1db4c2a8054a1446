"""`jobs.schedule` with a cluster and a clock of the test's own, and the schedules for others' clocks."""

from __future__ import annotations

import ast
import json
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import yaml
from croniter import croniter

from jobs import embed_pool, schedule
from jobs.schedule import Config, Scheduler
from pipeline.config import BadInput, parse

ROOT = Path(__file__).parents[2]
SCHEDULES = ROOT / "jobs" / "schedules"
COMMAND = "python -m jobs.embed_pool --config jobs/schedules/reembed.yaml"
START = datetime(2026, 11, 21, 12, tzinfo=UTC)


def at(hours: float) -> datetime:
    return START + timedelta(hours=hours)


def config(**settings) -> Config:
    return Config(**{"cron": "0 3 * * *", "command": COMMAND, "name": "n", **settings})


@dataclass
class Cluster:
    """What a client of Ray's jobs shows of a cluster."""

    statuses: dict[str, str] = field(default_factory=dict)
    submissions: list[dict] = field(default_factory=list)
    away: Exception | None = None

    def list_jobs(self):
        if self.away:
            raise self.away
        return [
            SimpleNamespace(submission_id=run, status=SimpleNamespace(value=status))
            for run, status in self.statuses.items()
        ]

    def submit_job(self, **arguments) -> None:
        assert arguments["submission_id"] not in self.statuses
        self.submissions.append(arguments)
        self.statuses[arguments["submission_id"]] = "RUNNING"


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_a_run_is_submitted_when_it_is_due_and_not_before(cluster, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow")
    monkeypatch.setenv("POLYRANK_GIT_REVISION", "abc")
    scheduler = Scheduler(config(), cluster, START)
    assert scheduler.next_time() == at(15)
    for hours in (0.1, 14.9):
        scheduler.step(at(hours))
    assert cluster.submissions == []
    for hours in (15, 15.1, 20):
        scheduler.step(at(hours))
    assert cluster.submissions == [
        {"entrypoint": COMMAND, "submission_id": "n-20261122T0300",
         "runtime_env": {"working_dir": ".", "env_vars": {
             "MLFLOW_TRACKING_URI": "https://mlflow", "POLYRANK_GIT_REVISION": "abc"}},
         "metadata": {"schedule": "n"}}
    ]  # fmt: skip
    assert scheduler.next_time() == at(39)
    cluster.statuses["n-20261122T0300"] = "SUCCEEDED"
    scheduler.step(at(39))
    submitted = [job["submission_id"] for job in cluster.submissions]
    assert submitted == ["n-20261122T0300", "n-20261123T0300"]
    assert scheduler.submitted == ["n-20261122T0300", "n-20261123T0300"]
    assert scheduler.missed == []
    assert "n-20261122T0300: SUCCEEDED" in capsys.readouterr().out


def test_a_run_that_would_meet_another_is_missed_and_that_is_said(cluster, capsys):
    scheduler = Scheduler(config(cron="0 * * * *"), cluster, START)
    for hours in (1, 2, 3):
        scheduler.step(at(hours))
    assert scheduler.submitted == ["n-20261121T1300"]
    assert scheduler.missed == ["n-20261121T1400", "n-20261121T1500"]
    assert "missed n-20261121T1400: n-20261121T1300 is still going" in capsys.readouterr().out
    cluster.statuses["n-20261121T1300"] = "FAILED"
    scheduler.step(at(3.5))
    assert "n-20261121T1300: FAILED" in capsys.readouterr().out
    scheduler.step(at(4))
    assert scheduler.submitted[1:] == ["n-20261121T1600"]


def test_runs_of_another_name_are_no_concern(cluster):
    cluster.statuses = {"m-20261122T0300": "RUNNING", "n-other-20261122T0300": "RUNNING",
                        "n-20261122": "RUNNING", "raysubmit_1": "RUNNING"}  # fmt: skip
    scheduler = Scheduler(config(), cluster, START)
    scheduler.step(at(15))
    assert scheduler.submitted == ["n-20261122T0300"]


def test_a_scheduler_that_is_started_again_submits_nothing_twice(cluster):
    Scheduler(config(), cluster, START).step(at(15))
    again = Scheduler(config(), cluster, at(15.01))
    again.step(at(15.02))
    assert len(cluster.submissions) == 1
    assert (again.submitted, again.missed) == ([], [])


def test_of_two_schedulers_one_submits(cluster, capsys):
    first, second = (Scheduler(config(), cluster, START) for _ in range(2))
    first.step(at(15))
    second.step(at(15))
    assert len(cluster.submissions) == 1
    assert "n-20261122T0300 has been submitted by another scheduler" in capsys.readouterr().out
    assert second.missed == []


@pytest.mark.parametrize("catch_up", [False, True])
def test_what_was_missed_while_no_scheduler_was_there_is_said(cluster, capsys, catch_up):
    cluster.statuses = {"n-20261118T0300": "SUCCEEDED", "n-20261117T0300": "FAILED"}
    scheduler = Scheduler(config(catch_up=catch_up), cluster, START)
    assert scheduler.missed == ["n-20261119T0300", "n-20261120T0300", "n-20261121T0300"]
    assert "missed n-20261119T0300: no scheduler was there" in capsys.readouterr().out
    scheduler.step(at(0))
    assert scheduler.submitted == (["n-20261121T0300"] if catch_up else [])
    scheduler.step(at(14))
    assert len(cluster.submissions) == catch_up


def test_a_cluster_that_is_away_is_asked_again_until_the_next_run_is_due(cluster, capsys):
    scheduler = Scheduler(config(), cluster, START)
    cluster.away = ConnectionError("connection refused\nand more")
    for hours in (15, 15.1, 15.2):
        scheduler.step(at(hours))
    assert capsys.readouterr().out.count("does not answer: connection refused\n") == 1
    cluster.away = None
    scheduler.step(at(15.3))
    assert (scheduler.submitted, scheduler.missed) == (["n-20261122T0300"], [])

    cluster.away = RuntimeError("503")
    cluster.statuses["n-20261122T0300"] = "SUCCEEDED"
    scheduler.step(at(39))
    scheduler.step(at(63))
    cluster.away = None
    scheduler.step(at(64))
    assert scheduler.missed == ["n-20261123T0300"]
    assert scheduler.submitted[1:] == ["n-20261124T0300"]


def test_after_a_long_sleep_one_run_makes_up_for_all(cluster):
    scheduler = Scheduler(config(cron="0 * * * *"), cluster, START)
    scheduler.step(at(5.5))
    assert scheduler.missed == [f"n-20261121T{hour}00" for hour in (13, 14, 15, 16)]
    assert scheduler.submitted == ["n-20261121T1700"]


def test_the_cron_line_is_read_in_its_time_zone(cluster):
    zone = config(cron="30 4 * * *", timezone="Europe/Berlin")
    winter = Scheduler(zone, cluster, START).next_time()
    summer = Scheduler(zone, cluster, datetime(2026, 7, 1, tzinfo=UTC)).next_time()
    assert winter == datetime(2026, 11, 22, 3, 30, tzinfo=UTC)
    assert summer == datetime(2026, 7, 1, 2, 30, tzinfo=UTC)


@pytest.mark.parametrize(("month", "day"), [(3, 28), (10, 24)])
def test_where_clocks_are_changed_a_night_has_one_run(month, day):
    """On 29 March 2026 there is no half past two in Berlin; on 25 October there are two."""
    zone = config(cron="30 2 * * *", timezone="Europe/Berlin")
    start = datetime(2026, month, day, 12, tzinfo=UTC)
    runs = list(schedule._times(zone, start, start + timedelta(hours=24)))
    assert len(runs) == 1
    assert not list(schedule._times(zone, runs[0], start + timedelta(hours=24)))  # as seen from it


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cron": "nightly"}, "cron: 'nightly' is not allowed; allowed: five fields"),
        ({"cron": "0 25 * * *"}, "cron: '0 25"),
        ({"cron": "0 0 3 * * *"}, "cron: '0 0 3"),
        ({"command": " "}, "command: ' ' is not allowed"),
        ({"name": "a b"}, "name: 'a b' is not allowed; allowed: letters"),
        ({"timezone": "Europe/Nowhere"}, "timezone: 'Europe/Nowhere' is not allowed"),
        ({"timezone": "/etc"}, "timezone: '/etc' is not allowed"),
        ({"poll_s": 0}, "poll_s: 0 is not allowed"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(BadInput, match=f"^{re.escape(message)}"):
        config(**settings)


def test_without_a_cluster_there_is_one_clear_line(run_job):
    # Nobody listens there.
    options = ("--cron", "0 3 * * *", "--command", COMMAND, "--address", "http://127.0.0.1:9")
    assert (
        "--address http://127.0.0.1:9: no cluster answers" in run_job("schedule", *options).refusal
    )


class Dashboard(BaseHTTPRequestHandler):
    """As much of a cluster's HTTP interface as a scheduler with nothing to do asks for."""

    def do_GET(self):
        body = (
            b"[]"
            if self.path.startswith("/api/jobs")
            else b'{"version": "4", "ray_version": "2.60.0"}'
        )
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def dashboard():
    """Its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Dashboard) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_sigterm_ends_it_at_once_and_cleanly(dashboard):
    command = [sys.executable, "-m", "jobs.schedule", "--cron", "0 3 1 1 *", "--command", COMMAND,
               "--address", dashboard]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert "the cluster knows of no run yet" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait() == 0
    said, summary = rest.splitlines()
    assert said == "stopped; a run that is going goes on"
    assert json.loads(summary) == {"job": "schedule", "submitted": [], "missed": []}


# The schedules for others' clocks: all submit the same job


def job_of(command: str) -> embed_pool.Config:
    """What a command submits; it is read from the project's root."""
    argv = shlex.split(command)
    assert argv[:3] == ["python", "-m", "jobs.embed_pool"]
    return parse(embed_pool.Config, argv[3:], "embed_pool")


@pytest.fixture
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def submitted_by_crontab() -> tuple[str, str]:
    (line,) = [x for x in (SCHEDULES / "crontab").read_text().splitlines() if x[:1].isdigit()]
    assert not re.search(r"(?<!\\)%", line)  # cron ends the command at a bare one
    assert "flock -n " in line
    return " ".join(line.split()[:5]), line.partition(" -- ")[2]


def submitted_by_cronjob() -> tuple[str, str]:
    spec = yaml.safe_load((SCHEDULES / "cronjob.yaml").read_text())
    assert (spec["apiVersion"], spec["kind"]) == ("batch/v1", "CronJob")
    assert spec["spec"]["concurrencyPolicy"] == "Forbid"
    pod = spec["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert {"RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} == {
        variable["name"] for variable in container["env"]
    }
    command = container["command"]
    assert command[:3] == ["ray", "job", "submit"]
    return spec["spec"]["schedule"], shlex.join(command[command.index("--") + 1 :])


def submitted_by_raycronjob() -> tuple[str, str]:
    spec = yaml.safe_load((SCHEDULES / "raycronjob.yaml").read_text())
    assert (spec["apiVersion"], spec["kind"]) == ("ray.io/v1", "RayCronJob")
    assert set(spec["spec"]) == {"schedule", "timeZone", "suspend", "jobTemplate"}
    job = spec["spec"]["jobTemplate"]
    assert job["shutdownAfterJobFinishes"] is True
    lock = (ROOT / "requirements.lock").read_text()
    assert f"ray=={job['rayClusterSpec']['rayVersion']}\n" in lock
    (workers,) = job["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["maxReplicas"] >= yaml.safe_load((SCHEDULES / "reembed.yaml").read_text())[
        "resources"
    ]["max_actors"]  # fmt: skip
    return spec["spec"]["schedule"], job["entrypoint"]


def submitted_by_airflow() -> tuple[str, str]:
    tree = ast.parse((SCHEDULES / "airflow_dag.py").read_text())
    calls = {node.func.id: node for node in ast.walk(tree)
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}  # fmt: skip
    given = {
        keyword.arg: ast.literal_eval(keyword.value)
        for name in ("DAG", "BashOperator")
        for keyword in calls[name].keywords
        if keyword.arg in ("schedule", "bash_command", "max_active_runs", "catchup")
    }
    assert (given["max_active_runs"], given["catchup"]) == (1, False)
    return given["schedule"], given["bash_command"].partition(" -- ")[2]


@pytest.mark.usefixtures("in_root")
@pytest.mark.parametrize(
    "read",
    [submitted_by_crontab, submitted_by_cronjob, submitted_by_raycronjob, submitted_by_airflow],
)
def test_every_schedule_submits_the_same_job_at_the_same_time(read):
    cron, command = read()
    assert croniter.is_valid(cron)
    assert cron == "0 3 * * *"
    assert job_of(command) == job_of(COMMAND)


@pytest.mark.usefixtures("in_root")
def test_the_nightly_job_is_what_its_file_says():
    job = job_of(COMMAND)
    assert (job.keep, job.resources.gpu, job.resources.max_actors) == (7, True, 8)
    assert job.gate.canaries.startswith("s3://")
