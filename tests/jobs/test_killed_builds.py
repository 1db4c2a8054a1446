"""Builds of a pool that are killed: what is kept, what is not mixed, what the next run does."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import mlflow
import pytest
import torch

from pipeline import storage
from pipeline.models import inference, precision
from pipeline.models.precision import NUMERICS
from pipeline.pools import candidates, plan, promotion
from pipeline.pools.pool import Pool
from tests.jobs.nights import (
    EXACT,
    FIRST,
    OTHER_PRECISION,
    changed,
    contents,
    current,
    embedded,
    interrupted,
    stop_after,
    versions,
)

pytestmark = pytest.mark.usefixtures("actors_in_process")


def test_the_shards_that_the_gate_has_refused_stay_and_are_named(night, pools, monkeypatch):
    """A faulty device makes other vectors of a batch than of a text alone."""
    vectors = inference.row_vectors

    def faulty(ranker, rows, *more):
        made = vectors(ranker, rows, *more)
        return made + torch.randn(made.shape) if len(rows) > 1 else made

    monkeypatch.setattr(inference, "row_vectors", faulty)
    refused = night(FIRST)
    (draft,) = pools.glob("p/*.partial")
    assert refused.code == 1
    assert f"Its shards stay in {draft}; remove this folder" in refused.stderr


def test_a_build_that_earlier_code_has_planned_is_resumed(night, pools, monkeypatch, model_texts):
    options = ("--embed.rows-per-shard", 5, *EXACT)
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        interrupted(night(FIRST, *options))
    plan_mark = next(pools.glob("p/*.partial/_tasks/plan.json"))
    planned = json.loads(plan_mark.read_text())
    del planned["source"]
    planned["unfinished"] = [{"folder": str(pools / "p" / "v-0"), "name": "part-00000", "rows": 5}]
    plan_mark.write_text(json.dumps(planned))
    model_texts.clear()
    night(FIRST, *options)
    assert model_texts == list(FIRST.values())[15:]


@pytest.mark.parametrize(
    ("names", "first"),
    [(("a.csv", "b.csv"), ("--embed.repeated-ids", "first")), (("1/same.csv", "2/same.csv"), ())],
)
def test_a_build_that_goes_on_with_its_files_in_another_order_loses_none(
    run_job_here, pools, tiny_ranker, tmp_path, monkeypatch, names, first
):
    """It is killed when it has read one of them."""
    files = [tmp_path / name for name in names]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"id,text\n{file},text of {file}\n")

    def run(files):
        return run_job_here(
            "embed_pool", "--model", tiny_ranker("poly").uri, "--pools", pools, "--name", "p",
            "--candidates", f"[{','.join(map(str, files))}]", *first,
        )  # fmt: skip

    read, tasks_read = candidates._stage_pieces, list[str]()

    def killed(draft, task, *arguments, **settings):
        if tasks_read:
            raise KeyboardInterrupt
        tasks_read.append(task)
        return read(draft, task, *arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(candidates, "_stage_pieces", killed)
        interrupted(run(files))
    rows = contents(run(reversed(files)).summary["output"])
    assert set(rows) == set(map(str, files))


@pytest.mark.processor
def test_a_pool_of_other_numerics_is_embedded_anew(night, first_night, pools, monkeypatch):
    first = first_night()
    monkeypatch.setattr(precision, "NUMERICS", NUMERICS + 1)
    with monkeypatch.context() as patch:
        stop_after(0, patch)
        interrupted(night(FIRST))
    second = night(FIRST).summary
    assert (second["already_done"], embedded(second)) == (False, 30)
    numerics = [Pool.open(run["output"]).artifact.manifest["numerics"] for run in (first, second)]
    assert numerics == [NUMERICS, NUMERICS + 1]


@pytest.mark.processor
def test_a_build_is_resumed_with_the_same_numerics_only(night, monkeypatch, model_texts):
    options = ("--embed.rows-per-shard", 5, "--gate.sample", 0, "--gate.canary-texts", 0)
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        interrupted(night(FIRST, *options))
    model_texts.clear()
    monkeypatch.setattr(precision, "NUMERICS", NUMERICS + 1)
    night(FIRST, *options)
    assert len(model_texts) == 30


def test_a_full_disk_fails_a_night_and_the_next_goes_on(night, first_night, pools, monkeypatch):
    first = first_night()
    write, calls = candidates.storage.write_bytes, []

    def full(uri, data):
        if "/vectors/" in uri:
            calls.append(uri)
            if len(calls) == 3:
                raise OSError(errno.ENOSPC, "No space left on device")
        write(uri, data)

    options = ("--embed.rows-per-shard", 5)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_bytes", full)
        failed = night(changed(FIRST), *options)
        assert failed.code == 1
        assert "No space left on device" in failed.stderr
    assert current(pools) == first["version"]
    assert len(Pool.open(str(pools / "p"))) == 30
    second = night(changed(FIRST), *options).summary
    assert second["counts"]["candidates"] == 29
    assert len(set(calls)) == 3  # the two shards before it were not written again


def test_a_build_that_goes_on_after_current_has_moved_is_compared_with_what_is_current_now(
    night, first_night, pools, monkeypatch
):
    first = first_night()
    second = night(changed(FIRST)).summary
    options = ("--embed.rows-per-shard", 5)
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        interrupted(night(changed(FIRST) | {"third": "third night"}, *options))
    promotion.promote(str(pools), "p", first["version"])
    finished = night(changed(FIRST) | {"third": "third night"}, *options)
    assert "planned anew, as CURRENT" in finished.stdout
    assert finished.summary["plan"] == {"new": 2, "changed": 1, "same": 27, "gone": 2}
    gate = Pool.open(finished.summary["output"]).artifact.manifest["gate"]
    assert gate["removed_share"] == 0.0667
    assert second["version"] != current(pools) == finished.summary["version"]


SHARDS_OF_FIVE = ("--embed.rows-per-shard", 5, *EXACT)
THIRD = changed(FIRST) | {"third": "third night"}


def test_a_build_that_goes_on_after_another_one_keeps_its_finished_shards(
    night, monkeypatch, tmp_path, tiny_ranker, model_texts
):
    """The killed build is of a model that no version has, so that nothing can be copied from CURRENT."""
    model = tiny_ranker("poly", seed=1).uri
    night(FIRST, *EXACT)
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        interrupted(night(THIRD, *SHARDS_OF_FIVE, model=model))
    night(FIRST | {"other": "another input"}, *EXACT)
    model_texts.clear()
    finished = night(THIRD, *SHARDS_OF_FIVE, model=model)
    assert model_texts == list(THIRD.values())[15:]
    assert finished.summary["already_done"] is False
    whole = night(THIRD, *SHARDS_OF_FIVE, "--pools", tmp_path / "undisturbed", model=model).summary
    assert finished.summary["fingerprint"] == whole["fingerprint"]
    assert contents(finished.summary["output"]) == contents(whole["output"])


def test_a_build_that_goes_on_beside_current_and_back_copies_from_the_right_places(
    night, pools, monkeypatch, model_texts
):
    """The versions have the same texts at other places."""
    first = night(FIRST, *EXACT).summary
    second = night(dict(reversed(FIRST.items())) | {"new": "new text"}, *EXACT).summary
    model_texts.clear()
    for version in (second, first):
        promotion.promote(str(pools), "p", version["version"])
        with monkeypatch.context() as patch:
            stop_after(1, patch)
            interrupted(night(THIRD, *SHARDS_OF_FIVE))
    promotion.promote(str(pools), "p", second["version"])
    rows = contents(night(THIRD, *SHARDS_OF_FIVE).summary["output"])
    assert {name: text for name, (text, _) in rows.items()} == THIRD
    assert model_texts == ["another text 5", "third night"]


def test_the_gate_asks_finished_shards_again_if_current_moved(night, pools, monkeypatch, tmp_path):
    """As if the build had begun after that: the same canaries, answers and recall."""
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        interrupted(night(THIRD, *SHARDS_OF_FIVE))  # beside no version, whose canaries it could ask
    night({**FIRST, "0": "another text 0"}, *EXACT)
    shutil.copytree(pools, tmp_path / "later")
    for killed in (tmp_path / "later").glob("p/*.partial"):
        shutil.rmtree(killed)
    ours, theirs = (
        Pool.open(night(THIRD, *SHARDS_OF_FIVE, "--pools", folder).summary["output"]).artifact
        for folder in (pools, tmp_path / "later")
    )
    assert ours.manifest["gate"] == theirs.manifest["gate"]
    assert ours.manifest["gate"]["recall"] == 1.0
    assert ours.manifest["canaries"] == theirs.manifest["canaries"]
    assert ours.manifest["files"] == theirs.manifest["files"]


@pytest.mark.processor
def test_finished_shards_of_another_precision_are_embedded_anew_after_current_has_moved(
    night, pools, monkeypatch, model_texts
):
    options = ("--embed.rows-per-shard", 5, "--gate.sample", 0)
    first = night(FIRST, *options, *OTHER_PRECISION).summary  # nothing can be copied from it
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        interrupted(night(THIRD, *options, "--resources.actors", 1))
    plan_mark = next(pools.glob("p/*.partial/_tasks/plan.json"))
    planned = json.loads(plan_mark.read_text())
    planned["precision"] = {"fp32": "bf16", "bf16": "fp32"}[planned["precision"]]
    plan_mark.write_text(json.dumps(planned))
    night(FIRST | {"other": "another input"}, *options, *OTHER_PRECISION)
    assert first["version"] != current(pools)
    model_texts.clear()
    night(THIRD, *options)
    assert {f"text {n}" for n in (0, 1, 2)} <= set(model_texts)


def test_finished_shards_that_the_new_plan_cuts_otherwise_are_made_again(night, pools, monkeypatch):
    """As a polyrank does that bounds a shard's bytes otherwise."""
    night(FIRST, *EXACT)
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        interrupted(night(THIRD, *SHARDS_OF_FIVE))
    night(FIRST | {"other": "another input"}, *EXACT)
    monkeypatch.setattr(plan, "_SHARD_BYTES", 20)
    rows = contents(night(THIRD, *SHARDS_OF_FIVE).summary["output"])
    assert {name: text for name, (text, _) in rows.items()} == THIRD


def test_a_killed_build_stays_until_so_many_newer_versions_as_are_kept(night, pools, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        interrupted(night(THIRD, *SHARDS_OF_FIVE))
    (killed,) = versions(pools)
    for number in range(2):
        night(FIRST | {"0": f"night {number}"}, "--keep", 2)
        assert (killed in versions(pools)) == (number == 0)


def test_the_run_of_a_killed_build_ends_when_nobody_can_resume_it(night, pools, monkeypatch):
    """Of one that was killed with -9: nothing of it could say so to MLflow."""
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        interrupted(night(THIRD, *SHARDS_OF_FIVE))
    (note,) = pools.glob("p/*.partial/_run.json")
    run_id, client = json.loads(note.read_text())["run_id"], mlflow.MlflowClient()
    client.update_run(run_id, "RUNNING")
    night(FIRST, "--keep", 2)
    assert client.get_run(run_id).info.status == "RUNNING"  # the same command resumes
    night(FIRST | {"0": "another night"}, "--keep", 2)
    assert client.get_run(run_id).info.status == "KILLED"


def test_canaries_that_are_named_when_a_build_goes_on_are_asked(night, monkeypatch, tmp_path):
    (tmp_path / "canaries.txt").write_text("hello\nhow are you\tfine\n")
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        interrupted(night(FIRST, "--embed.rows-per-shard", 5))
    canaries = ("--gate.canaries", tmp_path / "canaries.txt")
    summary = night(FIRST, "--embed.rows-per-shard", 5, *canaries).summary
    asked = Pool.open(summary["output"]).artifact.manifest["canaries"]
    assert asked["contexts"] == [["hello"], ["how are you", "fine"]]
    assert list(map(len, asked["answers"])) == [10, 10]


def test_a_dry_run_whose_version_is_removed_answers_in_one_line(night, first_night, monkeypatch):
    """The job that removes it holds the pool's lock; a dry run holds none."""
    rows = next(Path(first_night()["output"]).glob("rows/*"))
    opened = storage.open_input

    def remove_and_open(uri):
        if uri == str(rows):
            rows.unlink(missing_ok=True)
        return opened(uri)

    monkeypatch.setattr(storage, "open_input", remove_and_open)
    refusal = night(changed(FIRST), "--dry-run").refusal
    assert f"{rows}: another job has removed this version meanwhile" in refusal


def test_the_plan_of_a_killed_dry_run_goes_with_the_next_night(night, pools):
    plan_of_killed = pools / "_plans" / "v-1-0123abcd.partial" / "_candidates"
    plan_of_killed.mkdir(parents=True)
    (plan_of_killed / "file.arrow").write_bytes(b"texts")
    night(FIRST)
    assert not list(pools.glob("_plans/*"))


def test_rows_whose_version_is_half_removed_make_it_again(night, first_night, pools):
    first = first_night()["version"]
    night(changed(FIRST))
    (pools / "p" / first / "manifest.json").unlink()  # a removal begins so
    assert night(FIRST).summary["version"] == first == current(pools)


def test_a_plan_whose_removal_was_killed_is_made_again(night, first_night, monkeypatch):
    first, delete = first_night(), storage.delete
    turned = dict(reversed(FIRST.items()))

    def killed(uri):
        if not uri.endswith(".partial"):
            return delete(uri)
        for path in ("_candidates", "_tasks/plan.json"):
            delete(f"{uri}/{path}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(storage, "delete", killed)
        interrupted(night(turned))
    assert night(turned).summary["version"] == first["version"]
