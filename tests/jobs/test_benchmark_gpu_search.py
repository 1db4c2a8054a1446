"""`jobs.benchmark gpu`, the search: its made-up pool, its rows, and that a run that is stopped keeps them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from jobs import benchmark
from jobs.benchmarks import gpu, gpu_search
from jobs.benchmarks.measure import BenchmarkRow
from pipeline.models.flops import Peak
from pipeline.search import top_rows
from pipeline.search.exact import TopRows

CPU = torch.device("cpu")
SCALE = gpu_search.SCALES["cpu"]


def test_rows_of_search(monkeypatch):
    seconds = {"read": 0.002, "one": 0.003, "one, plain torch": 0.012, "16": 0.01,
               "16, plain torch": 0.05, "bi": 0.004, "bi, plain torch": 0.006}  # fmt: skip

    def run_once(ways, rounds, device):
        for run in ways.values():
            run()
        assert list(ways) == list(seconds)
        return seconds

    monkeypatch.setattr(gpu_search, "_in_turn", run_once)
    monkeypatch.setattr(gpu_search, "peak_flops", lambda device, kind: Peak(1e12, "stated"))
    first, together, bi = gpu_search.measure(CPU, SCALE)
    assert first.row == "gpu.search.10m_time_over_read_floor"
    assert (first.ours, first.peer, first.ratio) == pytest.approx((1.5, 6, 4))
    assert together.row == "gpu.search.16_contexts_share_of_peak"
    work = 2 * SCALE.candidates * SCALE.width * SCALE.vectors * 16
    assert together.ours == pytest.approx(work / 0.01 / 1e12)
    assert together.ratio == pytest.approx(5)
    assert bi.row == "gpu.search.10m_bi_time_over_read_floor"
    assert (bi.ours, bi.ratio) == pytest.approx((2, 1.5))
    assert len(first.detail["scored again in float64, rows"]) == 16
    assert first.detail["by"] == "plain torch"


def test_peers_that_are_not_installed_say_so():
    rows = gpu_search.measure_peers(CPU, SCALE)
    assert {row.row for row in rows} == {"gpu.search.10m_bi.vs_faiss", "gpu.search.10m_bi.vs_cuvs"}
    assert all(row.ours is None and row.detail["failed"] for row in rows)


def test_the_made_up_pool_is_searched_as_one_of_files():
    pool = gpu_search.made_up_pool(CPU, SCALE)
    assert len(pool) == SCALE.candidates
    rows = torch.from_numpy(pool.vectors_at(np.arange(len(pool))))
    torch.testing.assert_close(rows, pool.on_device.matrix_ND.float())
    vectors = gpu_search._directions(3, SCALE.width, CPU, seed=5)[None]
    found = top_rows(pool, vectors.numpy(), 10)
    logits = rows.double() @ vectors[0].double().T
    expected = (logits.softmax(1) * logits).sum(1).topk(10)
    assert found.places[0].tolist() == expected.indices.tolist()
    torch.testing.assert_close(
        gpu_search.plain_top(pool.on_device.matrix_ND, vectors)[0], expected.values.float(),
        rtol=0.05, atol=0.05,
    )  # fmt: skip


def test_scores_that_are_not_those_of_plain_torch_fail_the_part(monkeypatch):
    def wrong(*arguments: object) -> TopRows:
        found = top_rows(*arguments)
        return found._replace(scores=found.scores - 5)

    monkeypatch.setattr(gpu_search, "top_rows", wrong)
    (row,) = gpu._attempt("gpu.search", gpu_search.measure, CPU, SCALE)
    assert row.detail == {"failed": "the search's scores are not those of plain torch"}


def test_a_run_that_is_stopped_keeps_the_rows_of_its_parts(tmp_path, monkeypatch):
    def stop(*arguments: object) -> list[BenchmarkRow]:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_search, "measure_peers", stop)
    file = tmp_path / "rows.json"
    config = benchmark.Config(part="gpu", device="cpu", work=str(tmp_path), json=str(file))
    with pytest.raises(KeyboardInterrupt):
        benchmark.run(config)
    names = [row["row"] for row in json.loads(file.read_text())]
    assert names[0] == "gpu.search.10m_time_over_read_floor" and len(names) == 3
