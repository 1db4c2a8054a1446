"""Builds of a pool that are killed: what is kept, what is not mixed, what the next run does."""

from __future__ import annotations

import errno
import subprocess
import sys

import numpy as np
import pytest

from jobs import embed_pool
from pipeline import storage
from pipeline.retrieval.pools import candidates, embed, embedder, promotion
from pipeline.retrieval.pools import versions as versions_module
from pipeline.retrieval.pools.pool import Pool
from tests.jobs.nights import (
    FIRST,
    changed,
    contents,
    current,
    embedded,
    interrupted,
    stop_after,
    versions,
)

pytestmark = pytest.mark.usefixtures("actors_in_process")


def test_what_a_killed_build_has_embedded_is_not_lost_when_the_input_changes(
    night, pools, monkeypatch, tmp_path
):
    options = ("--embed.rows-per-shard", 5)
    for rows in (
        FIRST,
        changed(FIRST),
    ):  # two nights, each with an input of its own, and both killed
        with monkeypatch.context() as patch:
            stop_after(3, patch)
            interrupted(night(rows, *options))
    assert len([name for name in versions(pools) if name.endswith(".partial")]) == 2
    third = changed(FIRST) | {"third": "third night"}
    finished = night(third, *options)
    # Each of the killed ones has made 3 shards of 5 rows. Of the first, "text 3" is gone, and "text 5"
    # stands in no later one; the second has copied from the first what that had.
    kept = {f"text {n}" for n in range(15)} | set(list(changed(FIRST).values())[:15])
    expected = [text for text in third.values() if text not in kept]
    assert (
        f"{len(third) - len(expected)} texts were embedded by builds that were killed"
        in finished.stdout
    )
    assert f"to embed {len(expected)} of {len(third)}" in finished.stdout
    assert embedded(finished.summary) == len(expected) < 20
    assert versions(pools) == [current(pools)]
    monkeypatch.setattr(versions_module, "drafts", lambda *_: [])
    whole = night(third, *options, "--pools", tmp_path / "undisturbed").summary
    assert embedded(whole) == len(third)
    ours, theirs = contents(finished.summary["output"]), contents(whole["output"])
    assert {name: text for name, (text, _) in ours.items()} == third
    for name, (_, vector) in theirs.items():
        np.testing.assert_allclose(ours[name][1], vector, atol=0.05)


@pytest.mark.parametrize("change", ["model", "precision", "numerics", "removed"])
def test_vectors_of_a_killed_build_that_would_differ_are_not_copied(
    night, pools, monkeypatch, tiny_ranker, change
):
    before = ("--embed.precision", "fp32") if change == "precision" else ()
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        interrupted(night(FIRST, "--embed.rows-per-shard", 5, *before))
    model, after = "", ()
    if change == "model":
        model = tiny_ranker("poly", seed=1).uri
    elif change == "precision":
        after = ("--embed.precision", "bf16")
    elif change == "numerics":
        monkeypatch.setattr(embed_pool, "NUMERICS", 2)
    else:
        made = embedder.UnfinishedVectors.at
        monkeypatch.setattr(embedder.UnfinishedVectors, "at", lambda self, places: (
            [path.unlink() for path in pools.glob("p/*.partial/vectors/part-00000.npy")],
            made(self, places))[1])  # fmt: skip
    summary = night(changed(FIRST), *after, model=model).summary
    assert embedded(summary) == 29


def test_a_pool_of_other_numerics_is_embedded_anew_and_never_mixed(
    night, first_night, pools, monkeypatch
):
    first = first_night()
    for module in (embed_pool, embed, versions_module):
        monkeypatch.setattr(module, "NUMERICS", 2)
    with monkeypatch.context() as patch:
        stop_after(0, patch)
        interrupted(night(FIRST))
    second = night(FIRST).summary
    assert (second["already_done"], embedded(second)) == (False, 30)
    numerics = [Pool.open(run["output"]).artifact.manifest["numerics"] for run in (first, second)]
    assert numerics == [1, 2]


def test_a_build_is_not_resumed_with_other_numerics(night, monkeypatch, actors_in_process):
    options = ("--embed.rows-per-shard", 5)
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        interrupted(night(FIRST, *options))
    monkeypatch.setattr(embed, "NUMERICS", 2)
    assert embedded(night(FIRST, *options).summary) == 30


def test_a_full_disk_fails_the_night_and_the_next_run_goes_on(
    night, first_night, pools, monkeypatch
):
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
    assert "begun anew, as CURRENT" in finished.stdout
    assert finished.summary["plan"] == {"new": 2, "changed": 1, "same": 27, "gone": 2}
    assert (
        Pool.open(finished.summary["output"]).artifact.manifest["gate"]["removed_share"] == 0.0667
    )
    assert second["version"] != current(pools) == finished.summary["version"]


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


def test_a_night_with_nothing_to_do_leaves_the_killed_build_of_another_input(
    night, first_night, pools, monkeypatch
):
    first_night()
    with monkeypatch.context() as patch:
        stop_after(1, patch)
        interrupted(night(changed(FIRST), "--embed.rows-per-shard", 5))
    left = versions(pools)
    assert night(FIRST).summary["already_done"] is True
    assert versions(pools) == left and len(left) == 2


KILLED_DRY_RUN = """
import os, sys
from jobs import embed_pool
from pipeline import executors

embed_pool.rows_to_embed = lambda *_: os._exit(9)
model, candidates, pools = sys.argv[1:]
with executors.in_this_process():
    embed_pool.run(
        embed_pool.Config(model=model, candidates=(candidates,), pools=pools, name="p", dry_run=True)
    )
"""


def test_the_plan_of_a_killed_dry_run_goes_with_the_next_night(night, pools, tiny_ranker, tmp_path):
    (tmp_path / "rows.csv").write_text("id,text\n1,one\n2,two\n")
    arguments = (tiny_ranker("poly").uri, tmp_path / "rows.csv", pools)
    killed = subprocess.run([sys.executable, "-c", KILLED_DRY_RUN, *arguments], check=False)
    assert killed.returncode == 9
    assert list(pools.glob("_plans/*/_candidates/*.arrow"))
    night(FIRST)
    assert not list(pools.glob("_plans/*"))
