"""Jobs on a cluster without a single core, whose autoscaler starts nodes for tasks that wait."""

from __future__ import annotations

import json

import pytest

from pipeline.config import BadInput
from pipeline.engine import resources, waiting
from pipeline.engine.actors import Actors

DRIVER = """
import sys
from jobs import cluster, prepare_corpus
from pipeline.engine import waiting
from pipeline.engine.actors import Actors
from pipeline.config import BadInput
waiting._SILENT_S, waiting._LOOK_EVERY_S = 1, 1
with cluster.session():
    for ask in (lambda: waiting.await_room(1, 8), lambda: Actors(gpu=True).count(3),
                lambda: Actors(cpus_per_actor=64).count(3), lambda: waiting.await_room(2, 0, 3)):
        try:
            ask()
        except BadInput as error:
            print(error)
    import ray
    print("nodes:", len(ray.nodes()))
    print("now the job", file=sys.stderr)
    sys.argv = ["prepare_corpus", "--corpus", "reddit", "--input", {input!r}, "--output", {output!r}]
    prepare_corpus.program.main(prepare_corpus.Config, prepare_corpus.run, "prepare_corpus")
"""


@pytest.fixture(scope="module")
def driven(from_zero, drive, sample_files, reddit_corpus, tmp_path_factory):
    """A driver that asks for what there cannot be, and then does the cluster's first job."""
    output = tmp_path_factory.mktemp("from-zero") / "out"
    done = drive(
        from_zero, DRIVER.format(input=str(sample_files / "reddit_dump"), output=str(output))
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.long  # nodes start first: 65 s on two slow cores
def test_requests_that_no_node_type_satisfies_are_refused_before_anything_is_started(driven):
    assert "nodes: 1" in driven.stdout.splitlines()  # the head
    refusals = [line for line in driven.stdout.splitlines() if line.startswith("--resources")]
    no_gpus, no_gpu, no_cores, no_third_node = refusals
    assert no_gpus.startswith("--resources: needs 1 CPU, 8 GPUs; no node")
    assert no_gpu.startswith("--resources: needs 1 CPU, 1 GPU; no node")
    assert no_cores.startswith("--resources: needs 64 CPUs; no node")
    assert no_third_node.startswith("--resources: 3 workers need 2 CPUs each; 0 of them fit")


@pytest.mark.long  # nodes start first: 65 s on two slow cores
def test_the_first_job_of_an_empty_cluster_makes_what_one_node_makes(driven, reddit_corpus):
    # Behind it Ray may warn of a task that waits for its node: the driver's own session is still open.
    lines = [line for line in driven.stdout.splitlines() if line.startswith('{"job"')]
    summary = json.loads(lines[-1])
    assert summary["fingerprint"] == reddit_corpus.fingerprint
    assert "waits for 1 CPU: no node that is up" in driven.stderr.partition("now the job")[2]


@pytest.mark.long  # nodes start first: 65 s on two slow cores
def test_ray_prints_no_line_of_its_own_when_a_job_joins_a_cluster(driven):
    assert "RAY_BACKEND_LOG_LEVEL" not in driven.stderr


def test_on_a_cluster_that_cannot_grow_a_process_that_fits_nowhere_is_refused(local_ray):
    with pytest.raises(BadInput, match=r"largest node now: 2 CPUs\)"):
        waiting.await_room(1, 1)
    with pytest.raises(BadInput, match="needs 3 CPUs; no node"):
        Actors(cpus_per_actor=3).count(9)


@pytest.mark.long  # 24 s on two slow cores; the test of an empty cluster compares, too
def test_a_cluster_makes_what_one_process_makes(run_job, run_job_here, sample_files, tmp_path):
    folder = sample_files / "convai2"
    command = ("prepare_corpus", "--corpus", "convai2", "--input", folder, "--output")
    there = run_job(*command, tmp_path / "there").summary
    here = run_job_here(*command, tmp_path / "here").summary
    assert there["fingerprint"] == here["fingerprint"]
    assert there["counts"] == here["counts"]


def test_processes_share_the_cores_of_the_nodes_that_are_up(local_ray):
    assert [resources.cpus_each(number) for number in (1, 2, 3)] == [2, 1, 1]
    assert resources.cpus_each(4, chosen=2) == 2
    assert (resources.fitting(1), resources.fitting(2), resources.fitting(1, 1)) == (2, 1, 0)
    assert (Actors().max_count(9), Actors(max_actors=5).max_count(9)) == (2, 5)


def have_nodes(monkeypatch, nodes):
    for module in (resources, waiting):
        monkeypatch.setattr(module, "nodes_beside_services", lambda: nodes)


def test_a_share_of_the_cores_is_one_that_all_processes_get(monkeypatch):
    have_nodes(monkeypatch, [{"CPU": 3.0}, {"CPU": 5.0}])
    assert [resources.cpus_each(number) for number in (1, 2, 4, 9)] == [5, 3, 1, 1]


def test_more_workers_than_a_cluster_holds_that_cannot_grow_are_refused(
    run_job, convai2_corpus, tiny_ranker, tmp_path
):
    refusal = run_job(
        "finetune", "--corpus", convai2_corpus.uri, "--encoder", tiny_ranker("bi").uri,
        "--output", tmp_path / "ranker", "--resources.workers", 8, "--resources.min-workers", 3,
        "--finetune.max-steps", 1, "--finetune.batch-examples", 8, "--loop.validate-every-epochs", 0,
        "--ranker.max-context-tokens", 48, "--ranker.max-candidate-tokens", 32,
    ).refusal  # fmt: skip
    assert "--resources: 3 workers need 1 CPU each; 2 of them fit on the cluster" in refusal
    assert "--resources.min-workers 1" in refusal


def test_a_gpu_process_gets_the_cores_that_a_node_has_for_each_gpu(monkeypatch):
    nodes = [{"CPU": 16.0, "GPU": 1.0}, {"CPU": 48.0, "GPU": 4.0}, {"CPU": 64.0}, {}]
    have_nodes(monkeypatch, nodes)
    assert resources.cpus_each(8, gpu=True) == 12
    assert resources.fitting(0, 1) == 5
