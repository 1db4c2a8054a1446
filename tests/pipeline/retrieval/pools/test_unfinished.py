"""Vectors of builds that were never finished: which drafts a later build copies from."""

from __future__ import annotations

import pytest

from pipeline.drafts import Draft, draft
from pipeline.retrieval.pools.embed import CheckRecord, EmbedConfig, EmbedRecord
from pipeline.retrieval.pools.gate import ShardCheck
from pipeline.retrieval.pools.unfinished import find_shards


def shard_check(cosine: float | None) -> ShardCheck:
    return ShardCheck(8, (1.0, 1.0, 1.0), cosine)


@pytest.fixture
def killed(tmp_path) -> Draft:
    model = {"uri": "", "kind": "ranker", "fingerprint": "the model"}
    out = draft(str(tmp_path / "v-0"), "pool", EmbedConfig(), {"model": model})
    assert isinstance(out, Draft)
    for number, cosine in enumerate((0.999, None)):
        record = EmbedRecord(
            counts={"candidates": 5}, check=shard_check(cosine), rows_embedded=5, actor_seconds=1.0,
            started=0.0, ended=1.0,
        )  # fmt: skip
        out.mark(f"part-{number:05d}", record)
    return out


def shards_of(killed: Draft, min_cosine: float = 0.99) -> list[str]:
    return [s.name for s in find_shards([killed.staging], "the model", {}, {}, min_cosine)]


def test_finished_shards_are_found_whether_their_cosines_were_measured_or_not(killed):
    assert shards_of(killed) == ["part-00000", "part-00001"]


@pytest.mark.parametrize("task", ["part-00002", "check-12345678-part-00000"])
@pytest.mark.parametrize("cosine", [0.97, float("nan")])
def test_a_draft_with_a_shard_that_the_gate_refuses_is_left_out_whole(killed, task, cosine):
    killed.mark(task, CheckRecord(check=shard_check(cosine)))
    assert shards_of(killed) == []
    if cosine == 0.97:
        assert len(shards_of(killed, min_cosine=0.97)) == 2
