"""Search of a pool in a device's memory, against every score in float64.

The device is a CPU, and a GPU where there is one. `test_the_kernel_in_the_interpreter` runs this file once
more, with Triton's interpreter: the kernel then scores on the CPU what plain torch scores otherwise.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import BadInput
from pipeline.pools import device_rows
from pipeline.pools.pool import Pool
from pipeline.search import device as module
from pipeline.search import device_scores, top_rows
from pipeline.search.device_scores import Contexts, Scorer, error_bounds, sensitivity
from tests.pipeline.search.test_exact import (
    DTYPES,
    check,
    float64_scores,
    pool_of,
    tasks,
    tight_pools,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE_DTYPES = ["bfloat16", "float32"]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
    pytest.param(  # not the current GPU
        "cuda:1",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second CUDA device"),
        ],
    ),
]


@pytest.fixture(autouse=True)
def the_kernel_agrees_where_it_runs():
    """Scores by plain torch instead would pass every test here."""
    device_scores._agreement.clear()
    yield
    assert all(device_scores._agreement.values())


def on(pool, dtype="bfloat16", device="cpu") -> Pool:
    """The pool with its vectors on a device."""
    rows = device_rows.load(
        "memory", pool.shards, pool.dtype, pool.dimensions, torch.device(device), dtype
    )
    return replace(pool, on_device=rows)


def scorer_of(pool, vectors, mask, scale=1.0) -> Scorer:
    contexts = [
        np.asarray(v, np.float32)[m].astype(np.float64) for v, m in zip(vectors, mask, strict=True)
    ]
    rows = pool.on_device
    return Scorer(rows, Contexts.of(contexts, vectors.shape[1], scale, rows.device), None)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@settings(
    max_examples=20 if INTERPRETED or torch.cuda.is_available() else 70
)  # each compiles a kernel
@given(tasks(), st.data())
def test_finds_what_float64_over_all_rows_finds(device, task, data):
    pool, vectors, mask, top_k, attention, among = task
    pool = on(pool, data.draw(st.sampled_from(DEVICE_DTYPES)), device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SCORES", data.draw(st.sampled_from([1, 40, 1 << 20])))
        patch.setattr(module, "_CONTEXTS", data.draw(st.integers(1, 9)))
        patch.setattr(module, "_BLOCKS", data.draw(st.sampled_from([1, 3, 128])))
        patch.setattr(device_scores, "_BLOCK_ROWS", data.draw(st.sampled_from([1, 2, 128])))
        patch.setitem(device_scores._LOGITS, device, data.draw(st.sampled_from([1, 300, 1 << 20])))
        found = top_rows(pool, vectors, top_k, mask, attention, among=among)
    check(pool, vectors, mask, found, top_k, attention, among)


@pytest.mark.slow
@settings(max_examples=20 if INTERPRETED else 70)
@given(tasks(), st.data())
def test_no_score_is_off_by_more_than_its_bound(task, data):
    pool, vectors, mask, _, attention, _ = task
    pool = on(pool, data.draw(st.sampled_from(DEVICE_DTYPES)))
    keep = [
        device_scores.is_bounded(pool.on_device, v[m].astype(np.float64))
        for v, m in zip(vectors, mask, strict=True)
    ]
    if not any(keep):
        return
    vectors, mask = vectors[keep], mask[keep]
    scale = pool.dimensions**-0.5 if attention == "scaled_dot" else 1.0
    assert_bounded(scorer_of(pool, vectors, mask, scale), pool, vectors, mask, attention)


def assert_bounded(scorer, pool, vectors, mask, attention="dot") -> float:
    """Returns the largest share of a bound that an error takes."""
    scores_QN, highest_QB, block = scorer.scores(slice(0, len(pool)))
    found_QN = scores_QN.double().numpy()
    for start in range(0, len(pool), block):
        highest_Q = scores_QN[:, start : start + block].amax(1)
        torch.testing.assert_close(highest_QB[:, start // block], highest_Q, rtol=0, atol=0)
    errors = scorer.errors
    worst = 0.0
    for query, scores_N in enumerate(found_QN):
        expected_N = float64_scores(pool, vectors[query], mask[query], attention)
        lengths_N = pool.on_device.lengths_N.astype(np.float64)
        bounds_N = float(errors.per_length_Q[query]) * lengths_N + float(errors.constant_Q[query])
        assert (np.abs(scores_N - expected_N) <= bounds_N).all()
        worst = max(worst, float((np.abs(scores_N - expected_N) / bounds_N).max()))
    return worst


def test_a_row_and_vectors_that_bfloat16_rounds_the_worst_stay_within_the_bound():
    """One logit above many others, at the difference where the score is the most sensitive."""
    m, d = 64, 96
    share = np.linspace(0.01, 0.99, 999)
    gain = (1 - share) * (share * np.log(share * (m - 1) / (1 - share)) - 1)
    share = share[gain.argmax()]
    gap = np.log(share * (m - 1) / (1 - share))
    # Numbers half-way between two of bfloat16, all of which round away from what the score wants.
    row = np.full(d, 1 + 2.0**-8 - 2.0**-20)
    row *= 8 / np.linalg.norm(row)
    row = np.float32(row.astype(np.float32).view(np.uint32) & 0xFFFF0000 | 0x7FFF).astype(np.uint32)
    row = row.view(np.float32)
    low = row / float(row @ row.astype(np.float64))
    vectors = np.stack([(1 + gap) * low, *[low] * (m - 1)]).astype(np.float32)
    pool = on(pool_of(row[None], dtype="float32"))
    mask = np.ones((1, m), bool)
    used = assert_bounded(scorer_of(pool, vectors[None], mask), pool, vectors[None], mask)
    assert used > 0.1  # a bound of another size would hold and be of no use


@pytest.mark.parametrize("m", [1, 2, 5, 64, 360])
def test_a_score_is_as_sensitive_as_said(m):
    """The sum of the derivative's sizes, of random logits, and of one above the others: the worst."""
    rng = np.random.default_rng(m)
    rows = [rng.normal(size=m) * rng.choice([0.1, 1, 5]) for _ in range(200)]
    rows += [np.where(np.arange(m) == 0, gap, 0.0) for gap in np.linspace(0, 12, 400)]
    logits_NM = torch.tensor(np.stack(rows), requires_grad=True)
    (slopes_NM,) = torch.autograd.grad((logits_NM.softmax(1) * logits_NM).sum(), logits_NM)
    highest = float(slopes_NM.abs().sum(1).max())
    assert highest <= sensitivity(m) <= 1.01 * highest


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "device_dtype", "q", "m"),
    [
        *((dtype, "bfloat16", 16, 64) for dtype in DTYPES),
        *(("float32", "float32", q, m) for q, m in ((1, 64), (16, 64), (1, 1), (5, 150))),
    ],
)
def test_thousands_of_rows_of_many_dimensions(device, dtype, device_dtype, q, m):
    """As vectors of texts are; few rows are scored in float64."""
    rng = np.random.default_rng(5)
    scale = 1 / np.sqrt(1 + np.arange(200))
    count = 300 if INTERPRETED else 2500
    rows = rng.normal(size=(count, 200)) * scale
    vectors = (rng.normal(size=(q, 1, 200)) * 3 + rng.normal(size=(q, m, 200))) * scale
    pool = on(pool_of(rows, [count // 3, count // 2], dtype), device_dtype, device)
    vectors = np.float32(vectors)
    mask = np.ones((q, m), bool)
    check(pool, vectors, mask, top_rows(pool, vectors, 10), 10)
    contexts = list(vectors.astype(np.float64))
    found = dict(module.reaching_rows(pool.on_device, contexts, m, 10, 1.0, None))
    assert sorted(found) == list(range(q))
    assert max(map(len, found.values())) < 250


# Adversarial pools


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=10 if INTERPRETED else 30)
@given(tight_pools(), st.sampled_from(DEVICE_DTYPES))
def test_scores_just_below_or_above_the_kth_change_no_answer(device, task, dtype):
    pool, vectors, top_k, at_once = task
    found = top_rows(on(pool, dtype, device), vectors, top_k)
    np.testing.assert_array_equal(found.places[0], at_once.places[0, :top_k])
    np.testing.assert_array_equal(found.scores[0], at_once.scores[0, :top_k])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("device_dtype", DEVICE_DTYPES)
def test_rows_of_the_same_vector_stand_in_the_order_of_their_ids(monkeypatch, device, device_dtype):
    monkeypatch.setattr(module, "_SCORES", 100)
    rng = np.random.default_rng(2)
    rows, vectors = rng.normal(size=(403, 100)), rng.normal(size=(1, 5, 100))
    same = np.r_[5:403:7, 401, 402]
    rows[same] = vectors[0, 0]  # the best by far
    ids = sorted(f"id{n}" for n in same)
    pool = on(pool_of(rows, cuts=[6, 301]), device_dtype, device)
    for top_k in (1, 2, 30):
        found = top_rows(pool, vectors, top_k)
        assert [pool.row(place).id for place in found.places[0].tolist()] == ids[:top_k]
        assert len(set(found.scores[0])) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_rows_whose_numbers_leave_float32_are_found_by_their_scores(device):
    rng = np.random.default_rng(6)
    rows = np.abs(rng.normal(size=(50, 8))).astype(np.float32)
    rows[[7, 31]] *= np.float32(1e37)
    vectors = np.full((2, 2, 8), 1e3, np.float32)  # a product goes beyond 3e38
    vectors[1] = 1e-3  # and of another context in the same batch it does not
    found = top_rows(on(pool_of(rows), device=device), vectors, 2)
    for places in found.places:
        assert sorted(places.tolist()) == [7, 31]
    assert np.isinf(found.scores[0]).all()
    assert np.isfinite(found.scores[1]).all()
    zero = top_rows(on(pool_of(np.zeros((600, 8))), device=device), vectors, 2)
    assert zero.scores.tolist() == [[0, 0], [0, 0]]
    rows = -np.random.default_rng(7).uniform(1e29, 1e30, (600, 8))
    rows[[123, 500]] = 0
    found = top_rows(on(pool_of(rows), device=device), np.full((1, 2, 8), 1e20), 2)
    assert sorted(found.places[0].tolist()) == [123, 500]


@pytest.mark.parametrize("device", DEVICES)
def test_filters_that_leave_no_row_few_rows_and_rows_of_one_section(monkeypatch, device):
    monkeypatch.setattr(module, "_SCORES", 100)
    rng = np.random.default_rng(8)
    pool = on(pool_of(rng.normal(size=(400, 20))), device=device)
    vectors, mask = rng.normal(size=(2, 4, 20)), np.ones((2, 4), bool)
    for allowed in ([], [399], [3, 5], range(50, 100)):
        among = np.zeros(400, bool)
        among[list(allowed)] = True
        check(pool, vectors, mask, top_rows(pool, vectors, 3, among=among), 3, among=among)
    assert top_rows(on(pool_of(np.empty((0, 20))), device=device), vectors, 3).places.shape == (
        2,
        0,
    )


def test_methods_that_name_another_way_search_the_files(monkeypatch):
    monkeypatch.setattr(module, "reaching_rows", None)
    pool = on(pool_of(np.eye(4)))
    assert top_rows(pool, np.eye(4)[None], 1, method="pruned").certified.all()


# The kernel


def test_a_kernel_that_fails_or_is_wrong_is_replaced_by_plain_torch(monkeypatch, caplog):
    rng = np.random.default_rng(9)
    pool = on(pool_of(rng.normal(size=(40, 8))))
    vectors, mask = rng.normal(size=(1, 3, 8)), np.ones((1, 3), bool)

    def fail(*arguments):
        raise RuntimeError("no such GPU\nmore")

    def be_wrong(rows_ND, scales_N, vectors_QMD, *more):
        scores_QN = torch.ones(len(vectors_QMD), len(rows_ND))
        return scores_QN, scores_QN, 1

    for scores, message in (
        (fail, "search: plain torch scores the rows, as Triton cannot (RuntimeError: no such GPU)"),
        (be_wrong, "search: plain torch scores the rows, as Triton's scores on cpu are wrong"),
    ):
        device_scores._agreement.clear()
        kernel = SimpleNamespace(scores=scores)
        monkeypatch.setattr(device_scores, "kernel_module", lambda kind, kernel=kernel: kernel)
        for _ in range(2):
            check(pool, vectors, mask, top_rows(pool, vectors, 3), 3)
        assert [record.getMessage() for record in caplog.records] == [message]  # once
        caplog.clear()
    device_scores._agreement.clear()


def test_it_is_the_kernel_that_scores_in_the_interpreter():
    pool = on(pool_of(np.eye(4)))
    scorer = scorer_of(pool, np.eye(4)[None], np.ones((1, 4), bool))
    assert (scorer._kernel is not None) == INTERPRETED
    is_rounded = error_bounds(pool.on_device, scorer._contexts, by_kernel=True)
    assert (scorer.errors.per_length_Q == is_rounded.per_length_Q).all() or not INTERPRETED


def test_on_a_second_gpu_its_kernel_starts_and_its_copy_is_awaited(monkeypatch):
    """Triton and events take the current GPU, which is the first one unless somebody says so."""
    steps, pool = [], on(pool_of(np.eye(4)))

    class Current:
        def __init__(self, tensor):
            assert tensor is pool.on_device.matrix_ND

        def __enter__(self):
            steps.append("current")

        def __exit__(self, *error):
            steps.append("left")

    kernel = SimpleNamespace(scores=lambda *given: steps.append("kernel"))
    contexts = Contexts.of([np.eye(4)], 4, 1.0, torch.device("cpu"))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device_of", Current)
        device_scores.kernel_scores(kernel, pool.on_device, slice(0, 4), contexts, None)
    assert steps == ["current", "kernel", "left"]

    columns = SimpleNamespace(is_cuda=True, device="cuda:1", to=lambda *given, **more: "copy")
    event = SimpleNamespace(record=steps.append)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    assert module._begin_copy(columns) == ("copy", event)
    assert steps[-1] == "stream of cuda:1"


WITH_TRITON = pytest.mark.skipif(
    find_spec("triton") is None or INTERPRETED, reason="Triton is not installed, or interpreted"
)


def run_with(*command: str, **variables: str) -> str:
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1", **variables}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@WITH_TRITON
@pytest.mark.long  # more than a minute on a busy machine
@pytest.mark.timeout(900)
def test_the_kernel_in_the_interpreter():
    out = run_with("-m", "pytest", __file__, "-q", "-p", "no:cacheprovider", TRITON_INTERPRET="1")
    assert " passed" in out


COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from pipeline.search import triton_scores as kernel

for contexts in (1, 16):
    tile = kernel._tile(contexts, 64, torch.bfloat16, torch.device("cpu"))
    constants = {"WIDTH": 384, "VECTORS": 64, "BLOCK_N": tile.rows, "GROUP": tile.contexts,
                 "BLOCK_M": tile.vectors, "BLOCK_D": tile.dimensions, "HAS_SCALES": False,
                 "HAS_FILTER": True, "COMPUTE": kernel.tl.bfloat16}
    types = ["*bf16", "*i32", "*bf16", "*i32", "*u8", "*fp32", "*fp32", "i32", "i32", "fp32"]
    names = kernel._kernel.arg_names
    signature = dict(zip(names, types + ["constexpr"] * len(constants), strict=True))
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(7)}
    source = ASTSource(kernel._kernel, signature, constants, aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = compile(source, GPUTarget("cuda", 90, 32), options)
    print(tile.contexts, made.metadata.shared <= 227 << 10, "wgmma.mma_async" in made.asm["ptx"])
"""


@WITH_TRITON
@pytest.mark.long
def test_the_kernel_compiles_for_a_hopper_gpu_and_uses_its_tensor_cores():
    """The compiler needs no GPU."""
    assert run_with("-c", COMPILE).splitlines() == ["1 True True", "4 True True"]


# Memory


@pytest.fixture
def pool_uri(tmp_path, publish_pool) -> str:
    ids, rows = [f"id{n}" for n in range(51)], np.random.default_rng(10).normal(size=(51, 6))
    return publish_pool(tmp_path / "p" / "v1", ids, np.float32(rows), [30, 31]).uri


@pytest.mark.parametrize("device", DEVICES)
def test_a_pool_opens_on_a_device_and_gives_the_same_answers(pool_uri, device, monkeypatch, capsys):
    monkeypatch.setattr(device_rows, "_STAGED_BYTES", 4 * 6 * 7)  # seven rows at a time
    pool, held = Pool.open(pool_uri), Pool.open(pool_uri, device=device, device_dtype="float32")
    assert f"{pool_uri} to {held.on_device.device}" in capsys.readouterr().err
    rows = pool.vectors_at(np.arange(51))
    np.testing.assert_array_equal(held.on_device.matrix_ND.cpu(), rows)
    rounded = Pool.open(pool_uri, device=device).on_device
    assert torch.equal(rounded.matrix_ND.cpu(), torch.from_numpy(rows).bfloat16())
    assert rounded.is_rounded and not held.on_device.is_rounded
    vectors = np.random.default_rng(11).normal(size=(3, 2, 6))
    for expected, found in zip(top_rows(pool, vectors, 4), top_rows(held, vectors, 4), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_vectors_that_do_not_fit_stay_where_they_are(pool_uri, monkeypatch, caplog):
    monkeypatch.setattr(device_rows, "_free_bytes", lambda device: 3.2e9)
    pool = Pool.open(pool_uri, device="cpu")
    assert pool.on_device is None
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{pool_uri}: its 51 vectors need 0.0 GB of memory on cpu, beside 4.3 GB for the search, and "
        "3.2 GB are free; they stay where they are, and CPUs search them"
    )
    assert top_rows(pool, np.eye(6)[None], 3).certified.all()


@pytest.mark.parametrize("name", ["cuda:99", "tpu", "gpu"])
def test_a_device_that_is_not_there_is_refused(pool_uri, name):
    with pytest.raises(BadInput, match=f"device: '{name}' is not allowed; allowed: cpu"):
        Pool.open(pool_uri, device=name)
