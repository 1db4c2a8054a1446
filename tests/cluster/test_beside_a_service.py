"""Jobs on a node of a few cores and one GPU, some of which a replica of a service holds for ever."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.helpers import free_port, job_command

from .conftest import ROOT, head

pytestmark = pytest.mark.long  # a service starts first: 50 s on two slow cores

# As Serve starts a replica. A real service takes half a minute more.
SERVICE = """
import os
import ray
ray.init(os.environ["RAY_ADDRESS"], namespace="serve", log_to_driver=False)

class Replica:
    def ready(self):
        pass

options = {"name": "SERVE_REPLICA::default#Ranker#1", "lifetime": "detached", "num_cpus": 1, "num_gpus": 1}
ray.get(ray.remote(Replica).options(**options).remote().ready.remote())
"""

DRIVER = """
import json, os, sys
from jobs import cluster
from pipeline.config import MAX_WAIT_VARIABLE, BadInput, Stopped
from pipeline.engine import resources
from pipeline.engine import waiting
from pipeline.engine.actors import Actors

waiting._SILENT_S, waiting._LOOK_EVERY_S, waiting._GRACE_S = 1, 1, 1
os.environ[MAX_WAIT_VARIABLE] = "0.05"

def attempt(ask):
    try:
        return ask()
    except (BadInput, Stopped) as error:
        return f"{type(error).__name__}: {error}"

class Holder:
    def ready(self):
        pass

with cluster.session():
    import ray
    answers = {
        "actors": attempt(lambda: Actors().count(9)),
        "cores of one": attempt(lambda: resources.cpus_each(1)),
        "cores of two": attempt(lambda: resources.cpus_each(2)),
        "a GPU": attempt(lambda: waiting.await_room(1, 1)),
        "all cores": attempt(lambda: waiting.await_room(3)),
        "too many workers": attempt(lambda: waiting.await_room(2, 0, 2)),
        "two GPUs": attempt(lambda: waiting.await_room(1, 2)),
    }
    holder = ray.remote(num_cpus=2)(Holder).remote()
    ray.get(holder.ready.remote())
    answers["behind this job"] = attempt(lambda: waiting.await_room(1))
    ray.kill(holder)
    answers["after it"] = attempt(lambda: waiting.await_room(2))
    print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def node(drive):
    """The address of a cluster of one node with 3 cores and a GPU; a replica holds a core and the GPU."""
    with head(jobs_port=free_port(), cpus=3, gpus=1) as address:
        done = drive(address, SERVICE)
        assert done.returncode == 0, done.stderr
        yield address


@pytest.fixture(scope="module")
def answers(node, drive):
    done = drive(node, DRIVER)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


def test_defaults_leave_out_what_a_service_holds(answers):
    assert (answers["actors"], answers["cores of one"], answers["cores of two"]) == (2, 2, 1)


def test_a_wait_names_who_holds_what_is_missing_and_ends(answers):
    gpu = "1 CPU, 1 GPU: 2 of 3 CPUs free, 1 held by Serve; 0 of 1 GPUs free, 1 held by Serve"
    assert f"waits for {gpu}\n" in answers["stderr"]
    assert answers["a GPU"].startswith(f"Stopped: waited 0.05 minutes for {gpu}; the same command")
    assert "waits for 3 CPUs: 2 of 3 CPUs free, 1 held by Serve\n" in answers["stderr"]
    assert answers["all cores"].startswith("Stopped: ")
    assert "2 held by this job" in answers["behind this job"]
    assert answers["after it"] is None


def test_more_than_the_nodes_have_is_refused(answers):
    refusal = answers["too many workers"]
    assert "BadInput: --resources: 2 workers need 2 CPUs each; 1 of them fit" in refusal
    assert answers["two GPUs"].startswith("BadInput: --resources: needs 1 CPU, 2 GPUs; no node")


def job(node, verb, *options):
    environment = {**os.environ, "RAY_ADDRESS": node, "RAY_AUTH_MODE": "token",
                   "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # fmt: skip
    return subprocess.run(
        job_command(verb, *options), cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip


@pytest.fixture
def candidates(tmp_path):
    file = tmp_path / "candidates.csv"
    rows = "".join(f"{number},text number {number}\n" for number in range(300))
    file.write_text(f"id,text\n{rows}")
    return file


def test_the_nightly_job_ends_in_one_line_where_a_replica_holds_the_only_gpu(
    node, tiny_ranker, candidates, tmp_path
):
    done = job(
        node, "embed_pool", "--config", "jobs/schedules/reembed.yaml", "--model", tiny_ranker("bi").uri,
        "--candidates", candidates, "--pools", tmp_path / "pools",
        "--gate.canaries", "", "--max-wait-minutes", 0.02,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "embed_pool: waited 0.02 minutes for 1 CPU, 1 GPU: " in done.stderr.splitlines()[-1]
    assert "0 of 1 GPUs free, 1 held by Serve" in done.stderr
    assert "Traceback" not in done.stderr
