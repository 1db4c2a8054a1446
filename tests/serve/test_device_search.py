"""A replica with a GPU searches its pools there. Here a CPU takes the GPU's place."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from pipeline.pools.shard import PoolPart
from pipeline.search import device, device_scores
from serve import pools
from serve.engine import Engine
from serve.shards import PoolShard, ShardedPool

from .conftest import Asking

CONTEXT = ["hello there", "what do you do ?"]


@pytest.fixture
def on_device(monkeypatch):
    """Replicas find a device. Returns the number of rows of each search there."""
    searched = list[int]()

    class Counted(device._Pass):
        def __init__(self, rows, *more):
            searched.append(len(rows))
            super().__init__(rows, *more)

    monkeypatch.setattr(device, "_Pass", Counted)
    monkeypatch.setattr(pools, "search_device", lambda: "cpu")
    return searched


@pytest.mark.parametrize("in_shards", [False, True])
def test_a_pool_on_a_device_gives_the_answers_of_its_files(
    tiny_ranker, tiny_pool, asking, monkeypatch, on_device, in_shards
):
    model = tiny_ranker("poly")
    uri = tiny_pool(model)
    with monkeypatch.context() as patch:
        patch.setattr(pools, "search_device", lambda: "")
        plain = asking(model, uri)
        expected = plain.rank_pool(CONTEXT, "replies", 5)
    assert plain.engine.pools["replies"].on_device is None and not on_device
    if in_shards:
        made = [PoolShard(PoolPart(number, 2), 60.0) for number in range(2)]

        class Handle:
            def __init__(self, shard: PoolShard) -> None:
                self.search = shard.search
                self.open = lambda version: asyncio.run(shard.open(version))

        pool = ShardedPool(str(Path(uri) / "v-1"), [Handle(s) for s in made], 60.0, "refuse")
        served = Asking(Engine(model.uri, sharded=[pool]))
    else:
        served = asking(model, uri)
        on_device.clear()  # the searches before it answers
    found = served.rank_pool(CONTEXT, "replies", 5)
    assert [(row.id, row.score) for row in found] == [(row.id, row.score) for row in expected]
    assert sorted(on_device) == ([6, 6] if in_shards else [12])
    if in_shards:
        served.service.close()
        for shard in made:
            shard.close()


def test_a_kernel_is_compiled_before_the_first_request(
    tiny_ranker, tiny_pool, asking, monkeypatch, on_device
):
    compiled = list[tuple[int, bool]]()

    class Kernel:
        @staticmethod
        def scores(rows_ND, scales_N, vectors_QMD, counts_Q, allowed_N, scale):
            compiled.append((len(vectors_QMD), allowed_N is None))
            logits_NQM = (rows_ND.float() @ vectors_QMD.flatten(0, 1).T).unflatten(
                1, vectors_QMD.shape[:2]
            )
            scores_QN = ((logits_NQM * scale).softmax(2) * logits_NQM).sum(2).T
            return scores_QN, scores_QN, 1

    monkeypatch.setattr(device_scores, "kernel_module", lambda kind: Kernel)
    device_scores._agreement.clear()
    served = asking(tiny_ranker("poly"), tiny_pool(tiny_ranker("poly")))
    assert compiled[:4] == [(1, True), (1, False), (2, True), (2, False)]
    known = dict(device_scores._agreement)
    served.rank_pool(CONTEXT, "replies", 5)
    assert device_scores._agreement == known and all(known.values())
    device_scores._agreement.clear()


def test_a_replica_s_gpu_is_the_one_that_it_asked_for(monkeypatch):
    for place, name in ((torch.device("cpu"), ""), (torch.device("cuda"), "cuda")):
        monkeypatch.setattr(pools, "best_device", lambda place=place: place)
        assert pools.search_device() == name
