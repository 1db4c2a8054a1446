"""The schedules for others' clocks (cron, Kubernetes, KubeRay, Airflow): all submit the same job."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import yaml

from jobs import embed_pool
from pipeline.config import parse

ROOT = Path(__file__).parents[2]
SCHEDULES = ROOT / "jobs" / "schedules"
COMMAND = "python -m jobs.embed_pool --config jobs/schedules/reembed.yaml"


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
    assert cron == "0 3 * * *"
    assert job_of(command) == job_of(COMMAND)


@pytest.mark.usefixtures("in_root")
def test_the_nightly_job_is_what_its_file_says():
    job = job_of(COMMAND)
    assert (job.keep, job.resources.gpu, job.resources.max_actors) == (7, True, 8)
    assert job.gate.canaries.startswith("s3://")
