"""Rankings of given candidates and of pools, and what cannot be served."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import mlflow
import numpy as np
import pytest
import torch

from pipeline import storage
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import BadInput
from pipeline.models.precision import resolve_precision
from pipeline.models.ranker import load_ranker
from pipeline.pools.lock import is_leased
from pipeline.pools.shard import PoolPart
from pipeline.storage import node_cache
from serve import app
from serve.batcher import Batch, Batcher
from serve.engine import Engine
from serve.refusals import Refusal
from serve.service import CandidateText, RankQuery, Service
from serve.shards import PoolShard
from tests.helpers import formula_scores

from .conftest import REPLIES, run

CONTEXT = ["hello there", "what do you do ?"]
TEXTS = ["i paint", "rain again today", "no", "yes, a boat", "a nurse in the harbour"]


def test_a_version_that_is_refused_may_be_removed(tiny_ranker, tiny_pool, monkeypatch):
    model = tiny_ranker("poly", 2)
    uri = Path(tiny_pool(model))
    monkeypatch.setattr("serve.engine._NEAR", -1.0)  # no vector is near enough
    with pytest.raises(BadInput, match="not what the model makes of its text"):
        Engine(model.uri, [str(uri)])
    assert not is_leased(str(uri.parent), uri.name, "v-1")


def test_a_version_that_is_served_is_not_removed(tiny_ranker, tiny_pool):
    pool = Path(tiny_pool(tiny_ranker("poly")))
    engine = Engine(tiny_ranker("poly").uri, [str(pool)])
    assert is_leased(str(pool.parent), "replies", "v-1")
    engine.close()
    assert not is_leased(str(pool.parent), "replies", "v-1")


@pytest.fixture
def remote_cache(tmp_path, monkeypatch):
    """An object store in memory, and a cache of its own for this node, which is smaller than any copy."""
    monkeypatch.setenv("POLYRANK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("POLYRANK_CACHE_GIB", str(2**-30))
    yield tmp_path / "cache"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def remote_pool(tiny_ranker, tiny_pool, remote_cache):
    """The pool `replies` in an object store."""
    storage.upload(Path(tiny_pool(tiny_ranker("poly"))), "memory://pools/replies")
    return "memory://pools/replies/v-1"


def copies_in_use(cache: Path) -> list[Path]:
    """The copies that stay when another one needs their room."""
    storage.write_bytes("memory://other/x", b"1")
    other = node_cache.local_folder("memory://other", str(time.monotonic_ns()))
    node_cache.release(other)
    folders = [path for path in cache.iterdir() if path.is_dir()]
    return [path for path in folders if path != other and path.name != "checked"]


@pytest.mark.parametrize("opened_by", ["engine", "shard"])
def test_a_version_that_is_no_longer_served_may_leave_the_nodes_disk(
    tiny_ranker, remote_pool, remote_cache, opened_by
):
    served: Engine | PoolShard
    if opened_by == "engine":
        served = Engine(tiny_ranker("poly").uri, [remote_pool])
    else:
        served = PoolShard(PoolPart(0, 2), max_wait_s=60.0)
        served.preload(remote_pool)
    assert len(copies_in_use(remote_cache)) == 1
    served.close()
    assert copies_in_use(remote_cache) == []


@pytest.mark.parametrize(("option", "kept"), [("model", 1), ("second_stage", 1), ("classifier", 2)])
def test_models_that_are_no_longer_served_may_leave_the_nodes_disk(
    tiny_ranker, tiny_classifier, remote_cache, option, kept
):
    """The head of a classifier is one copy, its encoder another."""
    remote = f"memory://models/{option}"
    storage.upload(Path(tiny_ranker("cross" if option == "second_stage" else "bi").uri), remote)
    if option == "classifier":
        with node_cache.collect_uses() as copies_of_the_job:
            head = tiny_classifier(open_artifact(remote, "ranker"))
        for copy in copies_of_the_job:  # whose process ends in reality
            node_cache.release(copy)
        remote = "memory://models/head"
        storage.upload(Path(head), remote)
    engine = Engine(**{"model": tiny_ranker("poly").uri, option: remote})
    assert len(copies_in_use(remote_cache)) == kept
    engine.close()
    assert copies_in_use(remote_cache) == []


def test_a_model_that_is_refused_may_leave_the_nodes_disk(
    tiny_ranker, tiny_pool, remote_cache, monkeypatch
):
    model = tiny_ranker("poly")
    storage.upload(Path(model.uri), "memory://models/poly")
    monkeypatch.setattr("serve.engine._NEAR", -1.0)  # no vector is near enough
    with pytest.raises(BadInput, match="not what the model makes of its text"):
        Engine("memory://models/poly", [tiny_pool(model)])
    assert copies_in_use(remote_cache) == []


SHARED_BYTES = r"""
import re, sys
from pathlib import Path
from pipeline.pools.pool import Pool
pool = Pool.open(sys.argv[1])
float(sum(shard.vectors.matrix.sum() for shard in pool.shards))  # every page is read
print(flush=True)
input()  # the other process has read them too
for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
    if "/vectors/" in part.partition("\n")[0]:
        print(*(re.search(rf"{name}: *([0-9]+)", part)[1] for name in ("Rss", "Pss", "Private_Dirty")))
"""


def test_processes_share_the_pages_of_a_pool(publish_pool, tmp_path):
    """Each counts half of them (PSS); nothing is copied."""
    vectors = np.random.default_rng(0).normal(size=(4_096, 256)).astype(np.float32)
    uri = tmp_path / "replies" / "v-1"
    publish_pool(uri, list(map(str, range(4_096))), vectors, model={"fingerprint": "m"})
    command = [sys.executable, "-c", SHARED_BYTES, str(uri)]
    replicas = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for replica in replicas:
        replica.stdout.readline()
    said, _ = replicas[0].communicate("\n")
    replicas[1].communicate("\n")
    rss, pss, dirty = map(int, said.split())
    assert rss >= vectors.nbytes // 1024
    assert pss < 0.6 * rss
    assert dirty == 0


@pytest.mark.parametrize("architecture", ["poly", "cross"])
def test_equal_texts_score_alike_and_keep_the_order_given(tiny_ranker, asking, architecture):
    """In bf16 a text is rounded otherwise in another place of a batch."""
    texts = [
        text for number in range(9) for text in ("the same", f"a longer other one {number} " * 5)
    ]
    served = asking(tiny_ranker(architecture), precision="bf16")
    assert served.engine.info()["precision"] == "bf16"
    ranked = served.rank(CONTEXT, texts, top_k=18)
    same = [one for one in ranked if one.text == "the same"]
    assert len({one.score for one in same}) == 1
    assert [one.index for one in same] == list(range(0, 18, 2))


@pytest.mark.parametrize("architecture", ["bi", "poly", "convert"])
def test_a_pool_is_ranked_as_its_texts_would_be(tiny_ranker, tiny_pool, asking, architecture):
    model = tiny_ranker(architecture)
    engine = asking(model, tiny_pool(model))
    texts = list(REPLIES.values())
    for top_k in (3, len(texts) + 5):
        found = engine.rank_pool(CONTEXT, "replies", top_k)
        given = engine.rank(CONTEXT, texts, top_k)
        assert [(one.index, one.text) for one in found] == [(one.index, one.text) for one in given]
        assert [one.score for one in found] == pytest.approx(
            [one.score for one in given], rel=1e-5, abs=1e-6
        )
        assert [REPLIES[one.id] for one in found] == [one.text for one in found]


def test_the_model_and_its_pools_are_described(tiny_ranker, tiny_pool):
    model = tiny_ranker("poly")
    info = Engine(model.uri, [tiny_pool(model), tiny_pool(model, "more")]).info()
    assert info["model"]["fingerprint"] == model.fingerprint
    assert info["model"]["architecture"] == "poly"
    assert info["precision"] == resolve_precision("auto", torch.device("cpu"))
    assert info["limits"] == {"max_context_tokens": 48, "max_candidate_tokens": 32}
    pools = [(pool["name"], pool["version"], pool["candidates"]) for pool in info["pools"]]
    assert pools == [("replies", "v-1", len(REPLIES)), ("more", "v-1", len(REPLIES))]


def test_a_pool_that_is_not_served_leaves_nothing_in_the_batcher(tiny_ranker, asking, monkeypatch):
    """It keeps the time of a request for each name that it admits."""
    one = asking(tiny_ranker("poly"))
    monkeypatch.setattr(Batcher, "_waiting_s", lambda *_: 1e6)  # it admits nothing
    with pytest.raises(Refusal, match="there are: none") as refused:
        one.rank_pool(CONTEXT, "nope", 1)
    assert refused.value.code == "unknown_pool"


def test_a_tokenization_that_waits_for_another_one_says_so(tiny_ranker, asking, monkeypatch):
    engine = asking(tiny_ranker("poly")).engine
    batches: list[Batch] = []
    service = Service(lambda: engine, 60.0, batches.append)
    entered, may_end = threading.Event(), threading.Event()
    rows_of = engine.ranker.context_rows

    def slow_rows_of(contexts):
        entered.set()
        assert may_end.wait(60)
        return rows_of(contexts)

    monkeypatch.setattr(engine.ranker, "context_rows", slow_rows_of)
    query = RankQuery(CONTEXT, [CandidateText("a", "b")], None, 1)

    async def two():
        deadline = time.monotonic() + 60
        first = asyncio.ensure_future(service.work(deadline).rank([query]))
        await asyncio.to_thread(entered.wait, 60)
        second = asyncio.ensure_future(service.work(deadline).rank([query]))
        await asyncio.sleep(0)  # so that it has handed in its context
        may_end.set()
        await asyncio.gather(first, second)

    run(two())
    service.close()
    assert all(batch.waited_s > 0 for batch in batches if batch.stage == "tokenize")


@pytest.mark.parametrize("architecture", ["poly", "cross"])
def test_questions_at_once_get_what_each_gets_alone(tiny_ranker, tiny_pool, asking, architecture):
    model = tiny_ranker(architecture)
    pools = [] if architecture == "cross" else [tiny_pool(model)]
    one = asking(model, *pools)
    candidates = [CandidateText(str(place), text) for place, text in enumerate(TEXTS)]
    queries = [
        RankQuery([f"turn {n}", "and so on" * n], candidates if n % 2 or not pools else None,
                 None if n % 2 or not pools else "replies", n)
        for n in range(1, 13)
    ]  # fmt: skip

    async def together():
        deadline = time.monotonic() + 60
        return await asyncio.gather(
            *(one.service.work(deadline).rank([query]) for query in queries)
        )

    for query, (answer,) in zip(queries, run(together()), strict=True):
        alone = one.answer(query).results
        assert [found.id for found in answer.results] == [found.id for found in alone]
        expected = [found.score for found in alone]
        assert [found.score for found in answer.results] == pytest.approx(
            expected, rel=1e-4, abs=1e-6
        )
        assert answer.certified


def scores_of_replies(ranker: Artifact) -> dict[str, float]:
    """By id, for CONTEXT."""
    scores = formula_scores(load_ranker(ranker.local()), CONTEXT, list(REPLIES.values()))
    return dict(zip(REPLIES, scores, strict=True))


def test_a_second_stage_scores_the_best_anew(tiny_ranker, tiny_pool, asking):
    model, cross = tiny_ranker("poly"), tiny_ranker("cross")
    one = asking(model, tiny_pool(model), second_stage=cross.uri)
    found = one.rank_pool(CONTEXT, "replies", 4)
    scores = scores_of_replies(cross)
    best = sorted(scores, key=lambda name: -scores[name])[:4]
    assert [r.id for r in found] == best
    assert [r.score for r in found] == pytest.approx([scores[name] for name in best], rel=1e-4)
    assert one.engine.info()["second_stage"] == cross.fingerprint
    with pytest.raises(BadInput, match="architecture: 'poly' scores no pairs"):
        Engine(model.uri, second_stage=model.uri)


@pytest.mark.parametrize(("architecture", "scale"), [("poly", 1), ("convert", 4)])
def test_together_the_mean_of_both_stages_counts(
    tiny_ranker, tiny_pool, asking, architecture, scale
):
    """A ConveRT model's cosines count √16 times, as in its loss and in `jobs.evaluate --together`."""
    model, cross = tiny_ranker(architecture), tiny_ranker("cross")
    first = asking(model, tiny_pool(model)).rank_pool(CONTEXT, "replies", 3)
    again = scores_of_replies(cross)
    means = {result.id: (scale * result.score + again[result.id]) / 2 for result in first}
    one = asking(
        model, tiny_pool(model), second_stage=cross.uri, second_stage_candidates=3, together=True
    )
    found = one.rank_pool(CONTEXT, "replies", 2)
    best = sorted(means, key=lambda name: -means[name])[:2]
    assert [result.id for result in found] == best
    assert [r.score for r in found] == pytest.approx([means[name] for name in best], rel=1e-4)


def test_with_a_second_stage_the_certificate_is_that_of_the_first(tiny_ranker, tiny_pool, asking):
    """The cross-encoder would prefer a row that the first stage does not hand on."""
    model, cross = tiny_ranker("poly"), tiny_ranker("cross", 1)
    handed_on = [row.id for row in asking(model, tiny_pool(model)).rank_pool(CONTEXT, "replies", 3)]
    scores = scores_of_replies(cross)
    best = max(scores, key=lambda name: scores[name])
    assert best not in handed_on
    one = asking(model, tiny_pool(model), second_stage=cross.uri, second_stage_candidates=3)
    answer = one.answer(RankQuery(CONTEXT, None, "replies", 2))
    expected = sorted(handed_on, key=lambda name: -scores[name])[:2]
    assert [result.id for result in answer.results] == expected
    assert answer.certified
    assert answer.second_stage == cross.fingerprint


# What cannot be served is said in one line, before the start (`build`) and in a replica (`Engine`)

START = {
    "build": lambda model, pools: app.build(app.Args(model=model, pools=pools)),
    "engine": lambda model, pools: Engine(model, pools),
}


@pytest.fixture(params=list(START))
def refusal(request):
    def start(model: str, *pools: str) -> str:
        with pytest.raises(BadInput) as caught:
            START[request.param](model, list(pools))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return start


def test_a_pool_with_a_cross_encoder_is_refused(tiny_ranker, tiny_pool, refusal):
    pool = tiny_pool(tiny_ranker("poly"))
    assert "a cross-encoder cannot use one" in refusal(tiny_ranker("cross").uri, pool)


def test_a_pool_with_multi_head_attention_is_refused(
    tiny_ranker, tiny_pool, refusal, sizes_as_now, tmp_path
):
    """Its scores are bounded by no product, so that no search is exact."""
    model = tiny_ranker("poly")
    folder = tmp_path / "ranker"
    shutil.copytree(model.local(), folder)
    settings = json.loads((folder / "ranker.json").read_text())
    settings["candidate_attention"] = "multi_head"
    (folder / "ranker.json").write_text(json.dumps(settings))
    sizes_as_now(folder)
    said = refusal(str(folder), tiny_pool(model))
    assert said.startswith("candidate_attention: 'multi_head' cannot search a pool; allowed: dot")


def test_a_pool_of_another_model_is_refused(tiny_ranker, tiny_pool, refusal):
    embedder, other = tiny_ranker("poly"), tiny_ranker("poly", 1)
    said = refusal(other.uri, tiny_pool(embedder))
    assert re.search(f"by the model {embedder.fingerprint}, not by .*{other.fingerprint}", said)


def test_a_build_reads_no_files_of_a_pool_but_its_manifest(tiny_ranker, remote_pool, remote_cache):
    """It downloaded and hashed each pool, on the node that builds, at every deployment."""
    app.build(app.Args(model=tiny_ranker("poly").uri, pools=[remote_pool]))
    assert not [file for file in remote_cache.rglob("*.npy")]


def test_a_second_stage_that_scores_no_pairs_is_refused_before_the_start(tiny_ranker):
    model = tiny_ranker("poly").uri
    with pytest.raises(BadInput, match="architecture: 'poly' scores no pairs"):
        app.build(app.Args(model=model, second_stage=model))
    with pytest.raises(BadInput, match="together: True is not allowed; allowed: false without"):
        app.build(app.Args(model=model, together=True))


@pytest.mark.parametrize("argument", ["second_stage", "classifier"])
def test_an_alias_of_a_further_model_is_resolved_once_at_the_start(
    tiny_ranker, tiny_classifier, tracking_uri, argument
):
    model = tiny_ranker("bi")
    served = tiny_ranker("cross").uri if argument == "second_stage" else tiny_classifier(model)
    registry = mlflow.MlflowClient()
    registry.create_registered_model(argument)
    version = registry.create_model_version(argument, served).version
    registry.set_registered_model_alias(argument, "champion", version)
    options: dict[str, Any] = {"model": model.uri, argument: f"models:/{argument}@champion"}
    (args, _) = app.build(app.Args(**options))._bound_deployment.init_args
    assert getattr(args, argument) == served
    options[argument] = f"models:/{argument}@nobody"
    with pytest.raises(BadInput, match=f"{argument}@nobody: .*alias nobody not found") as refused:
        app.build(app.Args(**options))
    assert "\n" not in str(refused.value)


def test_a_candidate_that_cannot_be_served_yet_is_logged_before_the_start(tiny_ranker, caplog):
    app.build(app.Args(model=tiny_ranker("poly").uri, candidate="nowhere/ranker"))
    assert "candidate: not served until it can be" in caplog.text


def test_two_pools_of_one_name_are_refused(tiny_ranker, tiny_pool, refusal):
    model = tiny_ranker("poly")
    pool = tiny_pool(model)
    assert "two are named 'replies'" in refusal(model.uri, pool, f"{pool}/v-1")


def test_what_is_no_ranker_or_no_pool_is_refused(tiny_ranker, tiny_pool, refusal, tmp_path):
    model = tiny_ranker("poly")
    pool = tiny_pool(model)
    assert "not a ranker" in refusal(str(tmp_path / "none"))
    assert "needed here: ranker" in refusal(f"{pool}/v-1")
    assert "not a pool" in refusal(model.uri, str(tmp_path / "none"))
    assert "needed here: pool" in refusal(model.uri, model.uri)
