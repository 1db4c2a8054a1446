"""`jobs.benchmark gpu`: its made-up input, its rows, and that a run that is stopped keeps them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from jobs import benchmark
from jobs.benchmarks import gpu
from pipeline.config import BadInput
from pipeline.models.flops import Peak
from pipeline.search import top_rows
from pipeline.search.exact import TopRows

CPU = torch.device("cpu")
SCALE = gpu.SCALES["cpu"]
ON_CPU = benchmark.Config(part="gpu", device="cpu")


def test_without_a_gpu_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "rows.json"
    done = benchmark.run(benchmark.Config(part="gpu", work=str(tmp_path), json=str(file)))
    assert done["rows"] == {}
    assert "gpu: there is no GPU here, so nothing is measured" in capsys.readouterr().out
    assert json.loads(file.read_text()) == []


def test_parts_by_jobs_are_not_left_out_in_silence():
    with pytest.raises(
        BadInput, match="encoder: '' is not allowed; allowed: one, for gpu --only em"
    ):
        replace(ON_CPU, only=("embed",))


@pytest.mark.long  # 48 s on two slow cores
def test_what_a_gpu_runs_runs_on_a_cpu():
    rows = {row.row: row for row in gpu.measure(ON_CPU, Path())}
    assert list(rows) == [
        "gpu.search.10m_time_over_read_floor",
        "gpu.search.16_contexts_share_of_peak",
        "gpu.search.10m_bi_time_over_read_floor",
        "gpu.pretrain.mfu_bert_base_128",
        "gpu.pretrain.mfu_bert_base_512",
        "gpu.pretrain.packed_over_padded",
    ]
    assert all(row.ours is not None and row.ours >= 0 for row in rows.values())
    assert all(row.detail["note"].endswith("cpu.") for row in rows.values()), "no GPU's 10 million"
    kinds = [name for name in rows["gpu.pretrain.mfu_bert_base_512"].detail if "tokens" in name]
    assert kinds == ["eager, 1,024 tokens", "compiled, 1,024 tokens"]


def test_a_run_that_is_stopped_keeps_the_rows_of_its_parts(tmp_path, monkeypatch):
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "measure_utilisation", stop)
    file = tmp_path / "rows.json"
    config = benchmark.Config(part="gpu", device="cpu", work=str(tmp_path), json=str(file))
    with pytest.raises(KeyboardInterrupt):
        benchmark.run(config)
    names = [row["row"] for row in json.loads(file.read_text())]
    assert names[0] == "gpu.search.10m_time_over_read_floor" and len(names) == 3


# Search


def test_rows_of_search(monkeypatch):
    seconds = {"read": 0.002, "one": 0.003, "one, plain torch": 0.012, "16": 0.01,
               "16, plain torch": 0.05, "bi": 0.004, "bi, plain torch": 0.006}  # fmt: skip

    def run_once(ways, rounds):
        for run in ways.values():
            run()
        assert list(ways) == list(seconds)
        return {name: [value] for name, value in seconds.items()}

    monkeypatch.setattr(gpu, "in_turn", run_once)
    monkeypatch.setattr(gpu, "peak_flops", lambda device, kind: Peak(1e12, "stated"))
    first, together, bi = gpu.measure_search(CPU, SCALE)
    assert first.row == "gpu.search.10m_time_over_read_floor"
    assert (first.ours, first.peer, first.ratio) == pytest.approx((1.5, 6, 4))
    assert together.row == "gpu.search.16_contexts_share_of_peak"
    work = 2 * SCALE.candidates * SCALE.dimensions * SCALE.vectors * 16
    assert together.ours == pytest.approx(work / 0.01 / 1e12)
    assert together.ratio == pytest.approx(5)
    assert bi.row == "gpu.search.10m_bi_time_over_read_floor"
    assert (bi.ours, bi.ratio) == pytest.approx((2, 1.5))
    assert first.detail["note"].endswith("by plain torch on cpu.")


def test_the_made_up_pool_is_searched_as_one_of_files():
    pool = gpu.made_up_pool(CPU, SCALE)
    assert len(pool) == SCALE.candidates
    rows = torch.from_numpy(pool.vectors_at(np.arange(len(pool))))
    torch.testing.assert_close(rows, pool.on_device.matrix_ND.float())
    vectors = gpu.directions(3, SCALE.dimensions, CPU, seed=5)[None]
    answer = top_rows(pool, vectors.numpy(), 10)
    logits = rows.double() @ vectors[0].double().T
    expected = (logits.softmax(1) * logits).sum(1).topk(10)
    assert answer.places[0].tolist() == expected.indices.tolist()
    torch.testing.assert_close(
        gpu.plain_top(pool.on_device.matrix_ND, vectors)[0], expected.values.float(),
        rtol=0.05, atol=0.05,
    )  # fmt: skip


def test_scores_that_are_not_those_of_plain_torch_fail_the_part(monkeypatch):
    def wrong(*arguments: object) -> TopRows:
        answer = top_rows(*arguments)
        return answer._replace(scores=answer.scores - 5)

    monkeypatch.setattr(gpu, "top_rows", wrong)
    (row,) = gpu.measure(replace(ON_CPU, only=("search",)), Path())
    assert row.detail == {"failed": "the search's scores are not those of plain torch"}


# Pre-training


def test_what_does_not_fit_on_a_gpu_is_named_beside_what_does(monkeypatch):
    def measured(lengths, device, scale, compiled):
        if sum(lengths) >= 2048 or compiled:
            raise torch.OutOfMemoryError("no memory")
        return {"mfu": sum(lengths)}

    monkeypatch.setattr(gpu, "training_rate", measured)
    scale = replace(gpu.SCALES["cpu"], micro_batch_tokens=(512, 1024, 2048, 4096))
    row = gpu.measure_utilisation(128, torch.device("cpu"), scale)
    assert row.ours == 1024
    tried = {name: value for name, value in row.detail.items() if name.endswith("tokens")}
    failed = {name for name, value in tried.items() if value == "failed: no memory"}
    assert failed == {"eager, 2,048 tokens", "compiled, 1,024 tokens"}
    assert tried.keys() - failed == {"eager, 512 tokens", "eager, 1,024 tokens"}


def test_made_up_micro_batches_predict_no_padding():
    batch = gpu.made_up_micro_batch((128, 100, 28), 300)
    assert batch.token_count == batch.tokens.mask_BT.sum() == sum(batch.tokens.lengths) == 256
    assert batch.predicted_count == 38  # 15 %
    assert len(set(batch.predicted_N.tolist())) == 38
    assert batch.tokens.mask_BT.flatten()[batch.predicted_N].all()
    torch.testing.assert_close(batch.labels_N, batch.tokens.ids_BT.flatten()[batch.predicted_N])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_utilisation_of_a_gpu_is_a_share():
    """More than the peak would be a wrong count, or a clock that does not wait for the device."""
    found = gpu.training_rate((512,) * 32, torch.device("cuda"), gpu.SCALES["cuda"])
    assert 0.05 < found["mfu"] < 1
