"""jobs.promote: another version of a pool, of a model, or of both, and back."""

from __future__ import annotations

import functools
import json
import shutil

import mlflow
import pytest

from jobs import embed_pool, promote
from pipeline import storage, tracking
from pipeline.artifact import open_artifact
from pipeline.config import BadInput, Stopped
from pipeline.engine import executors
from pipeline.pools.lock import locked
from pipeline.pools.versions import current_name


def embed_replies(folder, model, count, **settings):
    """Another version of the pool `replies` below the folder; its name."""
    rows = [{"id": str(place), "text": f"reply {place}"} for place in range(count)]
    (folder / "replies.jsonl").write_text("\n".join(map(json.dumps, rows)))
    place = {"candidates": (str(folder / "replies.jsonl"),), "pools": str(folder / "pools")}
    config = embed_pool.Config(model=model.uri, name="replies", **place, **settings)
    with executors.in_this_process():
        return embed_pool.run(config)["version"]


@pytest.fixture
def embed(tmp_path):
    """`embed(model, rows)`: another version of the pool `replies`, and its name."""
    return functools.partial(embed_replies, tmp_path)


@pytest.fixture(scope="module")
def three_versions(tracking_uri, tiny_ranker, tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    return folder / "pools", [embed_replies(folder, tiny_ranker("bi"), 3 + n) for n in range(3)]


@pytest.fixture
def pools(three_versions, tmp_path):
    """(their folder, the versions of `replies` in the order that they were made)"""
    made, versions = three_versions
    return shutil.copytree(made, tmp_path / "pools"), versions


@pytest.fixture
def move(run_job_here, tmp_path):
    """`move("--rollback")`: the job on the pool `replies`."""
    pool = ("--pools", tmp_path / "pools", "--name", "replies")
    return functools.partial(run_job_here, "promote", *pool)


def artifact_text(run, name):
    return mlflow.artifacts.load_text(f"{run.info.artifact_uri}/{name}")


def aliases_of(name):
    found = mlflow.MlflowClient().get_registered_model(name).aliases
    return {alias: str(version) for alias, version in found.items()}


def test_a_pool_goes_back_step_by_step_and_forward_by_name(move, pools):
    folder, (first, second, third) = pools
    done = move("--rollback").summary["pool"]
    assert (done["before"], done["version"], done["pinned"]) == (third, second, True)
    again = move("--rollback").summary["pool"]
    assert again["version"] == third  # what the last one left
    assert move("--version", first).summary["pool"]["version"] == first
    assert current_name(str(folder), "replies") == first


def test_a_pool_without_an_older_version_stays(move, embed, tiny_ranker, tmp_path):
    only = embed(tiny_ranker("bi"), 3)
    assert f"has none before {only}" in move("--rollback").refusal


def test_a_pinned_pool_gets_new_versions_and_keeps_current(embed, pools, move, tiny_ranker, capfd):
    folder, (*_, third) = pools
    assert move("--pin").summary["pool"]["pinned"]
    newer = embed(tiny_ranker("bi"), 9)
    assert f"{third} stays CURRENT: it is pinned" in capfd.readouterr().out
    assert current_name(str(folder), "replies") == third != newer
    assert not move("--unpin").summary["pool"]["pinned"]
    assert current_name(str(folder), "replies") == third
    capfd.readouterr()
    assert embed(tiny_ranker("bi"), 9) == newer == current_name(str(folder), "replies")
    assert f"{newer}, made 2" in capfd.readouterr().out  # CURRENT may go to a version of weeks ago


def test_a_pool_goes_back_while_a_night_is_building(move, pools):
    folder, (first, second, third) = pools
    with locked(str(folder), "replies", 60):
        assert move("--pin").summary["pool"]["pinned"]
        assert not move("--unpin").summary["pool"]["pinned"]
        planned = move("--version", first, "--dry-run").summary["pool"]
        assert (planned["before"], planned["version"]) == (third, first)
        assert move("--version", first).code == 1
        assert current_name(str(folder), "replies") == third
        done = move("--rollback").summary["pool"]
        assert (done["before"], done["version"], done["pinned"]) == (third, second, True)
        assert current_name(str(folder), "replies") == second


def test_a_version_removed_while_a_pool_goes_back_does_not_become_current(pools, monkeypatch):
    folder, (_, second, third) = pools
    opened = promote.Pool.open

    def remove_then_open(uri):
        pool = opened(uri)
        (folder / "replies" / second / "manifest.json").unlink()
        return pool

    monkeypatch.setattr(promote.Pool, "open", remove_then_open)
    with pytest.raises(Stopped, match=f"{second} has been removed meanwhile"):
        promote.run(promote.Config(pools=str(folder), name="replies", rollback=True))
    assert current_name(str(folder), "replies") == third


def test_the_version_that_was_current_before_is_not_removed(embed, pools, move, tiny_ranker):
    folder, (_, second, third) = pools
    move("--version", second)
    newest = embed(tiny_ranker("bi"), 20, keep=2)
    left = {path.name for path in (folder / "replies").iterdir() if path.is_dir()}
    assert left == {second, third, newest}
    assert move("--rollback").summary["pool"]["version"] == second


@pytest.mark.parametrize("option", [(), ("--rollback",)])
def test_a_pool_that_is_not_there_is_refused_and_not_made(run_job_here, tmp_path, option):
    refused = run_job_here("promote", "--pools", tmp_path / "none", "--name", "p", *option)
    said = f"pool p: {tmp_path / 'none'} has no such pool, or no version of it"
    assert refused.refusal == f"python -m jobs.promote: {said}"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("names_nothing", [True, False])
def test_a_pool_whose_current_is_lost_is_mended(move, pools, names_nothing):
    folder, (first, second, third) = pools
    file = folder / "replies" / "CURRENT"
    file.write_bytes(b"\0" * 15) if names_nothing else file.unlink()
    assert f"newest first: {third}, {second}, {first}" in move("--pin").refusal
    assert move("--version", third).summary["pool"]["version"] == third
    assert current_name(str(folder), "replies") == third


def test_a_version_that_does_not_open_is_refused(move, pools):
    folder, _ = pools
    before = current_name(str(folder), "replies")
    assert "v-nope" in move("--version", "v-nope").refusal
    assert current_name(str(folder), "replies") == before


def test_an_alias_moves_and_moves_back(run_job_here, tiny_ranker, tracking_uri):
    one = tracking.register("replies-model", tiny_ranker("bi"), "champion")
    two = tracking.register("replies-model", tiny_ranker("poly"), "candidate")
    done = run_job_here("promote", "--model", "replies-model")
    assert (done.summary["before"], done.summary["version"]) == (one, two)
    assert aliases_of("replies-model")["champion"] == two
    back = ("promote", "--model", "replies-model", "--rollback")
    assert run_job_here(*back).summary["version"] == one
    assert aliases_of("replies-model") == {"champion": one, "previous": two, "candidate": two}
    assert run_job_here(*back).summary["version"] == two
    refused = run_job_here("promote", "--model", "replies-model", "--version", "7")
    assert refused.code == 2 and "replies-model, version 7" in refused.stderr


def test_each_alias_has_a_previous_version_of_its_own(run_job_here, tiny_ranker, tracking_uri):
    one = tracking.register("staged", tiny_ranker("bi"), "champion")
    tracking.register("staged", tiny_ranker("bi"), "staging")
    two = tracking.register("staged", tiny_ranker("poly"), "candidate")
    run_job_here("promote", "--model", "staged", "--alias", "staging")
    others = {"champion": one, "candidate": two}
    assert aliases_of("staged") == {**others, "staging": two, "previous-staging": one}
    run_job_here("promote", "--model", "staged", "--alias", "staging", "--rollback")
    assert aliases_of("staged") == {**others, "staging": one, "previous-staging": two}


@pytest.mark.parametrize("rollback", [True, False])
def test_a_promotion_that_is_killed_between_two_aliases_is_completed_by_the_same_command(
    run_job_here, tiny_ranker, tracking_uri, monkeypatch, rollback
):
    name = f"killed-{rollback}"
    one = tracking.register(name, tiny_ranker("bi"), "champion")
    two = tracking.register(name, tiny_ranker("poly"), "candidate")
    command = ["promote", "--model", name]
    if rollback:
        run_job_here(*command)
        command.append("--rollback")
    moved, set_alias = [], mlflow.MlflowClient.set_registered_model_alias

    def dies_after_one(client, *given):
        if moved:
            raise KeyboardInterrupt
        moved.append(given)
        set_alias(client, *given)

    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "set_registered_model_alias", dies_after_one)
        assert run_job_here(*command).code == 130
    run_job_here(*command)
    assert aliases_of(name)["champion"] == (one if rollback else two)
    assert aliases_of(name)["previous"] == one


def test_model_and_pool_move_together(run_job_here, embed, tiny_ranker, tmp_path, tracking_uri):
    old, new = tiny_ranker("bi", seed=1), tiny_ranker("bi", seed=2)
    one = tracking.register("pair", old, "champion")
    two = tracking.register("pair", new, "candidate")
    together = ("promote", "--model", "pair", "--pools", tmp_path / "pools", "--name", "replies")
    of_old = embed(old, 4)
    refused = run_job_here(*together)
    assert refused.code == 2 and "no version was embedded by" in refused.stderr
    assert aliases_of("pair")["champion"] == one
    of_new = embed(new, 4, publish_only=True)
    assert current_name(str(tmp_path / "pools"), "replies") == of_old

    def now():
        return aliases_of("pair")["champion"], current_name(str(tmp_path / "pools"), "replies")

    finished = run_job_here(*together, "--dry-run")
    planned = finished.summary
    assert (planned["version"], planned["pool"]["version"]) == (two, of_new)
    assert f"pool replies: CURRENT would move from {of_old} (" in finished.stdout
    assert f" UTC, 4 candidates) to {of_new} (" in finished.stdout
    assert f"model pair: champion would move from {one} to {two}\n" in finished.stdout
    assert now() == (one, of_old)
    run_job_here(*together)
    assert now() == (two, of_new)
    back = run_job_here(*together, "--rollback").summary
    assert (back["version"], back["pool"]["version"], back["pool"]["pinned"]) == (one, of_old, True)
    assert aliases_of("pair") == {"champion": one, "previous": two, "candidate": two}
    client = mlflow.MlflowClient()
    experiments = [client.get_experiment_by_name("polyrank").experiment_id]
    of_pair = "params.registered_model = 'pair'"
    runs = client.search_runs(experiments, of_pair, order_by=["start_time"])
    recorded = [json.loads(artifact_text(run, "promotion.json")) for run in runs]
    moves = [(entry["before"], entry["version"], entry["pool"]["version"]) for entry in recorded]
    # Neither the refused one nor the plan.
    assert moves[-2:] == [(one, two, of_new), (two, one, of_old)]
    # A workflow that runs again would bring back what somebody has left.
    assert "pool replies: it is pinned, as by a rollback" in run_job_here(*together).refusal
    assert now() == (one, of_old)
    pinned = run_job_here(*together, "--pin")
    assert pinned.summary["pool"]["pinned"] and "nightly jobs leave CURRENT" in pinned.stdout
    assert now() == (two, of_new)


def test_a_candidate_no_better_is_kept_back(
    run_job_here, tiny_ranker, convai2_corpus, tracking_uri
):
    """Two models of random weights: neither is better, and the interval is wide."""
    one = tracking.register("rivals", tiny_ranker("bi", seed=1), "champion")
    two = tracking.register("rivals", tiny_ranker("bi", seed=2), "candidate")
    compared = ("promote", "--model", "rivals", "--corpus", convai2_corpus.uri, "--split", "valid")
    stopped = run_job_here(*compared)
    assert stopped.code == 1
    (line,) = [line for line in stopped.stderr.splitlines() if line.startswith("python -m jobs.")]
    assert "rivals: not promoted: R@1 of the candidate minus the champion's is" in line
    assert aliases_of("rivals")["champion"] == one
    done = run_job_here(*compared, "--min-difference", "-0.9").summary
    low, high = done["comparison"]["interval"]
    assert low <= done["comparison"]["difference"] <= high
    assert done["comparison"]["examples"] == convai2_corpus.counts["examples.valid"]
    assert aliases_of("rivals")["champion"] == two


def test_a_registered_model_that_another_one_has_replaced_is_not_compared(
    run_job_here, tiny_ranker, convai2_corpus, tracking_uri, tmp_path
):
    """Both versions would be the new model: no difference, and so a promotion."""
    for seed, alias in ((1, "champion"), (2, "candidate")):
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        shutil.copytree(tiny_ranker("bi", seed=seed).uri, tmp_path / "model")
        made = open_artifact(str(tmp_path / "model"), "ranker")
        tracking.register("retrained", made, alias)
    compared = (
        "promote",
        "--model",
        "retrained",
        "--corpus",
        convai2_corpus.uri,
        "--split",
        "valid",
    )
    refused = run_job_here(*compared).refusal
    assert f"{made.uri} holds another model now, {made.fingerprint}" in refused
    assert aliases_of("retrained") == {"champion": "1", "candidate": "2"}


def test_models_are_compared_by_the_protocol_of_the_corpus(
    run_job_here, tiny_ranker, tracking_uri, tmp_path
):
    """A corpus of pairs was refused, with advice that no option of this job follows."""
    (tmp_path / "test.csv").write_text(
        "question,answer\n" + "".join(f"q{n},a{n}\n" for n in range(9))
    )
    made = ("--input", tmp_path / "test.csv", "--output", tmp_path / "corpus")
    assert run_job_here("prepare_corpus", "--format", "pairs", *made).code == 0
    for seed, alias in ((1, "champion"), (2, "candidate")):
        tracking.register("of-pairs", tiny_ranker("bi", seed=seed), alias)
    compared = ("promote", "--model", "of-pairs", "--corpus", tmp_path / "corpus", "--dry-run")
    done = run_job_here(*compared, "--min-difference", -1).summary
    assert done["comparison"]["examples"] == 9


def test_a_promotion_that_has_lost_its_lock_moves_nothing(pools, monkeypatch):
    folder, (first, _, third) = pools
    opened = promote.Pool.open

    def slowly(uri):
        """Meanwhile another job, which takes this one for dead, takes the next number."""
        number = 1 + max(int(path.stem) for path in folder.glob("_locks/replies/*.json"))
        storage.write_bytes(str(folder / f"_locks/replies/{number:08d}.json"), b"{}")
        return opened(uri)

    monkeypatch.setattr(promote.Pool, "open", slowly)
    with pytest.raises(Stopped, match="another job has taken over the lock"):
        promote.run(promote.Config(pools=str(folder), name="replies", version=first))
    assert current_name(str(folder), "replies") == third


@pytest.mark.parametrize(("settings", "message"), [
    ({}, "registered_model: '' is not allowed"),
    ({"pools": "p"}, "name: '' is not allowed"),
    ({"registered_model": "m", "pin": True}, "pin: True is not allowed"),
    ({"registered_model": "m", "version": "3", "rollback": True}, "version: '3' is not allowed"),
    ({"pools": "p", "name": "n", "corpus": "c"}, "corpus: 'c' is not allowed"),
    ({"pools": "p", "name": "n", "pin": True, "unpin": True}, "unpin: True is not allowed"),
])  # fmt: skip
def test_options_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(BadInput, match=f"^{message}"):
        promote.Config(**settings)


def test_the_versions_that_a_pool_may_move_to_are_named(move, pools):
    _, (first, second, third) = pools
    refused = move().refusal
    assert f"newest first: {third} (CURRENT), {second}, {first}" in refused


def test_a_model_without_a_previous_version_cannot_go_back(run_job_here, tiny_ranker, tracking_uri):
    tracking.register("new-one", tiny_ranker("bi"), "champion")
    refused = run_job_here("promote", "--model", "new-one", "--rollback").refusal
    assert "new-one: no version has the alias previous; there are: champion" in refused
