"""A pool night after night: the plan, copies, the gate, the lock, old versions."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from jobs import promote
from pipeline import artifact, storage
from pipeline.models.ranker import Ranker
from pipeline.pools import embedder, promotion
from pipeline.pools.lock import locked
from pipeline.pools.pool import Pool
from tests.jobs.nights import FIRST, changed, contents, current, embedded, versions

pytestmark = pytest.mark.usefixtures("actors_in_process")


# Incremental


def test_only_what_is_new_or_changed_is_embedded_and_the_pool_is_that_of_a_whole_run(
    night, first_night, pools, tmp_path
):
    first = first_night()
    assert first["plan"] == {"new": 30, "changed": 0, "same": 0, "gone": 0}
    finished = night(changed(FIRST))
    second = finished.summary
    assert "1 new, 1 changed, 27 same, 2 gone; to embed 2 of 29 (about 0.0" in finished.stdout
    assert second["plan"] == {"new": 1, "changed": 1, "same": 27, "gone": 2}
    assert (embedded(first), embedded(second)) == (30, 2)
    assert current(pools) == second["version"]

    before, after = contents(first["output"]), contents(second["output"])
    assert {name: text for name, (text, _) in after.items()} == changed(FIRST)
    for name in set(after) - {"5", "new"}:
        assert after[name] == before[name]  # to the bit
    storage.delete(str(pools))
    whole = night(changed(FIRST)).summary
    assert embedded(whole) == 29
    for name, (_, vector) in contents(whole["output"]).items():
        np.testing.assert_allclose(after[name][1], vector, atol=0.05)


def test_rows_of_another_model_are_embedded_again(night, first_night, tiny_ranker):
    first_night()
    finished = night(FIRST, model=tiny_ranker("poly", seed=1).uri)
    assert finished.summary["plan"] == {"new": 0, "changed": 0, "same": 30, "gone": 0}
    assert "to embed 30 of 30" in finished.stdout
    assert embedded(finished.summary) == 30
    assert "the version before is of another kind of model" in finished.stdout


def test_nights_of_a_model_that_is_not_yet_promoted_copy_its_own_last_version(
    night, first_night, pools, tiny_ranker
):
    first = first_night()
    model = tiny_ranker("poly", seed=1).uri
    prepared = night(FIRST, "--publish-only", model=model).summary
    assert current(pools) == first["version"]
    finished = night(changed(FIRST), "--publish-only", model=model)
    second = finished.summary
    assert f"27 texts are copied from {prepared['version']}\n" in finished.stdout
    assert embedded(second) == 2
    before, after = contents(prepared["output"]), contents(second["output"])
    for name in set(after) - {"5", "new"}:
        assert after[name] == before[name]  # to the bit
    next(Path(second["output"]).glob("rows/*")).unlink()
    finished = night(changed(FIRST) | {"more": "more"}, "--publish-only", model=model)
    assert f"nothing is copied from {second['version']}" in finished.stdout
    assert embedded(finished.summary) == 3


def test_nights_of_a_pinned_pool_embed_what_the_last_one_has_not(night, first_night, pools):
    first_night()
    promotion.set_pin(str(pools), "p", True)
    for number in range(3):
        rows = FIRST | {f"night {n}": f"night {n}" for n in range(number + 1)}
        assert embedded(night(rows).summary) == 1


def test_the_same_rows_elsewhere_leave_nothing_to_do(night, first_night, pools, actors_in_process):
    first = first_night()
    actors_in_process.clear()
    again = night(dict(reversed(FIRST.items()))).summary  # another order, and so another file
    assert again == {**first, "already_done": True}
    assert actors_in_process == []
    assert versions(pools) == [current(pools)] == [first["version"]]


def test_rows_that_are_set_aside_each_night_leave_nothing_to_do(
    night, pools, tiny_ranker, monkeypatch
):
    rows_of = Ranker.candidate_rows
    monkeypatch.setattr(
        Ranker,
        "candidate_rows",
        lambda self, texts, *limit: rows_of(self, [t.strip("#") for t in texts], *limit),
    )
    rows = FIRST | {"a": "#", "b": "##"}
    options = ("--reading.max-malformed-share", 0.1)
    first = night(rows, *options).summary
    assert first["dropped"] == {"text has no tokens": 2}
    assert first["counts"]["candidates"] == 30
    again = night(dict(reversed(rows.items())), *options).summary
    assert again == {**first, "already_done": True}
    assert night(dict(reversed(rows.items())), *options, "--dry-run").summary["already_done"]
    assert night(dict(reversed(FIRST.items())), *options).summary["already_done"]
    assert versions(pools) == [first["version"]]
    for changed_rows in ({"b": "###"}, {"a": "##", "b": "#"}):
        done = night(rows | changed_rows, *options, "--dry-run").summary
        assert done["already_done"] is False
    other = tiny_ranker("poly", seed=1).uri  # it may have vectors for them
    assert night(rows, *options, "--dry-run", model=other).summary["already_done"] is False


# Dry run


def test_a_dry_run_says_what_would_be_done_and_leaves_no_trace(night, first_night, pools, tmp_path):
    first = first_night()
    before = sorted(str(path) for path in pools.rglob("*") if path.is_file())
    finished = night(changed(FIRST), "--dry-run")
    assert "1 new, 1 changed, 27 same, 2 gone; to embed 2 of 29" in finished.stdout
    assert finished.summary["plan"] == {"new": 1, "changed": 1, "same": 27, "gone": 2}
    assert finished.summary["already_done"] is False
    assert "embed_pool: nothing is written; the job would take about" in finished.stdout
    estimate = finished.summary["estimate"]
    assert (estimate["input_files"], estimate["rows"]) == (1, 29)
    rate = Pool.open(str(pools / "p")).artifact.manifest["embedded"]["rate"]
    assert estimate["cpu_hours"] == pytest.approx(2 / rate / 3600 * os.cpu_count())
    assert "the version before" in estimate["basis"]
    assert finished.summary["version"] != first["version"] == current(pools)
    assert sorted(str(path) for path in pools.rglob("*") if path.is_file()) == before
    assert night(changed(FIRST)).summary["version"] == finished.summary["version"]
    done = night(changed(FIRST), "--dry-run", "--keep", 1).summary
    assert done["already_done"] is True and first["version"] in versions(pools)


def test_a_plan_does_not_fetch_the_version_before(night, pools, monkeypatch):
    """At another name of this disk, whose files are to it what those of an object store are."""
    options = ("--pools", f"local://{pools}")
    night(FIRST, *options)
    monkeypatch.setattr(artifact.node_cache, "local_folder", None)
    assert night(changed(FIRST), *options, "--dry-run").summary["plan"]["same"] == 27


def test_a_dry_run_loads_no_model_and_says_how_to_learn_what_a_text_takes(night, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(embedder, "load_ranker", None)
        first = night(FIRST, "--dry-run").summary
    assert first["plan"]["new"] == 30
    assert "cpu_hours" not in first["estimate"]
    assert "under another --name tells it" in first["estimate"]["basis"]
    night(dict(list(FIRST.items())[:9]), "--name", "other")
    assert night(FIRST, "--name", "other", "--dry-run").summary["estimate"]["cpu_hours"] > 0


# The gate and the lock


def stopped(finished) -> str:
    """The one line of a job that ends with exit code 1."""
    assert finished.code == 1, finished
    lines = finished.stderr.splitlines()
    (line,) = [line for line in lines if line.startswith("python -m jobs.embed_pool: ")]
    assert "Traceback" not in finished.stderr
    return line


def test_a_gate_that_is_not_passed_publishes_nothing(night, first_night, pools, monkeypatch):
    first = first_night()
    with monkeypatch.context() as patch:
        patch.setattr(Pool, "vectors_at", lambda _, at: np.ones((len(at), 16), np.float32))
        line = stopped(night(changed(FIRST), "--gate.sample", 30))
    assert "the gate: a text that was embedded twice has two vectors, of cosine" in line
    assert current(pools) == first["version"]
    assert [name for name in versions(pools) if not name.endswith(".partial")] == [first["version"]]
    # It has been looked at, and is let pass: the same shards, and nothing is done again.
    second = night(changed(FIRST), "--gate.min-cosine", -1, "--gate.min-recall", 0).summary
    assert current(pools) == second["version"]


def test_an_export_that_broke_off_is_refused_before_anything_is_embedded(
    night, first_night, pools, actors_in_process
):
    first = first_night()
    few = {name: FIRST[name] for name in ("1", "2")}
    actors_in_process.clear()
    line = stopped(night(few))
    assert f"28 of the 30 ids of {first['version']} are gone (93.3%" in line
    assert "the same command with --gate.max-removed-share 1" in line
    assert not [name for name in actors_in_process if name.startswith("part-")]
    assert current(pools) == first["version"]
    stopped(night({"1": FIRST["1"]}))
    left = [name for name in versions(pools) if name != first["version"]]
    assert len(left) == 1  # the texts of the last export, not those of each night
    dry = night(few, "--dry-run")
    assert "would be refused: the gate: 28 of the 30 ids" in dry.stdout
    meant = night(few, "--gate.max-removed-share", 1).summary
    assert current(pools) == meant["version"]
    gate = Pool.open(meant["output"]).artifact.manifest["gate"]
    assert (gate["removed_share"], gate["changed_share"]) == (0.9333, 0.0)


def test_the_last_version_of_a_larger_pool_stays_and_that_is_said(night, first_night, pools):
    first = first_night()
    night({"1": "text 1"}, "--gate.max-removed-share", 1)
    finished = night({"1": "text 1", "2": "text 2"}, "--keep", 1)
    assert f"kept {first['version']} beyond --keep 1: it has 30 candidates" in finished.stdout
    assert versions(pools) == sorted([first["version"], finished.summary["version"]])


def test_a_version_before_whose_vectors_are_damaged_is_not_copied(night, first_night):
    """Only who copies them opens them."""
    first = first_night()
    file = next(Path(first["output"]).glob("vectors/*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    finished = night(changed(FIRST))
    assert f"nothing is copied, as {first['output']} cannot be opened" in finished.stdout
    assert embedded(finished.summary) == 29


def test_canaries_of_a_file_that_are_not_found_stop_a_night(night, pools, tmp_path, tiny_ranker):
    file = tmp_path / "canaries.txt"
    file.write_text("text 1\ntext 2\thow are you ?\n")
    options = ("--gate.canaries", file, "--gate.top-k", 3, "--gate.min-recall", 0.9)
    first = night(FIRST, *options).summary
    other = tiny_ranker("poly", seed=1).uri  # of the same kind, and trained to something else
    refused = night(FIRST, *options, model=other)
    assert "the test queries (canaries) find 0." in stopped(refused)
    assert current(pools) == first["version"]
    bi = night(FIRST, *options, model=tiny_ranker("bi").uri).summary
    passed = Pool.open(bi["output"]).artifact.manifest["gate"]
    assert "skipped: the version before is of another kind of model (poly" in passed["recall"]


def test_a_pool_that_another_job_works_on_is_left_alone(night, first_night, pools):
    first = first_night()
    with locked(str(pools), "p", 60):
        assert "pool p: pid " in stopped(night(changed(FIRST)))
        assert night(FIRST).summary["already_done"] is True  # that needs no lock
    assert current(pools) == first["version"]
    assert [path.name for path in (pools / "p").iterdir() if "partial" in path.name] == []


def test_a_job_that_has_lost_its_lock_publishes_nothing(night, first_night, pools, monkeypatch):
    first = first_night()
    write = embedder.build.write_shard

    def stolen(*arguments):
        taken = {"token": "t", "machine": "far", "pid": 1, "expires_s": 1e12}
        storage.write_bytes(str(pools / "_locks/p/99999999.json"), json.dumps(taken).encode())
        return write(*arguments)

    monkeypatch.setattr(embedder.build, "write_shard", stolen)
    assert "another job has taken over the lock" in stopped(night(changed(FIRST)))
    assert current(pools) == first["version"]


@pytest.mark.parametrize("moved_by", ["rollback", "another job"])
def test_a_night_leaves_current_that_has_moved_while_it_was_building(
    night, first_night, pools, monkeypatch, moved_by
):
    first = first_night()["version"]
    second = night(FIRST | {"second": "second night"}).summary["version"]
    write, moved = embedder.build.write_shard, list[str]()

    def move_then_write(*arguments):
        if not moved:
            moved.append(moved_by)
            if moved_by == "another job":
                promotion.promote(str(pools), "p", first)
            else:
                promote.run(promote.Config(pools=str(pools), name="p", rollback=True))
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(embedder.build, "write_shard", move_then_write)
        finished = night(changed(FIRST))
    assert current(pools) == first
    (third,) = set(versions(pools)) - {first, second}
    if moved_by == "another job":
        assert f"{third} is published and does not become CURRENT" in stopped(finished)
        assert f"compared it with {second}, but {first} is CURRENT now" in stopped(finished)
        assert night(changed(FIRST)).summary["version"] == third == current(pools)
    else:
        assert f"{first} stays CURRENT: it is pinned" in finished.stdout


@pytest.mark.parametrize("damage", [None, b"", b"\0" * 15, b"\xff\xfe", b"v-gone\n"])
def test_a_current_that_names_no_version_costs_no_vector_and_no_gate(
    night, first_night, pools, damage
):
    """As a power cut or a person may leave it. It was once taken for that of a pool without versions."""
    first_night()
    second = night(changed(FIRST)).summary["version"]

    def lose() -> None:
        file = pools / "p" / "CURRENT"
        file.write_bytes(damage) if damage is not None else file.unlink()

    lose()
    assert night(dict(reversed(changed(FIRST).items()))).summary["already_done"]
    assert current(pools) == second
    lose()
    refused = night({"1": FIRST["1"]})
    assert f"compares with the newest one, {second}" in refused.stdout
    assert f"28 of the 29 ids of {second} are gone" in stopped(refused)
    third = night(changed(FIRST) | {"third": "third night"}).summary
    assert third["plan"] == {"new": 1, "changed": 0, "same": 29, "gone": 0}
    assert embedded(third) == 1
    assert current(pools) == third["version"]


def test_a_model_that_is_replaced_during_a_night_makes_no_version(
    night, pools, tiny_ranker, tmp_path, monkeypatch
):
    """Nodes that start later read another model than the one that the version would name."""
    model = tmp_path / "model"
    shutil.copytree(tiny_ranker("poly").uri, model)
    write = embedder.build.write_shard

    def replace_then_write(*arguments):
        shutil.rmtree(model)
        shutil.copytree(tiny_ranker("poly", seed=1).uri, model)
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(embedder.build, "write_shard", replace_then_write)
        line = stopped(night(FIRST, model=str(model)))
    assert f"--model {model}: has changed while it was read" in line
    assert versions(pools) == []
    assert embedded(night(FIRST, model=str(model)).summary) == 30


# Versions


def test_a_pool_whose_current_version_a_later_polyrank_has_made_is_left_alone(
    night, first_night, pools
):
    manifest = Path(first_night()["output"], "manifest.json")
    manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 2'))
    before = sorted(path for path in pools.rglob("*") if path.is_file())
    for options in ((), ("--dry-run",)):
        refusal = night(changed(FIRST), *options).refusal
        assert f"{manifest.parent}: format_version is 2; this polyrank reads 1" in refusal
    assert sorted(path for path in pools.rglob("*") if path.is_file()) == before


def test_an_unreadable_manifest_stops_neither_clean_up_nor_rollback(night, first_night, pools):
    first = first_night()
    second = night(changed(FIRST)).summary
    damaged = pools / "p" / "v-0123456789ab"
    damaged.mkdir()
    (damaged / "manifest.json").write_text('{"kind": "po')
    finished = night(changed(FIRST) | {"third": "third night"}, "--keep", 2)
    assert "a version is left alone" in finished.stdout
    assert "not a polyrank manifest" in finished.stdout
    third = finished.summary["version"]
    assert versions(pools) == sorted([damaged.name, second["version"], third])
    assert first["version"] not in versions(pools)
    assert promotion.version_before(str(pools), "p") == second["version"]


def test_where_the_first_text_of_an_id_stays_other_orders_of_files_are_other_versions(
    run_job_here, tiny_ranker, tmp_path
):
    for name, text in (("a", "old text"), ("b", "new text")):
        (tmp_path / f"{name}.csv").write_text(f"id,text\n1,{text}\n2,{name} alone\n")

    def texts(*names: str) -> dict[str, str]:
        done = run_job_here(
            "embed_pool", "--model", tiny_ranker("bi").uri, "--pools", tmp_path / "pools", "--name", "p",
            "--candidates", f"[{','.join(str(tmp_path / f'{name}.csv') for name in names)}]",
            "--embed.repeated-ids", "first", "--gate.max-changed-share", 1,
        )  # fmt: skip
        return {name: text for name, (text, _) in contents(done.summary["pool"]).items()}

    assert texts("a", "b") == {"1": "old text", "2": "a alone"}
    assert texts("b", "a") == {"1": "new text", "2": "b alone"}


def test_the_same_rows_under_other_names_leave_nothing_to_do(run_job_here, tiny_ranker, tmp_path):
    """Where the first text of an id stays, and the names have the date in them."""

    def run(*names: str):
        for name in names:
            part = name[0]
            (tmp_path / name).write_text(f"id,text\n1,text of {part}\n{part},alone {part}\n")
        return run_job_here(
            "embed_pool", "--model", tiny_ranker("bi").uri, "--pools", tmp_path / "pools", "--name", "p",
            "--candidates", f"[{','.join(str(tmp_path / name) for name in names)}]",
            "--embed.repeated-ids", "first",
        ).summary  # fmt: skip

    first = run("a-1.csv", "b-1.csv")
    assert run("a-2.csv", "b-2.csv") == {**first, "already_done": True}
    assert run("b-3.csv", "a-3.csv")["already_done"] is False
