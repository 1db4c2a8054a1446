"""The schedules for others' clocks (cron, Kubernetes, KubeRay, Airflow): all submit the same job."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest
import yaml

from jobs import embed_pool, submit
from pipeline.config import parse
from tests.manifests import rendered

ROOT = Path(__file__).parents[2]
SCHEDULES = ROOT / "jobs" / "schedules"
COMMAND = "python -m jobs.embed_pool --config jobs/schedules/reembed.yaml"


def job_of(command: str) -> embed_pool.Config:
    """What a command submits; it is read from the project's root."""
    argv = shlex.split(command)
    assert argv[:3] == ["python", "-m", "jobs.embed_pool"]
    return parse(embed_pool.Config, argv[3:], "embed_pool")


def job_sent_by(command: str) -> str:
    """What a command of jobs.submit sends, with the names that the clock fills in."""
    command = re.sub(r"\$\(.*?\)", "0", command)
    argv = shlex.split(command)
    config = parse(submit.Config, argv[argv.index("jobs.submit") + 1 :], "submit")
    assert config.wait  # its exit code is the job's
    assert config.name  # the same night is not sent twice
    return f"python -m jobs.{shlex.join(config.command)}"


@pytest.fixture
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def submitted_by_crontab() -> tuple[str, str]:
    (line,) = [x for x in (SCHEDULES / "crontab").read_text().splitlines() if x[:1].isdigit()]
    assert not re.search(r"(?<!\\)%", line)  # cron ends the command at a bare one
    assert "flock" not in line  # it ends without a word, and the pool's lock says who has it
    text = (SCHEDULES / "crontab").read_text()
    assert "CRON_TZ=" not in text  # Debian's and Ubuntu's cron does not read it
    # The heads that are shipped listen there only.
    assert "\nRAY_API_SERVER_ADDRESS=http://127.0.0.1:8265\n" in text
    assert "\nMLFLOW_TRACKING_URI=http" in text
    return " ".join(line.split()[:5]), job_sent_by(line)


def submitted_by_cronjob() -> tuple[str, str]:
    spec = yaml.safe_load((SCHEDULES / "cronjob.yaml").read_text())
    assert (spec["apiVersion"], spec["kind"]) == ("batch/v1", "CronJob")
    assert spec["spec"]["concurrencyPolicy"] == "Forbid"
    pod = spec["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    fails, ignores = spec["spec"]["jobTemplate"]["spec"]["podFailurePolicy"]["rules"]
    assert (fails["action"], fails["onExitCodes"]["values"]) == ("FailJob", [2])
    assert (ignores["action"], ignores["onPodConditions"]) == (
        "Ignore",
        [{"type": "DisruptionTarget", "status": "True"}],  # Kubernetes' schema asks for a status
    )
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert {
        "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "MLFLOW_TRACKING_URI", "JOB_NAME"
    } == {variable["name"] for variable in container["env"]}  # fmt: skip
    return spec["spec"]["schedule"], job_sent_by(shlex.join(container["command"]))


def submitted_by_raycronjob() -> tuple[str, str]:
    spec = rendered("overlays/nightly")["RayCronJob", "reembed-articles"]
    assert spec["apiVersion"] == "ray.io/v1"
    assert set(spec["spec"]) == {"schedule", "timeZone", "suspend", "jobTemplate"}
    job = spec["spec"]["jobTemplate"]
    assert job["shutdownAfterJobFinishes"] is True
    assert "MLFLOW_TRACKING_URI" in yaml.safe_load(job["runtimeEnvYAML"])["env_vars"]
    groups = {group["groupName"]: group for group in job["rayClusterSpec"]["workerGroupSpecs"]}
    nightly = yaml.safe_load((SCHEDULES / "reembed.yaml").read_text())
    assert groups["gpu"]["maxReplicas"] >= nightly["resources"]["max_actors"]
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
    # A run that a person or an asset starts has no logical date, and so no `ts_nodash`, but always this time.
    airflow = jinja2.Environment(undefined=jinja2.StrictUndefined)
    airflow.filters["ts_nodash"] = lambda time: time.strftime("%Y%m%dT%H%M%S")
    run = SimpleNamespace(run_after=datetime(2026, 11, 28, 3, tzinfo=UTC))
    command = airflow.from_string(given["bash_command"]).render(dag_run=run)
    assert " --name reembed-articles-20261128T030000 " in command
    return given["schedule"], job_sent_by(command)


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


@pytest.mark.parametrize("cluster", ["cluster.yaml", "cluster.onpremise.yaml"])
def test_the_line_of_the_crontab_runs_on_a_head(cluster, tmp_path):
    """As cron runs it, in a home that has what the head's has, but for the sending itself."""
    mounts = yaml.safe_load((ROOT / cluster).read_text())["file_mounts"]
    for remote, local in mounts.items():
        if (ROOT / local).exists():
            (tmp_path / remote[2:]).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / local).is_dir() else shutil.copy
            copy(ROOT / local, tmp_path / remote[2:])
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    *_, line = (SCHEDULES / "crontab").read_text().splitlines()
    command = line.split(maxsplit=5)[5].replace("\\%", "%").replace("--wait", "--dry-run")
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, env=environment,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    sent = json.loads(done.stdout.splitlines()[-1])
    assert sent["entrypoint"] == COMMAND
    # A night that is sent again by hand after midnight does not take the name of the next one.
    assert re.fullmatch(r"reembed-articles-\d{8}T\d\d", sent["name"])
    assert not sent["submitted"]
