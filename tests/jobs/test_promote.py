"""jobs.promote: another version of a pool or of a model, and back."""

from __future__ import annotations

import json

import mlflow
import pytest

from jobs import embed_pool
from pipeline import tracking
from pipeline.retrieval.pools.versions import current_name


@pytest.fixture
def pools(tiny_ranker, actors_in_process, tmp_path):
    """(their folder, the versions of `replies` in the order that they were made)"""
    root = tmp_path
    model, versions = tiny_ranker("bi"), []
    for number in range(3):
        rows = [{"id": str(place), "text": f"reply {place}"} for place in range(3 + number)]
        (root / "replies.jsonl").write_text("\n".join(map(json.dumps, rows)))
        embed_pool.run(
            embed_pool.Config(
                model=model.uri, candidates=(str(root / "replies.jsonl"),),
                pools=str(root / "pools"), name="replies",
            )
        )  # fmt: skip
        versions.append(current_name(str(root / "pools"), "replies"))
    return root / "pools", versions


def test_a_pool_goes_back_step_by_step_and_forward_by_name(run_job_here, pools):
    folder, (first, second, third) = pools
    pool = ("promote", "--pools", folder, "--name", "replies")
    done = run_job_here(*pool)
    assert (done.summary["before"], done.summary["version"]) == (third, second)
    assert run_job_here(*pool).summary["version"] == first == current_name(str(folder), "replies")
    refused = run_job_here(*pool)
    assert refused.code == 2 and f"has none before {first}" in refused.stderr
    assert run_job_here(*pool, "--version", third).summary["version"] == third


def test_a_version_that_does_not_open_is_refused(run_job_here, pools):
    folder, _ = pools
    before = current_name(str(folder), "replies")
    refused = run_job_here("promote", "--pools", folder, "--name", "replies",
                      "--version", "v-nope")  # fmt: skip
    assert refused.code == 2 and "v-nope" in refused.stderr
    assert current_name(str(folder), "replies") == before


def test_an_alias_moves_and_moves_back(run_job_here, tiny_ranker, tracking_uri):
    first, second = tiny_ranker("bi"), tiny_ranker("poly")
    one = tracking.register("replies-model", first, "champion")
    two = tracking.register("replies-model", second, "candidate")
    done = run_job_here("promote", "--model", "replies-model", "--version", "candidate")
    assert (done.summary["before"], done.summary["version"]) == (one, two)
    run_job_here("promote", "--model", "replies-model")
    client = mlflow.MlflowClient()
    aliases = client.get_registered_model("replies-model").aliases
    assert {name: str(number) for name, number in aliases.items()} == {
        "champion": one, "previous": two, "candidate": two,
    }  # fmt: skip
    refused = run_job_here("promote", "--model", "replies-model", "--version", "7")
    assert refused.code == 2 and "replies-model, version 7" in refused.stderr


def test_a_pool_and_a_model_are_not_promoted_at_once(run_job_here):
    refused = run_job_here("promote", "--pools", "p", "--name", "n", "--model", "m")
    assert refused.code == 2 and "either a pool or a model" in refused.stderr
