"""Peers that run by a Python of their own, and jobs on nodes of one machine."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from jobs.benchmarks import cluster, embed, engine_peer
from jobs.benchmarks.measure import BenchmarkRow
from pipeline.artifact import Artifact

PEER = """
import sys
print("loading", flush=True)
print("ready", flush=True)
for _ in sys.stdin:
    print("done", flush=True)
"""


def test_a_peer_is_asked_for_one_pass_at_a_time_and_ends(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    with embed._peer([sys.executable, str(script)]) as one_pass:
        one_pass()
        one_pass()
    script.write_text("raise SystemExit('no such engine')")
    with pytest.raises(RuntimeError, match=r"peer\.py has ended"), embed._peer(
        [sys.executable, str(script)]
    ):  # fmt: skip
        pass


@pytest.mark.parametrize("task", ["embed", "rerank"])
def test_a_peer_encodes_texts_and_scores_pairs(task, tiny_ranker, tmp_path):
    pytest.importorskip("sentence_transformers")
    from jobs import convert_model

    model = tiny_ranker("bi" if task == "embed" else "cross").uri
    output = str(tmp_path / "model")
    convert_model.run(convert_model.Config(model=model, to="sentence-transformers", output=output))
    folder = f"{output}/context" if task == "embed" else output
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps(["where is it ?", "here", "there"]))
    command = [sys.executable, engine_peer.__file__, task, "torch", folder, str(texts)]
    with embed._peer(command) as one_pass:
        one_pass()


@pytest.mark.long  # eight nodes are started, one after the other
@pytest.mark.timeout(600)
def test_work_that_waits_takes_less_time_on_four_nodes(tiny_ranker, tmp_path, monkeypatch):
    for name, value in (("_BLOCKS", 16), ("_SHARDS", 8), ("_COMMENTS", 1_600)):
        monkeypatch.setattr(cluster, name, {"small": value})
    model: Artifact = tiny_ranker("bi")
    monkeypatch.setattr(
        cluster, "measure_store", lambda config, work: BenchmarkRow("store", 1.0, "")
    )
    config = SimpleNamespace(size="small", model=model.uri)
    _, *rows = cluster.measure(config, tmp_path)
    assert [row.row for row in rows] == [
        "cluster.reddit.speedup_4_nodes",
        "cluster.embed.speedup_4_nodes",
    ]
    for row in rows:
        assert row.ours > 1, row.detail
        assert len(list(tmp_path.glob(f"{row.row.split('.')[1]}-*"))) == 2
