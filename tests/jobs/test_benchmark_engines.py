"""Peers that run by a Python of their own, and jobs on nodes of one machine."""

from __future__ import annotations

import io
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


@pytest.mark.long  # 37 s on two slow cores
def test_a_peer_encodes_texts_and_scores_pairs(tiny_ranker, tmp_path, monkeypatch, capsys):
    pytest.importorskip("sentence_transformers")
    from jobs import convert_model

    folders = {}
    for kind in ("bi", "cross"):
        folders[kind] = str(tmp_path / kind)
        model = tiny_ranker(kind).uri
        convert_model.run(
            convert_model.Config(model=model, to="sentence-transformers", output=folders[kind])
        )
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps(["where is it ?", "here", "there"]))
    embedding = ("embed", "torch", f"{folders['bi']}/context", str(texts))
    with embed._peer([sys.executable, engine_peer.__file__, *embedding]) as one_pass:
        one_pass()
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))  # in this process: an import takes 5 s
    engine_peer.main("rerank", "torch", folders["cross"], str(texts))
    assert capsys.readouterr().out == "ready\ndone\n"


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
    names = ["cluster.reddit.speedup_4_nodes", "cluster.embed.speedup_4_nodes"]
    assert [row.row for row in rows] == names
    for row in rows:
        assert row.ours > 1, row.detail
        assert len(list(tmp_path.glob(f"{row.row.split('.')[1]}-*"))) == 2


def test_a_part_that_there_is_not_is_refused(run_job_here, tmp_path):
    done = run_job_here("benchmark", "embed", "--only", "length", "--work", tmp_path)
    assert "only: 'length' is not allowed; allowed: rate, night, engines, plan" in done.refusal
