"""Pools in shards: what each opens, how answers are merged, and what a missing shard means."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fastapi.testclient import TestClient
from ray.exceptions import RayActorError

from pipeline.config import BadInput
from pipeline.pools.lock import is_leased
from pipeline.pools.pool import Pool
from pipeline.pools.shard import PoolPart
from serve.batcher import Batcher
from serve.engine import Engine
from serve.http import api
from serve.pools import ALL_ROWS, Masks, RowFilter
from serve.refusals import Refusal
from serve.replica import _DeployedShard
from serve.service import RankQuery
from serve.shards import PoolShard, ShardedPool, ShardUnavailable

from .conftest import REPLIES, Asking

CONTEXT = ["hello there", "what do you do ?"]


class InProcess:
    """A shard in this process, which may be gone."""

    def __init__(self, share: PoolPart) -> None:
        self.shard, self.is_gone, self.asked = PoolShard(share, 60.0), False, 0

    def open(self, version):
        if self.is_gone:
            raise ShardUnavailable("gone")
        return asyncio.run(self.shard.open(version))

    async def search(self, query):
        self.asked += 1
        if self.is_gone:
            raise ShardUnavailable("gone")
        return pickle.loads(pickle.dumps(await self.shard.search(query)))  # as from another process


@pytest.fixture(scope="module")
def model(tiny_ranker):
    return tiny_ranker("poly")


@pytest.fixture(scope="module")
def version(model, tiny_pool) -> str:
    return str(Path(tiny_pool(model)) / "v-1")


@pytest.fixture(scope="module")
def shards():
    made = [InProcess(PoolPart(number, 3)) for number in range(3)]
    yield made
    for one in made:
        one.shard.close()


@pytest.fixture
def sharded(model, version, shards):
    """A service over the shards; `on_missing` and `count_missing` as for ShardedPool."""
    made = []

    def make(on_missing="refuse", count_missing=lambda pool, shard: None):
        pool = ShardedPool(version, shards, 60.0, on_missing, count_missing)
        made.append(Asking(Engine(model.uri, sharded=[pool])))
        return made[-1]

    yield make
    for one in made:
        one.service.close()
    for one in shards:
        one.is_gone = False


@pytest.mark.parametrize("count", [1, 5, 20])
def test_shares_are_the_pool_in_order(version, count):
    """12 rows in files of 5 and 7."""
    parts = [Pool.open(version, part=PoolPart(number, count)) for number in range(count)]
    assert [part.row(at).id for part in parts for at in range(len(part))] == list(REPLIES)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    whole = Pool.open(version)
    for number, part in enumerate(parts):
        first = PoolPart(number, count).rows(len(whole)).start
        for at in range(len(part)):
            assert (
                part.vectors_at(np.array([at])) == whole.vectors_at(np.array([first + at]))
            ).all()


def test_a_share_needs_the_files_of_its_rows_alone(version, tmp_path):
    copy = tmp_path / "pools" / "replies" / "v-1"
    shutil.copytree(version, copy)
    (copy / "vectors" / "part-00001.npy").unlink()
    assert len(Pool.open(str(copy), part=PoolPart(0, 3))) == 4
    with pytest.raises(BadInput, match="part-00001"):
        Pool.open(str(copy), part=PoolPart(2, 3))


def test_the_work_of_a_list_does_not_refuse_it_in_a_shard(shards, sharded):
    one = sharded()
    times = [pool.stage.unit_s for each in shards for pool in each.shard._open_pools.values()]
    assert times
    for unit_s in times:
        unit_s.value = 5000.0
    question = {"context": CONTEXT, "pool": "replies", "top_k": 2}
    try:
        with TestClient(api.create_app(one.service)) as client:
            answer = client.post("/rank", json=[question] * 5)
    finally:
        for unit_s in times:
            unit_s.value = 0.0
    assert (answer.status_code, len(answer.json())) == (200, 5)


def test_shards_answer_as_the_whole_pool(model, version, sharded, asking):
    pool, parts = asking(model, version), sharded()
    for rows in (
        ALL_ROWS,
        RowFilter(allow=("r01", "r02", "r11", "r99")),
        RowFilter(allow=("r99",)),
        RowFilter(deny=("r01", "r02", "r11", "r99")),
    ):
        for top_k in (5, 50):
            whole = pool.rank_pool(CONTEXT, "replies", top_k, rows=rows)
            found = parts.rank_pool(CONTEXT, "replies", top_k, rows=rows)
            assert [(one.index, one.id, one.text) for one in found] == [
                (one.index, one.id, one.text) for one in whole
            ]
            expected = [one.score for one in whole]
            assert [one.score for one in found] == pytest.approx(expected, rel=1e-6)


def test_an_answer_is_certified_and_explained(model, version, sharded, asking):
    client = TestClient(api.create_app(sharded().service))
    asked = {"context": CONTEXT, "pool": "replies", "top_k": 3, "explain": True}
    answer = client.post("/rank", json=asked).json()
    assert answer["certified"] is True
    assert answer["pool"] == {"name": "replies", "version": "v-1", "missing_shards": []}
    own = TestClient(api.create_app(asking(model, version).service)).post("/rank", json=asked)
    for ours, theirs in zip(answer["results"], own.json()["results"], strict=True):
        assert ours["weights"] == pytest.approx(theirs["weights"], abs=1e-5)


def test_a_missing_shard_is_refused_or_said_and_counted(sharded, shards):
    missing = Counter()
    refusing, answering = (
        TestClient(api.create_app(sharded(mode, lambda *at: missing.update([at])).service))
        for mode in ("refuse", "answer")
    )
    asked = {"context": CONTEXT, "pool": "replies", "top_k": 12}
    shards[0].is_gone = True
    response = refusing.post("/rank", json=asked)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shard_missing")
    assert response.headers["retry-after"] == "1"
    answer = answering.post("/rank", json=asked).json()
    assert (answer["certified"], answer["pool"]["missing_shards"]) == (False, [0])
    assert missing == {("replies", 0): 2}
    there = list(REPLIES)[12 // len(shards) :]
    assert {one["id"] for one in answer["results"]} == set(there)
    for one in shards:
        one.is_gone = True
    assert answering.post("/rank", json=asked).status_code == 503  # nobody is left


def test_what_a_shard_refuses_is_the_services_refusal(sharded):
    client = TestClient(api.create_app(sharded().service))
    asked = {"context": CONTEXT, "pool": "replies", "where": {"lang": ["en"]}}
    response = client.post("/rank", json=asked)
    assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_request")
    assert "lang" in response.json()["error"]["message"]


def test_a_shard_that_is_new_opens_what_it_is_asked_for(sharded, shards):
    service = sharded()
    before = [one.id for one in service.rank_pool(CONTEXT, "replies", 12)]
    old, shards[1].shard = shards[1].shard, PoolShard(PoolPart(1, len(shards)), 60.0)
    old.close()
    assert [one.id for one in service.rank_pool(CONTEXT, "replies", 12)] == before


def test_a_shard_that_cannot_open_the_version_is_missing(model, version, shards, tmp_path):
    copy = tmp_path / "pools" / "replies" / "v-1"
    shutil.copytree(version, copy)
    pool = ShardedPool(str(copy), shards, 60.0, "refuse")
    one = Asking(Engine(model.uri, sharded=[pool]))
    shutil.rmtree(copy)
    old, shards[1].shard = shards[1].shard, PoolShard(PoolPart(1, len(shards)), 60.0)
    old.close()
    with pytest.raises(Refusal) as refused:
        one.rank_pool(CONTEXT, "replies", 3)
    one.service.close()
    assert refused.value.code == "shard_missing"
    assert str(copy) not in refused.value.message


class Silent(InProcess):
    """It opens versions, and answers nothing."""

    async def search(self, query):
        await asyncio.Event().wait()


def test_a_request_that_is_too_short_for_its_shards_is_too_late(model, version, shards):
    silent = Silent(PoolPart(0, 1))
    pool = ShardedPool(version, [silent], 60.0, "answer")
    one = Asking(Engine(model.uri, sharded=[pool]))
    response = TestClient(api.create_app(one.service)).post(
        "/rank", json={"context": CONTEXT, "pool": "replies"}, headers={"x-timeout-ms": "300"}
    )
    one.service.close()
    silent.shard.close()
    assert (response.status_code, response.json()["error"]["code"]) == (504, "too_late")


class Refusing(InProcess):
    """It opens versions, and refuses all queries."""

    async def search(self, query):
        return Refusal("overloaded", retry_after_s=1.0)


class Cancelled(Silent):
    """It says whether its query was cancelled."""

    def __init__(self, share):
        super().__init__(share)
        self.was_cancelled = False

    async def search(self, query):
        try:
            await super().search(query)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


def test_if_one_shard_refuses_the_others_do_not_search_on(model, version):
    """Where there was too much to do, all other shards searched for a request that was refused."""
    shards = [Refusing(PoolPart(0, 2)), Cancelled(PoolPart(1, 2))]
    one = Asking(Engine(model.uri, sharded=[ShardedPool(version, shards, 60.0, "answer")]))

    async def ask():
        with pytest.raises(Refusal, match="Too much is waiting"):
            await one.service.work(time.monotonic() + 60).rank(
                [RankQuery(CONTEXT, None, "replies", 3)]
            )
        return shards[1].was_cancelled

    assert asyncio.run(ask())
    one.service.close()
    for shard in shards:
        shard.shard.close()


def test_a_shard_that_has_too_much_to_do_makes_no_masks(version, sharded, shards, monkeypatch):
    """They read all rows of a pool."""
    asked = sharded()
    monkeypatch.setattr(Masks, "allowed_rows", None)
    monkeypatch.setattr(Batcher, "_waiting_s", lambda *_: 61.0 if shards[0].asked else 0.0)
    with pytest.raises(Refusal) as refused:
        asked.rank_pool(CONTEXT, "replies", 1, rows=RowFilter(deny=("r01",)))
    assert refused.value.code == "overloaded"


def test_a_shard_keeps_the_versions_of_each_pool(version, tmp_path):
    for name, numbers in (("replies", 5), ("articles", 1)):
        for number in range(numbers):
            shutil.copytree(version, tmp_path / name / f"v-{number}")
    shard, timers = PoolShard(PoolPart(0, 2), 60.0), threading.enumerate()
    shard.preload(str(tmp_path / "articles" / "v-0"))
    for number in range(5):
        shard.preload(str(tmp_path / "replies" / f"v-{number}"))
    kept = [("articles", "v-0"), *(("replies", f"v-{at}") for at in range(1, 5))]
    assert is_leased(str(tmp_path), "replies", "v-0")  # searches may still run on it
    (timer,) = [one for one in threading.enumerate() if isinstance(one, threading.Timer)
                and one not in timers]  # fmt: skip
    timer.cancel()
    timer.function()
    assert not is_leased(str(tmp_path), "replies", "v-0")
    assert all(is_leased(str(tmp_path), *version) for version in kept)
    shard.close()


def test_a_pool_that_cannot_be_served_from_shards_is_refused(
    tiny_ranker, model, version, tmp_path, shards
):
    copy = tmp_path / "pools" / "replies" / "v-1"
    shutil.copytree(version, copy)
    matrix = copy / "vectors" / "part-00001.npy"
    matrix.write_bytes(matrix.read_bytes()[:-64])
    with pytest.raises(BadInput, match="part-00001"):
        ShardedPool(str(copy), shards, 60.0, "refuse")
    pool = ShardedPool(version, shards, 60.0, "refuse")
    with pytest.raises(BadInput, match="not what the model makes of its text"):
        Engine(tiny_ranker("poly", 1).uri, sharded=[pool])
    with pytest.raises(BadInput, match="two are named 'replies'"):
        Engine(model.uri, [version], sharded=[pool])


def test_info_counts_all_shards(sharded, shards):
    (pool,) = json.loads(json.dumps(sharded().engine.info()["pools"]))
    assert pool["candidates"] == len(REPLIES) == sum(pool["candidates_of_shards"])
    assert len(pool["candidates_of_shards"]) == len(shards)


class DyingReplicas:
    """A handle to a shard's deployment, whose replicas die under the first searches."""

    def __init__(self, deaths: int) -> None:
        self.search, self.deaths = self, deaths

    async def remote(self, query):
        self.deaths -= 1
        if self.deaths >= 0:
            raise RayActorError
        return "answer"


def test_a_search_whose_replica_died_is_tried_on_another_one():
    assert asyncio.run(_DeployedShard(DyingReplicas(1)).search(None)) == "answer"
    with pytest.raises(ShardUnavailable):
        asyncio.run(_DeployedShard(DyingReplicas(2)).search(None))


def test_a_shard_that_does_not_open_in_time_is_unavailable():
    """An error without a text ended in an IndexError."""

    def time_out(timeout_s: float):
        raise TimeoutError

    reply = SimpleNamespace(result=time_out)
    handle = SimpleNamespace(open=SimpleNamespace(remote=lambda version: reply))
    with pytest.raises(ShardUnavailable, match="TimeoutError"):
        _DeployedShard(handle).open("v-1")
